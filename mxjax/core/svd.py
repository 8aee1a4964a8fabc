"""Truncated singular value decomposition by random projection (Halko, Martinsson and Tropp, arXiv 0909.4061)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

_matmul = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


@partial(jax.jit, static_argnames=("rank", "oversample", "power"))
def truncated_svd(
    m: jax.Array, rank: int, key: jax.Array, *, oversample: int = 8, power: int = 2
) -> tuple[jax.Array, jax.Array]:
    """``b a``, nearly the best approximation of ``m`` of that rank, balanced: ``b = U sqrt(S)``, ``a = sqrt(S) V^T``.

    The range of ``m`` is found from ``rank + oversample`` random combinations of its columns and ``power`` rounds of
    subspace iteration, each with a QR factorization; only a matrix of that few rows is decomposed.

    Args:
      m: [N, K], float32.
      rank: r; where it exceeds N or K, the rest of the factors is zero.
      key: of the random projection.
      oversample: random columns more than the rank.
      power: rounds; each sharpens the ratio of two singular values by its square.

    Returns:
      b [N, r] and a [r, K].

    Example:
      >>> b, a = truncated_svd(jnp.outer(jnp.arange(4.0), jnp.ones(6)), 1, jax.random.key(0))
      >>> bool(jnp.allclose(b @ a, jnp.outer(jnp.arange(4.0), jnp.ones(6)), atol=1e-5))
      True
    """
    n, k = m.shape
    width = min(rank + oversample, n, k)
    q = jnp.linalg.qr(_matmul(m, jax.random.normal(key, (k, width), m.dtype)))[0]
    for _ in range(power):
        z = jnp.linalg.qr(_matmul(m.T, q))[0]
        q = jnp.linalg.qr(_matmul(m, z))[0]
    u, s, vt = jnp.linalg.svd(_matmul(q.T, m), full_matrices=False)
    kept = min(rank, width)
    root = jnp.sqrt(s[:kept])
    b, a = _matmul(q, u[:, :kept]) * root, root[:, None] * vt[:kept]
    return jnp.pad(b, ((0, 0), (0, rank - kept))), jnp.pad(a, ((0, rank - kept), (0, 0)))
