"""SQNR, cosine and per-weight errors against float64 NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax import eval as mx_eval
from mxjax.errors import BlockShapeError, ConfigError

# Rows of n values are summed in float32: the relative error of such a sum is below n * 2**-24 for values of one sign,
# and below sqrt(n) * 2**-24 typically; 1e-5 covers n = 64 in the worst case (4e-6).
RTOL = 1e-5


def expected_sqnr(r, x):
    r, x = np.asarray(r, np.float64), np.asarray(x, np.float64)
    return 10 * np.log10((r**2).sum() / ((r - x) ** 2).sum())


@pytest.mark.parametrize("shape", [(64,), (5, 64), (3, 4, 33), ()])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_measures_match_float64(shape, dtype):
    r = jax.random.normal(jax.random.key(0), shape).astype(dtype)
    x = (r.astype(jnp.float32) + 0.1 * jax.random.normal(jax.random.key(1), shape)).astype(dtype)
    found = mx_eval.compare_arrays(r, x)
    r64, x64 = np.asarray(r, np.float64).reshape(-1), np.asarray(x, np.float64).reshape(-1)
    np.testing.assert_allclose(found.sqnr_db, expected_sqnr(r64, x64), rtol=RTOL, atol=4.35 * RTOL)  # d dB = 4.34 d ln
    np.testing.assert_allclose(found.cosine, r64 @ x64 / np.linalg.norm(r64) / np.linalg.norm(x64), rtol=RTOL)
    np.testing.assert_allclose(found.relative_error, np.linalg.norm(r64 - x64) / np.linalg.norm(r64), rtol=RTOL)
    assert found.max_abs == np.float32(np.abs(np.asarray(r, np.float32) - np.asarray(x, np.float32)).max(initial=0))


def test_special_arrays():
    ones, zeros = jnp.ones(4), jnp.zeros(4)
    assert mx_eval.sqnr(ones, ones) == math.inf and mx_eval.cosine(ones, ones) == 1.0
    assert mx_eval.sqnr(zeros, zeros) == math.inf and mx_eval.cosine(zeros, zeros) == 1.0
    assert mx_eval.sqnr(zeros, ones) == -math.inf and mx_eval.cosine(zeros, ones) == 0.0
    assert mx_eval.sqnr(ones, zeros) == 0.0 and mx_eval.cosine(ones, zeros) == 0.0
    assert math.isnan(mx_eval.sqnr(ones, ones.at[0].set(jnp.nan)))
    with pytest.raises(BlockShapeError, match=r"\(4,\) and \(5,\)"):
        mx_eval.sqnr(ones, jnp.ones(5))


def tree(key=0):
    keys = jax.random.split(jax.random.key(key), 3)
    layer = {"up": {"kernel": jax.random.normal(keys[0], (64, 32)), "bias": jnp.zeros(32)}}
    return {
        "layers": [layer, {"up": {"kernel": jax.random.normal(keys[1], (64, 32)), "bias": jnp.zeros(32)}}],
        "embed": {"embedding": jax.random.normal(keys[2], (10, 64))},
    }


@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4", "hadamard_mxfp4", "mxfp8_e4m3"])
def test_weight_errors(recipe):
    params = tree()
    qparams = mxjax.quantize(params, recipe)
    rows = mx_eval.weight_errors(params, qparams)
    assert [r.path for r in rows] == ["layers/0/up/kernel", "layers/1/up/kernel"]
    for i, row in enumerate(rows):
        w, q = params["layers"][i]["up"]["kernel"], qparams["layers"][i]["up"]["kernel"]
        np.testing.assert_allclose(row.sqnr_db, expected_sqnr(w, q.dequantize()), rtol=1e-4)
        assert row.shape == (64, 32) and row.format == q.format.name and row.nbytes == q.nbytes
        assert row.bits_per_value == q.nbytes * 8 / (64 * 32)
    # 4-bit floats of normal data lie near 19 dB (a step of 2 and 3 mantissa bits more give 37).
    assert all(15 < r.sqnr_db < 45 for r in rows)


def test_weight_errors_order_formats():
    params = tree(3)
    by_format = {f: mx_eval.weight_errors(params, mxjax.quantize(params, f))[0].sqnr_db for f in mxjax.FORMATS}
    assert by_format["mxfp4"] < by_format["nvfp4"] < by_format["mxfp6_e2m3"] < by_format["mxint8"]


def test_weight_errors_of_exact_weights():
    params = {"w": {"kernel": jnp.full((32, 4), 3.0)}}
    row = mx_eval.weight_errors(params, mxjax.quantize(params, "mxfp4"))[0]
    assert row.sqnr_db == math.inf and row.max_abs == 0.0 and row.relative_error == 0.0


def test_weight_errors_refuse_other_trees():
    params = tree()
    qparams = mxjax.quantize(params, "mxfp4")
    with pytest.raises(ConfigError, match="layers/0/up/kernel"):
        mx_eval.weight_errors({"other": jnp.ones((64, 32))}, qparams)
    with pytest.raises(ConfigError, match="layers/0/up/kernel"):
        mx_eval.weight_errors(qparams, qparams)
    params["layers"][0]["up"]["kernel"] = jnp.ones((32, 32))
    with pytest.raises(BlockShapeError, match="layers/0/up/kernel"):
        mx_eval.weight_errors(params, qparams)
