"""Scale conventions at the border: multipliers inside mxjax, divisors or multipliers in files; zero blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

ONE = 56  # E4M3 byte of 1.0, what a block of zeros has on disk: loaders divide by scales
# What stands for "no calibration". With it the block scales of an input are amax / 6 themselves: E4M3 holds them for
# blocks whose largest magnitude is between 0.012 and 2688, and nothing below 2688 clips.
UNCALIBRATED = np.float32(1.0)
SMALLEST, LARGEST = 2.0**-126, 2.0**126  # the reciprocal of a scale in this range is a normal float32


def multiplier(divisor: np.float32) -> np.float32:
    """``1 / divisor`` in float32: what a global scale is inside mxjax."""
    return np.float32(1.0) / np.float32(divisor)


def divisor(multiplier_: np.float32, stored: np.float32 | None = None) -> np.float32:
    """The divisor to write for a multiplier.

    The reciprocal is no one-to-one map of float32: between sqrt(2) and 2 (times any power of two) two divisors may have
    one reciprocal, below sqrt(2) some multipliers are nobody's reciprocal. Among the divisors whose reciprocal is the
    multiplier, the rule takes ``stored`` if it is one, else the one with the shortest significand (so divisors
    that were computed in bfloat16 come back), else the nearest. ``divisor(multiplier(d)) == d`` for every ``d`` that
    this function has returned, so a second trip through the file changes nothing.
    """
    m = np.float32(multiplier_)
    nearest = np.float32(1.0) / m
    around = [nearest, np.nextafter(nearest, np.float32(0)), np.nextafter(nearest, np.float32(np.inf))]
    exact = [d for d in around if multiplier(d) == m]
    if stored is not None and multiplier(stored) == m:
        return stored
    return max(exact, key=lambda d: _trailing_zeros(d)) if exact else nearest


def _trailing_zeros(x: np.float32) -> int:
    bits = int(np.float32(x).view(np.uint32))
    return (bits & -bits).bit_length()


def zero_blocks(scales: np.ndarray, codes: Any, old: int, new: int) -> np.ndarray:
    """``scales`` with ``new`` in the place of ``old`` wherever all codes of the block are 0."""
    found = np.nonzero(scales == old)
    if not len(found[0]):
        return scales
    empty = (np.asarray(codes).reshape(*scales.shape, -1)[found] == 0).all(axis=-1)
    if not empty.any():
        return scales  # a memory map stays one
    scales = scales.copy()
    scales[tuple(index[empty] for index in found)] = new
    return scales
