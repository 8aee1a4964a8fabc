"""Image metrics equal NumPy float64 written from the definitions."""

import jax.numpy as jnp
import numpy as np
import pytest
from mxjax_models import image_metrics


def test_feature_distance_is_its_definition():
    rng = np.random.default_rng(4)
    shapes = [(2, 8, 8, 5), (2, 4, 4, 7)]
    a, b = ([rng.random(s).astype(np.float32) for s in shapes] for _ in range(2))
    want = []
    for x, y in zip(a, b, strict=True):
        u, v = (f / np.sqrt((f.astype(np.float64) ** 2).sum(-1, keepdims=True)) for f in (x, y))
        want.append(((u - v) ** 2).sum(-1).mean((1, 2)))
    # Sums of 7 squares of numbers up to 1, and means of 64: some 10 ulps of a value below 1.
    np.testing.assert_allclose(image_metrics.feature_distance(a, b), np.mean(want, 0), atol=2e-6)


def frechet_by_roots(a, b):
    """float64, with the root of C_a^(1/2) C_b C_a^(1/2) by eigenvalues."""
    m, n = a.mean(0), b.mean(0)
    c, d = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    values, vectors = np.linalg.eigh(c)
    half = (vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T
    root = np.sqrt(np.clip(np.linalg.eigvalsh(half @ d @ half), 0, None)).sum()
    return ((m - n) ** 2).sum() + np.trace(c) + np.trace(d) - 2 * root


@pytest.mark.parametrize("rows", [40, 9], ids=["full rank", "fewer rows than features"])
def test_frechet_distance_is_its_definition(rows):
    rng = np.random.default_rng(5)
    a = rng.normal(size=(rows, 16)) @ rng.normal(size=(16, 16))
    b = rng.normal(size=(rows + 3, 16)) @ rng.normal(size=(16, 16)) + 0.3
    got = image_metrics.frechet_distance(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32))
    # Everything is below the sum of both traces, about 2 x 16 x 16 = 512, and right to some 30 ulps of it (QR and SVD
    # of 16 columns): 512 x 30 x 2^-24 = 1e-3.
    np.testing.assert_allclose(got, frechet_by_roots(a, b), atol=1e-3)


def test_frechet_distance_of_a_shift_is_its_square():
    a = jnp.asarray(np.random.default_rng(6).normal(size=(50, 8)), jnp.float32)
    # Traces are 8 each: 16 x 30 x 2^-24 = 3e-5.
    np.testing.assert_allclose(image_metrics.frechet_distance(a, a), 0, atol=3e-5)
    np.testing.assert_allclose(image_metrics.frechet_distance(a, a + 0.5), 8 * 0.25, atol=6e-5)
