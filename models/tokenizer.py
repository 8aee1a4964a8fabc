"""Text to token ids and back, from a GGUF file's metadata or a Hugging Face ``tokenizer.json``."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from mxjax_models._sources import import_gguf

from mxjax.errors import ConfigError, MissingExtraError

# llama.cpp names a pre-tokenizer in tokenizer.ggml.pre and keeps its regex in code; these are the ones of the model
# families here, as their own tokenizer.json spell them. Byte-level BPE comes after each.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {"llama-bpe": _WORDS % r"\p{N}{1,3}", "qwen2": _WORDS % r"\p{N}"}
_PRE = ("smollm", "gpt-2", *_SPLITS)

# tokenizer.ggml.token_type
_CONTROL, _USER_DEFINED = 3, 4


class Tokenizer:
    """Wraps ``tokenizers.Tokenizer`` (``backend``).

    Example::

        tokenizer = load_tokenizer("SmolLM2-135M-Instruct.Q4_1.gguf")
        tokenizer.decode(tokenizer.encode("Hello, world"))   # "Hello, world"
    """

    def __init__(self, backend: Any, *, bos_id: int | None = None, eos_id: int | None = None):
        self.backend = backend
        self.bos_id = bos_id
        self.eos_id = eos_id

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size()

    def encode(self, text: str, *, add_bos: bool = False) -> list[int]:
        """Text to ids. Special tokens written out in the text (``<|im_start|>``) become their ids.

        Raises:
            ConfigError: ``add_bos`` without a BOS token.
        """
        ids = self.backend.encode(text, add_special_tokens=False).ids
        if not add_bos:
            return ids
        if self.bos_id is None:
            raise ConfigError("add_bos=True, but this tokenizer has no BOS token")
        return [self.bos_id, *ids]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Ids to text; accepts arrays. Bytes that are no UTF-8 (a character cut in two) become U+FFFD."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
    """Loads the tokenizer that belongs to a model.

    Args:
        path: a ``.gguf`` file with a byte-level BPE vocabulary (``tokenizer.ggml.model`` gpt2), or a folder with
            ``tokenizer.json``.

    Raises:
        FileNotFoundError: nothing there.
        MissingExtraError: without ``tokenizers`` (``pip install 'mxjax[tokenizer]'``) or, for GGUF, without ``gguf``.
        ConfigError: a kind of vocabulary or pre-tokenizer that is not known here.
    """
    tokenizers = _import_tokenizers()
    path = Path(path)
    if path.is_dir():
        if not (path / "tokenizer.json").is_file():
            raise FileNotFoundError(f"{path} has no tokenizer.json")
        return _from_folder(tokenizers, path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    if path.suffix != ".gguf":
        raise ConfigError(f"{path} is neither a folder nor a .gguf file")
    return _from_gguf(tokenizers, path)


def _import_tokenizers() -> ModuleType:
    try:
        import tokenizers
    except ImportError as e:
        raise MissingExtraError("load_tokenizer needs the package tokenizers: pip install 'mxjax[tokenizer]'") from e
    return tokenizers


def _from_folder(tokenizers: ModuleType, folder: Path) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    def token_id(name):  # "<s>", or {"content": "<s>", ...}
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        return None if token is None else backend.token_to_id(token)

    return Tokenizer(backend, bos_id=token_id("bos_token"), eos_id=token_id("eos_token"))


def _from_gguf(tokenizers: ModuleType, path: Path) -> Tokenizer:
    fields = import_gguf().GGUFReader(path).fields

    def get(key, default=None):
        field = fields.get(f"tokenizer.ggml.{key}")
        return default if field is None else field.contents()

    model, pre = get("model"), get("pre")
    if model != "gpt2":
        raise ConfigError(f"{path}: tokenizer.ggml.model {model!r} is not supported, only 'gpt2' (byte-level BPE)")
    if pre not in _PRE:
        raise ConfigError(f"{path}: tokenizer.ggml.pre {pre!r} is not supported; supported: {', '.join(_PRE)}")
    tokens, merges = get("tokens"), get("merges")
    if not tokens or merges is None:
        raise ConfigError(f"{path}: no tokenizer.ggml.tokens or no tokenizer.ggml.merges")

    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in merges],
            ignore_merges=pre == "llama-bpe",  # Llama 3: a word that is a token is taken whole
        )
    )
    backend.pre_tokenizer = _pre_tokenizer(tokenizers, pre)
    backend.decoder = tokenizers.decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = tokenizers.normalizers.NFC()
    kinds = get("token_type", [])
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            tokenizers.AddedToken(t, special=special, normalized=False)
            for t, k in zip(tokens, kinds, strict=False)
            if k == kind
        ]
        (backend.add_special_tokens if special else backend.add_tokens)(added)
    return Tokenizer(backend, bos_id=get("bos_token_id"), eos_id=get("eos_token_id"))


def _pre_tokenizer(tokenizers: ModuleType, pre: str) -> Any:
    parts = tokenizers.pre_tokenizers
    if pre == "gpt-2":
        return parts.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "smollm":  # every digit alone, then GPT-2's words
        return parts.Sequence(
            [parts.Digits(individual_digits=True), parts.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    split = parts.Split(tokenizers.Regex(_SPLITS[pre]), behavior="isolated")
    return parts.Sequence([split, parts.ByteLevel(add_prefix_space=False, use_regex=False)])
