"""LoRaQ's branch fitted to the layer's output, where statistics of the input are there (``objective="output"``).

The paper's branch knows the weight only. Two things that it cannot know decide the error of the output: which channels
of the input are large, and which are rounded badly. With statistics the same branch, of the same bytes, is made in
three steps. On a layer made up like one behind adaLN, with KroQuant in MXFP4 (``benchmarks/lowrank_ablation.py``), the
output is off by 0.0055 with all three, 0.0056 without alternation in the first, 0.0055 without the third, and 0.0071
with a branch that knows the weight only; factors in MXFP8 in place of MXINT8 make 0.0069 of the 0.0055. On
the q, k and v of a block of PixArt-Mini the same numbers are 0.0042, 0.0045, 0.0042, 0.0047 and 0.0058.

1. It first takes what costs most once it is rounded: the SVD of ``W diag(s)``, with the s of
   :func:`~mxjax.transforms.branch.channel_weights`.
2. The rest is rounded, or solved by GPTQ, and stays as it is. Then the whole branch is fitted again to what the rounded
   weight lacks, ``min tr (W - Q - B A) H (W - Q - B A)^T`` in closed form, as in QERA (arXiv 2410.06040): it gives up
   what the inputs do not see, and makes up for rounding errors along the inputs' main directions. (To preserve first
   and reconstruct then is what SRR, arXiv 2602.02001, does, with a share of the rank for each; here both have all.)
3. Adam on the same loss with rounded factors, straight-through, as in the paper.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from mxjax.algorithms.base import WeightSpec
from mxjax.algorithms.low_rank import BranchFormat, Rows, stored, with_branch
from mxjax.calibration.stats import LayerStats
from mxjax.core.formats import BlockFormat
from mxjax.core.quantize import fake_quantize
from mxjax.errors import CalibrationError
from mxjax.ops.low_rank import LowRank, dense
from mxjax.ops.qweight import QWeight
from mxjax.transforms.base import Rounding
from mxjax.transforms.branch import balanced, channel_weights, hessian_svd, weighted_svd
from mxjax.transforms.measure import branch_error, measured_on, rounded_weight

_matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def by_output(
    w: jax.Array,
    rows: Rows,
    form: BranchFormat,
    rank: int,
    spec: WeightSpec,
    stats: LayerStats | None,
    options: dict[str, Any],
) -> QWeight:
    """The quantized weight with its branch. Arguments as in ``loraq``, parsed.

    Raises:
      CalibrationError: no statistics, a stack of them, or no sample where inputs are rounded.
    """
    if stats is None:
        raise CalibrationError(f"{spec.path}: loraq with objective='output' needs calibration statistics")
    seen = stats if rows.transform is None or stats.transform is not None else stats.through(rows.transform)
    data = measured_on(seen, spec.rounding, "loraq with objective='output'", spec.path)
    back = (lambda a: a) if rows.transform is None else rows.transform.undo_weight
    keys = jax.random.split(jax.random.key(options["seed"]), rows.turned.shape[0])
    start = partial(first_branch, rounding=spec.rounding, rank=rank, iterations=max(options["iterations"], 1))
    found = [start(data, one, key) for one, key in zip(rows.turned, keys, strict=True)]
    b, a = jnp.stack([f[0] for f in found]), back(jnp.stack([f[1] for f in found]))
    q = with_branch(w, rows, a, b, form, spec, stats, **options)
    held = jnp.moveaxis(q.qtensor.dequantize(jnp.float32), spec.axis, -1).reshape(rows.turned.shape)
    fit = partial(
        refit,
        factors=form.factors,
        rank=rank,
        steps=options["steps"],
        learning_rate=options["learning_rate"],
        damping=options["damping"],
    )
    each = zip(rows.turned - held, keys, strict=True)
    again = [fit(one, seen.hessian.astype(jnp.float32), rows.transform, key)[:2] for one, key in each]
    other = stored(rows, jnp.stack([f[1] for f in again]), jnp.stack([f[0] for f in again]), form)
    first, second = (_error(data, rows, held, branch, spec.rounding) for branch in (q.branch, other))
    return _chosen(second < first, QWeight(**{**vars(q), "branch": other}), q)


@jax.jit
def _chosen(first: jax.Array, a: QWeight, b: QWeight) -> QWeight:
    return jax.tree.map(partial(jnp.where, first), a, b)


def _error(data: jax.Array, rows: Rows, held: jax.Array, branch: Any, rounding: Rounding) -> jax.Array:
    """Of the layer's output with the branch as it is stored, but for the rounding of what goes through it."""
    there = (lambda a: a) if rows.transform is None else rows.transform.weight
    assert isinstance(branch, LowRank)
    n, k = rows.turned.shape[1:]
    a = there(dense(branch.a, jnp.float32)).reshape(-1, branch.rank, k)
    b = dense(branch.b, jnp.float32).reshape(-1, n, branch.rank)
    parts = zip(rows.turned, held, a, b, strict=True)
    return sum((branch_error(data, w, w_q, a, b, rounding) for w, w_q, a, b in parts), jnp.float32(0))


def first_branch(
    data: jax.Array, w: jax.Array, key: jax.Array, *, rounding: Rounding, rank: int, iterations: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``B``, ``A`` and their relative output errors [iterations]: ``B A = SVD((W - Q) diag(s)) diag(s)^-1``,
    ``Q = Q(W - B A)`` in turn from ``Q = 0``; the best of them.

    Args:
      data: inputs [n, K] in the space of ``w``, or the Hessian [K, K] where inputs stay float.
      w: [N, K].
      key: of the randomised SVD.
    """
    weights, rest, errors = channel_weights(data, w, rounding), w, []
    n, k = w.shape
    best: tuple[Any, Any, Any] = (np.float32(np.inf), np.zeros((n, rank), np.float32), np.zeros((rank, k), np.float32))
    for one in jax.random.split(key, iterations):
        b, a = weighted_svd(rest, weights, rank, one)
        rest, best, error = _judged(data, w, b, a, best, rounding)
        errors.append(error)
    return best[1], best[2], jnp.stack(errors)


@partial(jax.jit, static_argnames="rounding")
def _judged(
    data: jax.Array, w: jax.Array, b: jax.Array, a: jax.Array, best: tuple, rounding: Rounding
) -> tuple[jax.Array, tuple, jax.Array]:
    """What the rounded rest of the weight still lacks, the better of this branch and the best so far, and its error."""
    q = rounded_weight(w - _matmul(b, a), rounding)
    error = branch_error(data, w, q, a, b, rounding)
    return w - q, jax.tree.map(partial(jnp.where, error < best[0]), (error, b, a), best), error


def refit(
    e: jax.Array,
    hessian: jax.Array,
    transform: Any,
    key: jax.Array,
    *,
    factors: BlockFormat | None,
    rank: int,
    steps: int,
    learning_rate: float,
    damping: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``B``, ``A`` on the untransformed input, and the losses [steps + 1] of ``min tr (E - B A) H (E - B A)^T``.

    The closed form, then Adam with the factors rounded; the best iterate.

    Args:
      e: [N, K], what the rounded weight lacks, in the space of its transform.
      hessian: [K, K], there as well.
      transform: Transform of the layer, or None.
      key: of the randomised SVD.
      factors: format of A and B, or None for 16 bits.
      rank, steps, learning_rate, damping: as in ``loraq``.
    """
    b, a = hessian_svd(e, hessian, rank, key, damping)
    return _descent(b, a, e, hessian, transform, factors=factors, steps=steps, learning_rate=learning_rate)


@partial(jax.jit, static_argnames=("factors", "steps", "learning_rate"))
def _descent(
    b: jax.Array, a: jax.Array, e: jax.Array, hessian: jax.Array, transform: Any, *, factors: BlockFormat | None,
    steps: int, learning_rate: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Adam from this branch, A still on the transformed input."""
    there = (lambda a: a) if transform is None else transform.weight
    back = (lambda a: a) if transform is None else transform.undo_weight
    size = jnp.maximum(jnp.sum(_matmul(e, hessian) * e), 1e-30)

    def q(x: jax.Array) -> jax.Array:
        return x.astype(jnp.bfloat16).astype(jnp.float32) if factors is None else fake_quantize(x, factors)

    def loss(theta: tuple[jax.Array, jax.Array]) -> jax.Array:
        d = e - _matmul(q(theta[0] * scale[0]), there(q(theta[1] * scale[1])))
        return jnp.sum(_matmul(d, hessian) * d) / size

    b, a = balanced(b, back(a))
    rms = [jnp.maximum(jnp.sqrt(jnp.mean(jnp.square(x))), 1e-30) for x in (b, a)]
    scale = [0.01 * r for r in rms]  # of a step: about the rounding of 8 bits
    theta = (b / scale[0], a / scale[1])
    optimizer = optax.adam(optax.cosine_decay_schedule(learning_rate, max(steps, 1)))

    def step(state: tuple, _: None) -> tuple[tuple, jax.Array]:
        theta, moments, best = state
        value, gradient = jax.value_and_grad(loss)(theta)
        best = jax.tree.map(partial(jnp.where, value < best[0]), (value, theta), best)
        updates, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(theta, updates), moments, best), value

    start = (theta, optimizer.init(theta), (loss(theta), theta))
    (_, _, best), losses = lax.scan(step, start, None, length=steps)
    losses = jnp.concatenate([start[2][0][None], losses])
    return best[1][0] * scale[0], best[1][1] * scale[1], losses
