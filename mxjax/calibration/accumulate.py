"""Running Gram matrices in float32 that do not lose precision over millions of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.calibration.sample import RowSample
from mxjax.calibration.stats import LayerStats

# Rows that one matrix product sums in plain float32 before the compensated addition takes over. The relative error of
# such a product is about sqrt(rows) * 2**-24, which is then the error of the whole, whatever the number of tokens.
CHUNK = 4096
# Rows kept as they are, for choices that are measured: an error of 10^5 products or more, so within 1 % or so.
SAMPLE_ROWS = 512


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class GramSum:
    """``sum x^T y`` over rows seen so far, as an unevaluated sum ``high + low`` of two float32 arrays. A pytree.

    A plain float32 sum over 10^6 tokens loses the small terms: the running total is 2**20 times a term. Here the
    rounding error of each addition is computed exactly (Knuth's TwoSum) and kept in ``low``.

    Attributes:
      high, low: float32 [*stack, K, K].
      amax: float32 [*stack, K], largest magnitude of each channel of x.
      count: uint32 [*stack], rows seen; in a stack (experts) rows of zeros are padding and do not count.
      sample: some of the rows, or None: none are kept.
    """

    high: jax.Array
    low: jax.Array
    amax: jax.Array
    count: jax.Array
    sample: RowSample | None = None

    @classmethod
    def zeros(cls, size: int, stack: tuple[int, ...] = (), sample: int = 0) -> GramSum:
        """Nothing seen yet. ``sample``: how many rows to keep, for inputs that are no stack."""
        # Separate buffers: update() donates them.
        return cls(
            high=jnp.zeros((*stack, size, size), jnp.float32),
            low=jnp.zeros((*stack, size, size), jnp.float32),
            amax=jnp.zeros((*stack, size), jnp.float32),
            count=jnp.zeros(stack, jnp.uint32),
            sample=None if stack or not sample else RowSample.zeros(sample, size),
        )

    def add(self, x: jax.Array, y: jax.Array | None = None) -> GramSum:
        """With the rows of ``x [*stack, ..., K]`` added (``x^T y`` if ``y`` is given). For use inside ``jit``.

        The rows may be sharded over a mesh: each device multiplies its own, and XLA adds up the products.
        """
        y = x if y is None else y
        mesh = jax.typeof(x).sharding.mesh
        if mesh.explicit_axes:  # inside, XLA decides where things are; the sums are the same on all devices
            with jax.sharding.use_abstract_mesh(mesh):
                return jax.sharding.auto_axes(GramSum._add, out_sharding=jax.sharding.PartitionSpec())(self, x, y)
        return self._add(x, y)

    def _add(self, x: jax.Array, y: jax.Array) -> GramSum:
        stack = self.count.shape
        x = x.reshape(*stack, -1, x.shape[-1]).astype(jnp.float32)
        y = y.reshape(x.shape).astype(jnp.float32)
        high, low = self.high, self.low
        for left, right in zip(_chunks(x), _chunks(y), strict=True):
            part = jnp.matmul(jnp.swapaxes(left, -1, -2), right, precision=lax.Precision.HIGHEST)
            total, error = two_sum(high, part)
            high, low = total, low + error
        rows = jnp.sum(jnp.any(x != 0, axis=-1), axis=-1) if stack else x.shape[-2]
        return GramSum(
            high=high,
            low=low,
            amax=jnp.maximum(self.amax, jnp.max(jnp.abs(x), axis=-2, initial=0.0)),
            count=self.count + jnp.asarray(rows, jnp.uint32),
            sample=None if self.sample is None else self.sample.add(x, self.count),
        )

    def psum(self, axis_name: str) -> GramSum:
        """The sum over a mesh axis, inside ``shard_map``: each device added its own rows."""
        return GramSum(
            high=lax.psum(self.high, axis_name),
            low=lax.psum(self.low, axis_name),
            amax=lax.pmax(self.amax, axis_name),
            count=lax.psum(self.count, axis_name),
            sample=None if self.sample is None else self.sample.gather(axis_name),
        )

    def mean(self) -> jax.Array:
        """``2/n sum x^T y``: the Hessian of the squared output error of one row of the weight."""
        return 2.0 * (self.high + self.low) / jnp.maximum(self.count, 1).astype(jnp.float32)[..., None, None]


def _chunks(x: jax.Array) -> list[jax.Array]:
    """``[..., rows, K]`` cut into parts of at most :data:`CHUNK` rows: every n-th row, so that a part of a sharded
    array is a part of every shard, and no row moves to another device."""
    rows, k = x.shape[-2:]
    parts = -(-rows // CHUNK)
    if parts <= 1:
        return [x]
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, -rows % parts), (0, 0)])  # rows of zeros add nothing
    strided = padded.reshape(*x.shape[:-2], -1, parts, k)
    return [strided[..., i, :] for i in range(parts)]


def two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``fl(a + b)`` and its rounding error, exactly (Knuth)."""
    total = a + b
    virtual = total - a
    return total, (a - (total - virtual)) + (b - virtual)


@partial(jax.jit, donate_argnums=0)
def update(total: GramSum, x: jax.Array) -> GramSum:
    """``total`` with the rows of ``x`` added; the old buffers are donated.

    Example:
      >>> stats_of(update(GramSum.zeros(4), jnp.ones((10, 4)))).n_tokens.item()
      10
    """
    return total.add(x)


def stats_of(total: GramSum, cross: GramSum | None = None, transform: object = None) -> LayerStats:
    """The statistics that algorithms take. ``cross`` holds ``sum x_float^T x``."""
    return LayerStats(
        hessian=total.mean(),
        n_tokens=total.count,
        amax=total.amax,
        cross=None if cross is None else cross.mean(),
        transform=transform,
        sample=None if total.sample is None else total.sample.rows,
    )
