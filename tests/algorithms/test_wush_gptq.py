"""WUSH-GPTQ against a float64 transcription of the method, and its invariants."""

import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax.algorithms import WeightSpec, gptq, rtn, wush_gptq
from mxjax.algorithms.wush_gptq import solve
from mxjax.calibration import LayerStats
from mxjax.core.formats import MXFP4, NVFP4
from mxjax.errors import BlockShapeError, CalibrationError, ConfigError, NonFiniteError
from mxjax.ops import ActivationFormat
from mxjax.transforms import Hadamard, Wush, hadamard_matrix

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SHAPES = [(40, 32, MXFP4, "third", 1.0), (48, 96, MXFP4, "floor", 0.5), (64, 128, MXFP4, "third", 0.75),
          (96, 160, MXFP4, "even", 1.0), (24, 64, NVFP4, "even", 1.0), (80, 112, NVFP4, "even", 0.5)]  # fmt: skip


def problem(n, k, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((4 * k, k)) @ (np.eye(k) + rng.standard_normal((k, k)) / np.sqrt(k))
    x = x * np.exp(0.7 * rng.standard_normal(k))
    w = rng.standard_normal((n, k)) * np.exp(0.4 * rng.standard_normal(k))
    return x.astype(np.float32), w.astype(np.float32)


def stats_of(x):
    x = jnp.asarray(x)
    return LayerStats(hessian=2 * x.T @ x / len(x), n_tokens=jnp.array(len(x)), amax=jnp.abs(x).max(0))


def unit_values(codes, byte, fmt):
    """float64 [N, b] values of codes under scale bytes, before the global scale."""
    codes, byte = np.asarray(codes, int), np.asarray(byte, int)
    scale = 2.0 ** (byte - 127) if fmt.scale == "e8m0" else np.where(
        byte >> 3, (8 + (byte & 7)) * 2.0 ** ((byte >> 3) - 10), (byte & 7) * 2.0**-9)  # fmt: skip
    return np.where(codes & 8, -1, 1) * GRID[codes & 7] * scale[:, None], scale


@pytest.mark.parametrize(("n", "k", "fmt", "policy", "strength"), SHAPES)
def test_equals_the_float64_transcription_block_by_block(n, k, fmt, policy, strength):
    """Every block is computed in float64 from what the solver left after the blocks behind it: codes once different
    would change all that follows, so each block is compared on its own."""
    x, w = problem(n, k)
    h = np.asarray(stats_of(x).hessian)
    got = solve(jnp.asarray(w), jnp.asarray(h), fmt=fmt, policy=policy, observer="minmax", damping=0.01,
                strength=strength)  # fmt: skip
    assert bool(got.ok) and float(got.damping) == pytest.approx(0.01)
    b, g = fmt.block_size, 1.0 if got.global_scale is None else float(got.global_scale)
    h = h.astype(float) + 0.01 * np.trace(h.astype(float)) / k * np.eye(k)
    upper = np.linalg.cholesky(h).T
    d, wt, differing = w.T.astype(float).copy(), w.T.astype(float), 0
    for start in range(k - b, -1, -b):
        cut = slice(start, start + b)
        y, block = upper[cut] @ d, upper[cut, cut]
        v, s, _ = np.linalg.svd(y, full_matrices=False)
        s = s / np.sqrt(n)
        s = s + 0.01 * s.mean()
        m = np.asarray(got.matrices[start // b], float)
        # M M^T = B^-1 V S^(2-l) V^T B^-T up to its scale: free of the sign and order of singular vectors. Float32: the
        # squares of y lose half the digits of its smallest singular values, of which the damping keeps 1 % of the mean.
        spread = np.linalg.solve(block, v * s ** (1 - strength / 2))
        ours, theirs = m @ m.T / np.sum(m * m), spread @ spread.T / np.sum(spread * spread)
        assert np.abs(ours - theirs).max() < 1e-3 * np.abs(theirs).max()
        # The rest of M is an orthogonal matrix, and together with the Hadamard matrix it is V^T again.
        turn = np.linalg.inv(block @ m) @ v * s ** (1 - strength / 2)
        turn = np.abs(hadamard_matrix(b).astype(float) @ turn)
        assert np.abs(turn / turn.max(1, keepdims=True) - np.fliplr(np.eye(b))).max() < 0.05
        # Nearest plane in the metric of the solver's own M.
        byte = np.asarray(got.bytes[:, start // b])
        mine, scale = unit_values(got.codes[:, cut], byte, fmt)
        turned = np.linalg.solve(block @ m, y) / g
        if policy in ("third", "floor"):  # an amax next to a power of two may fall on either side of it
            exponent = np.floor(np.log2(np.abs(turned * g).max(0)))
            assert np.mean(np.log2(scale) == exponent - (2 if policy == "floor" else 0)) > 0.95
        q, r = np.linalg.qr(block @ m)
        z, values = q.T @ y / g, np.zeros((b, n))
        for i in range(b - 1, -1, -1):
            wanted = (z[i] - r[i] @ values) / r[i, i] / scale
            values[i] = np.sign(wanted) * GRID[np.abs(np.abs(wanted)[:, None] - GRID).argmin(-1)] * scale
        differing += int(np.sum(np.any(mine.T != values, axis=0)))
        d[cut] = wt[cut] - m @ mine.T * g  # as the solver did
    # Only a number within float32 rounding of the middle of two grid points may differ: 2^-24 times the condition of a
    # block (about 10^2) and 32 sums, on b numbers a row.
    assert differing <= 0.02 * n * (k // b) + 1


@pytest.mark.parametrize(("fmt", "policy"), [(MXFP4, "third"), (NVFP4, "even")])
def test_error_is_below_that_of_gptq_and_of_plain_wush(fmt, policy):
    x, w = problem(96, 128, seed=3)
    stats, exact = stats_of(x), x @ w.T
    errors = {}
    for name, algorithm, transform in (("rtn", rtn, None), ("gptq", gptq, Hadamard(16)), ("wush", rtn, Wush(size=16)),
                                       ("wush_gptq", wush_gptq, None)):  # fmt: skip
        spec = WeightSpec(path="w", format=fmt, scale=policy, transform=transform)
        q = algorithm(jnp.asarray(w.T), spec, stats)
        errors[name] = float(jnp.mean((mxjax.qdot(jnp.asarray(x), q) - exact) ** 2))
    assert errors["wush_gptq"] < 0.9 * min(errors["rtn"], errors["gptq"], errors["wush"])


def test_inputs_rounded_as_well():
    x, w = problem(96, 128, seed=4)
    stats, act = stats_of(x), ActivationFormat(format=MXFP4, scale="third")
    errors = {}
    for name, algorithm, transform in (("gptq", gptq, Hadamard(32)), ("wush_gptq", wush_gptq, None)):
        spec = WeightSpec(path="w", format=MXFP4, scale="third", transform=transform, activation=act)
        q = algorithm(jnp.asarray(w.T), spec, stats).validate()
        errors[name] = float(jnp.mean((mxjax.qdot(jnp.asarray(x), q) - x @ w.T) ** 2))
    assert errors["wush_gptq"] < 0.9 * errors["gptq"]


def test_white_inputs_and_weights_need_no_metric():
    """With H = I and W^T W = I every M is orthogonal, and nearest plane is plain rounding of the turned weight."""
    w = np.linalg.qr(np.random.default_rng(0).standard_normal((96, 64)))[0].astype(np.float32)
    got = solve(jnp.asarray(w), jnp.eye(64), fmt=MXFP4, policy="floor", observer="minmax", damping=1e-6, strength=1.0)
    turned = []
    for i, m in enumerate(np.asarray(got.matrices, float)):
        np.testing.assert_allclose(m.T @ m, np.eye(32), atol=2e-5)
        turned.append(w[:, 32 * i : 32 * i + 32] @ m)
    plain = mxjax.quantize_array(jnp.asarray(np.concatenate(turned, 1), jnp.float32), MXFP4, -1, "floor").dequantize()
    mine = np.concatenate([unit_values(got.codes[:, c : c + 32], got.bytes[:, c // 32], MXFP4)[0] for c in (0, 32)], 1)
    assert np.mean(mine != plain) < 2e-3  # numbers at the middle of two grid points


def test_zero_blocks_dead_inputs_and_axes():
    x, w = problem(16, 96)
    w[:, :32], x[:, 40:44] = 0, 0
    spec = WeightSpec(path="w", format=MXFP4, scale="third", axis=-1)
    q = wush_gptq(jnp.asarray(w).reshape(2, 8, 96), spec, stats_of(x)).validate()
    assert q.shape == (2, 8, 96) and np.all(np.isfinite(q.dequantize()))
    nv = wush_gptq(
        jnp.asarray(w).reshape(2, 8, 96), WeightSpec(path="w", format=NVFP4, axis=-1), stats_of(x)
    ).validate()
    assert np.all(np.isfinite(nv.dequantize()))


def test_options_and_reports():
    x, w = problem(16, 64)
    stats, kernel = stats_of(x), jnp.asarray(w.T)

    def run(stats=stats, kernel=kernel, transform=None, **options):
        return wush_gptq(kernel, WeightSpec(path="a/b", format=MXFP4, transform=transform, options=options), stats)

    assert run(observer="mse", strength=0.5).transform.describe() == "wush 0.5, 32"
    for options in (
        dict(surprise=1),
        dict(observer="alternating"),
        dict(strength=2.0),
        dict(damping=0),
        dict(damping=np.nan),
    ):
        with pytest.raises(ConfigError, match="a/b"):
            run(**options)
    with pytest.raises(ConfigError, match="transform=None"):
        run(transform=Hadamard(32))
    with pytest.raises(CalibrationError, match="a/b"):
        run(stats=None)
    with pytest.raises(CalibrationError, match=r"a/b.*stack"):
        run(stats=LayerStats(hessian=jnp.zeros((2, 64, 64)), n_tokens=jnp.ones(2), amax=jnp.ones((2, 64))))
    with pytest.raises(CalibrationError, match=r"a/b.*positive definite"):
        indefinite = jnp.eye(64).at[0, 1].set(70.0).at[1, 0].set(70.0)
        run(stats=LayerStats(hessian=indefinite, n_tokens=jnp.array(1), amax=jnp.ones(64)))
    with pytest.raises(BlockShapeError, match=r"a/b: .* no padding; give this weight a rule"):
        x2, w2 = problem(8, 48)
        run(stats=stats_of(x2), kernel=jnp.asarray(w2.T))
    with pytest.raises(NonFiniteError, match="a/b"):
        run(kernel=kernel.at[0, 0].set(jnp.nan))


def test_correction_moves_towards_the_float_models_output():
    x, w = problem(48, 64, seed=5)
    noisy = x + 0.2 * np.random.default_rng(0).standard_normal(x.shape).astype(np.float32)
    base = stats_of(noisy)
    stats = LayerStats(hessian=base.hessian, n_tokens=base.n_tokens, amax=base.amax,
                       cross=2 * jnp.asarray(x).T @ noisy / len(x))  # fmt: skip
    errors = []
    for correction in (0.0, 1.0):
        q = wush_gptq(jnp.asarray(w.T), WeightSpec(path="w", format=MXFP4, options={"correction": correction}), stats)
        errors.append(float(jnp.mean((mxjax.qdot(jnp.asarray(noisy), q) - x @ w.T) ** 2)))
    assert errors[1] < errors[0]
