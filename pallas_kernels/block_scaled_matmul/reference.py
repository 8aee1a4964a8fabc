"""Block-scaled products in plain JAX: the definition, and what runs where no kernel can."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.core import packing
from mxjax.core.formats import BlockFormat
from mxjax.core.qtensor import dequantize_blocks
from pallas_kernels.block_scaled_matmul import fragments, layout
from pallas_kernels.block_scaled_matmul.epilogue import Epilogue
from pallas_kernels.block_scaled_matmul.layout import PackedWeight


def dequantize(codes: jax.Array, scales: Any, fmt: BlockFormat, dtype: Any) -> jax.Array:
    """[R, K] values of packed codes and scale bytes."""
    blocks = packing.unpack(codes, fmt.element.bits).reshape(*scales.shape, fmt.block_size)
    one = jnp.ones((), jnp.float32) if fmt.has_tensor_scale else None
    values = dequantize_blocks(blocks, scales, one, fmt, dtype)
    return values.reshape(*scales.shape[:-1], scales.shape[-1] * fmt.block_size)


def weight_values(w: PackedWeight, dtype: Any) -> jax.Array:
    """[N, K] of ``dtype``, to be multiplied by ``w.row_scale``."""
    if w.layout == "tiles":
        return layout.relative_values(w).astype(dtype)
    if w.layout != "rows":
        return fragments.relative_values(w).astype(dtype)
    return dequantize(w.codes, w.scales, w.format, dtype)


def finish(y: jax.Array, w: PackedWeight, x_scale: jax.Array | None, bias: jax.Array | None, dtype: Any) -> jax.Array:
    """``y * (x_scale[:, None] * row_scale) + bias`` in float32, then the output dtype.

    The two scales meet first, here and in every kernel: each may be anything from 2**-133 to 2**127, and ``y`` times
    one of them alone overflows or vanishes where the result does not. Their product overflows only where that of the
    two rows' largest values does. It leaves the normal numbers below 2**-126; sums of the exact-FP8 pair are 0 or
    between 2**-18 and 2**33 (448 * 448 * 32768), so results from 2**-93 up are right.
    """
    factor = None if w.row_scale is None else w.row_scale[: y.shape[-1]]
    if x_scale is not None:
        factor = x_scale[:, None] if factor is None else x_scale[:, None] * factor
    if factor is not None:
        y = y * factor
    y = y[:, : w.n]
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(dtype)


def matmul(
    x: jax.Array,
    x_scales: jax.Array | None,
    x_scale: jax.Array | None,
    w: PackedWeight,
    epilogue: Epilogue,
    x_fmt: BlockFormat | None,
    out_dtype: Any,
) -> jax.Array:
    """``epilogue(x_values @ w_values^T)`` [M, N], accumulated in float32.

    Args:
      x: float [M, K], or uint8 codes with ``x_scales`` and ``x_fmt``, or float8 with ``x_scale``.
      x_scales: uint8 [M, K / block] or None.
      x_scale: float32 [M] or None.
      w: packed weight.
      epilogue: what follows the sums.
      x_fmt: format of x's codes, or None.
      out_dtype: of the result.
    """
    dtype = x.dtype if x.dtype in (jnp.float32, jnp.float16) else jnp.bfloat16
    a = x.astype(dtype) if x_fmt is None else dequantize(x, x_scales, x_fmt, dtype)
    b = weight_values(w, dtype)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    y = lax.dot_general(a, b, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)
    return epilogue.apply(finish(y, w, x_scale, None, jnp.float32)).astype(out_dtype)
