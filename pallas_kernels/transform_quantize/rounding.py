"""Values to codes inside a kernel: the codec, or shorter ways that give the same codes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mxjax.core import codec, scales
from mxjax.core.formats import E2M1, E4M3, E8M0_BIAS, NAN_BYTE, BlockFormat, ElementFormat

# How values become codes. "codec": integer steps, everywhere. "floats": E2M1 by float additions, which must keep
# subnormals (GPUs do, XLA's CPU code does not). "casts": also FP8 by the conversion instructions of sm_89 and later.
ROUNDINGS = ("codec", "floats", "casts")
_EXPONENT = 0x7F800000


def encode_e2m1(z: jax.Array, clip: bool) -> jax.Array:
    """int32 E2M1 codes of float32 ``z``: equal to ``codec.encode(z, E2M1)`` for |z| < 7, with ``clip`` for |z| < 8.

    Adding ``C = 2**22 * max(2**exponent(z), 1)`` rounds |z| to the step of its binade, half to even, and leaves the
    multiple of that step in the low bits of the sum: 7 operations where the codec takes about 25.
    """
    bits = codec.bits_of(z)
    top = jnp.maximum(bits & _EXPONENT, 127 << 23)
    c = top + (22 << 23)
    steps = codec.bits_of(codec.float_of(bits & codec.MAGNITUDE_MASK) + codec.float_of(c)) - c
    code = steps + ((top >> 22) - 254)
    if clip:
        code = jnp.minimum(code, 7)
    return code | ((bits >> 28) & 8)


def magic_step(element: ElementFormat) -> int:
    """Bits to add to those of a power of two 2**e: 1.5 * 2**23 steps of the element's numbers in [2**e, 2**(e + 1))."""
    return ((codec.MANTISSA_BITS - element.mantissa_bits) << codec.MANTISSA_BITS) + 0x400000


def round_to(z: jax.Array, one: jax.Array, element: ElementFormat, clip: bool) -> jax.Array:
    """float32 ``z`` rounded to ``element * one``, where ``one`` holds the bits of a power of two; never -0.

    The same idea with signs: 1.5 * 2**23 steps of z's binade, or of the element's lowest, are added and taken away.
    """
    lowest = one + (element.min_exponent << codec.MANTISSA_BITS)
    c = codec.float_of(jnp.maximum(codec.bits_of(z) & _EXPONENT, lowest) + magic_step(element))
    y = (z + c) - c
    if clip:
        limit = element.max_value * codec.float_of(one)
        y = jnp.clip(y, -limit, limit)
    return y


def _pack_nibbles(codes: jax.Array) -> jax.Array:
    """int32 codes [B, n] to uint8 [B, n/2], low nibble first. A sum of disjoint bits: the pair sits in one thread."""
    b, n = codes.shape
    pairs = codes.reshape(b, n // 2, 2)
    return jnp.sum(pairs << (4 * lax.broadcasted_iota(jnp.int32, pairs.shape, 2)), axis=2).astype(jnp.uint8)


def _power(n: jax.Array) -> jax.Array:
    """2**n as float32, |n| < 127."""
    return codec.float_of((n + 127) << codec.MANTISSA_BITS)


def quantize_tile(
    y: jax.Array, factor: np.float32, tensor_scale: jax.Array | None, fmt: BlockFormat, policy: str, rounding: str
) -> tuple[jax.Array, jax.Array]:
    """float32 ``y * factor`` [B, block] to packed codes uint8 [B, ..] and scale bytes uint8 [B]. Runs inside a kernel.

    The factor (Hadamard's) meets the block maximum and the scale instead of every value: rounding is monotone, and a
    power of two does not change it, so the codes are the same.

    Args:
      tensor_scale: float32 [B, 1] for NVFP4.
      rounding: one of :data:`ROUNDINGS`.
    """
    element = fmt.element
    fast = rounding != "codec" and policy != "third" and fmt.scale == "e8m0"
    fast = fast and (element is E2M1 or rounding == "casts")
    amax = jnp.max(codec.bits_of(y) & codec.MAGNITUDE_MASK, axis=1)
    if fast:
        amax = codec.bits_of(codec.float_of(amax) * factor)
    elif factor != 1:
        y = y * factor
        amax = jnp.max(codec.bits_of(y) & codec.MAGNITUDE_MASK, axis=1)
    bad = amax >= codec.INF_BITS
    amax = jnp.where(bad, 0, amax)
    keep = jnp.where(amax == 0, 0, 0xFF)[:, None]  # an all-zero block has no sign either
    if fmt.scale == "e4m3":
        assert tensor_scale is not None
        e, m = codec.split(codec.bits_of(tensor_scale))
        significand = codec.unit_of(m)
        # 2**-e in two exact steps, each of them a float32; what overflows is above every code
        half = -e >> 1
        scaled = scales.scale_by_power(y, -e) if rounding == "codec" else y * _power(half) * _power(-e - half)
        scaled_amax = scales.scale_by_power(codec.float_of(amax)[:, None], -e)
        # [B, 1] until here: Triton takes no scalar along an axis away
        byte = scales.e4m3_bytes(None, scaled_amax, significand, fmt, policy).astype(jnp.int32)
        scale = codec.decode(byte, E4M3)
        codes = codec.encode_quotient(scaled, scale, significand, element).astype(jnp.int32)
        byte = jnp.max(byte, axis=1)
    else:
        byte = scales.e8m0_bytes(amax, element, policy)
        if policy == "third":
            codes = codec.encode(3.0 * scales.scale_by_power(y, E8M0_BIAS - byte[:, None]), element).astype(jnp.int32)
        elif fast:
            # 2**(127 - byte); byte is at most 253 here, so this is a normal number
            z = y * (factor * codec.float_of((254 - byte) << 23))[:, None]
            if element is E2M1:
                codes = encode_e2m1(z, clip=policy == "floor")
            else:
                z = jnp.clip(z, -element.max_value, element.max_value).astype(jnp.dtype(element.dtype))
                codes = lax.bitcast_convert_type(z, jnp.uint8).astype(jnp.int32)
        else:
            codes = codec.encode(y, element, byte[:, None] - E8M0_BIAS).astype(jnp.int32)
    codes = codes & keep
    byte = jnp.where(bad, NAN_BYTE, jnp.where(amax == 0, 0, byte)).astype(jnp.uint8)
    return (_pack_nibbles(codes) if element.bits == 4 else codes.astype(jnp.uint8)), byte
