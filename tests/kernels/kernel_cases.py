"""Helpers of the kernel tests: which implementations run where, packed random weights, derived tolerances."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mxjax import backend
from mxjax.core.formats import get_format

E2M1_VALUES = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

ON_GPU = jax.default_backend() == "gpu"


def gpu(feature="triton"):
    """A mark: the test needs this machine to have a GPU with ``feature``."""
    missing = not (ON_GPU and backend.has(feature))
    return pytest.mark.skipif(missing, reason=f"needs a GPU with {feature}; runs where the device tests run")


# "interpret": the kernel's own code on the CPU; "device": compiled for this GPU
IMPLEMENTATIONS = [pytest.param(True, id="interpret"), pytest.param(False, id="device", marks=gpu())]


def bytes_of(x):
    """The bits, so that NaN equals NaN and -0 differs from 0."""
    return np.asarray(x).view(np.uint8)


def assert_same_bits(got, want):
    for g, w, name in zip(got, want, ("values", "scales"), strict=True):
        assert g.shape == w.shape and g.dtype == w.dtype
        np.testing.assert_array_equal(bytes_of(g), bytes_of(w), err_msg=name)


class Weight(NamedTuple):
    """A stored weight [n, k] and its float64 values without the tensor scale."""

    codes: jax.Array
    scales: jax.Array
    values: np.ndarray


def weight(n, k, fmt="mxfp4", seed=0):
    """Random bytes: every code, scales within 15 binades of a row's largest; decoded by NumPy and ml_dtypes."""
    fmt, rng = get_format(fmt), np.random.default_rng(seed)
    if fmt.element.bits == 4:
        nibbles = rng.integers(0, 16, (n, k), np.uint8)
        codes, values = nibbles[:, ::2] | (nibbles[:, 1::2] << 4), E2M1_VALUES[nibbles]
    elif fmt.element.bits == 6:
        c = rng.integers(0, 64, (n, k // 4, 4), np.uint8)
        three = [c[..., 0] | (c[..., 1] << 6), (c[..., 1] >> 2) | (c[..., 2] << 4), (c[..., 2] >> 4) | (c[..., 3] << 2)]
        codes, values = np.stack(three, -1).reshape(n, -1), c.view(fmt.element.dtype).astype(np.float64).reshape(n, k)
    else:
        codes = rng.integers(0, 0x7B, (n, k), np.uint8) | (rng.integers(0, 2, (n, k), np.uint8) << 7)  # no Inf, no NaN
        values = codes.view(fmt.element.dtype).astype(np.float64)
    blocks = (n, k // fmt.block_size)
    if fmt.scale == "e8m0":
        scales = (rng.integers(90, 150, (n, 1)) + rng.integers(0, 14, blocks)).astype(np.uint8)
        factor = np.exp2(scales.astype(np.float64) - 127)
    else:
        scales = rng.integers(1, 0x7E, blocks, np.uint8)
        factor = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return Weight(jnp.asarray(codes), jnp.asarray(scales), values * factor.repeat(fmt.block_size, axis=1))


def assert_product(got, x, w, bias=0.0):
    """``got`` is ``x @ w.T + bias`` up to the rounding of the output and of float32 accumulation.

    A float32 sum of K products is off by at most K * 2**-24 * sum |x||w| whatever its order; tensor cores may truncate
    where a CPU rounds, which doubles it. The output is rounded once: half a unit in the last place.
    """
    exact = x @ w.T + bias
    accumulated = 2 * x.shape[1] * 2.0**-24 * (np.abs(x) @ np.abs(w.T) + np.abs(bias))
    output = float(jnp.finfo(got.dtype).eps) / 2 * np.abs(exact)
    error = np.abs(np.asarray(got, np.float64) - exact)
    worst = np.max(error - 1.01 * (accumulated + output)) if error.size else -1.0
    # 2**-126: interpret mode flushes subnormal products
    assert worst <= x.shape[1] * 2.0**-126, f"largest error {error.max()} exceeds its bound by {worst}"


def assert_fp8_product(got, x, w, bias=0.0):
    """As :func:`assert_product`, for Hopper's FP8 units: they keep 13 bits behind the leading one of a running sum, and
    cut once every 32 products."""
    exact = x @ w.T + bias
    error = np.abs(np.asarray(got, np.float64) - exact)
    bound = max(x.shape[1] / 32, 1) * 2.0**-13 * (np.abs(x) @ np.abs(w).T) + 2.0**-8 * np.abs(exact)
    assert (error <= bound).all(), (error / bound).max()
    # and in norm: errors of that many cuts add up like a random walk, far below the bound
    assert np.linalg.norm(error) <= 2.0**-8 * np.linalg.norm(exact)
