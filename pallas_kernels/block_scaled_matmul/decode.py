"""Codes and scale bytes to values in registers, inside the Triton kernels for weights in "rows"."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.core.formats import NAN_BYTE, BlockFormat, ElementFormat
from pallas_kernels import _compat
from pallas_kernels.transform_quantize.reference import FP8_MIN_BYTE, fp8_top

# E8M0 operands are decoded as value * 2**(byte - 129): no code overflows bfloat16, none is lost below its subnormals.
OFFSET = 2


def _decode_e2m1(nibble: jax.Array) -> jax.Array:
    """uint16 nibbles to bfloat16, by integer operations: products with 2**126 would meet flushed subnormals."""
    magnitude = nibble & 7
    exponent = jnp.where(magnitude == 0, 0, 126 << 7).astype(jnp.uint16)
    bits = exponent + jnp.where(magnitude > 1, magnitude << 6, 0).astype(jnp.uint16)
    return lax.bitcast_convert_type(bits | ((nibble & 8) << 12), jnp.bfloat16)


def _decode_fp6(code: jax.Array, element: ElementFormat) -> jax.Array:
    """int32 codes of six bits to bfloat16: significand times a power of two, both small integers."""
    magnitude = code & 31
    exponent = magnitude >> element.mantissa_bits
    significand = magnitude & ((1 << element.mantissa_bits) - 1)
    significand = significand | (jnp.minimum(exponent, 1) << element.mantissa_bits)
    power = jnp.maximum(exponent, 1) + (127 - element.bias - element.mantissa_bits)
    value = significand.astype(jnp.float32) * lax.bitcast_convert_type(power << 23, jnp.float32)
    return jnp.where(code >= 32, -value, value).astype(jnp.bfloat16)


def element_values(codes: Any, element: ElementFormat) -> jax.Array:
    """Codes of a tile to bfloat16 values without their scales: [R, n / 2, 2], [R, n / 4, 2, 2] (six bits) or [R, n].

    Args:
      codes: packed uint8 [R, ..]; for six bits the three bytes of each four codes apart, a tuple of [R, n / 4].
    """
    if element.bits == 6:
        b0, b1, b2 = (b.astype(jnp.int32) for b in codes)
        first = [b0 & 63, (b0 >> 6) | ((b1 & 15) << 2)]
        last = [(b1 >> 4) | ((b2 & 3) << 4), b2 >> 2]
        first, last = ([_decode_fp6(c, element) for c in pair] for pair in (first, last))
        # codes 0 and 2, 1 and 3 side by side, then those pairs: 0, 1, 2, 3
        return jnp.stack([jnp.stack([first[i], last[i]], axis=-1) for i in range(2)], axis=-1)
    if element.bits == 4:
        wide = codes.astype(jnp.uint16)
        return jnp.stack([_decode_e2m1(wide & 15), _decode_e2m1(wide >> 4)], axis=-1)
    return lax.bitcast_convert_type(codes, jnp.dtype(element.dtype)).astype(jnp.bfloat16)


def decode_rows(codes: Any, scales: Any, fmt: BlockFormat) -> jax.Array:
    """Codes as :func:`element_values` takes them and scale bytes [R, B] to bfloat16 [R, B * block], exact; E8M0 over
    2**OFFSET."""
    r, blocks = scales.shape
    values = element_values(codes, fmt.element)
    if fmt.scale == "e4m3":
        factor = lax.bitcast_convert_type(scales, jnp.float8_e4m3fn).astype(jnp.bfloat16)
    else:
        byte = scales.astype(jnp.int32)
        bits = jnp.where(byte > OFFSET, (byte - OFFSET) << 7, 0x40 >> (OFFSET - jnp.minimum(byte, OFFSET)))
        bits = jnp.where(byte == NAN_BYTE, 0x7FC0, bits).astype(jnp.uint16)
        factor = lax.bitcast_convert_type(bits, jnp.bfloat16)
    values = values.reshape(r, blocks, fmt.block_size) * factor[:, :, None]
    return values.reshape(r, blocks * fmt.block_size)


def decode_fp8(codes: Any, scales: jax.Array, top: jax.Array, dtype: Any, fmt: BlockFormat) -> jax.Array:
    """Codes of MXFP4 or MXFP6 and scale bytes [R, B] to e4m3 [R, 32 B]: values over their row's largest scale.

    ``value * 2**(byte - top + fp8_top)``, exact down to ``exact_binades`` below the largest block, rounded further
    below.
    """
    r, blocks = scales.shape
    values = element_values(codes, fmt.element)
    byte = scales.astype(jnp.int32)
    exponent = jnp.maximum(byte - top[:, None] + (127 + fp8_top(dtype, fmt.element)), 1)
    bits = jnp.where(byte == NAN_BYTE, 0x7FC0, exponent << 7).astype(jnp.uint16)
    factor = lax.bitcast_convert_type(bits, jnp.bfloat16)
    values = values.reshape(r, blocks, fmt.block_size) * factor[:, :, None]
    wide32 = values.reshape(r, blocks * fmt.block_size).astype(jnp.float32)
    return _compat.to_e4m3fnuz(wide32) if dtype == jnp.float8_e4m3fnuz else wide32.astype(dtype)


def row_top(scales: jax.Array) -> jax.Array:
    """int32 [N]: the largest scale byte of each row, at least FP8_MIN_BYTE; a NaN block does not count."""
    byte = jnp.where(scales == NAN_BYTE, 0, scales).astype(jnp.int32)
    return jnp.maximum(jnp.max(byte, axis=-1), FP8_MIN_BYTE)


def offset_of(fmt: BlockFormat | None) -> int:
    return OFFSET if fmt is not None and fmt.scale == "e8m0" else 0
