"""How far images are from others by features of a network, jitted. (By pixels: ``mxjax.eval.psnr`` and ``ssim``.)

Papers: distance in unit-length features (LPIPS), arXiv:1801.03924; Fréchet distance of two Gaussians as a measure of
generated images (FID), arXiv:1706.08500.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


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
