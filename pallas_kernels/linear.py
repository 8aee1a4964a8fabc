"""A whole quantized layer on packed weights: transform and quantize x, multiply, epilogue. What ``qdot`` calls."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mxjax import backend
from mxjax.core import codec
from mxjax.core.formats import MXFP4, BlockFormat
from mxjax.core.scales import DEFAULT_POLICY, tensor_scale
from pallas_kernels.block_scaled_matmul import PackedWeight, block_scaled_matmul
from pallas_kernels.block_scaled_matmul.reference import dequantize
from pallas_kernels.block_scaled_matmul.routes import DECODE_ROWS
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.transform_quantize import (
    Transform,
    down_projection,
    transform_quantize,
    transform_quantize_fp8,
    transform_quantize_low_rank,
)
from pallas_kernels.transform_quantize.reference import PAIR_FORMATS, apply_transform


def quantized_linear(
    x: jax.Array,
    w: PackedWeight,
    *,
    activation: BlockFormat | None = None,
    policy: str = DEFAULT_POLICY,
    transform: Transform | None = None,
    input_scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    low_rank_a: jax.Array | None = None,
    low_rank_down: jax.Array | None = None,
    low_rank_up: jax.Array | None = None,
    low_rank_parts: tuple[int, ...] = (),
    activation_function: str | None = None,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """``f(Q(x T) W^T + (x A^T) B^T + bias)``: quantization of x and product, each on its best route.

    MXFP4 activations go as the exact-FP8 pair (as bfloat16 values to "bf16_fragments", and to "tiles" for few rows),
    and so do MXFP6 ones to "fp8_fragments"; other formats as bfloat16 values. A "rows" weight takes codes and scale
    bytes, or the pair where it is MXFP4 or MXFP6 and the chip has FP8 units but no FP4 ones. NVFP4's tensor scale is
    each row's own unless ``input_scale`` is given.

    Args:
      x: float [.., K].
      w: from :func:`pallas_kernels.block_scaled_matmul.prepare`.
      activation: format of x, or None: x is not quantized.
      policy: scale policy of x.
      transform: on x, before its quantization.
      input_scale: float32 scalar, NVFP4's fixed tensor scale of x.
      bias, activation_function, out_dtype: of the result, as of :func:`block_scaled_matmul`; ``out_dtype`` defaults to
        x's.
      low_rank_a: A [r, K]: x A^T is computed in the pass that quantizes x where a kernel can.
      low_rank_down: x A^T [.., r] where the caller has it, in place of A.
      low_rank_up: B [N, r].
      low_rank_parts: as of :func:`block_scaled_matmul`.
      implementation: None chooses each part; "xla" and "triton" force both, "mosaic_gpu" the product.

    Returns:
      [.., N].

    Raises:
      As :func:`transform_quantize` and :func:`block_scaled_matmul`.
    """
    out_dtype = x.dtype if out_dtype is None else out_dtype
    t = Transform() if transform is None else transform
    first = None if implementation == "mosaic_gpu" else implementation
    rest: dict[str, Any] = dict(bias=bias, activation_function=activation_function, out_dtype=out_dtype)
    rest |= dict(implementation=implementation, low_rank_parts=low_rank_parts)
    pair = activation in PAIR_FORMATS if w.layout == "fp8_fragments" else activation == MXFP4 and w.layout != "rows"
    rows = activation is not None and not pair
    if low_rank_a is not None and not rows:
        low_rank_down = down_projection(x, low_rank_a)
    if low_rank_down is not None and low_rank_up is not None:
        rest |= dict(low_rank=(low_rank_down, low_rank_up))
    if activation is None:
        if t != Transform():
            x = apply_transform(x, t).astype(x.dtype)
        return block_scaled_matmul(x, w, **rest)
    if not rows:
        few = x.size // x.shape[-1] <= DECODE_ROWS and implementation != "mosaic_gpu"
        few = w.layout == "bf16_fragments" or (few and w.layout == "tiles")
        dtype = jnp.bfloat16 if few else jnp.float8_e4m3fn
        options = dict(fmt=activation, policy=policy, transform=t, dtype=dtype)
        values, row_scale = transform_quantize_fp8(x, implementation=first, **options)
        return block_scaled_matmul(values, w, x_scale=row_scale, **rest)
    units = _pair_units(activation, w, t)
    if t.per_block and implementation is not None:  # no single pass of Triton makes this pair
        units = None
    if units is not None and implementation != "xla":
        if low_rank_a is not None:
            rest |= dict(low_rank=(down_projection(x, low_rank_a), low_rank_up))
        options = dict(fmt=activation, policy=policy, transform=t, dtype=units)
        values, row_scale = transform_quantize_fp8(x, implementation=first, **options)
        return block_scaled_matmul(values, w, x_scale=row_scale, **rest)
    codes, scales, scale, down = quantized_rows(x, activation, policy, t, input_scale, first, low_rank_a)
    if down is not None:
        rest |= dict(low_rank=(down, low_rank_up))
    if w.layout != "rows":  # whose kernels take values: exact in bfloat16, with the tensor scale beside them
        return block_scaled_matmul(dequantize(codes, scales, activation, jnp.bfloat16), w, x_scale=scale, **rest)
    return block_scaled_matmul(codes, w, x_scales=scales, x_format=activation, x_scale=scale, **rest)


def _pair_units(activation: BlockFormat, w: PackedWeight, t: Transform) -> Any:
    """The float8 that this chip multiplies the exact-FP8 pair in where the weight is in "rows", or None."""
    if w.layout != "rows" or not {activation, w.format} <= set(PAIR_FORMATS) or backend.has("fp4_matmul"):
        return None
    if t.per_block and (t.left is None or not backend.has("wgmma")):
        return None  # the pair needs whole rows, one matrix a block needs tiles of a block column
    if backend.has("fp8_fnuz_matmul"):  # gfx942
        return jnp.float8_e4m3fnuz
    return jnp.float8_e4m3fn if backend.has("fp8_matmul") else None


def quantized_rows(
    x: jax.Array,
    activation: BlockFormat,
    policy: str,
    transform: Transform,
    input_scale: jax.Array | None,
    implementation: str | None,
    low_rank_a: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Codes and scale bytes of x, each row's factor [..] or None, and x A^T or None.

    The factor is NVFP4's tensor scale, and 1/3 under "third".
    """
    scale = None
    if activation.has_tensor_scale:
        if input_scale is not None:
            scale = jnp.broadcast_to(input_scale.astype(jnp.float32), x.shape[:-1])
        else:
            bits = codec.bits_of(apply_transform(x, transform)) & codec.MAGNITUDE_MASK
            amax = jnp.max(jnp.where(bits >= codec.INF_BITS, 0, bits), axis=-1)
            scale = tensor_scale(amax, policy)
    options: dict[str, Any] = dict(policy=policy, transform=transform, tensor_scale=scale)
    down = None
    if low_rank_a is None:
        codes, scales = transform_quantize(x, activation, implementation=implementation, **options)
    else:
        codes, scales, down = transform_quantize_low_rank(
            x, low_rank_a, activation, implementation=implementation, **options
        )
    if policy == "third":
        third = jnp.full(x.shape[:-1], 1 / 3, jnp.float32)
        scale = third if scale is None else third * scale
    return codes, scales, scale, down


def grouped_linear(
    x: jax.Array,
    w: PackedWeight,
    group_sizes: jax.Array,
    *,
    activation: BlockFormat | None = None,
    policy: str = DEFAULT_POLICY,
    input_scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """``Q(x[r]) W[e]^T + bias[e]`` for every row r of group e: :func:`quantized_linear` for experts.

    Args:
      x: float [M, K], sorted by expert.
      w: from :func:`pallas_kernels.grouped_matmul.expert_stack`.
      group_sizes: integers [E].
      bias: [E, N].
      Others as of :func:`quantized_linear`; every row of x is quantized by itself, so in one pass for all experts.

    Returns:
      [M, N], zero beyond the last group.
    """
    rest: dict[str, Any] = dict(bias=bias, out_dtype=x.dtype if out_dtype is None else out_dtype)
    if activation is None:
        return grouped_matmul(x, w, group_sizes, implementation=implementation, **rest)
    codes, scales, scale, _ = quantized_rows(x, activation, policy, Transform(), input_scale, implementation)
    rest |= dict(x_scales=scales, x_format=activation, x_scale=scale, implementation=implementation)
    return grouped_matmul(codes, w, group_sizes, **rest)
