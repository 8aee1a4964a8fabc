"""Observers: which scale bytes the blocks of a weight get before a solver rounds it.

=========== =========================================================================================================
observer    scale bytes
=========== =========================================================================================================
minmax      what the scale policy makes of the largest magnitude (exactly those of ``quantize_array``)
mse         the byte with the least squared error of its block: among the neighbouring exponents (E8M0), or among the
            E4M3 codes within an octave of ``amax / 6`` (NVFP4)
alternating ``mse`` in turn with the least-squares tensor scale (MR-GPTQ, arXiv 2509.23202, section 4; NVFP4, and
            MXFP4 under the policy ``third``)
=========== =========================================================================================================

All of them work on *unit* blocks, ``u = x / global_scale``: there a scale is an E8M0 or E4M3 number and nothing else.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.core import codec, scales
from mxjax.core.formats import E4M3, E8M0_BIAS, E8M0_MAX_BYTE, BlockFormat
from mxjax.core.quantize import quantize_blocks

OBSERVERS = ("minmax", "mse", "alternating")

# Candidates around the code of amax / 6. E4M3 has 8 codes an octave: -4 lets amax reach about 8 (clipped to 6), +6
# maps it to 3.5. Wider windows were never chosen for Gaussian or Laplace blocks.
_E4M3_WINDOW = tuple(range(-4, 7))
_ALTERNATIONS = 8


def round_unit(u: jax.Array, byte: jax.Array, fmt: BlockFormat) -> tuple[jax.Array, jax.Array]:
    """Codes (uint8) and values of unit-space numbers under scale bytes; the arithmetic of ``quantize_blocks``.

    A scale of zero (E4M3 byte 0) gives code 0, value 0.

    Args:
      u: float32.
      byte: uint8 or int32, broadcast against ``u``.
      fmt: block format.
    """
    if fmt.scale == "e8m0":
        codes = codec.encode(u, fmt.element, byte.astype(jnp.int32) - E8M0_BIAS)
    else:
        scale = codec.decode(byte.astype(jnp.uint8), E4M3)
        codes = codec.encode(jnp.where(scale > 0, u / jnp.where(scale > 0, scale, 1.0), 0.0), fmt.element)
    return codes, decode_unit(codes, byte, fmt)


def decode_unit(codes: jax.Array, byte: jax.Array, fmt: BlockFormat) -> jax.Array:
    """Unit-space values of codes under scale bytes: the second result of :func:`round_unit`."""
    if fmt.scale == "e8m0":
        return codec.decode(codes, fmt.element, byte.astype(jnp.int32) - E8M0_BIAS)
    return codec.decode(codes, fmt.element) * codec.decode(byte.astype(jnp.uint8), E4M3)


def to_unit(x: jax.Array, global_scale: jax.Array | None) -> jax.Array:
    """``x / global_scale`` with one rounding, as in ``quantize_blocks``; ``global_scale`` has leading axes of x."""
    if global_scale is None:
        return x
    g = global_scale.astype(jnp.float32).reshape(global_scale.shape + (1,) * (x.ndim - global_scale.ndim))
    exponent, significand = codec.split(codec.bits_of(g))
    unit = codec.unit_of(significand)
    return scales.scale_by_power(x, -exponent) / unit


def initial_global(blocks: jax.Array, fmt: BlockFormat, policy: str, batch_axes: int) -> jax.Array | None:
    """The global scale that ``quantize_blocks`` would use, or None. For ``third`` it is 1/3: codes of ``3 x``."""
    lead = blocks.shape[:batch_axes]
    if fmt.scale == "e8m0":
        return jnp.full(lead, 1 / 3, jnp.float32) if policy == "third" else None
    amax = jnp.max(jnp.abs(blocks), axis=tuple(range(batch_axes, blocks.ndim)), initial=0.0)
    return scales.tensor_scale(codec.bits_of(amax), policy)


def observe(
    blocks: jax.Array,
    fmt: BlockFormat,
    policy: str,
    batch_axes: int,
    observer: str,
    given: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Unit blocks, scale bytes and global scale of a weight.

    Args:
      blocks: float32 [*lead, blocks, block_size], finite.
      fmt: block format.
      policy: scale policy; it decides the bytes under ``minmax`` and the global scale under all.
      batch_axes: leading axes with a global scale each.
      observer: one of :data:`OBSERVERS`.
      given: a global scale to keep, float32 ``lead[:batch_axes]``, or None.

    Returns:
      ``u`` like ``blocks`` with ``blocks = u * global_scale``; uint8 bytes [*lead, blocks]; the global scale, float32
      ``lead[:batch_axes]``, or None. Blocks of zeros have byte 0.
    """
    global_scale = initial_global(blocks, fmt, policy, batch_axes) if given is None else given
    # 3 x is one rounding, x / fl(1/3) would be two: third's grid is exactly 2**k / 3.
    unit = 3.0 * blocks if policy == "third" else to_unit(blocks, global_scale)
    if observer == "minmax":
        return unit, quantize_blocks(blocks, fmt, policy, batch_axes, given)[1], global_scale
    byte = best_bytes(unit, fmt)
    if observer == "mse" or global_scale is None or given is not None:
        return unit, byte, global_scale

    def alternate(_, state):
        g, byte = state
        values = round_unit(to_unit(blocks, g), byte[..., None], fmt)[1]
        axes = tuple(range(batch_axes, blocks.ndim))
        signal, energy = jnp.sum(blocks * values, axis=axes), jnp.sum(values * values, axis=axes)
        g = jnp.where((energy > 0) & (signal > 0), signal / jnp.where(energy > 0, energy, 1.0), g)
        return g, best_bytes(to_unit(blocks, g), fmt)

    global_scale, byte = lax.fori_loop(0, _ALTERNATIONS, alternate, (global_scale, byte))
    return to_unit(blocks, global_scale), byte, global_scale


def candidate_bytes(unit: jax.Array, fmt: BlockFormat) -> list[jax.Array]:
    """The scale bytes (int32 [..., blocks]) worth trying for unit blocks, the usual one first."""
    amax = jnp.max(jnp.abs(unit), axis=-1)
    if fmt.scale == "e8m0":
        base = scales.e8m0_bytes(codec.bits_of(amax), fmt.element, "floor")
        return [jnp.clip(base + step, 0, E8M0_MAX_BYTE) for step in (0, 1, -1)]
    base = codec.encode(jnp.clip(amax / 6.0, scales.NV_MIN_SCALE, scales.NV_MAX_SCALE), E4M3).astype(jnp.int32)
    return [jnp.clip(base + step, 1, E4M3.max_code) for step in sorted(_E4M3_WINDOW, key=abs)]


def best_bytes(unit: jax.Array, fmt: BlockFormat) -> jax.Array:
    """The candidate byte of each block with the least squared error (uint8 [..., blocks]); ties keep the first."""

    def step(best, byte):
        error = jnp.sum(jnp.square(round_unit(unit, byte[..., None], fmt)[1] - unit), axis=-1)
        return (jnp.where(error < best[1], byte, best[0]), jnp.minimum(error, best[1])), None

    candidates = jnp.stack(candidate_bytes(unit, fmt))
    start = (candidates[0], jnp.full(candidates.shape[1:], jnp.inf, jnp.float32))
    (byte, _), _ = lax.scan(step, start, candidates)
    return jnp.where(jnp.max(jnp.abs(unit), axis=-1) == 0, 0, byte).astype(jnp.uint8)
