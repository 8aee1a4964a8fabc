"""grouped_matmul: arguments, checks, and the choice of a route."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from mxjax import backend
from mxjax.core.formats import BlockFormat, get_format
from mxjax.errors import BlockShapeError, FormatError
from pallas_kernels import _dispatch
from pallas_kernels.block_scaled_matmul import PackedWeight, triton_generic
from pallas_kernels.block_scaled_matmul.api import GENERIC_ROWS, native_pair, rows_obstacle
from pallas_kernels.block_scaled_matmul.reference import dequantize
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.grouped_matmul.tiles import row_tiles


def expert_stack(
    codes: jax.Array, scales: jax.Array, fmt: str | BlockFormat, tensor_scale: jax.Array | None = None
) -> PackedWeight:
    """Weights of all experts as :func:`grouped_matmul` takes them: a "rows" weight with a leading axis.

    Args:
      codes: uint8 [E, N, K * bits / 8].
      scales: uint8 [E, N, K / block].
      fmt: their format.
      tensor_scale: float32 scalar, [E] or [E, N], or None.

    Raises:
      BlockShapeError: shapes that contradict each other.
    """
    fmt = get_format(fmt)
    if codes.ndim != 3 or scales.ndim != 3:
        raise BlockShapeError(f"experts are [E, N, K]; codes are {codes.shape}, scales {scales.shape}")
    e, n, k = *scales.shape[:2], scales.shape[2] * fmt.block_size
    if codes.shape != (e, n, fmt.packed_size(k)):
        raise BlockShapeError(f"codes {codes.shape} do not fit scales {scales.shape} of {fmt}")
    factor = None
    if tensor_scale is not None:
        factor = jnp.asarray(tensor_scale, jnp.float32)
        factor = jnp.broadcast_to(factor.reshape(factor.shape + (1,) * (2 - factor.ndim)), (e, n))
    return PackedWeight(codes=codes, scales=scales, row_scale=factor, format=fmt, layout="rows", n=n, k=k)


def grouped_matmul(
    x: jax.Array,
    w: PackedWeight,
    group_sizes: jax.Array,
    *,
    x_scales: jax.Array | None = None,
    x_format: str | BlockFormat | None = None,
    x_scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """``x[r] @ W[e]^T + bias[e]`` for every row r of group e; float32 accumulation, one rounding at the end.

    Args:
      x: [M, ..] as :func:`block_scaled_matmul` takes it for a weight in "rows", sorted by expert: the first
        ``group_sizes[0]`` rows go to expert 0, and so on.
      w: from :func:`expert_stack`.
      group_sizes: integers [E]; zeros are allowed. Rows beyond their sum give zero.
      x_scales, x_format, x_scale: as of :func:`block_scaled_matmul`.
      bias: [E, N].
      out_dtype: default: x's dtype if that is a float of 16 bits or more, else bfloat16.
      implementation: None chooses; "xla", "triton".

    Returns:
      [M, N].

    Raises:
      BlockShapeError, FormatError: arguments that do not fit.
      BackendUnsupported: a forced implementation that cannot run.

    Example:
      >>> q = mxjax.quantize_array(jnp.ones((4, 8, 64)), "mxfp4")
      >>> from pallas_kernels.grouped_matmul import expert_stack
      >>> w = expert_stack(q.codes, q.scales, "mxfp4")
      >>> grouped_matmul(jnp.ones((5, 64)), w, jnp.array([2, 0, 3, 0])).shape
      (5, 8)
    """
    fmt = None if x_format is None else get_format(x_format)
    x = jnp.asarray(x)
    if (fmt is None) != (x_scales is None) or (fmt is None) != (x.dtype != jnp.uint8):
        raise FormatError("quantized x is uint8 codes with x_scales and x_format; float x has neither")
    width = w.k if fmt is None else fmt.packed_size(w.k)
    if x.ndim != 2 or x.shape[1] != width:
        raise BlockShapeError(f"x {x.shape} is not [M, {width}], as experts [{w.n}, {w.k}] take it")
    experts = w.codes.shape[0]
    if group_sizes.shape != (experts,):
        raise BlockShapeError(f"group_sizes {group_sizes.shape} is not one size for each of {experts} experts")
    if bias is not None and bias.shape != (experts, w.n):
        raise BlockShapeError(f"bias {bias.shape} is not [{experts}, {w.n}]")
    if out_dtype is None:
        out_dtype = x.dtype if x.dtype in (jnp.bfloat16, jnp.float16, jnp.float32) else jnp.bfloat16
    args = (x, x_scales, None if x_scale is None else x_scale.astype(jnp.float32), w)
    out_dtype = jnp.dtype(out_dtype)
    target = backend.target()
    obstacle = _dispatch.triton_obstacle(target) or rows_obstacle(x, fmt, w.format, target)
    if x.shape[0] == 0:
        obstacle = obstacle or "x has no rows"
    elif max(x.shape[0] * max(w.n, w.k), experts * w.n * w.k) >= 2**31:
        obstacle = obstacle or f"[{experts}, {w.n}, {w.k}] is beyond the 32-bit offsets of Pallas Triton"
    mean = -(-x.shape[0] // max(experts, 1))
    native = native_pair(fmt, w.format, target)
    slow = f"{mean} rows an expert: XLA's dequantize and product is faster"
    chosen = _dispatch.pick(
        "grouped_matmul",
        implementation,
        [
            _dispatch.Candidate(
                "triton",
                lambda: _triton(*args, group_sizes, bias, fmt, out_dtype, native),
                obstacle,
                slow if mean > GENERIC_ROWS and not native else None,
            ),
            _dispatch.Candidate("xla", partial(_xla, *args, group_sizes, bias, fmt, out_dtype)),
        ],
    )
    return chosen.run()


_xla = jax.jit(reference.matmul, static_argnums=(6, 7))


def _triton(
    x: jax.Array,
    x_scales: jax.Array | None,
    x_scale: jax.Array | None,
    w: PackedWeight,
    group_sizes: jax.Array,
    bias: jax.Array | None,
    fmt: BlockFormat | None,
    out_dtype: Any,
    native: bool,
    *,
    interpret: bool = False,
) -> jax.Array:
    """The kernel, with tiles for the mean number of rows an expert has.

    Without FP4 units it multiplies bfloat16, which holds every code times its scale. x then is decoded once, before it:
    each tile of columns of each expert would do that again (H200, 32 experts of 5760 x 2880, 128 tokens: 592 us for
    codes, 312 for bfloat16).
    """
    if fmt is not None and not native:
        x, x_scales, fmt = dequantize(x, x_scales, fmt, jnp.bfloat16), None, None
    config = triton_generic.generic_config(-(-x.shape[0] // w.codes.shape[0]), w.n, native)
    table = row_tiles(group_sizes, x.shape[0], config.block_m)
    return triton_generic.grouped(
        x, x_scales, x_scale, w, table, bias, fmt, out_dtype, config, native=native, interpret=interpret
    )
