"""PSNR and SSIM against their formulas."""

import math

import numpy as np
import pytest

from mxjax.errors import BlockShapeError
from mxjax.eval import psnr, ssim


def pair(shape=(14, 13, 3)):
    rng = np.random.default_rng(0)
    a = rng.integers(0, 256, shape)
    return a.astype(np.uint8), np.clip(a + rng.integers(-40, 40, shape), 0, 255).astype(np.uint8)


def test_psnr():
    a, b = pair()
    error = np.mean((a.astype(float) - b.astype(float)) ** 2)
    assert psnr(a, b) == pytest.approx(10 * math.log10(255**2 / error), rel=1e-12)
    assert psnr(a, a) == math.inf and psnr(a / 255, b / 255, peak=1) == pytest.approx(psnr(a, b), rel=1e-12)


def test_ssim_window_by_window():
    a, b = pair()
    x = np.arange(-5, 6)
    window = np.exp(-(x[:, None] ** 2 + x[None] ** 2) / (2 * 1.5**2))[..., None]
    window /= window.sum()
    c1, c2, found = (0.01 * 255) ** 2, (0.03 * 255) ** 2, []
    for i in range(4):
        for j in range(3):
            p, q = (image[i : i + 11, j : j + 11].astype(float) for image in (a, b))
            mean = lambda z: np.sum(window * z, axis=(0, 1))  # noqa: E731
            mp, mq = mean(p), mean(q)
            spq = mean(p * q) - mp * mq
            sp, sq = mean(p * p) - mp**2, mean(q * q) - mq**2
            found.append((2 * mp * mq + c1) * (2 * spq + c2) / ((mp**2 + mq**2 + c1) * (sp + sq + c2)))
    assert ssim(a, b) == pytest.approx(np.mean(found), rel=1e-9)
    assert ssim(a, a) == 1.0


def test_what_cannot_be_compared():
    a, b = pair()
    with pytest.raises(BlockShapeError, match="one shape"):
        psnr(a, b[1:])
    with pytest.raises(BlockShapeError, match="11 x 11"):
        ssim(a[:10], b[:10])
