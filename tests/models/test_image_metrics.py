"""Image metrics equal NumPy float64 written from the definitions."""

import jax.numpy as jnp
import numpy as np
import pytest
from mxjax_models import image_metrics


def pair(seed, shape=(3, 20, 24, 3)):
    rng = np.random.default_rng(seed)
    a = rng.integers(0, 256, shape).astype(np.uint8)
    b = np.clip(a.astype(int) + rng.integers(-40, 41, shape), 0, 255).astype(np.uint8)
    return a, b


def test_psnr_is_its_definition():
    a, b = pair(0)
    error = np.square(a.astype(np.float64) - b).mean((1, 2, 3))
    # The mean of 1440 squares of integers up to 40, below 2^24 in all: exact in float32 up to the division. A relative
    # error e of it is 4.34 e dB, that of each logarithm (up to 5) an ulp of 10 x 5: 50 x 2^-23 = 6e-6.
    np.testing.assert_allclose(image_metrics.psnr(a, b), 10 * np.log10(255**2 / error), atol=2e-5)


def test_psnr_of_equal_images_is_infinite():
    a, _ = pair(1)
    assert np.isposinf(image_metrics.psnr(a, a)).all()


def ssim_by_loops(a, b, peak=255.0):
    """One image, float64, one window at a time, two-dimensional weights."""
    g = np.exp(-(np.arange(-5, 6) ** 2) / (2 * 1.5**2))
    w = np.outer(g, g) / np.outer(g, g).sum()
    c1, c2, found = (0.01 * peak) ** 2, (0.03 * peak) ** 2, []
    for c in range(a.shape[-1]):
        for y in range(a.shape[0] - 10):
            for x in range(a.shape[1] - 10):
                p, q = (v[y : y + 11, x : x + 11, c].astype(np.float64) for v in (a, b))
                m, n = (w * p).sum(), (w * q).sum()
                s, t, u = (w * (p - m) ** 2).sum(), (w * (q - n) ** 2).sum(), (w * (p - m) * (q - n)).sum()
                found.append((2 * m * n + c1) * (2 * u + c2) / ((m * m + n * n + c1) * (s + t + c2)))
    return np.mean(found)


@pytest.mark.parametrize("kind", ["noise", "flat", "dark"])
def test_ssim_is_its_definition(kind):
    a, b = pair(2)
    if kind == "flat":  # white with a little dirt: variances near zero, where cancellation would show
        a, b = 255 - a // 128, 255 - b // 64
    if kind == "dark":
        a, b = a // 100, b // 100
    want = [ssim_by_loops(x, y) for x, y in zip(a, b, strict=True)]
    # In units of the peak about the middle, |x| <= 0.5: a smoothed square takes 11 products and sums along each axis,
    # each rounded to 2^-26 of 0.25, so about sqrt(44) x 2^-26 = 1e-7 off, and so is a variance, against c2 = 9e-4 below
    # it: 1e-4 a window at worst. 140 overlapping windows and 3 channels: a tenth of that in their mean.
    np.testing.assert_allclose(image_metrics.ssim(a, b), want, atol=2e-5)


def test_ssim_of_equal_images_is_one():
    a, _ = pair(3)
    np.testing.assert_allclose(image_metrics.ssim(a, a), 1.0, atol=1e-6)


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
