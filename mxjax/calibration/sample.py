"""A uniform sample of the rows of a stream, gathered in one pass."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# The key of a place that is still empty. NumPy's: an array of JAX would start its backend at import.
_LAST = np.uint32(0xFFFFFFFF)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RowSample:
    """The rows with the smallest hashed index: each row of the stream is as likely as any other. A pytree.

    Which rows those are depends on their positions only, not on how the stream was cut into batches.

    Attributes:
      rows: float32 [R, K]; zeros where fewer rows than R were seen.
      keys: uint32 [R], their hashes.
    """

    rows: jax.Array
    keys: jax.Array

    @classmethod
    def zeros(cls, size: int, width: int) -> RowSample:
        return cls(rows=jnp.zeros((size, width), jnp.float32), keys=jnp.full(size, _LAST))

    def add(self, x: jax.Array, start: jax.Array) -> RowSample:
        """With rows ``x [n, K]``, whose first has the position ``start`` (uint32). For use inside ``jit``."""
        if not x.shape[0]:  # an empty batch
            return self
        keys = jnp.minimum(_hash(start + jnp.arange(x.shape[0], dtype=jnp.uint32)), _LAST - 1)
        return self._merge(x.astype(jnp.float32), keys)

    def gather(self, axis_name: str) -> RowSample:
        """One sample of those of all devices along a mesh axis, inside ``shard_map``."""
        devices, mine = lax.axis_size(axis_name), lax.axis_index(axis_name)

        def everyone(x: jax.Array) -> jax.Array:  # a psum, since shard_map knows its result to be the same everywhere
            return lax.psum(jnp.zeros((devices, *x.shape), x.dtype).at[mine].set(x), axis_name)

        rows, keys = everyone(self.rows), everyone(self.keys)
        # Devices number their rows alike; with a salt each, they compete as if the stream had been one.
        salt = _hash(jnp.arange(devices, dtype=jnp.uint32))[:, None]
        keys = jnp.where(keys == _LAST, _LAST, jnp.minimum(_hash(keys ^ salt), _LAST - 1))
        start = RowSample.zeros(*self.rows.shape)
        return start._merge(rows.reshape(-1, rows.shape[-1]), keys.reshape(-1))

    def _merge(self, x: jax.Array, keys: jax.Array) -> RowSample:
        size = self.keys.shape[0]
        everything = jnp.concatenate([self.keys, keys])
        chosen = jnp.argsort(everything, stable=True)[:size]
        mine = jnp.take(self.rows, chosen, axis=0, mode="clip")
        theirs = jnp.take(x, chosen - size, axis=0, mode="clip")
        return RowSample(rows=jnp.where((chosen < size)[:, None], mine, theirs), keys=everything[chosen])


def _hash(x: jax.Array) -> jax.Array:
    """A permutation of uint32 that looks random (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
