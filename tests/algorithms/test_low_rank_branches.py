"""SVDQuant and LoRaQ: factors, formats, descent, and errors against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax.algorithms import WeightSpec, loraq, rtn, svdquant
from mxjax.algorithms.loraq import optimize
from mxjax.algorithms.loraq_output import first_branch, refit
from mxjax.algorithms.low_rank import BRANCHES
from mxjax.algorithms.svdquant import decompose
from mxjax.calibration import LayerStats
from mxjax.core.formats import MXFP4, get_format
from mxjax.core.svd import truncated_svd
from mxjax.errors import BlockShapeError, CalibrationError, ConfigError, NonFiniteError
from mxjax.ops import ActivationFormat
from mxjax.transforms import BranchSmooth, Hadamard, Rounding
from mxjax.transforms.branch import channel_weights, hessian_svd

K, N = 128, 96
W4A4 = Rounding(weight=MXFP4, activation=MXFP4)


@pytest.fixture(scope="module")
def layer():
    """Inputs with outlier channels, a weight [K, N] with a few large directions, and statistics."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((160, K)) * np.exp(rng.standard_normal(K)), jnp.float32)
    large = rng.standard_normal((K, 8)) @ rng.standard_normal((8, N))
    w = jnp.asarray(rng.standard_normal((K, N)) + large, jnp.float32)
    stats = LayerStats(hessian=2 * x.T @ x / 160, n_tokens=jnp.array(160), amax=jnp.abs(x).max(0), sample=x)
    return x, w, stats


def spec(fmt="mxfp4", transform=None, activation=True, **options):
    act = ActivationFormat(format=get_format(fmt)) if activation else None
    return WeightSpec(path="w", format=get_format(fmt), activation=act, transform=transform, options=options)


def error_of(x, w, q):
    return float(jnp.sum((mxjax.qdot(x, q) - x @ w) ** 2) / jnp.sum((x @ w) ** 2))


def weight_error(w, q):
    return float(jnp.sum((q.dequantize() - w) ** 2) / jnp.sum(w**2))


def test_truncated_svd_is_nearly_the_best(layer):
    _, w, _ = layer
    s = np.linalg.svd(np.asarray(w, float), compute_uv=False)
    b, a = truncated_svd(w, 12, jax.random.key(0))
    best = np.sqrt(np.sum(s[12:] ** 2))
    # Two rounds with 8 columns to spare: the expected excess is far below a percent even for a flat spectrum.
    assert best * 0.9999 <= np.linalg.norm(w - b @ a) < 1.01 * best
    np.testing.assert_allclose(jnp.linalg.norm(b, axis=0), jnp.linalg.norm(a, axis=1), rtol=1e-3)
    b, a = truncated_svd(w[:, :3], 8, jax.random.key(0))
    np.testing.assert_allclose(b @ a, w[:, :3], atol=1e-4)
    assert b.shape == (K, 8) and not b[:, 3:].any() and not a[3:].any()


@pytest.mark.parametrize("activation", [True, False])
def test_svdquant_alternates_to_a_smaller_error(layer, activation):
    x, w, stats = layer
    rounding = spec(activation=activation).rounding
    data = x if activation else stats.hessian
    found = decompose(data, w.T, jax.random.key(0), rounding=rounding, rank=8, iterations=10)
    errors = np.asarray(found.errors)[~np.isnan(found.errors)]
    assert float(found.error) == errors.min() < errors[0]
    assert len(errors) == 10 or errors[-1] >= errors[:-1].min()  # stopped at the first rise
    q = svdquant(w, spec(activation=activation, rank=8, iterations=10), stats).validate("w")
    assert q.branch.a.dtype == jnp.bfloat16 and q.branch.rank == 8
    if activation:
        # bfloat16 factors (relative error 2^-9) of a branch that carries the output: far below 4-bit errors.
        assert error_of(x, w, q) == pytest.approx(float(found.error), rel=0.05)
    assert error_of(x, w, q) < 0.6 * error_of(x, w, rtn(w, spec(activation=activation)))
    again = svdquant(w, spec(activation=activation, rank=8, iterations=10), stats)
    jax.tree.map(np.testing.assert_array_equal, q, again)


def test_svdquant_smooths_and_compensates(layer):
    x, w, stats = layer
    smooth = BranchSmooth(rank=8, grid=4)
    plain, smoothed, solved = (
        svdquant(w, spec(transform=t, rank=8, iterations=3, **o), stats)
        for t, o in ((None, {}), (smooth, {}), (smooth, {"residual": "gptq", "gptq_observer": "mse"}))
    )
    assert error_of(x, w, smoothed) < error_of(x, w, plain)
    assert error_of(x, w, solved) < error_of(x, w, smoothed)
    np.testing.assert_array_equal(smoothed.branch.a, solved.branch.a)
    assert weight_error(w, smoothed) < 0.05  # the transform is undone, also in the branch


@pytest.mark.parametrize("form, rank", [("w16a16", 32), ("w8a8", 64), ("int8", 64), ("w6a6", 64), ("w4a8", 128)])
def test_loraq_branches_take_equal_bytes(layer, form, rank):
    x, w, _ = layer
    q = loraq(w, spec(branch=form, iterations=3, steps=3)).validate("w")
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(q.branch))
    assert q.branch.rank == rank and nbytes <= 1.07 * 32 * 2 * (N + K)
    assert weight_error(w, q) < 0.7 * weight_error(w, rtn(w, spec()))
    assert error_of(x, w, q) < 1
    expected = BRANCHES[form].activation
    assert q.branch.activation == (None if expected is None else ActivationFormat(format=expected))


@pytest.mark.parametrize("fmt, rotation, transform", [("mxfp4", False, None), ("nvfp4", True, Hadamard(32))])
def test_loraq_descends(layer, fmt, rotation, transform):
    _, w, _ = layer
    own = spec(fmt, transform=transform)
    turned = w.T if transform is None else transform.weight(w.T)
    solve = lambda steps: optimize(  # noqa: E731
        turned, transform, jax.random.key(0), rounding=own.rounding, factors=get_format("mxfp8_e4m3"), rank=16,
        iterations=4, steps=steps, rotation=rotation,
    )  # fmt: skip
    before, after = solve(0), solve(60)
    assert after.losses.shape == (64,) and after.losses[-1] < 0.99 * after.losses[4]
    assert float(after.error) == float(after.losses.min()) < 0.99 * float(before.error)
    q = loraq(w, spec(fmt, transform=transform, rank=16 * 2, iterations=4, steps=20, rotation=rotation)).validate("w")
    assert weight_error(w, q) < float(before.error)
    again = solve(60)
    jax.tree.map(np.testing.assert_array_equal, after, again)  # the same key: the same bits


def test_the_branch_that_a_hessian_asks_for(layer):
    """Damping aside, no other of that rank has a smaller error: the rest is the tail of the spectrum of E H^1/2."""
    _, w, stats = layer
    e, h = np.asarray(w.T, float), np.asarray(stats.hessian, float)
    h = h + 0.01 * np.trace(h) / K * np.eye(K)
    tail = np.linalg.svd(e @ np.linalg.cholesky(h), compute_uv=False)[12:]
    b, a = (np.asarray(m, float) for m in hessian_svd(w.T, stats.hessian, 12, jax.random.key(0)))
    d = e - b @ a
    # The randomised SVD's own excess is far below a percent (see above).
    assert np.sum(tail**2) * 0.9999 <= np.trace(d @ h @ d.T) < 1.01 * np.sum(tail**2)


def test_channels_cost_what_their_rounding_does(layer):
    """Errors of R are in proportion to it, so twice the input noise or power is a root of two in the weight."""
    x, w, stats = layer
    s = np.asarray(channel_weights(x, w.T, W4A4), float)
    x_q, w_q = mxjax.fake_quantize(x, MXFP4), np.asarray(mxjax.fake_quantize(w.T, MXFP4), float)
    noise = np.mean(np.square(np.asarray(x_q - x, float)), axis=0)
    relative = np.sum((w_q - np.asarray(w.T)) ** 2) / np.sum(np.asarray(w, float) ** 2)
    power = np.mean(np.square(np.asarray(x, float)), axis=0).reshape(-1, 32).mean(1).repeat(32)
    np.testing.assert_allclose(s**2, noise + relative * power, rtol=1e-3)
    only = channel_weights(stats.hessian / 2, w.T, Rounding(weight=MXFP4))
    np.testing.assert_allclose(np.asarray(only) ** 2, relative * power, rtol=1e-3)


@pytest.mark.parametrize("transform, activation", [(Hadamard(32), True), (None, False)])
def test_loraq_fits_the_output(layer, transform, activation):
    x, w, stats = layer
    options = dict(branch="int8", rank=32, iterations=3, steps=20, objective="output")
    q = loraq(w, spec(transform=transform, activation=activation, **options), stats).validate("w")
    blind = loraq(w, spec(transform=transform, activation=activation, **{**options, "objective": "weight"}), stats)
    assert error_of(x, w, q) < 0.95 * error_of(x, w, blind)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(q)) == sum(leaf.nbytes for leaf in jax.tree.leaves(blind))
    solved = loraq(w, spec(transform=transform, activation=activation, residual="gptq", **options), stats)
    assert error_of(x, w, solved) < 1.05 * error_of(x, w, q)
    again = loraq(w, spec(transform=transform, activation=activation, **options), stats)
    jax.tree.map(np.testing.assert_array_equal, q, again)


def test_each_step_of_it_descends(layer):
    x, w, stats = layer
    b, a, errors = first_branch(x, w.T, jax.random.key(0), rounding=W4A4, rank=16, iterations=4)
    assert errors.shape == (4,) and errors.min() < errors[0]
    rest = w.T - b @ a
    lack = w.T - mxjax.fake_quantize(rest, MXFP4)
    fp4 = get_format("mxfp4")  # coarse, so that there is something to gain
    b, a, losses = refit(
        lack, stats.hessian, None, jax.random.key(0), factors=fp4, rank=32, steps=40, learning_rate=0.2, damping=0.01
    )
    assert losses.shape == (41,) and losses[-1] < 0.97 * losses[0]
    with pytest.raises(CalibrationError, match="needs calibration statistics"):
        loraq(w, spec(objective="output"))
    with pytest.raises(ConfigError, match="rotation"):
        loraq(w, spec(objective="output", rotation=True), stats)


def test_loraq_of_a_stack_is_that_of_its_members(layer):
    _, w, _ = layer
    stack = jnp.stack([w, w[::-1]])
    options = dict(iterations=2, steps=2, rank=32)
    q = loraq(stack, spec("nvfp4", **options)).validate("experts")
    assert q.branch.a.shape == (2, 32, K) and q.branch.b.shape == (2, N, 32)
    y = mxjax.qeinsum("ebk,ekn->ebn", jnp.ones((2, 3, K)), q)
    assert y.shape == (2, 3, N)
    for i in range(2):
        assert float(jnp.sum((q.dequantize()[i] - stack[i]) ** 2) / jnp.sum(w**2)) < 0.01
    heads = loraq(w.reshape(K, 4, N // 4), WeightSpec(path="w", format=MXFP4, axis=-3, options=options)).validate("w")
    assert heads.branch.a.shape == (32, K) and heads.branch.b.shape == (4, N // 4, 32)


def test_what_does_not_go(layer):
    _, w, stats = layer
    with pytest.raises(CalibrationError, match="needs calibration statistics"):
        svdquant(w, spec())
    with pytest.raises(CalibrationError, match="sample"):
        svdquant(w, spec(), LayerStats(hessian=stats.hessian, n_tokens=stats.n_tokens, amax=stats.amax))
    with pytest.raises(CalibrationError, match="gptq"):
        loraq(w, spec(residual="gptq", iterations=1, steps=1, rank=32))
    for algorithm, options in ((svdquant, {"ranks": 3}), (loraq, {"branch": "w2a2"}), (svdquant, {"residual": "awq"})):
        with pytest.raises(ConfigError, match="option"):
            algorithm(w, spec(**options), stats)
    with pytest.raises(ConfigError, match="powers of two"):
        loraq(w, spec(rotation=True, rank=96))
    with pytest.raises(BlockShapeError, match="w: "):
        loraq(w[:100], spec())
    with pytest.raises(NonFiniteError, match="w: 1 of"):
        loraq(w.at[0, 0].set(jnp.nan), spec())
