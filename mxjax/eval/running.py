"""How a language model is run for its scores: block by block, and through the head a few rows at a time.

Memory is that of the weights, one batch of hidden states, and ``HEAD_ROWS`` rows of logits for each model. The logits
of a batch (``batch * length * vocabulary`` floats) never exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mxjax.errors import ConfigError

HEAD_ROWS = 256  # positions that go through the head at once: 48 MiB of logits for a vocabulary of 49152


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


def batches(tokens: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, int, int]]:
    """(batch, real rows in it, rows done): the last batch is filled up, so that one shape is compiled."""
    size = min(size, len(tokens))
    for start in range(0, len(tokens), size):
        batch = tokens[start : start + size]
        real = len(batch)
        if real < size:
            batch = np.concatenate([batch, np.repeat(batch[:1], size - real, axis=0)])
        yield batch, real, start + real


def has_blocks(model: Any) -> bool:
    return all(hasattr(model, name) for name in ("embed", "layers", "head"))


@jax.jit
def embed(model: Any, tokens: jax.Array) -> jax.Array:
    return model.embed(tokens)


@jax.jit
def run_block(block: Any, x: jax.Array) -> jax.Array:
    return block(x)


@jax.tree_util.register_pytree_node_class
class Head:
    """What turns a row of the last hidden state, or a row of logits, into logits."""

    def __init__(self, model: Any = None):
        self.model = model

    def __call__(self, rows: jax.Array) -> jax.Array:
        rows = rows if self.model is None else self.model.head(rows[None])[0]
        return rows.astype(jnp.float32)

    def tree_flatten(self) -> tuple[tuple, None]:
        return (self.model,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple) -> Head:
        return cls(*children)


def prepared(model: Any, batch: np.ndarray) -> tuple[Head, jax.Array]:
    """The head and what it reads: [B, S, E] after the last block, or the logits [B, S, V] of a plain function."""
    if not has_blocks(model):
        logits = model(jnp.asarray(batch))
        _check_vocabulary(logits.shape[-1], batch)
        return Head(), logits
    _check_vocabulary(jax.eval_shape(lambda t: model.head(model.embed(t)), batch).shape[-1], batch)
    x = embed(model, batch)
    for block in model.layers:
        x = run_block(block, x)
    return Head(model), x


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
def nll_rows(head: Head, x: jax.Array, tokens: jax.Array) -> jax.Array:
    targets = _chunked(tokens[:, 1:].reshape(-1))
    nll = lax.map(lambda rows: _target_nll(head(rows[0]), rows[1]), (_rows(x), targets))
    return _unchunked(nll, tokens)


@jax.jit
def divergence_rows(
    head: Head, x: jax.Array, reference_head: Head, reference_x: jax.Array, tokens: jax.Array
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


@jax.jit
def scored_rows(head: Head, x: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """nll of each token but the first, and whether it is the most likely one: [B, S - 1] each."""

    def one(rows: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        logits = head(rows[0])
        return _target_nll(logits, rows[1]), jnp.argmax(logits, axis=-1) == rows[1]

    targets = _chunked(tokens[:, 1:].reshape(-1))
    nll, greedy = lax.map(one, (_rows(x), targets))
    return _unchunked(nll, tokens), _unchunked(greedy, tokens)
