"""Scores of language models: perplexity, KL divergence from a reference, top-1 agreement.

A model here is anything of one of two kinds:

* a pytree with ``embed(tokens)``, ``layers`` and ``head(x)``, such as ``mxjax_models.llama.Llama``. It runs block by
  block, so that equal blocks are compiled once, and through the head a few rows at a time, so that the logits of a
  whole batch (``batch * length * vocabulary`` floats) never exist;
* any function ``logits = f(tokens)``, ``[B, S] -> [B, S, V]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mxjax.errors import ConfigError
from mxjax.eval.arrays import ArrayError, compare_arrays

HEAD_ROWS = 256  # positions that go through the head at once: 48 MiB of logits for a vocabulary of 49152
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class LanguageScore:
    """What :func:`evaluate` found; whatever needs a reference is None without one.

    Attributes:
      perplexity: ``exp(nll)``.
      nll: mean negative log-likelihood of the predicted tokens, in nats.
      tokens: how many tokens were predicted.
      kl: mean ``KL(reference || model)`` a token, in nats.
      top1_agreement: share of positions where both rank the same token first.
      reference_nll: the ``nll`` of the reference on the same tokens.
      nll_stderr, kl_stderr, top1_stderr: standard errors of these means, or None with a single sequence.
      increase_stderr: standard error of ``nll - reference_nll``. Both models read the same tokens, so it is far smaller
        than that of either.
    """

    perplexity: float
    nll: float
    tokens: int
    kl: float | None = None
    top1_agreement: float | None = None
    reference_nll: float | None = None
    nll_stderr: float | None = None
    kl_stderr: float | None = None
    top1_stderr: float | None = None
    increase_stderr: float | None = None

    @property
    def reference_perplexity(self) -> float | None:
        """``exp(reference_nll)``."""
        return None if self.reference_nll is None else _exp(self.reference_nll)


def evaluate(
    model: Any,
    tokens: Any,
    *,
    reference: Any = None,
    batch_size: int = 4,
    progress: Progress | None = None,
) -> LanguageScore:
    """Score a model on token sequences, beside a reference in the same pass over the tokens.

    With ``p(t | ...)`` the softmax of the logits in float32, over every token but the first of each sequence::

        nll = mean_i -log p(t_i | t_<i)      KL = mean_i sum_v p_ref(v) (log p_ref(v) - log p(v))

    No BOS is added; sequences do not see one another. Tokens of one sequence are not independent, sequences are: a
    standard error is ``s / sqrt(n)`` with the standard deviation ``s`` of the means of the n sequences.

    Memory: the weights, one batch's hidden states of each model, and ``HEAD_ROWS`` rows of logits of each.

    Args:
      model: see the module's text.
      tokens: integers [sequences, length], length at least 2.
      reference: a model of either kind to compare with, or None.
      batch_size: sequences at a time; does not change the result.
      progress: called with (sequences done, sequences in all).

    Raises:
      ConfigError: tokens of another shape or dtype, or outside the vocabulary.

    Example:
      >>> round(evaluate(lambda t: jnp.zeros((*t.shape, 50)), np.zeros((2, 8), np.int32)).perplexity, 3)
      50.0
    """
    tokens = check_tokens(tokens)
    if batch_size < 1:
        raise ConfigError(f"batch_size is at least 1, not {batch_size}")
    means: list[np.ndarray] = []  # for each batch, [measures, sequences]: the mean over each sequence, float64
    for batch, real, done in _batches(tokens, batch_size):
        prepared = _prepared(model, batch)
        if reference is None:
            measures: tuple[jax.Array, ...] = (_nll(*prepared, batch),)
        else:
            measures = _divergence(*prepared, *_prepared(reference, batch), batch)
        means.append(np.stack([np.asarray(m[:real], np.float64).mean(axis=1) for m in measures]))
        if progress:
            progress(done, len(tokens))
    nll, *compared = np.concatenate(means, axis=1)
    count = tokens.shape[0] * (tokens.shape[1] - 1)
    score = LanguageScore(_exp(nll.mean()), float(nll.mean()), count, nll_stderr=_stderr(nll))
    if reference is None:
        return score
    kl, same, reference_nll = compared
    return replace(
        score,
        kl=float(kl.mean()),
        top1_agreement=float(same.mean()),
        reference_nll=float(reference_nll.mean()),
        kl_stderr=_stderr(kl),
        top1_stderr=_stderr(same),
        increase_stderr=_stderr(nll - reference_nll),
    )


def _exp(nll: float) -> float:
    return math.exp(nll) if nll < 700 else math.inf


def _stderr(means: np.ndarray) -> float | None:
    """The standard error of the mean of independent values; one value says nothing about it."""
    return float(means.std(ddof=1) / math.sqrt(means.size)) if means.size > 1 else None


def perplexity(model: Any, tokens: Any, *, batch_size: int = 4) -> float:
    """``exp`` of the mean negative log-likelihood of every predicted token; see :func:`evaluate`."""
    return evaluate(model, tokens, batch_size=batch_size).perplexity


def token_nll(model: Any, tokens: Any, *, batch_size: int = 4) -> np.ndarray:
    """``-log p(token | tokens before it)``: float32 [sequences, length - 1]. See :func:`evaluate`."""
    tokens = check_tokens(tokens)
    rows = [np.asarray(_nll(*_prepared(model, b), b))[:real] for b, real, _ in _batches(tokens, batch_size)]
    return np.concatenate(rows)


def block_errors(reference: Any, model: Any, tokens: Any) -> list[ArrayError]:
    """How far the hidden states have drifted after each block: one :class:`ArrayError` a block.

    Args:
      reference, model: models with ``embed`` and ``layers`` of one depth.
      tokens: integers [sequences, length]; a few hundred are enough.

    Raises:
      ConfigError: a model without blocks, or of another depth.
    """
    tokens = check_tokens(tokens)
    for m in (reference, model):
        if not _has_blocks(m):
            raise ConfigError(f"{type(m).__name__} has no embed(), layers and head(): its blocks cannot be compared")
    if len(reference.layers) != len(model.layers):
        raise ConfigError(f"the models have {len(reference.layers)} and {len(model.layers)} blocks")
    r, x = _embed(reference, tokens), _embed(model, tokens)
    errors = []
    for reference_block, block in zip(reference.layers, model.layers, strict=True):
        r, x = _block(reference_block, r), _block(block, x)
        errors.append(compare_arrays(r, x))
    return errors


def check_tokens(tokens: Any) -> np.ndarray:
    """``tokens`` as int32 [sequences, length].

    Raises:
      ConfigError: another shape or dtype, or ids that int32 cannot hold.
    """
    tokens = np.asarray(tokens)
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer) or tokens.shape[0] < 1 or tokens.shape[1] < 2:
        raise ConfigError(
            f"tokens are integers [sequences, length] with at least 1 sequence of 2, not {tokens.dtype} {tokens.shape}"
        )
    for extreme in (tokens.min(), tokens.max()):
        if not 0 <= int(extreme) < 2**31:  # before the cast, which would wrap it to a valid id
            raise ConfigError(f"token ids are at least 0 and below 2**31: found {extreme}")
    return tokens.astype(np.int32)


def _check_vocabulary(size: int, tokens: np.ndarray) -> None:
    """JAX clamps an index that is out of range, which would score the wrong token in silence."""
    if tokens.max() >= size:
        raise ConfigError(f"token id {tokens.max()} is outside the model's vocabulary of {size}")


def _batches(tokens: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, int, int]]:
    """(batch, real rows in it, rows done): the last batch is filled up, so that one shape is compiled."""
    size = min(size, len(tokens))
    for start in range(0, len(tokens), size):
        batch = tokens[start : start + size]
        real = len(batch)
        if real < size:
            batch = np.concatenate([batch, np.repeat(batch[:1], size - real, axis=0)])
        yield batch, real, start + real


def _has_blocks(model: Any) -> bool:
    return all(hasattr(model, name) for name in ("embed", "layers", "head"))


@jax.jit
def _embed(model: Any, tokens: jax.Array) -> jax.Array:
    return model.embed(tokens)


@jax.jit
def _block(block: Any, x: jax.Array) -> jax.Array:
    return block(x)


@jax.tree_util.register_pytree_node_class
class _Head:
    """What turns a row of the last hidden state, or a row of logits, into logits."""

    def __init__(self, model: Any = None):
        self.model = model

    def __call__(self, rows: jax.Array) -> jax.Array:
        rows = rows if self.model is None else self.model.head(rows[None])[0]
        return rows.astype(jnp.float32)

    def tree_flatten(self) -> tuple[tuple, None]:
        return (self.model,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple) -> _Head:
        return cls(*children)


def _prepared(model: Any, batch: np.ndarray) -> tuple[_Head, jax.Array]:
    """The head and what it reads: [B, S, E] after the last block, or the logits [B, S, V] of a plain function."""
    if not _has_blocks(model):
        logits = model(jnp.asarray(batch))
        _check_vocabulary(logits.shape[-1], batch)
        return _Head(), logits
    _check_vocabulary(jax.eval_shape(lambda t: model.head(model.embed(t)), batch).shape[-1], batch)
    x = _embed(model, batch)
    for block in model.layers:
        x = _block(block, x)
    return _Head(model), x


def _rows(x: jax.Array) -> jax.Array:
    """[B, S, E] -> [chunks, HEAD_ROWS, E]: every position but the last of each sequence, zeros behind them."""
    return _chunked(x[:, :-1].reshape(-1, x.shape[-1]))


def _chunked(rows: jax.Array) -> jax.Array:
    count = -(-rows.shape[0] // HEAD_ROWS)
    rows = jnp.pad(rows, [(0, count * HEAD_ROWS - rows.shape[0])] + [(0, 0)] * (rows.ndim - 1))
    return rows.reshape(count, HEAD_ROWS, *rows.shape[1:])


def _unchunked(values: jax.Array, tokens: jax.Array) -> jax.Array:
    b, s = tokens.shape
    return values.reshape(-1)[: b * (s - 1)].reshape(b, s - 1)


def _target_nll(logits: jax.Array, targets: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


@jax.jit
def _nll(head: _Head, x: jax.Array, tokens: jax.Array) -> jax.Array:
    targets = _chunked(tokens[:, 1:].reshape(-1))
    nll = lax.map(lambda rows: _target_nll(head(rows[0]), rows[1]), (_rows(x), targets))
    return _unchunked(nll, tokens)


@jax.jit
def _divergence(
    head: _Head, x: jax.Array, reference_head: _Head, reference_x: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, ...]:
    """nll, KL, whether the top tokens agree, and the reference's nll: [B, S - 1] each."""

    def one(rows: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        logits, reference = head(rows[0]), reference_head(rows[1])
        log_p = jax.nn.log_softmax(reference, axis=-1)
        kl = jnp.sum(jnp.exp(log_p) * (log_p - jax.nn.log_softmax(logits, axis=-1)), axis=-1)
        same = jnp.argmax(logits, -1) == jnp.argmax(reference, -1)
        return _target_nll(logits, rows[2]), kl, same, _target_nll(reference, rows[2])

    targets = _chunked(tokens[:, 1:].reshape(-1))
    measures = lax.map(one, (_rows(x), _rows(reference_x), targets))
    return tuple(_unchunked(m, tokens) for m in measures)
