"""An independent quantizer in float64 numpy: tables and midpoints, no bit tricks, only mxjax's format constants.

Every float32 and every product of one with a power of two is exact in float64, and so is every midpoint between two
element values, so nothing here rounds until a code is chosen.
"""

import ml_dtypes
import numpy as np

from mxjax.core.formats import BlockFormat, ElementFormat

FLT_MAX = np.finfo(np.float32).max


def element_values(f: ElementFormat) -> np.ndarray:
    """float64 values of the non-negative finite codes 0..max_code."""
    codes = np.arange(f.max_code + 1, dtype=np.uint8)
    if f.name == "int8":
        return codes / 64.0
    return codes.view(getattr(ml_dtypes, f.dtype)).astype(np.float64)


def midpoints(f: ElementFormat) -> np.ndarray:
    values = element_values(f)
    return (values[1:] + values[:-1]) / 2


def encode(v: np.ndarray, f: ElementFormat) -> np.ndarray:
    """uint8 codes of float64 ``v``: nearest value, ties to the even code, saturating; the sign of zero is kept."""
    mids = midpoints(f)
    code = np.searchsorted(mids, np.abs(v), side="left")  # a tie goes down ...
    tie = np.append(mids, np.nan)[code] == np.abs(v)
    code = code + (tie & (code % 2 == 1))  # ... and up again where the lower code is odd
    if f.name == "int8":
        return np.where(v < 0, -code, code).astype(np.int64).astype(np.uint8)
    return (code | np.where(np.signbit(v), f.sign_mask, 0)).astype(np.uint8)


def decode(codes: np.ndarray, f: ElementFormat) -> np.ndarray:
    """float64 values of finite codes."""
    if f.name == "int8":
        return codes.view(np.int8) / 64.0
    magnitude = element_values(f)[codes & (f.sign_mask - 1)]
    return np.where(codes & f.sign_mask, -magnitude, magnitude)


def near_tie(v: np.ndarray, f: ElementFormat, relative: float) -> np.ndarray:
    """Where ``v`` lies so close to a midpoint that a relative error of that size may change its code."""
    mids = midpoints(f)
    i = np.searchsorted(mids, np.abs(v))
    nearest = np.minimum(
        np.abs(np.abs(v) - mids[np.clip(i - 1, 0, None)]), np.abs(np.abs(v) - mids[np.clip(i, None, len(mids) - 1)])
    )
    return nearest <= relative * np.abs(v)


def floor_log2(a: np.ndarray) -> np.ndarray:
    return np.frexp(a)[1] - 1


def e8m0_exponent(amax: np.ndarray, f: ElementFormat, policy: str) -> np.ndarray:
    """Unclamped exponent of the block scale of positive float64 ``amax``."""
    emax = int(floor_log2(np.float64(f.max_value)))
    e = floor_log2(amax)
    if policy == "floor":
        return e - emax
    if policy == "even":
        step = np.ldexp(1.0, e - f.mantissa_bits)
        return floor_log2(np.floor(amax / step + 0.5) * step) - emax
    if policy == "ceil":
        return e + (amax > np.ldexp(1.0, e)) - emax
    if policy == "rceil":  # the smallest k with amax <= max_value * 2**k, by trying
        k = e - emax
        return np.where(amax <= f.max_value * np.ldexp(1.0, k), k, k + 1)
    assert policy == "third"
    return e


def e8m0_bytes(amax: np.ndarray, f: ElementFormat, policy: str) -> np.ndarray:
    positive = np.where(amax > 0, amax, 1.0)
    byte = np.clip(e8m0_exponent(positive, f, policy) + 127, 0, 254)
    return np.where(amax > 0, byte, 0)


def quantize_mx(blocks: np.ndarray, fmt: BlockFormat, policy: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes, bytes, the exact scaled values that were rounded) of finite blocks [..., 32]."""
    x = blocks.astype(np.float64)
    amax = np.abs(x).max(-1)
    byte = e8m0_bytes(amax, fmt.element, policy)
    v = np.ldexp(x, 127 - byte[..., None]) * (3.0 if policy == "third" else 1.0)
    codes = np.where(amax[..., None] > 0, encode(v, fmt.element), 0)
    return codes.astype(np.uint8), byte.astype(np.uint8), v


def wild(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Finite float32 of every magnitude: each block (last axis) has an exponent of its own, from subnormal to huge."""
    exponent = rng.integers(-150, 128, size=(*shape[:-1], 1)) + rng.integers(-12, 1, size=shape)
    x = np.ldexp(rng.uniform(-1, 1, size=shape), exponent)
    return np.clip(x, -FLT_MAX, FLT_MAX).astype(np.float32)
