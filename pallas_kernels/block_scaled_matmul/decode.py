"""Codes and scale bytes to values in registers, inside the Triton kernels for weights in "rows"."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.core.formats import MXFP4, NAN_BYTE, BlockFormat
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


def decode_rows(codes: jax.Array, scales: Any, fmt: BlockFormat) -> jax.Array:
    """Packed codes [R, ..] and scale bytes [R, B] to bfloat16 [R, B * block], exact; E8M0 over 2**OFFSET."""
    r, blocks = scales.shape
    if fmt.element.bits == 4:
        wide = codes.astype(jnp.uint16)
        values = jnp.stack([_decode_e2m1(wide & 15), _decode_e2m1(wide >> 4)], axis=-1)
    else:
        values = lax.bitcast_convert_type(codes, jnp.dtype(fmt.element.dtype)).astype(jnp.bfloat16)
    if fmt.scale == "e4m3":
        factor = lax.bitcast_convert_type(scales, jnp.float8_e4m3fn).astype(jnp.bfloat16)
    else:
        byte = scales.astype(jnp.int32)
        bits = jnp.where(byte > OFFSET, (byte - OFFSET) << 7, 0x40 >> (OFFSET - jnp.minimum(byte, OFFSET)))
        bits = jnp.where(byte == NAN_BYTE, 0x7FC0, bits).astype(jnp.uint16)
        factor = lax.bitcast_convert_type(bits, jnp.bfloat16)
    values = values.reshape(r, blocks, fmt.block_size) * factor[:, :, None]
    return values.reshape(r, blocks * fmt.block_size)


def decode_fp8(codes: jax.Array, scales: jax.Array, top: jax.Array, dtype: Any) -> jax.Array:
    """MXFP4 codes [R, ..] and scale bytes [R, B] to e4m3 [R, 32 B]: values over their row's largest scale.

    ``value * 2**(byte - top + fp8_top)``, exact down to 14 binades below the largest block, rounded further below.
    """
    r, blocks = scales.shape
    wide = codes.astype(jnp.uint16)
    values = jnp.stack([_decode_e2m1(wide & 15), _decode_e2m1(wide >> 4)], axis=-1)
    byte = scales.astype(jnp.int32)
    exponent = jnp.maximum(byte - top[:, None] + (127 + fp8_top(dtype)), 1)
    bits = jnp.where(byte == NAN_BYTE, 0x7FC0, exponent << 7).astype(jnp.uint16)
    factor = lax.bitcast_convert_type(bits, jnp.bfloat16)
    values = values.reshape(r, blocks, MXFP4.block_size) * factor[:, :, None]
    wide32 = values.reshape(r, blocks * MXFP4.block_size).astype(jnp.float32)
    return _compat.to_e4m3fnuz(wide32) if dtype == jnp.float8_e4m3fnuz else wide32.astype(dtype)


def row_top(scales: jax.Array) -> jax.Array:
    """int32 [N]: the largest scale byte of each row, at least FP8_MIN_BYTE; a NaN block does not count."""
    byte = jnp.where(scales == NAN_BYTE, 0, scales).astype(jnp.int32)
    return jnp.maximum(jnp.max(byte, axis=-1), FP8_MIN_BYTE)


def offset_of(fmt: BlockFormat | None) -> int:
    return OFFSET if fmt is not None and fmt.scale == "e8m0" else 0
