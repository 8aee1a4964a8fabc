"""How far one image is from another: PSNR and SSIM."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mxjax.errors import BlockShapeError

_WINDOW, _SIGMA = 11, 1.5  # of the paper


def psnr(reference: Any, image: Any, peak: float = 255.0) -> float:
    """Peak signal to noise ratio in decibels: ``10 log10(peak^2 / mean (r - x)^2)``; inf for equal images.

    Args:
      reference, image: [..., height, width, channels] of one shape; uint8, or floats.
      peak: the largest value that a pixel can have.

    Raises:
      BlockShapeError: different shapes.

    Example:
      >>> round(psnr(np.zeros((8, 8, 3), np.uint8), np.full((8, 8, 3), 25, np.uint8)), 2)
      20.17
    """
    r, x = _pair(reference, image)
    error = np.mean(np.square(r - x))
    return math.inf if error == 0 else float(10 * np.log10(peak**2 / error))


def ssim(reference: Any, image: Any, peak: float = 255.0) -> float:
    """Structural similarity (Wang et al., 2004), 1 for equal images: the mean over all windows and channels of::

        (2 m_r m_x + c1) (2 s_rx + c2) / ((m_r^2 + m_x^2 + c1) (s_r^2 + s_x^2 + c2))

    with means m, variances s^2 and covariance s_rx under a Gaussian window of 11 x 11 pixels with sigma 1.5 that lies
    inside the image, and ``c1 = (0.01 peak)^2``, ``c2 = (0.03 peak)^2``.

    Args:
      reference, image: [height, width, channels] of one shape, 11 x 11 pixels or more; uint8, or floats.
      peak: the largest value that a pixel can have.

    Raises:
      BlockShapeError: different shapes, or too few pixels.

    Example:
      >>> ssim(np.eye(16)[..., None], np.eye(16)[..., None], peak=1)
      1.0
    """
    r, x = _pair(reference, image)
    if r.ndim != 3 or min(r.shape[:2]) < _WINDOW:
        raise BlockShapeError(f"SSIM compares images [height, width, channels] of 11 x 11 or more, not {r.shape}")
    m_r, m_x = _smooth(r), _smooth(x)
    s_r, s_x, s_rx = _smooth(r * r) - m_r**2, _smooth(x * x) - m_x**2, _smooth(r * x) - m_r * m_x
    c1, c2 = (0.01 * peak) ** 2, (0.03 * peak) ** 2
    similar = (2 * m_r * m_x + c1) * (2 * s_rx + c2) / ((m_r**2 + m_x**2 + c1) * (s_r + s_x + c2))
    return float(np.mean(similar))


def _pair(reference: Any, image: Any) -> tuple[np.ndarray, np.ndarray]:
    r, x = np.asarray(reference, np.float64), np.asarray(image, np.float64)
    if r.shape != x.shape:
        raise BlockShapeError(f"images to compare have one shape, not {r.shape} and {x.shape}")
    return r, x


def _smooth(x: np.ndarray) -> np.ndarray:
    """Means under the window, along both axes in turn: [h, w, c] -> [h - 10, w - 10, c]."""
    window = np.exp(-np.square(np.arange(_WINDOW) - _WINDOW // 2) / (2 * _SIGMA**2))
    window /= window.sum()
    for axis in (0, 1):
        x = np.lib.stride_tricks.sliding_window_view(x, _WINDOW, axis) @ window
    return x
