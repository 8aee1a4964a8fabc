"""Where the training of a Kronecker transform starts: WUSH's closed form, and scales that tell outliers apart."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

_DAMPING = 0.01  # of both second moments, relative to their mean diagonal, as in WUSH
_ROUNDS = 20


def second_moment_metric(hessian: jax.Array, w: jax.Array, size: int) -> np.ndarray:
    """``T T^T`` of WUSH for each block of ``size``, determinant one: float64 [K / size, size, size].

    WUSH's T is known up to an orthogonal matrix on its right (the Hadamard, an order of singular values), so T itself
    cannot be averaged over blocks. ``T T^T = A^-1 # B`` can: the geometric mean ``X`` of the inverse second moments of
    the inputs and those of the weights, the solution of ``X A X = B``.

    Args:
      hessian: [K, K], second moments of the inputs up to a factor.
      w: [N, K].
      size: channels of a block.
    """
    h, rows, k = np.asarray(hessian, np.float64), np.asarray(w, np.float64), w.shape[-1]
    x_moment = _damped(np.stack([h[i : i + size, i : i + size] for i in range(0, k, size)]))
    blocks = rows.reshape(-1, k // size, size).transpose(1, 2, 0)
    w_moment = _damped(blocks @ blocks.transpose(0, 2, 1))
    root, inverse = _powers(x_moment)
    metric = inverse @ _powers(root @ w_moment @ root)[0] @ inverse
    return metric / np.exp(np.linalg.slogdet(metric)[1] / size)[:, None, None]


def nearest_kronecker(metric: np.ndarray, p: int, left_groups: int, right_groups: int) -> tuple[jax.Array, jax.Array]:
    """Symmetric ``L`` [left_groups, p, p] and ``R`` of determinant one with ``L^2 (x) R^2`` nearest to the metrics.

    Least squares in one factor with the other fixed, in turn (Van Loan and Pitsianis, 1993); for positive definite
    matrices both factors stay positive definite.

    Args:
      metric: [blocks, p q, p q], positive definite.
      p: size of the left factors.
      left_groups, right_groups: equal runs of blocks that share a factor.
    """
    blocks, size = metric.shape[:2]
    q = size // p
    g = metric.reshape(blocks, p, q, p, q)
    right = np.broadcast_to(np.eye(q), (blocks, q, q))

    def shared(numerator: np.ndarray, other: np.ndarray, groups: int) -> np.ndarray:
        each = blocks // groups
        total = numerator.reshape(groups, each, *numerator.shape[1:]).sum(1)
        norm = np.square(other).sum((1, 2)).reshape(groups, each).sum(1)
        return np.repeat(total / norm[:, None, None], each, axis=0)

    for _ in range(_ROUNDS):
        left = shared(np.einsum("gaibj,gij->gab", g, right), right, left_groups)
        right = shared(np.einsum("gaibj,gab->gij", g, left), left, right_groups)
    out = []
    for factors, groups in ((left, left_groups), (right, right_groups)):
        m = factors[:: blocks // groups]
        m = m / np.exp(np.linalg.slogdet(m)[1] / m.shape[-1])[:, None, None]
        out.append(jnp.asarray(_powers(m)[0], jnp.float32))
    return out[0], out[1]


@partial(jax.jit, static_argnames=("p", "q"))
def outer_scales(amax: jax.Array, w: jax.Array, exponent: float, p: int, q: int) -> tuple[jax.Array, jax.Array]:
    """SmoothQuant's ``s = max|x|^e / max|w|^(1 - e)`` as products: [blocks, p] and [blocks, q], geometric mean one.

    ``s_ij <= l_i r_j``, with ``l_i^2 = max_j s_ij`` and ``r_j^2 = max_i s_ij``: a channel that stands out by a factor
    of 10 is scaled by 10, those of its row and column by about the root of that, all others not at all.
    """
    s = jnp.maximum(amax, 1e-5) ** exponent / jnp.maximum(jnp.max(jnp.abs(w), axis=0), 1e-5) ** (1 - exponent)
    logs = jnp.log(s).reshape(-1, p, q)
    logs = logs - logs.mean((1, 2), keepdims=True)
    left, right = logs.max(2) / 2, logs.max(1) / 2
    return tuple(jnp.exp(x - x.mean(1, keepdims=True)).astype(jnp.float32) for x in (left, right))  # type: ignore[return-value]


def _damped(m: np.ndarray) -> np.ndarray:
    mean = np.trace(m, axis1=-2, axis2=-1)[:, None, None] / m.shape[-1]
    return m + np.where(mean > 0, _DAMPING * mean, 1.0) * np.eye(m.shape[-1])


def _powers(m: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``m^1/2`` and ``m^-1/2`` of symmetric positive definite matrices."""
    values, vectors = np.linalg.eigh((m + np.swapaxes(m, -1, -2)) / 2)
    root = np.sqrt(np.maximum(values, 1e-12 * values[..., -1:]))[..., None, :]
    return vectors * root @ np.swapaxes(vectors, -1, -2), vectors / root @ np.swapaxes(vectors, -1, -2)
