"""How far images are from others, for batches, jitted: PSNR, SSIM, distance in features, Fréchet distance.

Papers: SSIM, doi:10.1109/TIP.2003.819861; distance in unit-length features (LPIPS), arXiv:1801.03924; Fréchet distance
of two Gaussians as a measure of generated images (FID), arXiv:1706.08500.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

WINDOW, SIGMA = 11, 1.5  # of SSIM's paper


@jax.jit
def psnr(a: jax.Array, b: jax.Array, peak: float = 255.0) -> jax.Array:
    """10 log10(peak^2 / mean (a - b)^2) of each pair, in decibels; inf where both are equal.

    Args:
        a, b: (B, H, W, C), any dtype.
        peak: the largest value of a pixel.

    Returns:
        float32 (B,).

    Example::

        psnr(jnp.zeros((1, 8, 8, 3)), jnp.full((1, 8, 8, 3), 25.5))     # [20.0]
    """
    error = jnp.mean(jnp.square(a.astype(jnp.float32) - b.astype(jnp.float32)), axis=(1, 2, 3))
    return 10 * (2 * jnp.log10(jnp.float32(peak)) - jnp.log10(error))


@jax.jit
def ssim(a: jax.Array, b: jax.Array, peak: float = 255.0) -> jax.Array:
    """Structural similarity of each pair, 1 for equal images: the mean over windows and channels of::

        (2 m_a m_b + c1) (2 s_ab + c2) / ((m_a^2 + m_b^2 + c1) (s_a + s_b + c2))

    with means m, variances s_a and s_b and covariance s_ab under a Gaussian window of 11 x 11 (sigma 1.5) inside the
    image, c1 = (0.01 peak)^2, c2 = (0.03 peak)^2.

    Args:
        a, b: (B, H, W, C) of 11 x 11 pixels or more, any dtype.
        peak: the largest value of a pixel.

    Returns:
        float32 (B,).

    Example::

        ssim(images, images)    # ones
    """
    # In units of the peak, about the middle: variances are differences of squares, and float32 has 24 bits for them.
    x, y = (v.astype(jnp.float32) / peak - 0.5 for v in (a, b))
    m_x, m_y = _smooth(x), _smooth(y)
    s_x, s_y, s_xy = _smooth(x * x) - m_x**2, _smooth(y * y) - m_y**2, _smooth(x * y) - m_x * m_y
    m_x, m_y = m_x + 0.5, m_y + 0.5
    c1, c2 = 0.01**2, 0.03**2
    alike = (2 * m_x * m_y + c1) * (2 * s_xy + c2) / ((m_x**2 + m_y**2 + c1) * (s_x + s_y + c2))
    return jnp.mean(alike, axis=(1, 2, 3))


def _smooth(x: jax.Array) -> jax.Array:
    """Means under the window: (B, H, W, C) -> (B, H - 10, W - 10, C)."""
    w = np.exp(-((np.arange(WINDOW) - WINDOW // 2) ** 2) / (2 * SIGMA**2))
    w = (w / w.sum()).astype(np.float32)
    for axis in (1, 2):
        n = x.shape[axis] - WINDOW + 1
        x = sum(w[i] * jax.lax.slice_in_dim(x, i, i + n, axis=axis) for i in range(WINDOW))  # type: ignore[assignment]
    return x


@jax.jit
def feature_distance(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> jax.Array:
    """LPIPS with equal weights: mean over layers of mean over places of |u_a - u_b|^2, u = f / |f| along channels.

    Args:
        a, b: features of B images, one (B, h, w, c) a layer.

    Returns:
        float32 (B,), 0 to 2 where features are not negative.
    """
    layers = []
    for x, y in zip(a, b, strict=True):
        u, v = (f / jnp.sqrt(jnp.sum(f * f, axis=-1, keepdims=True) + 1e-10) for f in (x, y))
        layers.append(jnp.mean(jnp.sum(jnp.square(u - v), axis=-1), axis=(1, 2)))
    return jnp.mean(jnp.stack(layers), axis=0)


@jax.jit
def frechet_distance(a: jax.Array, b: jax.Array) -> jax.Array:
    """|m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)) of the means and covariances of two sets of features.

    No root of a matrix is taken: with C = A^T A, A the centred features over sqrt(N - 1), the trace of the root is the
    sum of the singular values of A_a A_b^T, which a triangular factor R of each A gives as those of R_a R_b^T. Singular
    values are right to an ulp of the largest, their squares' roots would be to the root of an ulp.

    Args:
        a, b: (N, D) and (M, D), N, M >= 2.

    Returns:
        float32 scalar; rounding can leave a set that is compared with itself at +-1e-6 of its variance.
    """
    factors, total, means = [], jnp.float32(0), []
    for x in (a, b):
        x = x.astype(jnp.float32)
        mean = jnp.mean(x, axis=0)
        centred = (x - mean) / np.sqrt(len(x) - 1)
        means.append(mean)
        total += jnp.sum(centred * centred)
        factors.append(jnp.linalg.qr(centred, mode="r"))
    root = jnp.sum(jnp.linalg.svd(factors[0] @ factors[1].T, compute_uv=False))
    return jnp.sum(jnp.square(means[0] - means[1])) + total - 2 * root
