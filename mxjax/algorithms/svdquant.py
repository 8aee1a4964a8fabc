"""SVDQuant (arXiv 2411.05007): a low-rank branch in 16 bits takes what is hard to quantize of a weight."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.algorithms.base import WeightSpec
from mxjax.algorithms.low_rank import BRANCHES, parsed, rows_of, with_branch
from mxjax.calibration.stats import LayerStats
from mxjax.core.svd import truncated_svd
from mxjax.errors import CalibrationError
from mxjax.ops.qweight import QWeight
from mxjax.transforms.base import Rounding
from mxjax.transforms.measure import branch_error, measured_on, rounded_weight

_DEFAULTS = {"rank": 32, "iterations": 100, "residual": "rtn", "seed": 0}


def svdquant(w: jax.Array, spec: WeightSpec, stats: LayerStats | None = None) -> QWeight:
    """``Q(x T) Q(R)^T + (x A^T) B^T`` with ``W = R + B A``, A and B of rank 32 in bfloat16.

    The branch is the truncated SVD of the transformed weight; then in turn ``Q = Q(W - B A)`` and ``B A = SVD(W - Q)``,
    as long as the error of the layer's output falls, 100 times at most; the best is kept. With SVDQuant's own
    smoothing (:class:`~mxjax.transforms.BranchSmooth`) as the transform this is the published algorithm; any other
    transform will do as well. In 16 bits a branch on the transformed input is one on the input itself,
    ``x T A^T = x (A T^T)^T``, which is how it is stored.

    Args:
      w: the weight, float, any rank of 2 and more; all of it shares one input.
      spec: formats, axis and transform. Options: ``rank``, ``iterations``, ``residual`` ("rtn", or "gptq" for GPTQ on
        what the branch leaves, with its options as ``gptq_observer``, ...), ``seed`` of the randomised SVD.
      stats: LayerStats of the input. With rounded inputs the error is measured on ``stats.sample``; weight-only in the
        Hessian norm.

    Raises:
      CalibrationError: no statistics, a stack of them, or no sample where inputs are rounded.
      ConfigError: unknown options.
      BlockShapeError, NonFiniteError: as ``quantize_array``.

    Example:
      >>> x = jax.random.normal(jax.random.key(0), (256, 64))
      >>> stats = LayerStats(hessian=x.T @ x, n_tokens=jnp.array(256), amax=jnp.abs(x).max(0), sample=x)
      >>> w = svdquant(jnp.ones((64, 8)), WeightSpec(path="w", format=mxjax.get_format("mxfp4")), stats)
      >>> w.branch.rank
      32
    """
    options = parsed("svdquant", spec, _DEFAULTS, {})
    if stats is None:
        raise CalibrationError(
            f"{spec.path}: svdquant needs calibration statistics for this weight; run stats = mxjax.calibrate(model, "
            f"params, batches, cfg) with the same config and pass mxjax.quantize(..., stats=stats)"
        )
    rows = rows_of(w, spec, stats)
    stats.check(rows.turned.shape[-1], spec.path)
    seen = stats if rows.transform is None or stats.transform is not None else stats.through(rows.transform)
    data = measured_on(seen, spec.rounding, "svdquant", spec.path)
    solve = partial(decompose, rounding=spec.rounding, rank=options["rank"], iterations=options["iterations"])
    keys = jax.random.split(jax.random.key(options["seed"]), rows.turned.shape[0])
    found = [solve(data, one, key) for one, key in zip(rows.turned, keys, strict=True)]
    a = jnp.stack([f.a for f in found])
    if rows.transform is not None:
        a = rows.transform.undo_weight(a)
    b = jnp.stack([f.b for f in found])
    return with_branch(w, rows, a, b, BRANCHES["w16a16"], spec, stats, **options)


class Decomposition(NamedTuple):
    """The best branch found, and how.

    Attributes:
      a, b: [r, K] and [N, r].
      error: relative squared error of the output with it.
      errors: [iterations], of each iterate; NaN after the last.
    """

    a: jax.Array
    b: jax.Array
    error: jax.Array
    errors: jax.Array


@partial(jax.jit, static_argnames=("rounding", "rank", "iterations"))
def decompose(
    data: jax.Array, w: jax.Array, key: jax.Array, *, rounding: Rounding, rank: int, iterations: int
) -> Decomposition:
    """``B A = SVD(W - Q)``, ``Q = Q(W - B A)`` in turn from ``Q = 0`` until the error rises; the best of them.

    Args:
      data: inputs [n, K] in the space of ``w``, or the Hessian [K, K] where inputs stay float.
      w: [N, K].
      key: of the randomised SVD.
    """

    class State(NamedTuple):
        i: Any
        q: Any
        best: Decomposition
        improving: Any

    def step(s: State) -> State:
        b, a = truncated_svd(w - s.q, rank, jax.random.fold_in(key, s.i))
        q = rounded_weight(w - b @ a, rounding)
        error = branch_error(data, w, q, a, b, rounding)
        errors = s.best.errors.at[s.i].set(error)
        better = error < s.best.error
        best = jax.tree.map(partial(jnp.where, better), Decomposition(a, b, error, errors), s.best)
        return State(s.i + 1, q, best._replace(errors=errors), better)

    n, k = w.shape
    nothing = Decomposition(
        jnp.zeros((rank, k)), jnp.zeros((n, rank)), jnp.float32(jnp.inf), jnp.full(iterations, jnp.nan)
    )
    start = State(jnp.int32(0), jnp.zeros_like(w), nothing, jnp.bool_(True))
    return lax.while_loop(lambda s: (s.i < iterations) & s.improving, step, start).best
