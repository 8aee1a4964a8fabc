"""What a low-rank branch beside a quantized weight should take, where statistics of the input are known."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.core.svd import truncated_svd
from mxjax.transforms.base import Rounding
from mxjax.transforms.measure import rounded_input, rounded_weight

_matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)

# The SVD takes longest to compile, so these functions are programs around one that all of them share, a shape.


@partial(jax.jit, static_argnames="rounding")
def channel_weights(data: jax.Array, w: jax.Array, rounding: Rounding) -> jax.Array:
    """What a unit of the weight costs in each channel once it is left to 4 bits: float32 [K], as standard deviations.

    With rounding errors e of the inputs and f of the rest R of the weight, the output is off by
    ``|e R^T|^2 + |x f^T|^2``. Both grow with R: the first as ``sum_j E e_j^2 |R_j|^2``; in the second f is in
    proportion to the size of R in its block, so a unit of R costs the mean power of x in the block times the relative
    error of rounding a weight. The branch that leaves least is the SVD of ``W diag(s)`` with these s. (H-SVDQuant
    weighs with the first term alone, plus the whole Hessian for what the branch itself makes up for.)

    Args:
      data: inputs [n, K] in the space of ``w``, or their second moments [K, K] where inputs stay float.
      w: [N, K].
      rounding: by ``activation`` it says what ``data`` is.
    """
    block = rounding.weight.block_size
    relative = jnp.sum(jnp.square(rounded_weight(w, rounding) - w)) / jnp.maximum(jnp.sum(jnp.square(w)), 1e-30)
    noise: jax.Array | float = 0.0
    if rounding.activation is None:
        power = jnp.diagonal(data)
    else:
        power = jnp.mean(jnp.square(data), axis=0)
        noise = jnp.mean(jnp.square(rounded_input(data, rounding) - data), axis=0)
    mean = jnp.repeat(power.reshape(-1, block).mean(1), block)
    cost = noise + relative * mean
    return jnp.sqrt(cost + 1e-6 * jnp.mean(cost) + 1e-30)


def weighted_svd(w: jax.Array, weights: jax.Array, rank: int, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``B`` [N, r] and ``A`` [r, K] with ``|(W - B A) diag(weights)|`` smallest."""
    b, a = truncated_svd(_weighted(w, weights), rank, key)
    return _unweighted(b, a, weights)


def hessian_svd(
    e: jax.Array, hessian: jax.Array, rank: int, key: jax.Array, damping: float = 0.01
) -> tuple[jax.Array, jax.Array]:
    """``B`` and ``A`` with ``tr (E - B A) (H + d I) (E - B A)^T`` smallest, d relative to H's mean diagonal.

    The closed form of QERA (arXiv 2410.06040): with ``H + d I = C C^T``, the SVD of ``E C``, times ``C^-1``.

    Args:
      e: [N, K], what a branch shall make up for.
      hessian: [K, K], second moments of the inputs up to a factor.
      rank: r.
      key: of the randomised SVD.
      damping: d; larger: less trust in directions that calibration has hardly seen.
    """
    turned, root = _whitened(e, hessian, damping)
    b, a = truncated_svd(turned, rank, key)
    return _unwhitened(b, a, root)


def balanced(b: jax.Array, a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same product, each column of B as long as its row of A: neither's rounding decides."""
    ratio = jnp.sqrt(jnp.maximum(jnp.linalg.norm(a, axis=1), 1e-30) / jnp.maximum(jnp.linalg.norm(b, axis=0), 1e-30))
    return b * ratio, a / ratio[:, None]


@jax.jit
def _weighted(w: jax.Array, weights: jax.Array) -> jax.Array:
    return w * weights


@jax.jit
def _unweighted(b: jax.Array, a: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    return balanced(b, a / weights)


@jax.jit
def _whitened(e: jax.Array, hessian: jax.Array, damping: float) -> tuple[jax.Array, jax.Array]:
    """``E C`` and C, where ``C C^T`` is the damped Hessian."""
    k = hessian.shape[-1]
    mean = jnp.trace(hessian) / k
    root = jnp.linalg.cholesky(hessian + jnp.maximum(damping * mean, 1e-30) * jnp.eye(k))
    return _matmul(e, root), root


@jax.jit
def _unwhitened(b: jax.Array, a: jax.Array, root: jax.Array) -> tuple[jax.Array, jax.Array]:
    return balanced(b, lax.linalg.triangular_solve(root, a, left_side=False, lower=True))
