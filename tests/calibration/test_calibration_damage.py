"""What calibration and the algorithms say to data, statistics and models that cannot be used."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calibration_models import Blocks, config, tokens

import mxjax
from mxjax.calibration import CalibrationOptions, LayerStats
from mxjax.errors import CalibrationError, ConfigError, MxjaxWarning
from mxjax.search import search_formats, search_rules
from mxjax.transforms import SmoothQuant

PARAMS = {"up": {"kernel": jax.random.normal(jax.random.key(0), (64, 8))}}
X = jax.random.normal(jax.random.key(1), (40, 64))


def model(params, x):
    return mxjax.qdot(x, params["up"]["kernel"])


def stats_of(*batches, cfg="gptq_mxfp4"):
    return mxjax.calibrate(model, PARAMS, batches, cfg)


def test_empty_batches_add_nothing():
    mixed, full = (s["up/kernel"] for s in (stats_of(X[:0], X, X[:0]), stats_of(X)))
    assert jax.tree.all(jax.tree.map(np.array_equal, mixed, full))
    with pytest.raises(CalibrationError, match=r"up/kernel.*\(0 tokens\)"):
        mxjax.quantize(PARAMS, "gptq_mxfp4", stats=stats_of(X[:0]))


@pytest.mark.parametrize("recipe", ["smoothquant_mxfp4", "awq_mxfp4_a16", "wush_mxfp4", "kbbq_mxfp4"])
def test_transforms_are_not_fitted_to_nan(recipe):
    stats = stats_of(X.at[3, 5].set(jnp.nan), cfg=recipe)
    with pytest.raises(CalibrationError, match=r"up/kernel: the Hessian .* has NaN"):
        mxjax.quantize(PARAMS, recipe, stats=stats)


@pytest.mark.parametrize("recipe", ["wush_mxfp4", "kbbq_mxfp4"])
def test_what_is_found_on_the_host_says_so_inside_jit(recipe):
    stats = stats_of(X, cfg=recipe)
    with pytest.raises(CalibrationError, match=r"up/kernel: .* inside jit"):
        jax.eval_shape(lambda p, s: mxjax.quantize(p, recipe, stats=s), PARAMS, stats)


def test_statistics_are_layer_stats_by_path():
    with pytest.raises(CalibrationError, match=r"by path, .* not LayerStats"):
        mxjax.quantize(PARAMS, "gptq_mxfp4", stats=stats_of(X)["up/kernel"])
    with pytest.raises(CalibrationError, match="up/kernel: its statistics are ndarray"):
        mxjax.quantize(PARAMS, "gptq_mxfp4", stats={"up/kernel": np.eye(64)})
    other = LayerStats(hessian=jnp.eye(32), n_tokens=jnp.array(32), amax=jnp.ones(32))
    with pytest.raises(CalibrationError, match=r"up/kernel: a Hessian .* does not fit"):
        mxjax.quantize(PARAMS, "gptq_mxfp4", stats={"up/kernel": other})


def test_a_negative_diagonal_is_damage_and_no_dead_column():
    stats = stats_of(X)["up/kernel"]
    for size, broken in ((-1.0, True), (-1e-9, False)):  # the second is what rounding in a transform may leave of zero
        hurt = dataclasses.replace(stats, hessian=stats.hessian.at[3].set(0).at[:, 3].set(0).at[3, 3].set(size))
        if broken:
            with pytest.raises(CalibrationError, match=r"up/kernel: the Hessian \(64, 64\) has a negative diagonal"):
                mxjax.quantize(PARAMS, "gptq_mxfp4", stats={"up/kernel": hurt})
        else:
            mxjax.quantize(PARAMS, "gptq_mxfp4", stats={"up/kernel": hurt})


def test_tokens_are_checked():
    for batches, message in (
        ([], "no batches"),
        ([tokens()[:0]], "no tokens"),
        ([tokens()[0]], r"tokens \[B, S\]"),
        ([tokens().astype(np.float32)], "integers, not float32"),
        ([tokens(), np.where(tokens() > 60, -100, tokens())], "found -100"),
        ([tokens() + 2**32], r"below 2\*\*31: found 4294967296"),
    ):
        with pytest.raises(ConfigError, match=message):
            mxjax.quantize_sequential(Blocks(), batches, config())
    with pytest.raises(CalibrationError, match="beyond the vocabulary"):
        mxjax.quantize_sequential(Blocks(depth=1), [tokens() + 64], config())
    with pytest.raises(CalibrationError, match=r"^layers/0/up/kernel: .* beyond"):  # in a transform too: the whole path
        mxjax.quantize_sequential(Blocks(depth=1), [tokens() + 64], config(transform=SmoothQuant()))


@pytest.mark.parametrize("hidden", [32, 64], ids=["one solve for all shapes", "a solve for each"])
def test_a_layer_without_input_is_told(hidden):
    """It is no expert: whatever is solved beside it, it is an error and names that layer alone."""
    model = Blocks(depth=1, hidden=hidden)
    up = model.layers[0].up.kernel
    up[...] = jnp.zeros_like(up[...])  # bias too: down sees zeros
    with pytest.raises(CalibrationError, match=r"^layers/0/down/kernel: calibration saw no nonzero input"):
        mxjax.quantize_sequential(model, [tokens()], config(CalibrationOptions(batch_size=4, fuse=False)))


def test_what_one_pass_cannot_see_is_told():
    with pytest.warns(MxjaxWarning, match=r"mismatch, inputs='quantized' of this config take quantize_sequential"):
        stats_of(X, cfg="best_nvfp4")
    stats_of(X, cfg="best_mxfp4")  # warnings are errors here


def test_a_config_that_quantizes_nothing_is_told():
    with pytest.warns(MxjaxWarning, match="nothing is calibrated"):
        assert mxjax.calibrate(model, mxjax.quantize(PARAMS, "mxfp4"), [X], "gptq_mxfp4") == {}
    nowhere = mxjax.QuantConfig(rules=[mxjax.Rule(path="nowhere", algorithm="gptq")])
    with (
        pytest.warns(MxjaxWarning, match="'nowhere' matches no parameter"),
        pytest.warns(MxjaxWarning, match="nothing was quantized"),
    ):
        assert mxjax.quantize_sequential(Blocks(depth=1), [tokens()], nowhere) == {}


def test_searches_are_checked():
    broken = stats_of(X.at[3, 5].set(jnp.nan))
    for search in (lambda: search_formats(PARAMS, broken), lambda: search_rules(PARAMS, broken, ["mxfp4"])):
        with pytest.raises(CalibrationError, match=r"up/kernel: the Hessian .* has NaN"):
            search()
    stats = stats_of(X)
    with pytest.raises(ConfigError, match="cannot be met"):
        search_formats(PARAMS, stats, average_bits=float("nan"))
    assert search_formats(PARAMS, stats, average_bits=float("inf")).rules[0].weight == "mxfp8_e4m3"
    by_name, by_config = (search_rules(PARAMS, stats, [c]) for c in ("mxfp4", mxjax.recipes.get("mxfp4")))
    assert by_name == by_config


def test_a_config_file_nested_too_deep_is_refused(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 50_000)
    with pytest.raises(ConfigError, match=r"deep\.json"):
        mxjax.load_config(tmp_path / "deep.json")
