"""LoRaQ (arXiv 2604.18117): a low-rank branch below 16 bits, optimized for the weight's quantization error. Data-free.

Known (the paper's abstract and a kernel package of its kind): no data; the quantization error of the weight is fitted
by low-rank factors with gradient descent, from an SVD; the branch is quantized itself, W8A8, W6A6 or W4A8 beside a
4-bit weight; at equal bytes its rank is twice SVDQuant's (64 in MXFP8 for 32 in 16 bits); a learned rotation acts on
the branch; smoothing acts on the quantized path only, the branch takes the layer's own input.

Inferred, as the paper's text is not public to us: the loss, its gradient, the optimizer and its schedule, the start,
the keeping of the best iterate, and where the rotation stands. :func:`optimize` says why;
``benchmarks/lowrank_ablation.py`` compares them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from mxjax.algorithms.base import WeightSpec
from mxjax.algorithms.loraq_output import by_output
from mxjax.algorithms.low_rank import BRANCHES, parsed, rows_of, with_branch
from mxjax.calibration.stats import LayerStats
from mxjax.core.formats import BlockFormat
from mxjax.core.quantize import fake_quantize
from mxjax.core.svd import truncated_svd
from mxjax.errors import ConfigError
from mxjax.ops.qweight import QWeight
from mxjax.transforms.base import Rounding
from mxjax.transforms.hadamard import hadamard_matrix
from mxjax.transforms.measure import rounded_weight

_DEFAULTS = {
    "objective": "weight",
    "branch": "w8a8",
    "rank": None,
    "iterations": 10,
    "steps": 100,
    "learning_rate": 0.2,
    "rotation": False,
    "residual": "rtn",
    "seed": 0,
    "damping": 0.01,
}
OBJECTIVES = ("weight", "output")
_TURN = 0.003  # of the rotation's steps, relative to the factors': each of its angles moves a whole row
_matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def loraq(w: jax.Array, spec: WeightSpec, stats: LayerStats | None = None) -> QWeight:
    """``Q(W T^-T - B A T^-T)`` beside a quantized branch: ``min |W - Q(W - B A) - q(B) q(A)|^2`` over A and B.

    That is LoRaQ, and needs no data. With ``objective="output"`` the branch is fitted to the layer's output instead
    (:mod:`mxjax.algorithms.loraq_output`), which is no part of the paper, and needs statistics.

    Args:
      w: the weight, float, any rank of 2 and more. Axes before the last two (stacked layers, experts) get branches of
        their own.
      spec: formats, axis and transform. Options: ``objective`` ("weight", "output"), ``branch`` ("w8a8" in MXFP8,
        "int8", "w6a6", "w4a8", "w16a16"), ``rank`` (None: the bytes of rank 32 in 16 bits), ``iterations`` of
        alternating SVD and rounding before the first step, ``steps`` and ``learning_rate`` of Adam, relative to what a
        factor still misses, ``rotation`` (learn a rotation of the rank axis, from a Hadamard matrix; "weight" only),
        ``residual`` ("rtn", or "gptq" for GPTQ on what the branch leaves, which needs statistics; its options as
        ``gptq_observer``, ...), ``damping`` of the Hessian ("output" only), ``seed``.
      stats: for a transform that is chosen from data, for GPTQ, and for "output"; otherwise unused.

    Raises:
      ConfigError: unknown options, or a rank that the rotation cannot turn.
      CalibrationError: no statistics where they are needed.
      BlockShapeError, NonFiniteError: as ``quantize_array``.

    Example:
      >>> w = loraq(jnp.ones((64, 8)), WeightSpec(path="w", format=mxjax.get_format("mxfp4")))
      >>> w.branch.rank, w.branch.a.format
      (64, <mxfp8_e4m3>)
    """
    options = parsed("loraq", spec, _DEFAULTS, {"branch": BRANCHES, "objective": OBJECTIVES})
    form = BRANCHES[options["branch"]]
    rank = form.equal_rank() if options["rank"] is None else options["rank"]
    if options["rotation"] and rank & (rank - 1):
        raise ConfigError(f"{spec.path}: loraq turns ranks that are powers of two, not {rank}")
    rows = rows_of(w, spec, stats)
    if options["objective"] == "output":
        if options["rotation"]:
            raise ConfigError(f"{spec.path}: loraq learns a rotation of the branch for objective='weight' only")
        return by_output(w, rows, form, rank, spec, stats, options)
    static = {k: options[k] for k in ("iterations", "steps", "learning_rate", "rotation")}
    solve = partial(optimize, rounding=spec.rounding, factors=form.factors, rank=rank, **static)
    keys = jax.random.split(jax.random.key(options["seed"]), rows.turned.shape[0])
    found = [solve(one, rows.transform, key) for one, key in zip(rows.turned, keys, strict=True)]
    a, b = jnp.stack([f.a for f in found]), jnp.stack([f.b for f in found])
    return with_branch(w, rows, a, b, form, spec, stats, **options)


class Optimized(NamedTuple):
    """The best branch found, and how.

    Attributes:
      a, b: [r, K], on the untransformed input, and [N, r]; not yet rounded.
      error: relative squared weight error with it, in the transformed space.
      losses: [iterations + steps]: of each alternation and each step, in the same measure.
    """

    a: jax.Array
    b: jax.Array
    error: jax.Array
    losses: jax.Array


@partial(
    jax.jit,
    static_argnames=("rounding", "factors", "rank", "iterations", "steps", "learning_rate", "rotation"),
)
def optimize(
    w: jax.Array,
    transform: Any,
    key: jax.Array,
    *,
    rounding: Rounding,
    factors: BlockFormat | None,
    rank: int,
    iterations: int = 10,
    steps: int = 100,
    learning_rate: float = 0.2,
    rotation: bool = False,
) -> Optimized:
    """Alternation, then gradient descent, on ``|W - Q(W - L) - L|^2`` with ``L = q(B) q(A) T^-T``; the best iterate.

    ``W`` is the transformed weight, and A acts on the untransformed input, where it is rounded.

    * The gradient. Straight through Q as well, ``d (W - Q(W - L) - L) = dL - dL = 0``: nothing would ever move. The
      derivative of Q itself is zero almost everywhere. So Q(W - L) is held fixed in the gradient, and rounded anew at
      every step; only q of the factors is differentiated straight-through. What changes the codes is that L moves.
    * The start. ``B A = SVD(W)``, then ``B A = SVD(W - Q(W - B A))`` in turn: what the gradient leads to, solved
      exactly but without q; Adam then learns to live with q. From the SVD of the error of plain rounding the weight
      error ends higher, and the branch would not take the large part of W that rounded inputs are multiplied with.
    * Rounding is not smooth, and so is no loss: the best iterate is kept.

    Args:
      w: [N, K], transformed.
      transform: Transform of the layer, or None.
      key: of the randomised SVD.
      factors: format of A and B, or None for 16 bits.
    """
    signal = jnp.maximum(jnp.sum(jnp.square(w)), 1e-30)
    there = (lambda a: a) if transform is None else transform.weight
    back = (lambda a: a) if transform is None else transform.undo_weight

    def q(x: jax.Array) -> jax.Array:
        return x.astype(jnp.bfloat16).astype(jnp.float32) if factors is None else fake_quantize(x, factors)

    def low(a: jax.Array, b: jax.Array) -> jax.Array:
        return _matmul(q(b), there(q(a)))

    def loss(a: jax.Array, b: jax.Array) -> jax.Array:
        branch = low(a, b)
        fixed = lax.stop_gradient(w - rounded_weight(w - branch, rounding))
        return jnp.sum(jnp.square(fixed - branch)) / signal

    def better(candidate: tuple, best: tuple) -> tuple:
        return jax.tree.map(partial(jnp.where, candidate[0] < best[0]), candidate, best)

    def alternate(state: tuple, key: jax.Array) -> tuple[tuple, jax.Array]:
        rest, best = state
        b, a = truncated_svd(w - rest, rank, key)
        a = back(a)
        value = loss(a, b)
        return (rounded_weight(w - low(a, b), rounding), better((value, a, b), best)), value

    nothing = (jnp.float32(jnp.inf), jnp.zeros((rank, w.shape[1])), jnp.zeros((w.shape[0], rank)))
    keys = jax.random.split(key, iterations)
    (_, best), first = lax.scan(alternate, (jnp.zeros_like(w), nothing), keys)

    h = jnp.asarray(hadamard_matrix(rank)) if rotation else None

    def turned(theta: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        a, b = theta["a"] * scale_a, theta["b"] * scale_b
        if h is None:
            return a, b
        r = _matmul(jax.scipy.linalg.expm(_TURN * (theta["skew"] - theta["skew"].T)), h)
        return _matmul(r, a), _matmul(b, r.T)

    # The unit of a step: what changes the branch by about as much as it still misses.
    missing = jnp.sqrt(best[0] * signal / jnp.maximum(jnp.sum(jnp.square(low(*best[1:]))), 1e-30))
    rms = (jnp.sqrt(jnp.mean(jnp.square(x))) for x in best[1:])
    scale_a, scale_b = (jnp.maximum(r * jnp.minimum(missing, 1.0), 1e-30) for r in rms)
    theta = {"a": best[1] / scale_a, "b": best[2] / scale_b}
    if rotation:
        theta["skew"] = jnp.zeros((rank, rank))
    optimizer = optax.adam(optax.cosine_decay_schedule(learning_rate, max(steps, 1)))

    def step(state: tuple, _: None) -> tuple[tuple, jax.Array]:
        theta, moments, best = state
        value, gradient = jax.value_and_grad(lambda theta: loss(*turned(theta)))(theta)
        best = better((value, *turned(theta)), best)
        updates, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(theta, updates), moments, best), value

    (_, _, best), rest = lax.scan(step, (theta, optimizer.init(theta), best), None, length=steps)
    return Optimized(best[1], best[2], best[0], jnp.concatenate([first, rest]))
