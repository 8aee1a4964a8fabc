"""Experts [E, K, N]: token counts of each, and a finite result with a warning for one that saw none."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calibration_models import WIDTH, Blocks, config, tokens
from flax import nnx

import mxjax
from mxjax.algorithms.gptq_solver import SCALE_MODES
from mxjax.algorithms.observers import OBSERVERS
from mxjax.calibration import CalibrationOptions
from mxjax.errors import MxjaxWarning
from mxjax.transforms import Hadamard

EXPERTS, UNUSED = 3, 1


def route(scores):
    """One expert a token, never the unused one: float [B, S, E] of zeros and ones."""
    scores = scores.at[..., UNUSED].set(-jnp.inf)
    return jax.nn.one_hot(jnp.argmax(scores, axis=-1), EXPERTS)


def experts(x, scores, up, down):
    """``x + sum_e route_e down_e(relu(up_e(x)))``: sparse, with rows of zeros for the tokens that go elsewhere."""
    h = jnp.einsum("bsk,bse->ebsk", x, route(scores))
    h = jax.nn.relu(mxjax.qeinsum("ebsk,ekn->ebsn", h, up))
    return x + mxjax.qeinsum("ebsk,ekn->bsn", h, down)


class SparseLayer(nnx.Module):
    quantized_params = {"up": -2, "down": -2}  # noqa: RUF012  as users write it

    def __init__(self, rngs, hidden):
        self.router = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)
        self.up = nnx.Param(jax.random.normal(rngs.params(), (EXPERTS, WIDTH, hidden)) / 6)
        self.down = nnx.Param(jax.random.normal(rngs.params(), (EXPERTS, hidden, WIDTH)) / 8)

    def __call__(self, x):
        return experts(x, self.router(x), self.up[...], self.down[...])


def counts_in(warning):
    return [int(n) for n in re.search(r"tokens: \[(.*)\]", str(warning.message))[1].split(",")]


def check(weights, caught, n_tokens):
    """Finite, and one warning for each weight with all counts."""
    assert len(caught) == len(weights)
    for warning in caught:
        assert f"1 of {EXPERTS} stacked weights saw no calibration token" in str(warning.message)
        counts = counts_in(warning)
        assert counts[UNUSED] == 0 and sum(counts) <= n_tokens and min(counts[0], counts[2]) > 0
    for path, w in weights.items():
        w.validate(path)
        assert np.isfinite(w.dequantize()).all(), path
        assert np.abs(w.dequantize()[UNUSED]).max() > 0


@pytest.fixture(scope="module")
def function_model():
    """Parameters, and statistics through a plain function."""
    key = jax.random.key(0)
    params = {
        "scores": jax.random.normal(key, (WIDTH, EXPERTS)),
        "up": jax.random.normal(key, (EXPERTS, WIDTH, 64)) / 6,
        "down": jax.random.normal(key, (EXPERTS, 64, WIDTH)) / 8,
    }
    batches = [jax.random.normal(jax.random.key(i), (4, 16, WIDTH)) for i in range(2)]

    def f(params, x):
        return experts(x, x @ params["scores"], params["up"], params["down"])

    return params, mxjax.calibrate(f, params, batches, rules()), f, batches


def rules(weight="mxfp4", **options):
    rule = mxjax.Rule(path="^(up|down)$", weight=weight, activation=weight, algorithm="gptq", options=options)
    return mxjax.QuantConfig(rules=[rule])


def test_counts_and_hessians_are_those_of_each_expert(function_model):
    params, stats, _, batches = function_model
    x = np.concatenate([np.asarray(b).reshape(-1, WIDTH) for b in batches])
    chosen = np.asarray(route(jnp.asarray(x) @ params["scores"])).argmax(-1)
    assert stats["up"].n_tokens.tolist() == np.bincount(chosen, minlength=EXPERTS).tolist()
    for e in range(EXPERTS):
        mine = x[chosen == e].astype(np.float64)
        want = 2 * mine.T @ mine / max(len(mine), 1)
        # len(mine) <= 128 products a sum in float32
        assert np.abs(stats["up"].hessian[e] - want).max() <= 128 * 2.0**-24 * max(np.abs(want).max(), 1e-30)


@pytest.mark.parametrize(
    ("weight", "observer"), [("mxfp4", "minmax"), ("mxfp4", "mse"), ("nvfp4", "mse"), ("nvfp4", "alternating")]
)
def test_quantize_with_statistics(function_model, weight, observer):
    params, stats, f, batches = function_model
    with pytest.warns(MxjaxWarning) as caught:
        got = mxjax.quantize(params, rules(weight, observer=observer), stats=stats)
    check({p: got[p] for p in ("up", "down")}, caught, 128)
    assert np.isfinite(f(got, batches[0])).all()


def test_all_observers_are_above():
    assert set(OBSERVERS) == {"minmax", "mse", "alternating"}


@pytest.mark.parametrize("scales", sorted(set(SCALE_MODES) - {"frozen"}))
def test_every_scale_mode(function_model, scales):
    params, stats, _, _ = function_model
    with pytest.warns(MxjaxWarning) as caught:
        got = mxjax.quantize(params, rules(scales=scales), stats=stats)
    check({p: got[p] for p in ("up", "down")}, caught, 128)


def test_an_expert_that_saw_nothing_is_rounded_to_nearest(function_model):
    params, stats, _, _ = function_model
    with pytest.warns(MxjaxWarning):
        got = mxjax.quantize(params, rules(), stats=stats)
    plain = mxjax.quantize(params, rules().replace(rules=[mxjax.Rule(path="^(up|down)$")]))
    for path in ("up", "down"):
        codes, nearest = (np.asarray(tree[path].qtensor.codes) for tree in (got, plain))
        assert np.array_equal(codes[UNUSED], nearest[UNUSED])
        assert not np.array_equal(codes[0], nearest[0])


@pytest.mark.parametrize(
    ("options", "transform"),
    [
        (CalibrationOptions(batch_size=4), None),
        (CalibrationOptions(batch_size=4, inputs="quantized", mismatch=True, true_sequential=True), Hadamard(32)),
    ],
    ids=["plain", "everything"],
)
def test_quantize_sequential(options, transform):
    model = Blocks(2, layer=SparseLayer)
    cfg = config(options, transform=transform, correction=0.5 if options.mismatch else 0.0, observer="mse")
    with pytest.warns(MxjaxWarning) as caught:
        got = mxjax.quantize_sequential(model, [tokens()], cfg)
    assert sorted(got) == [f"layers/{i}/{name}" for i in range(2) for name in ("down", "up")]
    check(got, caught, 160)
    whole = mxjax.nnx.from_params(model, mxjax.nn.calibrate.replace_leaves(nnx.state(model), got))
    x = whole.embed(jnp.asarray(tokens(2)))
    for layer in whole.layers:
        x = layer(x)
    assert np.isfinite(x).all()


def test_nnx_model_through_calibrate():
    layer = SparseLayer(nnx.Rngs(0), 64)
    x = jax.random.normal(jax.random.key(1), (4, 16, WIDTH))
    stats = mxjax.calibrate(layer, None, [x], rules())
    assert stats["up"].n_tokens.shape == (EXPERTS,) and int(stats["up"].n_tokens.sum()) == 64
    with pytest.warns(MxjaxWarning) as caught:
        got = mxjax.nnx.quantize(layer, rules(), stats=stats)
    check({"up": got.up[...], "down": got.down[...]}, caught, 64)
    assert np.isfinite(got(x)).all()
    assert isinstance(layer.up[...], jax.Array)  # the model is as it was
