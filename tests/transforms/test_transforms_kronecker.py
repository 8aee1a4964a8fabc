"""Kronecker transforms and KroQuant, against dense matrices in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax.calibration import LayerStats
from mxjax.core.formats import MXFP4, NVFP4
from mxjax.errors import BlockShapeError, CalibrationError, ConfigError
from mxjax.transforms import BranchSmooth, ChannelScale, Hadamard, Kronecker, KroQuant, Rounding, Wush, fit
from mxjax.transforms.kronecker_start import nearest_kronecker, second_moment_metric
from mxjax.transforms.kroquant import invertible, rounded_with_scale_gradient
from mxjax.transforms.measure import branch_error, output_error

K, N = 128, 48
W4A4 = Rounding(weight=MXFP4, activation=MXFP4)
W4A16 = Rounding(weight=MXFP4)


def stats_of(x):
    return LayerStats(hessian=2 * x.T @ x / len(x), n_tokens=jnp.array(len(x)), amax=jnp.abs(x).max(0), sample=x)


@pytest.fixture(scope="module")
def layer():
    """Inputs whose blocks have a structure in common, and a weight [N, K]."""
    rng = np.random.default_rng(0)
    block = rng.standard_normal((32, 32)) * np.exp(rng.standard_normal(32))
    x = (rng.standard_normal((192, K // 32, 32)) @ block).reshape(192, K)
    x = jnp.asarray(x * np.exp(0.3 * rng.standard_normal(K)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((N, K)) * np.exp(0.5 * rng.standard_normal(K)), jnp.float32)
    return x, w, stats_of(x)


def some_kronecker(seed=0, left=2, right=4):
    rng = np.random.default_rng(seed)
    return Kronecker(
        jnp.asarray(np.eye(4) + 0.3 * rng.standard_normal((left, 4, 4)), jnp.float32),
        jnp.asarray(np.eye(8) + 0.2 * rng.standard_normal((right, 8, 8)), jnp.float32),
    )


def test_is_the_kronecker_product_of_its_factors():
    t, x = some_kronecker(), jax.random.normal(jax.random.key(1), (3, K))
    dense = np.zeros((K, K))
    for i in range(4):
        block = np.kron(np.asarray(t.left[i // 2], float), np.asarray(t.right[i], float))
        dense[32 * i : 32 * i + 32, 32 * i : 32 * i + 32] = block
    # Sums of 4 and of 8 products of float32: a few units in the last place of values of order one.
    np.testing.assert_allclose(t.activation(x), np.asarray(x, float) @ dense, atol=1e-5)
    np.testing.assert_allclose(t.weight(x), np.asarray(x, float) @ np.linalg.inv(dense).T, atol=2e-5)
    np.testing.assert_allclose(t.undo_weight(t.weight(x)), x, atol=2e-5)
    np.testing.assert_allclose(t.dense(K).activation(x), t.activation(x), atol=1e-5)
    assert t.parameters == 2 * 16 + 4 * 64 and t.block == 32


def test_an_axis_that_it_does_not_cover():
    t = some_kronecker()
    for size in (96, 64, 0):
        with pytest.raises(BlockShapeError, match="Kronecker"):
            t.check(size, "w")
    with pytest.raises(BlockShapeError, match="KroQuant"):
        KroQuant(left_groups=3).check(K)
    for bad in ({"left": 5}, {"starts": ("zero",)}, {"parametrization": "svd"}, {"steps": -1}):
        with pytest.raises(ConfigError):
            KroQuant(**bad)


def test_round_trip_through_our_own_layout(tmp_path):
    t = some_kronecker()
    rule = mxjax.Rule(weight="mxfp4", activation="mxfp4", transform=t)
    tree = mxjax.quantize({"w": jax.random.normal(jax.random.key(0), (K, 8))}, mxjax.QuantConfig(rules=[rule]))
    mxjax.save(tmp_path / "q", tree)
    back = mxjax.load(tmp_path / "q")
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, back, tree)
    x = jax.random.normal(jax.random.key(1), (3, K))
    np.testing.assert_array_equal(mxjax.qdot(x, back["w"]), mxjax.qdot(x, tree["w"]))


@pytest.mark.parametrize("parametrization", ["lu", "exp"])
def test_parameters_of_any_size_give_determinant_one(parametrization):
    theta = 3 * jax.random.normal(jax.random.key(0), (5, 4, 4))
    m = np.asarray(invertible(theta, parametrization), float)
    # LU with entries of 3 is badly conditioned, and rounding grows with the condition number (up to 1e4 here).
    np.testing.assert_allclose(np.linalg.det(m), 1, rtol=2e-2)
    np.testing.assert_allclose(invertible(jnp.zeros((1, 4, 4)), parametrization)[0], np.eye(4), atol=1e-7)
    if parametrization == "exp":  # |A|_F <= 1.5, so singular values lie within e^-1.5 and e^1.5
        assert np.linalg.cond(m).max() <= np.exp(3) * 1.001


def test_nearest_kronecker_finds_a_kronecker_product():
    rng = np.random.default_rng(0)

    def spd(n, size):
        a = rng.standard_normal((n, size, size))
        m = a @ a.transpose(0, 2, 1) + np.eye(size)
        return m / np.exp(np.linalg.slogdet(m)[1] / size)[:, None, None]

    left, right = spd(2, 4), spd(4, 8)
    metric = np.stack([np.kron(left[i // 2], right[i]) for i in range(4)])
    a, b = (np.asarray(m, float) for m in nearest_kronecker(metric, 4, 2, 4))
    np.testing.assert_allclose(a @ a, left, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(b @ b, right, rtol=1e-4, atol=1e-5)


def test_metric_is_that_of_wush(layer):
    _, w, stats = layer
    m = np.asarray(Wush(size=32, damping=1e-2).fit(stats, [w]).matrices, float)
    # WUSH also damps its singular values by 1 % of their mean, so the small ones differ; the large ones do not.
    want = m @ m.transpose(0, 2, 1)
    want /= np.exp(np.linalg.slogdet(want)[1] / 32)[:, None, None]
    got = second_moment_metric(stats.hessian, w, 32)
    assert np.linalg.norm(got - want) < 0.2 * np.linalg.norm(want)


@pytest.mark.parametrize("size, k, left, right", [(32, 576, 9, 2), (32, 1536, 24, 4), (16, 576, 12, 4), (32, 64, 1, 1)])
def test_fewer_than_half_a_parameter_a_channel(size, k, left, right):
    fitter = KroQuant(size=size)
    assert fitter.groups(k) == (left, right)
    if k > 64:  # one pair of factors is 80 numbers already
        assert left * 16 + right * (size // 4) ** 2 < k / 2


@pytest.mark.parametrize("parametrization", ["lu", "exp"])
def test_training_lowers_the_loss_and_the_error(layer, parametrization):
    x, w, stats = layer
    fitter = KroQuant(parametrization=parametrization, steps=60, starts=("identity", "hadamard"), left_groups=1)
    found = {t.name: t for t in fitter.search(stats, [w], "w", W4A4)}
    assert list(found)[:2] == sorted(["identity", "hadamard"], key=lambda name: found[name].error)
    (trained,) = (t for t in found.values() if t.losses is not None)
    assert trained.losses.shape == (60,)
    assert trained.losses[-10:].mean() < 0.97 * trained.losses[:10].mean()
    plain, turned = (float(output_error(x, w, t, W4A4)) for t in (None, Hadamard(32)))
    assert found["identity"].error == pytest.approx(plain, rel=1e-3)
    assert found["hadamard"].error == pytest.approx(turned, rel=2e-2)
    assert trained.error < 0.97 * min(plain, turned)
    again = fitter.fit(stats, [w], "w", W4A4)
    jax.tree.map(np.testing.assert_array_equal, again, trained.transform)


def test_weight_only_and_beside_a_branch(layer):
    _, w, stats = layer
    for rounding, rank in ((W4A16, 0), (W4A4, 16)):
        found = KroQuant(steps=30, starts=("hadamard",), rank=rank).search(stats, [w], "w", rounding)
        assert found[1].error < found[0].error
        if rank:  # the branch takes the largest directions, so less is left to err on
            alone = KroQuant(steps=0, starts=("hadamard",)).search(stats, [w], "w", rounding)
            assert found[0].error < alone[0].error
    with pytest.raises(CalibrationError, match="rounding"):
        KroQuant().fit(stats, [w], "w")
    with pytest.raises(CalibrationError, match="statistics"):
        fit(KroQuant(), None, [w], "w", W4A4)


@pytest.mark.parametrize("fmt", [MXFP4, NVFP4])
def test_scale_gradient(fmt):
    """The values are those of fake_quantize; ``x e'`` for the error in proportion to the largest value of the block."""
    x = jax.random.normal(jax.random.key(0), (1, fmt.block_size))
    q = mxjax.fake_quantize(x, fmt)
    # x + (q - x) rounds once more: half a unit of x and of q.
    np.testing.assert_allclose(rounded_with_scale_gradient(x, fmt, "even"), q, atol=1e-6)
    got = jax.grad(lambda x: rounded_with_scale_gradient(x, fmt, "even").sum())(x)
    want, top = np.ones(fmt.block_size), int(jnp.argmax(jnp.abs(x)))
    want[top] += float(jnp.sum(q - x)) / float(jnp.abs(x[0, top])) * np.sign(float(x[0, top]))
    np.testing.assert_allclose(got[0], want, rtol=1e-5)


def test_branch_smoothing_takes_the_best_of_its_grid(layer):
    x, w, stats = layer
    fitter = BranchSmooth(rank=4, grid=3)
    got = fitter.fit(stats, [w], "w", W4A4)
    from mxjax.core.svd import truncated_svd
    from mxjax.transforms.measure import rounded_weight

    def error(s):
        b, a = truncated_svd(w * s, 4, jax.random.key(0))
        return float(branch_error(x / s, w * s, rounded_weight(w * s - b @ a, W4A4), a, b, W4A4))

    x_max, w_max = jnp.abs(x).max(0), jnp.abs(w).max(0)
    points = [(0, 0), (1 / 3, 0), (2 / 3, 0), (1 / 3, 2 / 3), (2 / 3, 1 / 3)]
    errors = [error(x_max**a / w_max**b) for a, b in points]
    assert isinstance(got, ChannelScale)
    assert error(got.scale) == pytest.approx(min(errors), rel=1e-2) and min(errors) < 0.98 * errors[0]
