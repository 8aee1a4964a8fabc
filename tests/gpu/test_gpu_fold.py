"""Under jit on a GPU, XLA folds ``x.astype(small).astype(float32)`` to ``x``: quantization must not be written so.

The same comparisons run on a CPU, where nothing folds; they prove their point on a GPU: ``python -m pytest tests/gpu``.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.core.formats import FORMATS
from mxjax.core.quantize import fake_quantize, quantize_array

CASES = [(name, "even") for name in FORMATS]
CASES += [("mxfp4", policy) for policy in ("floor", "ceil", "rceil", "mse", "third")] + [("nvfp4", "four_over_six")]


def data(fmt):
    """Values of many magnitudes; for formats with power-of-two scales also ties, which every backend must break alike.

    NVFP4 divides by scales that are no powers of two, and XLA compiles a division by a constant to a multiplication by
    its reciprocal: there a tie may fall to either side, and only values off the ties can be compared exactly.
    """
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 128)).astype(np.float32) * np.exp2(rng.integers(-12, 12, (8, 4)).repeat(32, 1))
    if FORMATS[fmt].scale == "e8m0":
        x[:4] = rng.integers(-64, 65, (4, 128)) / 8
    return x.astype(np.float32)


def functions(fmt, policy):
    def fake(v):
        return fake_quantize(v, fmt, scale=policy).astype(jnp.float32)

    def stored(v):
        return quantize_array(v, fmt, scale=policy, on_nonfinite="nan").dequantize(jnp.float32)

    def scanned(v):
        return jax.lax.scan(lambda c, row: (c, fake(row)), 0, v)[1]

    return fake, stored, scanned


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("fmt", "policy"), CASES)
def test_jit_and_scan_equal_the_cpu(fmt, policy, dtype):
    x = np.asarray(jnp.asarray(data(fmt)).astype(dtype))
    for fn in functions(fmt, policy):
        with jax.default_device(jax.devices("cpu")[0]):
            want = np.asarray(jax.jit(fn)(jnp.asarray(x)))
        assert np.abs(want - x.astype(np.float32)).max() > 0, "the data survive quantization: they test nothing"
        np.testing.assert_array_equal(np.asarray(jax.jit(fn)(jnp.asarray(x))), want, err_msg=fn.__name__)


@pytest.mark.parametrize("fmt", FORMATS)
def test_jit_equals_eager(fmt):
    x = jnp.asarray(data(fmt)[:2, :32])
    for fn in functions(fmt, "even")[:2]:
        with jax.disable_jit():
            want = np.asarray(fn(x))
        np.testing.assert_array_equal(np.asarray(jax.jit(fn)(x)), want, err_msg=fn.__name__)


def test_mxfp4_equals_numpy():
    """The definition once more, in float64 NumPy: even scale, then the nearest magnitude, ties to the even code."""
    x = data("mxfp4").astype(np.float64)
    blocks = x.reshape(8, 4, 32)
    amax = np.abs(blocks).max(-1, keepdims=True)
    e = np.floor(np.log2(amax))
    e = np.where(amax / 2**e >= 1.75, e + 1, e) - 2
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    distance = np.abs(np.abs(blocks / 2**e)[..., None] - grid)
    odd = np.arange(8) % 2  # among equally near ones the even code wins
    value = grid[np.lexsort((np.broadcast_to(odd, distance.shape), distance), axis=-1)[..., 0]]
    want = (np.sign(blocks) * value * 2**e).reshape(x.shape)
    got = jax.jit(lambda v: fake_quantize(v, "mxfp4"))(jnp.asarray(x, jnp.float32))
    np.testing.assert_array_equal(np.asarray(got, np.float64), want)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="the fold happens in XLA's GPU compiler only")
def test_the_trap_is_real_on_this_gpu():
    """If this fails, XLA no longer folds, and the warnings in the docs can go."""
    x = jnp.asarray(data("mxfp8_e4m3"))
    folded = jax.jit(lambda v: v.astype(jnp.float8_e4m3fn).astype(jnp.float32))(x)
    np.testing.assert_array_equal(folded, x)
