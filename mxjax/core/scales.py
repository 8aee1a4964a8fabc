"""Scale policies: from the largest magnitude of a block to its scale byte.

For E8M0 (the MX formats), with ``E = floor(log2(amax))``, ``emax = floor(log2(max element))``:

========= ============================================== ======================== =====================================
policy    scale                                          amax/scale for E2M1      also known as
========= ============================================== ======================== =====================================
floor     2**(E - emax)                                  [4, 8), clips above 6    OCP MX
even      2**(E' - emax), E' of amax rounded to the      [3.5, 7), clips above 6  Quark, AITER, compressed-tensors
          element's mantissa bits, half up
ceil      2**(ceil(log2 amax) - emax)                    (2, 4]                   torchao CEIL
rceil     2**ceil(log2(amax / max element))              (3, 6], never clips      NVIDIA, ModelOpt
mse       the best of floor's exponent - 1, + 0, + 1 by  data dependent           --
          the squared error of the block
third     4/3 * 2**(E - 2); byte 2**E, global 1/3        [3, 6), never clips      MR-GPTQ / FP-Quant (E2M1 only)
========= ============================================== ======================== =====================================

For E4M3 (NVFP4) the wanted scale ``amax / 6 / global`` is clamped to [2**-9, 448] and rounded to E4M3: to nearest
(``even``), down (``floor``), up (``ceil``, ``rceil``), or to the neighbour with the least squared error (``mse``).
``four_over_six`` lets each block choose between mapping amax to 6 and to 4 (arXiv 2512.02010; global 1/(6*256)).

Exponents are read from bits, never from ``log2``, which is one too high just below a power of two.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from mxjax.core import codec
from mxjax.core.formats import E4M3, E8M0_BIAS, E8M0_MAX_BYTE, BlockFormat, ElementFormat
from mxjax.errors import FormatError

POLICIES = ("floor", "even", "ceil", "rceil", "mse", "third", "four_over_six")
DEFAULT_POLICY = "even"
BY_ERROR = ("mse", "four_over_six")  # these read the values of a block, the others its largest magnitude

NV_MIN_SCALE = 2.0**-9  # smallest positive E4M3 number
NV_MAX_SCALE = 448.0
# Largest E4M3 block scale that a tensor's amax is mapped to; four_over_six keeps room for its factor 1.5.
NV_SCALE_CEILING = {"four_over_six": 256.0}


def check_policy(policy: str, fmt: BlockFormat) -> None:
    """Raise FormatError where ``policy`` is unknown or means nothing for ``fmt``."""
    if policy not in POLICIES:
        raise FormatError(f"unknown scale policy {policy!r}; known: {', '.join(POLICIES)}")
    if policy == "third" and (fmt.element.name != "e2m1" or fmt.scale != "e8m0"):
        raise FormatError(f"scale policy 'third' is made for mxfp4 (E2M1 with E8M0 scales), not for {fmt}")
    if policy == "four_over_six" and fmt.scale != "e4m3":
        raise FormatError(f"scale policy 'four_over_six' needs E4M3 scales (nvfp4), not {fmt}: 1.5 is no power of two")


# --- E8M0 ------------------------------------------------------------------------------------------------------------
# Each rule takes amax as non-negative finite float32 bits and returns the unclamped exponent of the scale.


def _floor(amax_bits: jax.Array, f: ElementFormat) -> jax.Array:
    return codec.split(amax_bits)[0] - f.max_exponent


def _even(amax_bits: jax.Array, f: ElementFormat) -> jax.Array:
    e, m = codec.split(amax_bits)
    half_step = 1 << (codec.MANTISSA_BITS - f.mantissa_bits - 1)
    return e + (m + half_step >= 2 * codec.IMPLICIT_BIT) - f.max_exponent


def _ceil(amax_bits: jax.Array, f: ElementFormat) -> jax.Array:
    e, m = codec.split(amax_bits)
    return e + (m > codec.IMPLICIT_BIT) - f.max_exponent


def _rceil(amax_bits: jax.Array, f: ElementFormat) -> jax.Array:
    # amax > max_element * 2**k  <=>  (exponent, significand) of amax is above that of max_element shifted by k.
    e, m = codec.split(amax_bits)
    max_significand = int(f.max_value / 2**f.max_exponent * codec.IMPLICIT_BIT)
    return e + (m > max_significand) - f.max_exponent


_E8M0_RULES: dict[str, Callable[[jax.Array, ElementFormat], jax.Array]] = {
    "floor": _floor,
    "even": _even,
    "ceil": _ceil,
    "rceil": _rceil,
    "third": lambda amax_bits, f: codec.split(amax_bits)[0],  # three times the scale that is meant
}


def clamp_byte(exponent: jax.Array) -> jax.Array:
    """int32 E8M0 byte of ``2**exponent``, clamped to the finite bytes 0..254."""
    return jnp.clip(exponent + E8M0_BIAS, 0, E8M0_MAX_BYTE)


def e8m0_bytes(amax_bits: jax.Array, f: ElementFormat, policy: str, exponent: jax.Array | int = 0) -> jax.Array:
    """int32 scale bytes of blocks whose largest magnitude is ``2**exponent`` times the float32 with bits ``amax_bits``.

    Every policy but ``mse``, which needs the block itself (:func:`mse_bytes`).
    """
    return clamp_byte(_E8M0_RULES[policy](amax_bits, f) + exponent)


def mse_bytes(
    blocks: jax.Array, amax_bits: jax.Array, f: ElementFormat, exponent: jax.Array | int = 0, axis: int = -1
) -> jax.Array:
    """The byte among floor's and its two neighbours with the least squared error of the block.

    Errors are measured on ``x * 2**-floor_exponent``, where nothing overflows or is subnormal. Ties keep the first of
    floor, floor + 1, floor - 1.

    Args:
      blocks: float32, the values over ``2**exponent``; a block lies along ``axis``.
      amax_bits: int32, blocks' shape without ``axis``.
      f: element format.
      exponent: int32 of amax_bits' shape, or 0.
      axis: the axis of a block's elements.
    """
    base = clamp_byte(_floor(amax_bits, f) + exponent)
    unit = scale_by_power(blocks, jnp.expand_dims(E8M0_BIAS - base + exponent, axis))
    best, best_error = base, _squared_error(unit, f, jnp.zeros_like(base), axis)
    for step in (1, -1):
        candidate = jnp.clip(base + step, 0, E8M0_MAX_BYTE)
        error = _squared_error(unit, f, candidate - base, axis)
        best = jnp.where(error < best_error, candidate, best)
        best_error = jnp.minimum(error, best_error)
    return best


def _squared_error(x: jax.Array, f: ElementFormat, shift: jax.Array, axis: int) -> jax.Array:
    shift = jnp.expand_dims(shift, axis)
    return jnp.sum(jnp.square(codec.decode(codec.encode(x, f, shift), f, shift) - x), axis=axis)


def scale_by_power(x: jax.Array, n: jax.Array) -> jax.Array:
    """``x * 2**n`` for any finite float32 ``x``, subnormals included, and -254 <= n <= 149; for what is rounded later.

    Saturates at the largest float32. A result below 2**-126 is some number below 2**-126: far under every element of
    every format here, it encodes as zero whatever it is.
    """
    bits = codec.bits_of(x)
    magnitude = bits & codec.MAGNITUDE_MASK
    # Conversion from integer normalizes a subnormal; its exponent field then goes on below zero, to -22 for 2**-149.
    renormalized = codec.bits_of(magnitude.astype(jnp.float32)) - (149 << codec.MANTISSA_BITS)
    magnitude = jnp.where(magnitude < codec.IMPLICIT_BIT, renormalized, magnitude)
    step = n << codec.MANTISSA_BITS
    magnitude = jnp.minimum(jnp.maximum(magnitude, -step), codec.MAX_BITS - jnp.maximum(step, 0)) + step
    return codec.float_of(magnitude | (bits & ~codec.MAGNITUDE_MASK))


# --- E4M3 ------------------------------------------------------------------------------------------------------------


def tensor_scale(amax_bits: jax.Array, policy: str) -> jax.Array:
    """NVFP4's float32 tensor scale ``amax / (6 * 448)``; 1 for an all-zero tensor, never below 2**-126.

    Args:
      amax_bits: int32, float32 bits of the largest finite magnitude of the tensor.
      policy: scale policy; ``four_over_six`` divides by 6 * 256.
    """
    ceiling = NV_SCALE_CEILING.get(policy, NV_MAX_SCALE)
    scale = jnp.maximum(codec.float_of(amax_bits) / (6.0 * ceiling), 2.0**-126)
    return jnp.where(amax_bits == 0, 1.0, scale)


def e4m3_bytes(
    unit_blocks: jax.Array | None,
    amax: jax.Array,
    significand: jax.Array,
    fmt: BlockFormat,
    policy: str,
    axis: int = -1,
) -> jax.Array:
    """Scale bytes (uint8) of NVFP4 blocks under a tensor scale ``2**exponent * significand``.

    Args:
      unit_blocks: float32, the values over the tensor scale; a block lies along ``axis``. None for a policy that is
        not in :data:`BY_ERROR`.
      amax: float32, the largest magnitude of each block over ``2**exponent``: blocks' shape without ``axis``.
      significand: float32 in [1, 2), broadcast against ``amax``.
      fmt: the format.
      policy: scale policy.
      axis: the axis of a block's elements.
    """
    nearest = _nearest_e4m3(amax, significand, 6.0)
    if policy == "even":
        return nearest
    if policy in ("floor", "ceil", "rceil"):
        scale, smallest = (6.0 * significand) * codec.decode(nearest, E4M3), (6.0 * significand) * NV_MIN_SCALE
        if policy == "floor":
            return nearest - (scale > jnp.maximum(amax, smallest)).astype(jnp.uint8)
        return nearest + ((scale < amax) & (nearest < E4M3.max_code)).astype(jnp.uint8)
    assert unit_blocks is not None
    if policy == "mse":
        candidates = [jnp.clip(nearest.astype(jnp.int32) + step, 1, E4M3.max_code) for step in (0, 1, -1)]
    else:  # four_over_six: amax at 6, or at 4
        candidates = [nearest, _nearest_e4m3(amax, significand, 4.0)]
    best = candidates[0].astype(jnp.uint8)
    best_error = e4m3_error(unit_blocks, best, fmt.element, axis)
    for candidate in candidates[1:]:
        candidate = candidate.astype(jnp.uint8)
        error = e4m3_error(unit_blocks, candidate, fmt.element, axis)
        best = jnp.where(error < best_error, candidate, best)
        best_error = jnp.minimum(error, best_error)
    return best


def _nearest_e4m3(amax: jax.Array, significand: jax.Array, top: float) -> jax.Array:
    """The code of the E4M3 number nearest to ``amax / (top * significand)``, ties to even, in [NV_MIN_SCALE,
    NV_MAX_SCALE].

    A division's last bits depend on the compiler (:func:`codec.encode_quotient`), so the quotient says only between
    which numbers ``n`` and ``n + 1`` (in units of the last place) it lies, and a product which of them is nearer. Where
    the quotient falls to the wrong side of a number, that number is the nearer one of either pair.
    """
    divisor = top * significand
    bits = codec.bits_of(jnp.clip(amax / divisor, NV_MIN_SCALE, NV_MAX_SCALE))
    own = (bits >> codec.MANTISSA_BITS) - 127
    exponent = jnp.maximum(own, 1 - E4M3.bias)  # of the subnormals, too
    dropped = codec.MANTISSA_BITS - E4M3.mantissa_bits
    n = ((bits & codec.MANTISSA_MASK) | codec.IMPLICIT_BIT) >> (dropped + exponent - own)
    half = codec.float_of((exponent + (127 - E4M3.mantissa_bits - 1)) << codec.MANTISSA_BITS)
    tie = ((2 * n + 1).astype(jnp.float32) * half) * divisor
    up = (amax > tie) | ((amax == tie) & (n % 2 == 1))
    code = ((exponent + (E4M3.bias - 1)) << E4M3.mantissa_bits) + n + up.astype(jnp.int32)
    return jnp.clip(code, 1, E4M3.max_code).astype(jnp.uint8)


def e4m3_error(unit_blocks: jax.Array, byte: jax.Array, f: ElementFormat, axis: int = -1) -> jax.Array:
    """Squared error of each block, in units of the tensor scale, when quantized under the scale ``byte``."""
    scale = jnp.expand_dims(codec.decode(byte, E4M3), axis)
    return jnp.sum(jnp.square(codec.decode(codec.encode(unit_blocks / scale, f), f) * scale - unit_blocks), axis=axis)
