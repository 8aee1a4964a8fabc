"""Layer errors against the layer itself, run on the very inputs that the statistics saw."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax.calibration import GramSum, stats_of, update
from mxjax.errors import BlockShapeError, CalibrationError, ConfigError
from mxjax.eval import layer_errors

PATH = "proj/kernel"


def inputs(channels=64, rows=512, key=0):
    """Channels of different size, correlated."""
    first, second = jax.random.split(jax.random.key(key))
    x, mix = jax.random.normal(first, (rows, channels)), jax.random.normal(second, (channels, channels))
    return x @ mix * jnp.logspace(-1, 1, channels)


def tree(shape=(64, 48)):
    return {"proj": {"kernel": jax.random.normal(jax.random.key(5), shape)}}


def stats_for(x, transform=None):
    seen = x if transform is None else transform.activation(x)
    return {PATH: stats_of(update(GramSum.zeros(seen.shape[-1]), seen), transform=transform)}


def output_error(x, w, q):
    """In float64: what the layer's output loses on the inputs themselves."""
    x, w, q = (np.asarray(a, np.float64) for a in (x, w, q))
    return (((x @ w) - (x @ q)) ** 2).sum() / ((x @ w) ** 2).sum()


@pytest.mark.parametrize("recipe", ["mxfp4", "hadamard_mxfp4", "nvfp4_a16"])
@pytest.mark.parametrize("in_transformed_space", [False, True])
def test_output_error_is_that_of_the_layer(recipe, in_transformed_space):
    params, x = tree(), inputs()
    qparams = mxjax.quantize(params, recipe)
    leaf = qparams["proj"]["kernel"]
    stats = stats_for(x, leaf.transform if in_transformed_space else None)
    (row,) = layer_errors(params, qparams, stats)
    expected = output_error(x, params["proj"]["kernel"], leaf.dequantize())
    # H sums 512 rows in float32 and both traces sum 64 * 64 * 48 products of it: the relative error is below
    # sqrt(512) * 2**-24 * (condition of the quadratic form, at most 100 here) ~ 1.4e-4.
    assert row.output_error == pytest.approx(expected, rel=2e-4)
    assert row.output_sqnr_db == pytest.approx(-10 * math.log10(expected), abs=1e-3)
    assert row.path == PATH and row.tokens == 512
    peak = float(jnp.abs(x).max() / jnp.sqrt(jnp.mean(x * x)))
    if not in_transformed_space:
        assert row.input_peak == pytest.approx(peak, rel=1e-4)
    assert (row.input_sqnr_db is None) == recipe.endswith("a16")


def test_it_is_not_the_error_of_the_weight():
    """All of the input's power in one channel, whose weights are exact: the output loses nothing."""
    # 4 is a value of E2M1 times any power of two.
    w = jax.random.normal(jax.random.key(1), (64, 8)).at[0].set(4.0)
    params, x = {"proj": {"kernel": w}}, jnp.zeros((16, 64)).at[:, 0].set(1.0)
    (row,) = layer_errors(params, mxjax.quantize(params, "mxfp4"), stats_for(x))
    assert row.output_error == 0 and row.output_sqnr_db == math.inf
    assert mxjax.eval.weight_errors(params, mxjax.quantize(params, "mxfp4"))[0].sqnr_db < 30


def test_input_sqnr_of_normal_inputs_is_the_measured_one():
    """Where its assumption holds, the estimate is what quantizing the inputs gives."""
    for recipe in ("mxfp4", "nvfp4", "hadamard_mxfp4"):
        params = tree((256, 8))
        x = jax.random.normal(jax.random.key(3), (2048, 256)) * jnp.logspace(-1, 1, 256)
        leaf = mxjax.quantize(params, recipe)["proj"]["kernel"]
        (row,) = layer_errors(params, {"proj": {"kernel": leaf}}, stats_for(x))
        seen = x if leaf.transform is None else leaf.transform.activation(x)
        measured = mxjax.eval.sqnr(seen, leaf.activation.quantize(seen))
        # 256 rows of 8 blocks that differ by decades: the largest block decides, some 8192 independent values, each
        # with an error whose square varies by about its own size: 1 / sqrt(8192) of the power, 0.05 dB; 5 deviations.
        assert row.input_sqnr_db == pytest.approx(measured, abs=0.25)


def test_a_stack_of_experts():
    """Each expert has its own inputs; the powers add up."""
    w = jax.random.normal(jax.random.key(2), (3, 64, 8))
    x = jnp.stack([inputs(key=k) for k in range(3)])
    qparams = mxjax.quantize({"experts": w}, "mxfp4")
    stats = {"experts": stats_of(update(GramSum.zeros(64, (3,)), x))}
    (row,) = layer_errors({"experts": w}, qparams, stats)
    y, q = (np.einsum("erk,ekn->ern", *(np.asarray(a, np.float64) for a in (x, b)))
            for b in (w, qparams["experts"].dequantize()))  # fmt: skip
    assert row.output_error == pytest.approx(((y - q) ** 2).sum() / (y**2).sum(), rel=2e-4)


def test_gptq_helps_the_output_not_the_weight():
    params, x = tree(), inputs()
    stats = stats_for(x)
    cfg = mxjax.recipes.gptq("mxfp4", None)
    rounded, solved = mxjax.quantize(params, "mxfp4_a16"), mxjax.quantize(params, cfg, stats=stats)
    better, worse = (layer_errors(params, q, stats)[0].output_error for q in (solved, rounded))
    assert better < 0.8 * worse


def test_errors():
    params, x = tree(), inputs()
    qparams = mxjax.quantize(params, "mxfp4")
    with pytest.raises(ConfigError, match="paths differ"):
        layer_errors(params, qparams, {"other": stats_for(x)[PATH]})
    with pytest.raises(CalibrationError, match="proj/kernel"):
        layer_errors(params, qparams, stats_for(inputs(32)))
    with pytest.raises(BlockShapeError, match="in the reference"):
        layer_errors(tree((64, 8)), qparams, stats_for(x))
    with pytest.raises(ConfigError, match="no float array"):
        layer_errors(qparams, qparams, stats_for(x))
