"""Transforms that are chosen from statistics: WUSH, SmoothQuant, chains."""

import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax.algorithms import WeightSpec, gptq, rtn
from mxjax.calibration import LayerStats, transform_gram
from mxjax.core.formats import MXFP4
from mxjax.errors import BlockShapeError, CalibrationError, ConfigError
from mxjax.ops import ActivationFormat
from mxjax.transforms import BlockMatrix, Chain, ChannelScale, Hadamard, SmoothQuant, Wush, fit, needs_fit

K = 64


@pytest.fixture(scope="module")
def layer():
    """Inputs with strong channel correlations and outliers, a weight, and the statistics."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((512, K)) @ rng.standard_normal((K, K)) * np.exp(rng.standard_normal(K))
    w = rng.standard_normal((K, 48)) * np.exp(0.5 * rng.standard_normal((K, 1)))
    x, w = jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)
    stats = LayerStats(hessian=2 * x.T @ x / 512, n_tokens=jnp.array(512), amax=jnp.abs(x).max(0))
    return x, w, stats


RECIPES = [
    Wush(),
    Wush(strength=0.5),
    Wush(size=16),
    SmoothQuant(),
    Hadamard(32),
    Chain((SmoothQuant(alpha=0.6), Hadamard(32))),
    Chain((Wush(), Hadamard(16))),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_a_fitted_transform_keeps_the_product(layer, recipe):
    x, w, stats = layer
    t = fit(recipe, stats, [w.T])
    assert needs_fit(recipe) == (not isinstance(recipe, Hadamard)) and not needs_fit(t)
    t.check(K)
    y, exact = t.activation(x) @ t.weight(w.T).T, np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    # Float32 sums of K products after a map of condition at most 1e3: K * 2**-24 * 1e3 relative to the largest.
    assert np.abs(y - exact).max() < K * 2.0**-24 * 1e3 * np.abs(exact).max()
    assert np.allclose(t.undo_weight(t.weight(w.T)), w.T, atol=1e-3)
    assert np.allclose(transform_gram(t, stats.hessian), 2 * t.activation(x).T @ t.activation(x) / 512, rtol=1e-3,
                       atol=1e-4 * float(jnp.abs(t.activation(x)).max() ** 2))  # fmt: skip


def test_wush_balances_both_sides(layer):
    x, w, stats = layer
    t = Wush(damping=1e-6).fit(stats, [w.T])
    xt, wt = np.asarray(t.activation(x), np.float64), np.asarray(t.weight(w.T), np.float64)
    for block in range(2):
        cut = slice(32 * block, 32 * block + 32)
        a, b = xt[:, cut].T @ xt[:, cut], wt[:, cut].T @ wt[:, cut]
        assert np.allclose(a / np.trace(a), b / np.trace(b), atol=2e-3)  # H S H on both sides
        diagonal = np.diag(a) / np.mean(np.diag(a))
        assert np.allclose(diagonal, 1, atol=1e-2)  # the Hadamard matrix spreads the spectrum evenly


def test_wush_helps_w4a4(layer):
    x, w, stats = layer
    errors = {}
    for name, transform in (("none", None), ("hadamard", Hadamard(32)), ("wush", Wush())):
        spec = WeightSpec(path="w", format=MXFP4, transform=transform, activation=ActivationFormat(format=MXFP4))
        for algorithm in (rtn, gptq):
            q = algorithm(w, spec, stats)
            errors[name, algorithm.__name__] = float(jnp.mean((mxjax.qdot(x, q) - x @ w) ** 2))
    assert errors["wush", "rtn"] < 0.8 * min(errors["none", "rtn"], errors["hadamard", "rtn"])
    assert errors["wush", "gptq"] < errors["wush", "rtn"]


def test_smoothquant_formula():
    stats = LayerStats(hessian=jnp.eye(2), n_tokens=jnp.array(1), amax=jnp.array([16.0, 1.0]))
    t = SmoothQuant(alpha=0.5).fit(stats, [jnp.array([[1.0, -4.0]]), jnp.array([[0.5, 0.25]])])
    assert t.scale.tolist() == [4.0, 0.5]
    assert t.activation(jnp.array([8.0, 1.0])).tolist() == [2.0, 2.0]


def test_reports():
    stats = LayerStats(hessian=jnp.eye(64), n_tokens=jnp.array(1), amax=jnp.ones(64))
    w = jnp.ones((64, 4))
    with pytest.raises(CalibrationError, match=r"a/b.*chosen from calibration statistics"):
        rtn(w, WeightSpec(path="a/b", format=MXFP4, transform=Wush()))
    with pytest.raises(BlockShapeError, match="a/b"):
        Wush(size=128).fit(stats, [w.T], "a/b")
    with pytest.raises(BlockShapeError, match="a/b"):
        BlockMatrix(jnp.eye(32)[None]).check(64, "a/b")
    with pytest.raises(BlockShapeError, match="a/b"):
        ChannelScale(jnp.ones(3)).check(64, "a/b")
    for bad in (lambda: Wush(size=24), lambda: Wush(strength=2), lambda: SmoothQuant(alpha=-1)):
        with pytest.raises(ConfigError):
            bad()
    stacked = LayerStats(hessian=jnp.zeros((2, 64, 64)), n_tokens=jnp.ones(2), amax=jnp.ones((2, 64)))
    for recipe in (Wush(), SmoothQuant()):
        with pytest.raises(CalibrationError, match="stack"):
            recipe.fit(stacked, [w.T], "a/b")
