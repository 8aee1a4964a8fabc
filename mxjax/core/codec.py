"""The one rounding rule of mxjax: float32 to small-float codes and back, in integer arithmetic only.

Why not ``x.astype(float4_e2m1fn)``? Under ``jit`` on a GPU XLA folds a cast there and back into nothing, and on a CPU
the cast rounds twice inside loops. Integer operations mean the same everywhere: eager, ``jit``, ``scan``, ``vmap``,
Pallas. They also keep subnormal float32 values, which XLA's CPU code flushes to zero in float arithmetic.

Every function takes an integer ``shift``, so that scaling by a power of two is an addition to the exponent: exact, with
no overflow and no subnormal intermediate::

    encode(x, f, shift) = code of RNE(x * 2**-shift)        decode(c, f, shift) = value(c) * 2**shift
"""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.core.formats import ElementFormat

MANTISSA_BITS = 23
MANTISSA_MASK = 0x7FFFFF
IMPLICIT_BIT = 0x800000
MAGNITUDE_MASK = 0x7FFFFFFF
INF_BITS = 0x7F800000
MAX_BITS = 0x7F7FFFFF  # largest finite float32
NAN_BITS = 0x7FC00000


def bits_of(x: jax.Array) -> jax.Array:
    """The int32 bit pattern of ``x`` as float32."""
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def float_of(bits: jax.Array) -> jax.Array:
    """The float32 with the bit pattern ``bits``."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def split(magnitude: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Exponent ``e`` and 24-bit significand ``m`` of non-negative float32 bits: value = m / 2**23 * 2**e.

    ``m`` has its leading bit at position 23 for subnormal inputs too. Zero gives (-276, 2**23), below every format.
    """
    fraction = magnitude & MANTISSA_MASK
    field = magnitude >> MANTISSA_BITS
    # A conversion from integer normalizes: the fraction of a subnormal is a small integer times 2**-149.
    renormalized = bits_of(fraction.astype(jnp.float32))
    subnormal = field == 0
    e = jnp.where(subnormal, (renormalized >> MANTISSA_BITS) - 149, field) - 127
    m = jnp.where(subnormal, renormalized, fraction) & MANTISSA_MASK
    return e, m | IMPLICIT_BIT


def unit_of(m: jax.Array) -> jax.Array:
    """The float32 in [1, 2) whose 24-bit significand is ``m``, as :func:`split` gives it."""
    return float_of((m & MANTISSA_MASK) | 0x3F800000)


def shift_right_rne(m: jax.Array, drop: jax.Array | int) -> jax.Array:
    """``m / 2**drop`` rounded to the nearest integer, ties to even; 1 <= drop <= 25, m < 2**24."""
    return (m + ((1 << (drop - 1)) - 1) + ((m >> drop) & 1)) >> drop


def encode(x: jax.Array, f: ElementFormat, shift: jax.Array | int = 0) -> jax.Array:
    """Codes of ``x * 2**-shift`` in the format ``f``: round half to even, saturate.

    Args:
      x: any float dtype; taken as float32.
      f: element format.
      shift: int32, broadcast against ``x``. For formats with ``min_exponent == 0`` it must be at least -127.

    Returns:
      uint8 codes of x's shape, one code a byte. The sign of zero is kept (INT8 has one zero). NaN and Inf become the
      largest finite code with their sign: callers decide what a non-finite value means before they call.

    Example:
      >>> encode(jnp.array([0.25, 0.75, -5.0, 7.0]), E2M1).tolist()
      [0, 2, 14, 7]
    """
    bits = bits_of(x)
    magnitude = bits & MAGNITUDE_MASK
    emin = f.min_exponent
    if emin == 0:
        # shift >= -127 puts every float32 subnormal on the coarsest grid, where m needs no leading bit.
        field = magnitude >> MANTISSA_BITS
        fraction = magnitude & MANTISSA_MASK
        e = field - 127
        m = jnp.where(field == 0, fraction << 1, fraction | IMPLICIT_BIT)
    else:
        e, m = split(magnitude)
    e = e - shift
    drop = MANTISSA_BITS - f.mantissa_bits + jnp.clip(emin - e, 0, f.mantissa_bits + 2)
    # A carry out of the rounded significand moves into the exponent by itself.
    code = ((jnp.maximum(e, emin) - emin) << f.mantissa_bits) + shift_right_rne(m, drop)
    code = jnp.where(magnitude >= INF_BITS, f.max_code, jnp.minimum(code, f.max_code))
    if f.twos_complement:
        code = jnp.where(bits < 0, -code, code)
    else:
        code = code | ((bits >> (32 - f.bits)) & f.sign_mask)
    return code.astype(jnp.uint8)


def encode_quotient(x: jax.Array, d: jax.Array, significand: jax.Array, f: ElementFormat) -> jax.Array:
    """Codes of ``x / (d * significand)``: what :func:`encode` gives for the exact quotient, without a division.

    Compilers divide by what is no power of two with an error of up to two units in the last place, each its own (XLA
    joins two divisions, and multiplies by a reciprocal); a quotient that is a tie then falls to either side. Products
    are rounded alike everywhere. So |x| is compared with the midpoints between codes, times the divisor: exact where
    ``significand`` is 1, else two roundings.

    Args:
      x: float32, not NaN.
      d: positive float32, broadcast against ``x``, with at most ``22 - f.mantissa_bits`` bits.
      significand: float32 in [1, 2), likewise.
      f: a format of 4 bits: there is one comparison a code.
    """
    values = [f.value_of(c) for c in range(f.max_code + 1)]
    bits = bits_of(x)
    magnitude, code = float_of(bits & MAGNITUDE_MASK), (bits >> (32 - f.bits)) & f.sign_mask
    for c, (low, high) in enumerate(pairwise(values)):
        tie = (0.5 * (low + high) * significand) * d
        code = code + (magnitude >= tie if c % 2 else magnitude > tie).astype(jnp.int32)  # ties go to the even code
    return code.astype(jnp.uint8)


def ldexp(x: jax.Array, n: jax.Array | int, max_bits: int = MAX_BITS) -> jax.Array:
    """``x * 2**n`` as float32 with one rounding (to even, where the result is subnormal), saturating at ``max_bits``.

    Args:
      x: float32, zero or normal; NaN and Inf pass through.
      n: int32, broadcast against ``x``.
      max_bits: bit pattern of the largest result.
    """
    bits = bits_of(x)
    magnitude = bits & MAGNITUDE_MASK
    field = (magnitude >> MANTISSA_BITS) + n
    normal = jnp.minimum(magnitude + (n << MANTISSA_BITS), max_bits)  # may wrap; then `field` rejects it
    normal = jnp.where(field > 254, max_bits, normal)
    m = (magnitude & MANTISSA_MASK) | IMPLICIT_BIT
    subnormal = shift_right_rne(m, jnp.clip(1 - field, 1, 25))
    out = jnp.where(field > 0, normal, subnormal)
    out = jnp.where((magnitude == 0) | (magnitude >= INF_BITS), magnitude, out)
    return float_of(out | (bits & ~MAGNITUDE_MASK))


def decode(codes: jax.Array, f: ElementFormat, shift: jax.Array | int = 0, max_bits: int = MAX_BITS) -> jax.Array:
    """float32 values ``value(code) * 2**shift``: exact where float32 can hold them, saturating at ``max_bits``.

    Args:
      codes: uint8, one code a byte.
      f: element format.
      shift: int32, broadcast against ``codes``.
      max_bits: bit pattern of the largest result (codes of Inf and NaN stay what they are).
    """
    code = codes.astype(jnp.int32)
    if f.twos_complement:
        signed = jnp.where(code >= f.sign_mask, code - 2 * f.sign_mask, code)
        return ldexp(signed.astype(jnp.float32), shift - f.mantissa_bits, max_bits)
    magnitude = code & (f.sign_mask - 1)
    field = magnitude >> f.mantissa_bits
    significand = (magnitude & ((1 << f.mantissa_bits) - 1)) | (jnp.minimum(field, 1) << f.mantissa_bits)
    exponent = jnp.maximum(field, 1) - f.bias - f.mantissa_bits
    value = bits_of(ldexp(significand.astype(jnp.float32), exponent + shift, max_bits))
    if f.max_code < f.sign_mask - 1:
        special = jnp.where(magnitude == f.inf_code, INF_BITS, NAN_BITS) if f.inf_code is not None else NAN_BITS
        value = jnp.where(magnitude > f.max_code, special, value)
    return float_of(value | ((code & f.sign_mask) << (32 - f.bits)))
