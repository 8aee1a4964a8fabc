"""AWQ's search, the choice by measured error, and KBBQ's brake, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax.algorithms import WeightSpec, gptq, rtn
from mxjax.calibration import LayerStats
from mxjax.core.formats import MXFP4, NVFP4
from mxjax.errors import CalibrationError, ConfigError
from mxjax.ops import ActivationFormat
from mxjax.transforms import Awq, BlockMatrix, Chain, Choose, Hadamard, Rounding, SmoothQuant, Wush, describe, fit
from mxjax.transforms.measure import output_error

K, N = 64, 48
W4A16 = Rounding(weight=MXFP4)
W4A4 = Rounding(weight=MXFP4, activation=MXFP4)
NV = Rounding(weight=NVFP4, weight_scale="mse", activation=NVFP4)


def stats_of(x):
    return LayerStats(hessian=2 * x.T @ x / len(x), n_tokens=jnp.array(len(x)), amax=jnp.abs(x).max(0), sample=x)


@pytest.fixture(scope="module")
def layer():
    """Correlated inputs with outlier channels, and a weight [N, K]."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((256, K)) @ (np.eye(K) + 0.3 * rng.standard_normal((K, K)))
    x = jnp.asarray(x * np.exp(1.5 * rng.standard_normal(K)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((N, K)) * np.exp(0.5 * rng.standard_normal(K)), jnp.float32)
    return x, w, stats_of(x)


def rounded(a, fmt, scale, batch_axes=0):
    return np.asarray(mxjax.fake_quantize(jnp.asarray(a, jnp.float32), fmt, -1, scale, batch_axes=batch_axes), float)


def error_in_float64(x, w, left, right, rounding):
    """``|Q(x T) Q(W T^-T)^T - x W^T|^2 / |x W^T|^2``, for maps given as K x K matrices T and T^-T."""
    w_q = rounded(w @ right, rounding.weight, rounding.weight_scale)
    if rounding.activation is None:
        y = x @ (w_q @ np.linalg.inv(right)).T
    else:
        y = rounded(x @ left, rounding.activation, rounding.activation_scale, 1) @ w_q.T
    return np.sum((y - x @ w.T) ** 2) / np.sum((x @ w.T) ** 2)


def as_matrices(t):
    eye = jnp.eye(K)
    return (
        (np.eye(K), np.eye(K))
        if t is None
        else (np.asarray(t.activation(eye), float), np.asarray(t.weight(eye), float))
    )


@pytest.mark.parametrize("rounding", [W4A16, W4A4, NV], ids=["w4a16", "w4a4", "nv"])
@pytest.mark.parametrize("transform", [None, Hadamard(16), Wush(strength=0.5), SmoothQuant()], ids=describe)
def test_measured_error_equals_float64(layer, rounding, transform):
    x, w, stats = layer
    t = fit(transform, stats, [w])
    data = stats.hessian if rounding.activation is None else x
    want = error_in_float64(np.asarray(x, float), np.asarray(w, float), *as_matrices(t), rounding)
    # A number at the middle of two grid points may round either way: one code in thousands, each a part in 10^3.
    assert float(output_error(data, w, t, rounding)) == pytest.approx(want, rel=5e-3)


@pytest.mark.parametrize("rounding", [W4A16, W4A4], ids=["w4a16", "w4a4"])
def test_awq_is_the_papers_search(layer, rounding):
    x, w, stats = layer
    x64, w64 = np.asarray(x, float), np.asarray(w, float)
    magnitude, errors, scales = np.abs(x64).mean(0), [], []
    for r in np.arange(20) / 20:
        s = np.maximum(magnitude**r, 1e-4)
        s = s / np.sqrt(s.max() * s.min())
        scales.append(s)
        errors.append(error_in_float64(x64, w64, np.diag(1 / s), np.diag(s), rounding))
    got = Awq().fit(stats, [w[:16], w[16:]], "", rounding)
    index = round(float(got.exponent) * 20)
    assert errors[index] == pytest.approx(min(errors), rel=5e-3)
    np.testing.assert_allclose(got.scale, scales[index], rtol=1e-5)
    assert errors[index] < 0.9 * errors[0]  # these outlier channels are what AWQ is for
    assert describe(got) == f"awq {index / 20:.2g}"


def test_awq_changes_nothing_where_channels_are_alike():
    x = jnp.asarray(np.random.default_rng(0).choice([-1.0, 1.0], (128, 32)), jnp.float32)
    w = jnp.asarray(np.random.default_rng(1).standard_normal((8, 32)), jnp.float32)
    t = Awq(grid=4).fit(stats_of(x), [w], "", W4A16)
    assert float(t.exponent) == 0 and np.all(t.scale == 1)  # ties keep r = 0


def test_choose_takes_the_smallest_error(layer):
    x, w, stats = layer
    choice = Choose([Hadamard(16), Wush(strength=0.5), Wush(), SmoothQuant(), Awq(), Chain((Awq(), Hadamard(16)))])
    measured = choice.errors(stats, [w], "", W4A4)
    assert len(measured) == 7 and measured[0][0] is None
    want = [error_in_float64(np.asarray(x, float), np.asarray(w, float), *as_matrices(t), W4A4) for t, _ in measured]
    np.testing.assert_allclose([e for _, e in measured], want, rtol=5e-3)
    chosen = choice.fit(stats, [w], "", W4A4)
    assert describe(chosen) == describe(measured[int(np.argmin(want))][0]) != "none"


def test_choose_keeps_the_identity_where_rotating_hurts():
    # Weights and inputs on the grid: no error at all without a rotation.
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.choice([-6.0, -3, -1, 0.5, 2, 6], (64, 32)), jnp.float32)
    w = jnp.asarray(rng.choice([-6.0, -3, -1, 0.5, 2, 6], (8, 32)), jnp.float32)
    choice = Choose([Hadamard(32), Wush()])
    assert choice.errors(stats_of(x), [w], "", W4A4)[0] == (None, 0.0)
    assert choice.fit(stats_of(x), [w], "", W4A4) is None
    spec = WeightSpec(path="w", format=MXFP4, transform=choice, activation=ActivationFormat(format=MXFP4))
    for algorithm in (rtn, gptq):
        q = algorithm(w.T, spec, stats_of(x))
        assert q.transform is None and np.array_equal(mxjax.qdot(x, q), x @ w.T)


def test_the_choice_is_in_the_summary(layer):
    _, w, stats = layer
    rule = mxjax.Rule(transform=Choose([Wush(strength=0.5)]), activation="mxfp4")
    q = mxjax.quantize({"a": {"kernel": w.T}}, mxjax.QuantConfig(rules=[rule]), stats={"a/kernel": stats})
    assert mxjax.summary(q).rows[0].extras == "wush 0.5, 32"
    assert mxjax.summary(jax.eval_shape(lambda: q)).rows[0].extras == "wush ?, 32"


def moments(x, w, t, cut):
    """Second moments of both transformed factors in one block, each with trace 1."""
    pair = (np.asarray(t.activation(x), float)[:, cut], np.asarray(t.weight(w), float)[:, cut])
    return [m.T @ m / np.sum(m * m) for m in pair]


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_kbbqs_brake_splits_the_spectrum(layer, strength):
    """Weights get ``H S^l H``, inputs ``H S^(2-l) H``: at 1 (WUSH) both are equal, at 0 the weights are white."""
    x, w, stats = layer
    t = Wush(strength=strength, damping=1e-7).fit(stats, [w])
    for cut in (slice(0, 32), slice(32, 64)):
        x_moment, w_moment = moments(x, w, t, cut)
        a, b = np.linalg.cholesky(np.asarray(x, float)[:, cut].T @ x[:, cut]), np.asarray(w, float)[:, cut]
        s = np.linalg.svd(np.linalg.cholesky(b.T @ b).T @ a)[1]
        h = np.asarray(mxjax.transforms.hadamard_matrix(32), float)
        for got, power in ((w_moment, strength), (x_moment, 2 - strength)):
            want = h @ np.diag(s**power / np.sum(s**power)) @ h
            assert np.abs(got - want).max() < 1e-3 * np.abs(want).max()


def test_strength_zero_is_orthogonal_on_white_weights(layer):
    _, _, stats = layer
    white = jnp.asarray(np.linalg.qr(np.random.default_rng(0).standard_normal((96, K)))[0], jnp.float32)
    for m in np.asarray(Wush(strength=0.0, damping=1e-7).fit(stats, [white]).matrices, float):
        gram = m.T @ m
        np.testing.assert_allclose(gram / np.mean(np.diag(gram)), np.eye(32), atol=1e-4)


def test_reports(layer):
    _, w, stats = layer
    bare = LayerStats(hessian=stats.hessian, n_tokens=stats.n_tokens, amax=stats.amax)
    stacked = LayerStats(hessian=jnp.zeros((2, K, K)), n_tokens=jnp.ones(2), amax=jnp.ones((2, K)))
    for fitter in (Awq(), Choose([Hadamard(16)])):
        with pytest.raises(CalibrationError, match=r"a/b.*hold none"):
            fitter.fit(bare, [w], "a/b", W4A4)
        with pytest.raises(CalibrationError, match=r"a/b.*stack"):
            fitter.fit(stacked, [w], "a/b", W4A4)
        with pytest.raises(CalibrationError, match=r"a/b.*rounding"):
            fitter.fit(stats, [w], "a/b")
    for bad in (lambda: Awq(grid=0), lambda: Choose(["hadamard"])):
        with pytest.raises(ConfigError):
            bad()
    with pytest.raises(mxjax.errors.BlockShapeError, match="a/b"):
        Choose([Hadamard(64)]).check(96, "a/b")
    assert isinstance(Choose([Wush()]).fit(stats, [w], "", W4A4), BlockMatrix)
