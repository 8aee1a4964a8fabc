"""Grouped products in plain JAX. One expert is held dequantized at a time, and only experts that have rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.core.formats import BlockFormat
from pallas_kernels.block_scaled_matmul.layout import PackedWeight
from pallas_kernels.block_scaled_matmul.reference import dequantize
from pallas_kernels.grouped_matmul.tiles import spans


def row_block(rows: int, experts: int) -> int:
    """Rows multiplied at once: about what an expert has, a power of two in 8..512."""
    wanted = max(rows // max(experts, 1), 1)
    return min(max(1 << (wanted - 1).bit_length(), 8), 512)


def by_expert(x: jax.Array, group_sizes: jax.Array, n: int, values: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """float32 ``y[r] = x[r] @ values(e)^T`` for every row r of group e, zero for rows of none.

    Args:
      x: [M, K], sorted by group.
      group_sizes: [E].
      n: rows of ``values(e)``.
      values: expert (int32 scalar) to [n, K] of x's dtype.
    """
    rows = x.shape[0]
    if rows == 0:
        return jnp.zeros((0, n), jnp.float32)
    block = min(row_block(rows, group_sizes.shape[0]), rows)
    start, end = spans(group_sizes, rows)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def expert(e: jax.Array, out: jax.Array) -> jax.Array:
        w = values(e)

        def tile(i: jax.Array, out: jax.Array) -> jax.Array:
            # The last tile of x begins earlier: its first rows were written before, to the same numbers or masked out.
            first = jnp.minimum(start[e] + i * block, rows - block)
            part = lax.dynamic_slice_in_dim(x, first, block)
            y = lax.dot_general(
                part, w, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
            )
            row = first + jnp.arange(block)
            mine = (row >= start[e] + i * block) & (row < end[e])
            old = lax.dynamic_slice_in_dim(out, first, block)
            return lax.dynamic_update_slice_in_dim(out, jnp.where(mine[:, None], y, old), first, 0)

        return lax.fori_loop(0, (end[e] - start[e] + block - 1) // block, tile, out)

    def visit(e: jax.Array, out: jax.Array) -> jax.Array:
        return lax.cond(end[e] > start[e], expert, lambda e, out: out, e, out)

    return lax.fori_loop(0, group_sizes.shape[0], visit, jnp.zeros((rows, n), jnp.float32))


def expert_of_row(group_sizes: jax.Array, rows: int) -> jax.Array:
    """int32 [rows]: the group of each row, E for rows beyond the last group."""
    end = spans(group_sizes, rows)[1]
    return jnp.searchsorted(end, jnp.arange(rows), side="right").astype(jnp.int32)


def matmul(
    x: jax.Array,
    x_scales: jax.Array | None,
    x_scale: jax.Array | None,
    w: PackedWeight,
    group_sizes: jax.Array,
    bias: jax.Array | None,
    x_fmt: BlockFormat | None,
    out_dtype: Any,
) -> jax.Array:
    """``x[r] @ w[e]^T * x_scale[r] * row_scale[e] + bias[e]`` for every row r of group e: [M, N], zero for other rows.

    Args:
      x, x_scales, x_scale, x_fmt, out_dtype: as of :func:`pallas_kernels.block_scaled_matmul.reference.matmul`.
      w: "rows" weight whose arrays have a leading axis of experts.
      group_sizes: [E].
      bias: [E, N] or None.
    """
    dtype = x.dtype if x.dtype in (jnp.float32, jnp.float16) else jnp.bfloat16
    values = x.astype(dtype) if x_fmt is None else dequantize(x, x_scales, x_fmt, dtype)
    scales = w.scales
    assert scales is not None  # "rows"

    def expert(e: jax.Array) -> jax.Array:
        return dequantize(w.codes[e], scales[e], w.format, dtype)

    y = by_expert(values, group_sizes, w.n, expert)
    factor = None if x_scale is None else x_scale[:, None]
    if w.row_scale is None and bias is None:
        return (y if factor is None else y * factor).astype(out_dtype)
    group = expert_of_row(group_sizes, x.shape[0])
    mine, group = group < w.codes.shape[0], jnp.minimum(group, w.codes.shape[0] - 1)
    if w.row_scale is not None:
        factor = w.row_scale[group] if factor is None else factor * w.row_scale[group]
    if factor is not None:
        y = y * factor
    if bias is not None:
        y = y + bias.astype(jnp.float32)[group]
    return jnp.where(mine[:, None], y, 0.0).astype(out_dtype)
