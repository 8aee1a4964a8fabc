"""The solver against a float64 transcription of the published loop, and the invariants of GPTQ."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.algorithms import observers
from mxjax.algorithms.gptq_solver import SolverOptions, hessian_error, inverse_factor, solve
from mxjax.core.formats import E2M1, MXFP4, NVFP4, BlockFormat
from mxjax.core.quantize import quantize_blocks

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
# One compilation each instead of one an operation.
observe = jax.jit(observers.observe, static_argnums=(1, 2, 3, 4))
decode_unit, round_unit = (jax.jit(f, static_argnums=2) for f in (observers.decode_unit, observers.round_unit))
PAIR = BlockFormat(name="pair", element=E2M1, block_size=2, scale="e8m0")  # a block small enough to solve by hand


def random_problem(rng, n, k):
    """A weight and the Hessian of strongly correlated inputs."""
    mix = np.eye(k) + rng.standard_normal((k, k)) / np.sqrt(k)
    x = rng.standard_normal((4 * k, k)) @ mix * np.exp(rng.standard_normal(k))
    return rng.standard_normal((n, k)), 2 * x.T @ x / len(x)


def scale_bytes(w, fmt, policy="even"):
    blocks = np.asarray(w, np.float32).reshape(-1, fmt.block_size)
    count = len(blocks)
    padded = np.pad(blocks, ((0, -count % 512), (0, 0)))  # blocks of zeros change no other, and most shapes become one
    unit, byte, _ = observe(padded, fmt, policy, 0, "minmax")
    unit, byte = (np.asarray(x)[:count] for x in (unit, byte))
    return jnp.asarray(unit.reshape(w.shape)), jnp.asarray(byte.reshape(len(w), -1))


def grid_values(codes):
    """What E2M1 codes stand for, in units of their scale."""
    codes = np.asarray(codes)
    return np.where(codes & 8, -1, 1) * GRID[codes & 7]


def scales_of(byte, fmt):
    """float64 values of scale bytes."""
    byte = np.asarray(byte, np.int64)
    if fmt.scale == "e8m0":
        return 2.0 ** (byte - 127)
    field, fraction = byte >> 3, byte & 7
    return np.where(field > 0, (8 + fraction) * 2.0 ** (field - 10), fraction * 2.0**-9)


def transcription(w, h, s, perm, damping):
    """GPTQ as published, right-looking, float64. Returns values in units of the scale and what was rounded."""
    k = w.shape[1]
    w, h, s = w[:, perm].astype(np.float64), h[np.ix_(perm, perm)].astype(np.float64), s[:, perm]
    h = h + damping * np.mean(np.diag(h)) * np.eye(k)
    u = np.linalg.cholesky(np.linalg.inv(h)).T
    q, before = np.zeros_like(w), np.zeros_like(w)
    for i in range(k):
        before[:, i] = ratio = w[:, i] / s[:, i]
        q[:, i] = np.sign(ratio) * GRID[np.abs(np.abs(ratio)[:, None] - GRID).argmin(-1)]
        error = (w[:, i] - q[:, i] * s[:, i]) / u[i, i]
        w[:, i:] -= np.outer(error, u[i, i:])
    inverse = np.argsort(perm)
    return q[:, inverse], before[:, inverse], np.linalg.cond(h)


SHAPES = [(n, 32 * b) for n, b in [(1, 1), (3, 2), (8, 3), (5, 4), (16, 5), (2, 6), (9, 7), (4, 8), (7, 9), (12, 10)]]
CASES = [(n, k, fmt, order) for n, k in SHAPES for fmt, order in [(MXFP4, "none"), (NVFP4, "column")]]


@pytest.mark.parametrize(("n", "k", "fmt", "order"), CASES)
def test_equals_a_float64_transcription(n, k, fmt, order):
    rng = np.random.default_rng(1000 * n + k)
    w, h = random_problem(rng, n, k)
    unit, byte = scale_bytes(w, fmt)
    h32 = h.astype(np.float32)
    options = SolverOptions(act_order=order, guard=False)
    args = (unit[None], jnp.asarray(h32)[None], byte[None])
    got = solve(*args, fmt=fmt, options=options)
    assert bool(got.ok[0]) and np.array_equal(got.bytes[0], byte)
    s = np.repeat(scales_of(byte, fmt), fmt.block_size, axis=1)
    perm = np.argsort(-np.diag(h32), kind="stable") if order == "column" else np.arange(k)
    q, before, condition = transcription(np.asarray(unit), h32, s, perm, 0.01)
    mine = grid_values(got.codes[0])
    # In float32 a number before rounding is off by the backward error of the factor, 2**-24 * condition, times its own
    # size (at most 8 scales here), and by K roundings of the sum. So only a number this close to the middle between two
    # grid points may round the other way; what follows it in its row then differs legitimately.
    margin = 2.0**-24 * (condition + k) * 8
    middles = (GRID[1:] + GRID[:-1]) / 2
    exact_rows = 0
    for row in range(n):
        differing = [j for j in perm if mine[row, j] != q[row, j]]
        exact_rows += not differing
        if differing:
            assert np.abs(np.abs(before[row, differing[0]]) - middles).min() <= margin
    assert exact_rows >= 0.8 * n


@pytest.mark.parametrize("order", ["none", "column", "block"])
@pytest.mark.parametrize("policy_format", [("third", MXFP4), ("floor", MXFP4), ("even", NVFP4)])
def test_identity_hessian_is_plain_rounding(policy_format, order):
    policy, fmt = policy_format
    w = np.random.default_rng(0).standard_normal((24, 192)) * np.exp(np.random.default_rng(1).standard_normal((24, 1)))
    unit, byte = scale_bytes(w, fmt, policy)
    options = SolverOptions(act_order=order, guard=False)
    got = solve(unit[None], jnp.eye(192)[None], byte[None], fmt=fmt, options=options)
    codes, plain_byte, _ = quantize_blocks(jnp.asarray(w, jnp.float32).reshape(24, -1, fmt.block_size), fmt, policy)
    assert np.array_equal(got.codes[0], codes.reshape(24, 192))
    assert np.array_equal(got.bytes[0], plain_byte)


def test_two_columns_by_hand():
    # H = [[2, 1], [1, 2]], scale 1. Column 0: 0.9 -> 1, error -0.1. The best answer of column 1 moves by
    # H01 / H11 * -0.1 = -0.05: 2.53 -> 2.48, which rounds to 2, where plain rounding gives 3.
    h = jnp.array([[[2.0, 1.0], [1.0, 2.0]]])
    w, byte = jnp.array([[[0.9, 2.53]]]), jnp.full((1, 1, 1), 127, jnp.uint8)
    got = solve(w, h, byte, fmt=PAIR, options=SolverOptions(damping=1e-6))
    assert decode_unit(got.codes[0], byte[0], PAIR).tolist() == [[1.0, 2.0]]
    # d = (-0.1, 0.53): d H d = 2 * 0.01 - 2 * 0.053 + 2 * 0.2809 = 0.4758; plain (-0.1, -0.47): 0.02 + 0.094 + 0.4418.
    assert float(hessian_error(jnp.array([[-0.1, 0.53]]), h[0])[0]) == pytest.approx(0.4758, rel=1e-6)
    plain = solve(w, jnp.eye(2)[None], byte, fmt=PAIR, options=SolverOptions())
    assert decode_unit(plain.codes[0], byte[0], PAIR).tolist() == [[1.0, 3.0]]
    # In the other order column 1 goes first: 2.53 -> 3, error -0.47, so 0.9 - 0.235 = 0.665 -> 0.5.
    swapped = solve(
        w, h.at[0, 1, 1].set(2.001), byte, fmt=PAIR, options=SolverOptions(damping=1e-6, act_order="column")
    )
    assert decode_unit(swapped.codes[0], byte[0], PAIR).tolist() == [[0.5, 3.0]]


@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)
@pytest.mark.parametrize("scales", ["frozen", "refit", "replay"])
def test_never_worse_than_plain_rounding(fmt, scales):
    """Neither than plain rounding on the scales it ends with, nor than that on the scales as observed."""
    rng = np.random.default_rng(5)
    w, h = random_problem(rng, 400, 64)
    unit, byte = scale_bytes(w, fmt)
    hessian = jnp.asarray(h, jnp.float32)[None]

    def errors(codes, scale_bytes):
        repeated = jnp.repeat(scale_bytes, fmt.block_size, -1)
        codes = round_unit(unit, repeated, fmt)[0] if codes is None else codes
        d = np.asarray(decode_unit(codes, repeated, fmt), np.float64) - np.asarray(unit, np.float64)
        return np.einsum("nk,kl,nl->n", d, h, d)

    def run(guard):
        got = solve(unit[None], hessian, byte[None], fmt=fmt, options=SolverOptions(scales=scales, guard=guard))
        return got.codes[0], got.bytes[0]

    codes, new_bytes = run(guard=True)
    mine = errors(codes, new_bytes)
    for plain in (errors(None, new_bytes), errors(None, byte)):
        assert np.all(mine <= plain * (1 + 1e-5))  # the guard compares in float32
        assert mine.sum() < 0.8 * plain.sum()  # and on correlated inputs compensation is worth a lot
    if scales == "refit":  # it takes the guard: scales that suit the compensated weights lose to the observed ones
        assert np.any(errors(*run(guard=False)) > errors(None, byte) * (1 + 1e-5))


def test_the_guard_takes_the_better_row():
    # Greedy rounding can lose: without the guard some rows of many random problems are worse than plain rounding.
    rng = np.random.default_rng(0)
    w, h = random_problem(rng, 2000, 32)
    unit, byte = scale_bytes(w, MXFP4)
    args = (unit[None], jnp.asarray(h, jnp.float32)[None], byte[None])
    free = solve(*args, fmt=MXFP4, options=SolverOptions(guard=False))
    safe = solve(*args, fmt=MXFP4, options=SolverOptions(guard=True))
    changed = np.any(np.asarray(free.codes) != np.asarray(safe.codes), axis=-1)[0]
    assert 0 < changed.sum() < 400


def test_block_size_does_not_matter():
    w, h = random_problem(np.random.default_rng(3), 8, 192)
    unit, byte = scale_bytes(w, MXFP4)
    results = []
    for block_size in (32, 192):
        options = SolverOptions(block_size=block_size, guard=False)
        got = solve(unit[None], jnp.asarray(h, jnp.float32)[None], byte[None], fmt=MXFP4, options=options)
        results.append(np.asarray(got.codes[0]))
    # Only the order of sums differs: a row differs where a number sits on the middle of two grid points.
    assert all(np.mean(np.any(r != results[0], axis=1)) <= 1 / 8 for r in results[1:])


@pytest.mark.parametrize("order", ["none", "column", "block"])
def test_dead_inputs_and_zero_columns(order):
    """The mask of dead columns must travel with the permutation: permuting the whole problem permutes the result."""
    rng = np.random.default_rng(11)
    w, h = random_problem(rng, 16, 128)
    dead, zero = [3, 40, 41, 127], [0, 64, 100]
    h[dead, :] = h[:, dead] = 0
    w[:, zero] = 0
    unit, byte = scale_bytes(w, MXFP4)
    h = jnp.asarray(h, jnp.float32)
    options = SolverOptions(act_order=order, guard=False)
    got = solve(unit[None], h[None], byte[None], fmt=MXFP4, options=options)
    codes = np.asarray(got.codes[0])
    plain = np.asarray(round_unit(unit, jnp.repeat(byte, 32, -1), MXFP4)[0])
    assert bool(got.ok[0])
    assert np.array_equal(codes[:, dead], plain[:, dead])
    assert np.all(codes[:, zero] == 0)
    live = [j for j in range(128) if j not in dead + zero]
    assert np.mean(codes[:, live] != plain[:, live]) > 0.05  # the others are compensated
    # The transcription on the decoupled Hessian, where the mask was applied before any permutation.
    gone = np.isin(np.arange(128), dead + zero)
    coupled = np.where(gone[:, None] | gone[None, :], 0.0, np.asarray(h, np.float64))
    coupled[gone, gone] = np.mean(np.diag(np.asarray(h, np.float64)))
    means = np.diag(coupled).reshape(4, 32).mean(-1)
    perm = {
        "none": np.arange(128),
        "column": np.argsort(-np.diag(coupled).astype(np.float32), kind="stable"),
        "block": (np.argsort(-means)[:, None] * 32 + np.arange(32)).reshape(-1),
    }[order]
    s = np.repeat(scales_of(byte, MXFP4), 32, axis=1)
    q = transcription(np.asarray(unit), coupled, s, perm, 0.01)[0]
    mine = grid_values(got.codes[0])
    assert np.mean(np.all(mine == q, axis=1)) >= 0.8  # rows without a number at the middle of two grid points


def test_reordering_leaves_storage_order():
    # A diagonal Hessian couples nothing, so any visiting order must return plain rounding, in place, scales untouched.
    rng = np.random.default_rng(2)
    w = rng.standard_normal((8, 96)) * np.exp(rng.standard_normal(96))
    unit, byte = scale_bytes(w, NVFP4)
    h = jnp.diag(jnp.asarray(rng.permutation(96) + 1.0, jnp.float32))
    plain = solve(unit[None], jnp.eye(96)[None], byte[None], fmt=NVFP4, options=SolverOptions(guard=False))
    for order in ("column", "block"):
        got = solve(unit[None], h[None], byte[None], fmt=NVFP4, options=SolverOptions(act_order=order, guard=False))
        assert np.array_equal(got.codes, plain.codes) and np.array_equal(got.bytes, byte[None])


@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)
def test_replay_is_best_within_a_block(fmt):
    """With one block the replayed loss is the whole loss, so no other scale mode can be lower."""
    k = fmt.block_size
    w, h = random_problem(np.random.default_rng(7), 200, k)
    unit, byte = scale_bytes(w, fmt)
    damped = np.asarray(h + 0.01 * np.trace(h) / k * np.eye(k))
    losses = {}
    for mode in ("frozen", "refit", "replay"):
        options = SolverOptions(scales=mode, guard=False)
        got = solve(unit[None], jnp.asarray(h, jnp.float32)[None], byte[None], fmt=fmt, options=options)
        value = decode_unit(got.codes[0], jnp.repeat(got.bytes[0], k, -1), fmt)
        d = np.asarray(value, np.float64) - np.asarray(unit, np.float64)
        losses[mode] = np.einsum("nk,kl,nl->n", d, damped, d)
    assert np.all(losses["replay"] <= losses["frozen"] * (1 + 1e-4))
    assert np.all(losses["replay"] <= losses["refit"] * (1 + 1e-4))
    assert losses["replay"].sum() < 0.97 * losses["frozen"].sum()


def test_inverse_factor_and_rising_damping():
    _, h = random_problem(np.random.default_rng(4), 1, 64)
    u, damping, ok = inverse_factor(jnp.asarray(h, jnp.float32), 0.01)
    assert bool(ok) and float(damping) == pytest.approx(0.01)
    u = np.asarray(u, np.float64)
    assert np.array_equal(u, np.triu(u))
    damped = h + 0.01 * np.trace(h) / 64 * np.eye(64)
    # Backward error of two triangular float32 operations: K * 2**-24 each, grown by the condition number.
    assert np.abs(u.T @ u @ damped - np.eye(64)).max() < 4 * 64 * 2.0**-24 * np.linalg.cond(damped)

    lowest = np.linalg.eigvalsh(h)[0]
    indefinite = h - (lowest + 0.05 * np.trace(h) / 64) * np.eye(64)  # needs more than 0.01, less than 0.1
    _, damping, ok = inverse_factor(jnp.asarray(indefinite, jnp.float32), 0.01)
    assert bool(ok) and float(damping) == pytest.approx(0.1)

    hopeless = h - (lowest + 5 * np.trace(h) / 64) * np.eye(64)
    assert not bool(inverse_factor(jnp.asarray(hopeless + 5 * np.eye(64), jnp.float32), 0.01)[2])
    assert not bool(inverse_factor(jnp.full((4, 4), jnp.nan), 0.01)[2])
