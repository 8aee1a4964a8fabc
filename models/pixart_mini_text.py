"""Prompts for PixArt-Mini: word pieces (or bytes) to ids, and a small bidirectional transformer over their embeddings.

The word pieces and the table of their embeddings come from MiniLM (all-MiniLM-L6-v2, Apache-2.0): the rows of its
ASCII tokens, reduced by a principal component analysis. The table stays as it is in training, so that words that no
caption has still lie near their neighbours; the layers above it are learned with the images.

Paper: BERT, arXiv:1810.04805 (word pieces: greedy, longest first).
"""

import dataclasses
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from mxjax_models.dit_layers import FeedForward, attention, layer_norm

from mxjax.errors import ConfigError

_LONGEST_WORD = 100  # as BERT's: longer ones are unknown


class Frozen(nnx.Variable):
    """An array that training leaves as it is."""


class WordPieces:
    """BERT's uncased tokenizer over a list of pieces: [CLS], pieces, [SEP].

    Args:
        pieces: ids are positions; has "[PAD]" first, "[UNK]", "[CLS]" and "[SEP]"; "##ed" continues a word.

    Example::

        ids, mask = WordPieces(pieces)(["a red apple"], length=32)     # int32 (1, 32), bool (1, 32)
    """

    def __init__(self, pieces: Sequence[str]):
        self.ids = {piece: i for i, piece in enumerate(pieces)}
        if missing := [t for t in ("[PAD]", "[UNK]", "[CLS]", "[SEP]") if t not in self.ids] or self.ids["[PAD]"]:
            raise ConfigError(f"a vocabulary of word pieces begins with [PAD] and has all of {missing}")

    def pieces(self, text: str) -> list[int]:
        """Ids of the text alone."""
        text = unicodedata.normalize("NFD", text.lower())
        text = "".join(c for c in text if unicodedata.category(c) != "Mn")
        return [i for word in re.findall(r"[^\W_]+|[^\w\s]|_", text) for i in self._word(word)]

    def _word(self, word: str) -> list[int]:
        found: list[int] = []
        start = 0
        while start < len(word) <= _LONGEST_WORD:
            for end in range(len(word), start, -1):
                if (i := self.ids.get(("##" if start else "") + word[start:end])) is not None:
                    found.append(i)
                    start = end
                    break
            else:
                return [self.ids["[UNK]"]]
        return found or [self.ids["[UNK]"]]

    def __call__(self, texts: Sequence[str], length: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids, 0 beyond the end, and where there is text; what is longer is cut."""
        rows = [[self.ids["[CLS]"], *self.pieces(t)[: length - 2], self.ids["[SEP]"]] for t in texts]
        return _padded(rows, length)


class Bytes:
    """UTF-8 bytes b as ids b + 2; 0 is padding, 1 the start."""

    def __call__(self, texts: Sequence[str], length: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids, 0 beyond the end, and where there is text; what is longer is cut."""
        return _padded([[1, *(b + 2 for b in t.lower().encode()[: length - 1])] for t in texts], length)


def _padded(rows: list[list[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.zeros((len(rows), length), np.int32)
    for out, row in zip(ids, rows, strict=True):
        out[: len(row)] = row
    return ids, np.arange(length)[None, :] < np.array([len(r) for r in rows])[:, None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Sizes of the text encoder.

    Raises:
        ConfigError: a kind that is not known, or heads that do not divide the width.
    """

    kind: str = "wordpieces"  # or "bytes"
    vocabulary: int  # rows of the table; 258 for bytes
    features: int = 80  # of the table
    width: int = 192
    layers: int = 2
    heads: int = 4
    length: int = 32  # tokens of a prompt

    def __post_init__(self):
        if self.kind not in ("wordpieces", "bytes") or self.width % self.heads:
            raise ConfigError(f"{self}: kind is wordpieces or bytes, and heads divide the width")


class TextEncoder(nnx.Module):
    """Ids (B, T) and mask -> (B, T, width): the table, a projection, positions, pre-norm layers, a norm."""

    def __init__(self, config: TextConfig, *, rngs: nnx.Rngs, dtype: Any = jnp.float32):
        c = self.config = config
        rows = jax.random.normal(rngs.params(), (c.vocabulary, c.features), dtype)
        self.table = Frozen(rows) if c.kind == "wordpieces" else nnx.Param(rows)
        self.proj = nnx.Linear(c.features, c.width, param_dtype=dtype, rngs=rngs)
        self.positions = nnx.Param(jax.random.normal(rngs.params(), (c.length, c.width), dtype) / c.width**0.5)
        self.layers = nnx.List([TextLayer(c.width, c.heads, dtype, rngs) for _ in range(c.layers)])

    def __call__(self, ids, mask):  # int (B, T), bool (B, T) -> (B, T, width)
        x = self.proj(self.table[...][ids]) + self.positions[...][: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, mask)
        return layer_norm(x)


class TextLayer(nnx.Module):
    """x + out(attention(norm(x))), then + ff(norm(x))."""

    def __init__(self, width: int, heads: int, dtype: Any, rngs: nnx.Rngs):
        self.qkv = nnx.Linear(width, 3 * width, param_dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(width, width, param_dtype=dtype, rngs=rngs)
        self.ff = FeedForward(width, dtype, rngs)
        self.heads = heads

    def __call__(self, x, mask):
        qkv = self.qkv(layer_norm(x)).reshape(*x.shape[:2], self.heads, 3, -1)
        x = x + self.out(attention(qkv[..., 0, :], qkv[..., 1, :], qkv[..., 2, :], mask, None))
        return x + self.ff(layer_norm(x))
