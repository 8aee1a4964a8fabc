"""Scales chosen by replaying GPTQ on each block ("Replay the Curvature"), against a float64 transcription."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.algorithms import observers
from mxjax.algorithms.gptq_solver import SolverOptions, solve
from mxjax.core.formats import MXFP4, NVFP4

observe = jax.jit(observers.observe, static_argnums=(1, 2, 3, 4))  # one compilation instead of one an operation
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array([m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:-1])


def scale_value(byte, fmt):
    byte = np.asarray(byte, int)
    return 2.0 ** (byte - 127) if fmt.scale == "e8m0" else E4M3[byte]


def nearest(ratio):
    return np.sign(ratio) * GRID[np.abs(np.abs(ratio)[:, None] - GRID).argmin(-1)]


def replay(w, u, scale):
    """GPTQ's columns inside one block, under one scale for each row: values [n, b]."""
    w, values = w.copy(), np.zeros_like(w)
    for i in range(w.shape[1]):
        values[:, i] = nearest(w[:, i] / scale) * scale
        w[:, i:] -= np.outer((w[:, i] - values[:, i]) / u[i, i], u[i, i:])
    return values


def neighbours(w, old, fmt):
    """Bytes to try: the old one, and the exponents (codes) around that of the largest magnitude."""
    amax = np.abs(w).max(1)
    if fmt.scale == "e8m0":
        base = np.floor(np.log2(amax)).astype(int) - 2 + 127
        return [old, *(base + step for step in (0, 1, -1))]
    base = np.abs(amax[:, None] / 6 - E4M3).argmin(1)
    return [old, *(np.clip(base + step, 1, 126) for step in range(-4, 7))]


def papers_proposals(w, old, metric, h=4):
    """Section 7.3's: three fixed-point steps to the scale that is best in the metric, and the 2 h + 1 codes near it."""
    s = np.abs(w).max(1) / 6
    for _ in range(3):
        q = np.stack([nearest(row / x) for row, x in zip(w, s, strict=True)])
        top, bottom = np.einsum("nk,kl,nl->n", q, metric, w), np.einsum("nk,kl,nl->n", q, metric, q)
        s = np.where((top > 0) & (bottom > 0), top / np.where(bottom > 0, bottom, 1), s)
    base = np.abs(s[:, None] - E4M3).argmin(1)
    return [old, *(np.clip(base + step, 1, 126) for step in range(-h, h + 1))]


def problem(n, k, fmt, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((4 * k, k)) @ (np.eye(k) + rng.standard_normal((k, k)) / np.sqrt(k))
    h = 2 * x.T @ x / len(x)
    w = jnp.asarray(rng.standard_normal((n, k)), jnp.float32)
    unit, byte, _ = observe(w.reshape(n, -1, fmt.block_size), fmt, "even", 0, "mse")
    return unit.reshape(n, k), byte, h.astype(np.float32)


@pytest.mark.parametrize(("fmt", "k"), [(MXFP4, 64), (MXFP4, 160), (NVFP4, 48), (NVFP4, 112)])
def test_equals_the_transcription_block_by_block(fmt, k):
    """Each block from what the solver left before it: one different byte would change all blocks behind it."""
    n, b = 24, fmt.block_size
    unit, byte, h32 = problem(n, k, fmt, seed=k)
    options = SolverOptions(scales="replay", guard=False)
    got = solve(unit[None], jnp.asarray(h32)[None], byte[None], fmt=fmt, options=options)
    h = h32.astype(float) + 0.01 * np.trace(h32.astype(float)) / k * np.eye(k)
    u = np.linalg.cholesky(np.linalg.inv(h)).T
    w, differing, changed = np.asarray(unit, float), 0, 0
    for start in range(0, k, b):
        g, f = slice(start, start + b), slice(start + b, k)
        metric = np.linalg.inv(u[g, g].T @ u[g, g])
        # The paper's definition: what an error here costs when all later columns adapt.
        schur = h[g, g] - h[g, f] @ np.linalg.solve(h[f, f], h[f, g])
        np.testing.assert_allclose(metric, schur, atol=1e-9 * np.abs(schur).max())
        old = np.asarray(byte[:, start // b], int)
        losses = []
        for candidate in neighbours(w[:, g], old, fmt):
            d = replay(w[:, g], u[g, g], scale_value(candidate, fmt)) - w[:, g]
            losses.append(np.einsum("nk,kl,nl->n", d, metric, d))
        chosen = np.asarray(got.bytes[0, :, start // b], int)
        scale = scale_value(chosen, fmt)
        code = np.asarray(got.codes[0, :, g], int)
        values = np.where(code & 8, -1, 1) * GRID[code & 7] * scale[:, None]
        d = values - w[:, g]
        loss = np.einsum("nk,kl,nl->n", d, metric, d)
        # Float32 against float64: losses equal to 2^-24 times the condition of the metric and b terms, unless a number
        # at the middle of two grid points rounds the other way.
        differing += int(np.sum(np.abs(loss / np.min(losses, axis=0) - 1) > 1e-4))
        changed += int(np.sum(chosen != old))
        for i in range(start, start + b):  # commit what the solver did
            w[:, i:] -= np.outer((w[:, i] - values[:, i - start]) / u[i, i], u[i, i:])
    assert differing <= 0.02 * n * (k // b) + 1
    assert changed > 0.03 * n * (k // b)  # the replay does choose


def test_e4m3_candidates_are_as_good_as_the_papers():
    """Codes around amax / 6 instead of around a fixed point: the same losses, without iterations."""
    unit, byte, h32 = problem(200, 16, NVFP4, seed=0)
    h = h32.astype(float) + 0.01 * np.trace(h32.astype(float)) / 16 * np.eye(16)
    u, w, old = np.linalg.cholesky(np.linalg.inv(h)).T, np.asarray(unit, float), np.asarray(byte[:, 0], int)

    def best(candidates):
        d = [replay(w, u, scale_value(c, NVFP4)) - w for c in candidates]
        return np.min([np.einsum("nk,kl,nl->n", x, h, x) for x in d], axis=0)

    ours, papers = best(neighbours(w, old, NVFP4)), best(papers_proposals(w, old, h))
    assert ours.sum() <= 1.01 * papers.sum()
