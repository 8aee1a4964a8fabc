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
from mxjax.transforms.kronecker_start import nearest_kronecker, outer_scales, second_moment_metric
from mxjax.transforms.kronecker_train import (
    _stretch,
    invertible,
    noise_loss,
    output_loss,
    rounded_with_scale_gradient,
)
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


def some_kronecker(seed=0, left=2, right=4, scales=()):
    rng = np.random.default_rng(seed)
    own = {f"{side}_scale": np.exp(0.3 * rng.standard_normal((4, {"left": 4, "right": 8}[side]))) for side in scales}
    return Kronecker(
        jnp.asarray(np.eye(4) + 0.3 * rng.standard_normal((left, 4, 4)), jnp.float32),
        jnp.asarray(np.eye(8) + 0.2 * rng.standard_normal((right, 8, 8)), jnp.float32),
        **{k: jnp.asarray(v, jnp.float32) for k, v in own.items()},
    )


@pytest.mark.parametrize("scales", [(), ("right",), ("left", "right")])
def test_is_the_kronecker_product_of_its_factors(scales):
    t, x = some_kronecker(scales=scales), jax.random.normal(jax.random.key(1), (3, K))
    dense = np.zeros((K, K))
    for i in range(4):
        block = np.kron(np.asarray(t.left[i // 2], float), np.asarray(t.right[i], float))
        left, right = (
            np.ones(n) if s is None else np.asarray(s[i], float) for s, n in ((t.left_scale, 4), (t.right_scale, 8))
        )
        block = block / np.outer(left, right).reshape(-1, 1)
        dense[32 * i : 32 * i + 32, 32 * i : 32 * i + 32] = block
    # Sums of 4 and of 8 products of float32: a few units in the last place of values of order one.
    np.testing.assert_allclose(t.activation(x), np.asarray(x, float) @ dense, atol=1e-5)
    np.testing.assert_allclose(t.weight(x), np.asarray(x, float) @ np.linalg.inv(dense).T, atol=2e-5)
    np.testing.assert_allclose(t.undo_weight(t.weight(x)), x, atol=2e-5)
    np.testing.assert_allclose(t.dense(K).activation(x), t.activation(x), atol=1e-5)
    assert t.parameters == 2 * 16 + 4 * 64 + 4 * sum({"left": 4, "right": 8}[s] for s in scales) and t.block == 32


def test_an_axis_that_it_does_not_cover():
    t = some_kronecker()
    for size in (96, 64, 0):
        with pytest.raises(BlockShapeError, match="Kronecker"):
            t.check(size, "w")
    with pytest.raises(BlockShapeError, match="KroQuant"):
        KroQuant(left_groups=3).check(K)
    with pytest.raises(BlockShapeError, match="as many scales"):
        some_kronecker(left=1, right=1, scales=("left",)).check(2 * K, "w")
    for bad in (
        {"steps": 5},
        {"scales": "all"},
        {"loss": "mse"},
        {"left": 5},
        {"starts": ("zero",)},
        {"parametrization": "svd"},
        {"steps": -1},
    ):
        with pytest.raises(ConfigError):
            KroQuant(**bad)


def test_round_trip_through_our_own_layout(tmp_path):
    t = some_kronecker(scales=("right",))
    rule = mxjax.Rule(weight="mxfp4", activation="mxfp4", transform=t)
    tree = mxjax.quantize({"w": jax.random.normal(jax.random.key(0), (K, 8))}, mxjax.QuantConfig(rules=[rule]))
    mxjax.save(tmp_path / "q", tree)
    back = mxjax.load(tmp_path / "q")
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, back, tree)
    x = jax.random.normal(jax.random.key(1), (3, K))
    np.testing.assert_array_equal(mxjax.qdot(x, back["w"]), mxjax.qdot(x, tree["w"]))


@pytest.mark.parametrize("parametrization", ["lu", "exp", "cayley"])
def test_parameters_of_any_size_give_determinant_one(parametrization):
    theta = 3 * jax.random.normal(jax.random.key(0), (5, 4, 4))
    m = np.asarray(invertible(theta, parametrization), float)
    # LU with entries of 3 is badly conditioned, and rounding grows with the condition number (up to 1e4 here).
    np.testing.assert_allclose(np.linalg.det(m), 1, rtol=2e-2)
    np.testing.assert_allclose(invertible(jnp.zeros((1, 4, 4)), parametrization)[0], np.eye(4), atol=1e-7)
    if parametrization == "exp":  # |A|_F <= 1.5, so singular values lie within e^-1.5 and e^1.5
        assert np.linalg.cond(m).max() <= np.exp(3) * 1.001
    if parametrization == "cayley":  # a rotation times a diagonal
        gram = m.transpose(0, 2, 1) @ m
        np.testing.assert_allclose(gram, gram * np.eye(4), atol=1e-4 * np.abs(gram).max())


def test_scales_single_out_an_outlier():
    """10 times as large as the rest: scaled by all of it, its row and column by about the root, the rest not at all."""
    amax, w = jnp.ones(K).at[37].set(100.0), jnp.ones((3, K))
    left, right = outer_scales(amax, w, 0.5, 4, 8)
    s = np.asarray(left[:, :, None] * right[:, None, :], float).reshape(4, 32)
    np.testing.assert_allclose(s[[0, 2, 3]], 1, rtol=1e-5)
    unit = s[1, 20]  # neither in its row nor in its column
    np.testing.assert_allclose(s[1, 5] / unit, 10, rtol=1e-4)
    np.testing.assert_allclose(np.delete(s[1, :8], 5) / unit, 10**0.5, rtol=1e-4)
    np.testing.assert_allclose(s[1, [13, 21, 29]] / unit, 10**0.5, rtol=1e-4)


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


@pytest.mark.parametrize(
    "options, k, want",
    [
        ({}, 1152, (1, 1, "both")), ({}, 640, (1, 1, "right")), ({}, 320, (1, 1, "left")), ({}, 192, (1, 1, "none")),
        ({"scales": "none"}, 576, (9, 2, "none")), ({"scales": "none"}, 1536, (24, 4, "none")),
        ({"size": 16}, 576, (1, 1, "right")),
    ],
)  # fmt: skip
def test_fewer_than_half_a_parameter_a_channel(options, k, want):
    fitter = KroQuant(**options)
    left, right, scales = fitter.layout(k)
    assert (left, right, scales) == want
    p, q = fitter.left, fitter.size // fitter.left
    held = {"both": p + q, "right": q, "left": p, "none": 0}[scales]
    assert left * p * p + right * q * q + k // fitter.size * held < k / 2


@pytest.mark.parametrize("options", [{}, {"loss": "output", "parametrization": "exp", "scales": "none"}])
def test_training_lowers_the_loss_and_the_error(layer, options):
    x, w, stats = layer
    fitter = KroQuant(steps=60, starts=("identity", "hadamard"), exponents=(0.0,), **{"scales": "right", **options})
    found = {t.name: t for t in fitter.search(stats, [w], "w", W4A4)}
    assert list(found)[:2] == sorted(["identity", "hadamard"], key=lambda name: found[name].error)
    (trained,) = (t for t in found.values() if t.losses is not None)
    assert trained.losses.shape == (60,)
    assert trained.losses[-10:].mean() < 0.97 * trained.losses[:10].mean()
    plain, turned = (float(output_error(x, w, t, W4A4)) for t in (None, Hadamard(32)))
    assert found["identity"].error == pytest.approx(plain, rel=1e-3)
    assert found["hadamard"].error == pytest.approx(turned, rel=2e-2)
    assert trained.error < 0.97 * min(plain, turned)
    if not options:
        again = fitter.fit(stats, [w], "w", W4A4)
        jax.tree.map(np.testing.assert_array_equal, again, trained.transform)


def test_noise_is_what_rounding_is_expected_to_do(layer):
    """The loss without cross terms is their mean: signs of the errors drawn at random, over many draws."""
    x, w, _ = layer
    t = some_kronecker(scales=("left",))
    want = float(noise_loss(t, x, w, W4A4))
    x_t, w_t = np.asarray(t.activation(x), float), np.asarray(t.weight(w), float)
    e, f = (np.asarray(mxjax.fake_quantize(jnp.asarray(z, jnp.float32), MXFP4), float) - z for z in (x_t, w_t))
    # Errors of a block are taken as equally large, so their squares are shared out evenly.
    even = lambda z: np.repeat(np.sqrt((z**2).reshape(len(z), -1, 32).mean(-1)), 32, axis=1)  # noqa: E731
    rng = np.random.default_rng(0)
    draws = []
    for _ in range(40):
        e_n, f_n = (even(z) * rng.choice([-1.0, 1.0], z.shape) for z in (e, f))
        draws.append(np.sum((e_n @ w_t.T) ** 2) + np.sum((x_t @ f_n.T) ** 2))
    assert np.mean(draws) == pytest.approx(want, rel=4 * np.std(draws) / np.mean(draws) / 40**0.5 + 1e-3)
    assert float(output_loss(t, x, w, W4A4)) == pytest.approx(want, rel=0.5)


def test_weight_only_and_beside_a_branch(layer):
    _, w, stats = layer
    plain = dict(starts=("hadamard",), exponents=(0.0,), scales="left")
    for rounding, rank in ((W4A16, 0), (W4A4, 16)):
        found = KroQuant(steps=30, rank=rank, **plain).search(stats, [w], "w", rounding)
        assert found[1].error < found[0].error
        if rank:  # the branch takes the directions that cost most, so less is left to err on
            alone = KroQuant(steps=0, **plain).search(stats, [w], "w", rounding)
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


def test_another_seed_is_another_result_of_the_same_program(layer):
    _, w, stats = layer
    rank = dict(rank=8, steps=10, starts=("hadamard",), exponents=(0.0,), loss="output")
    first, again, other = (KroQuant(seed=seed, **rank).search(stats, [w], "w", W4A4)[-1] for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, first.transform, again.transform)
    assert not np.array_equal(first.losses, other.losses)
    compiled = _stretch._cache_size()
    KroQuant(seed=2, **rank).search(stats, [w], "w", W4A4)
    assert _stretch._cache_size() == compiled
