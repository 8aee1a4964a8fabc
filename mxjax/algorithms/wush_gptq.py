"""WUSH inside GPTQ (arXiv 2512.00956): each block's transform is found when the solver reaches the block.

Plain ``Wush`` fixes all transforms beforehand, from the float weight and the block's own second moments. Here a block
gets its transform from what is really left to round: the *compensated* weight, and the *conditional* Hessian, which
knows that earlier columns will make up for part of the error.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.algorithms.base import WeightSpec
from mxjax.algorithms.gptq import check_tokens, correct, finite
from mxjax.algorithms.gptq_solver import HIGHEST, damped_cholesky
from mxjax.algorithms.observers import best_bytes, round_unit
from mxjax.calibration.stats import LayerStats
from mxjax.core import codec, packing, scales
from mxjax.core.formats import NAN_BYTE, BlockFormat
from mxjax.core.qtensor import QTensor
from mxjax.core.quantize import quantize_blocks
from mxjax.errors import BlockShapeError, CalibrationError, ConfigError
from mxjax.ops.qweight import QWeight
from mxjax.transforms.base import NO_STACK
from mxjax.transforms.block_matrix import BlockMatrix
from mxjax.transforms.hadamard import hadamard_matrix

_DEFAULTS = {"damping": 0.01, "strength": 1.0, "observer": "minmax", "correction": 0.0}
_SPECTRUM_DAMPING = 0.01  # of the singular values, relative to their mean; the paper's
_NV_CEILING = 256.0  # E4M3 scale of the largest float block: room for compensation to make a block 1.75 times larger
_matmul = partial(jnp.matmul, precision=HIGHEST)


def wush_gptq(w: jax.Array, spec: WeightSpec, stats: LayerStats | None = None) -> QWeight:
    """Blocks from last to first: transform from the compensated weight, then nearest plane inside the block.

    With ``H = B^T B`` (``B`` upper triangular), ``d`` the error of the blocks done so far and ``y = B_bb w_b + B_b: d``
    (so ``B_bb^-1 y`` is the compensated weight and ``B_bb^T B_bb`` the Hessian given that earlier blocks adapt)::

        y y^T / N = V S^2 V^T          M_b = B_bb^-1 V S^(1 - l/2) Hadamard

    Inputs take ``x M``, weights ``M^-1 w``; scales are observed on the transformed block and frozen, and its elements
    are rounded last to first in the metric ``R``, ``B_bb M_b = Q R``, each error compensated in those before it.

    Args:
      w: the weight, float, any rank of 2 and more; all of it shares one input. ``quantize_sequential`` gives q, k and v
        (gate and up) as one weight, so that they share the transform.
      spec: formats and axis. Options (``Rule.options``): ``damping`` of the Hessian (0.01), ``strength`` l (1: WUSH;
        below: KBBQ's brake), ``observer`` of the block scales ("minmax": the rule's scale policy, or "mse"),
        ``correction`` as in ``gptq``.
      stats: LayerStats of the input itself, one Hessian.

    Returns:
      A QWeight with a :class:`~mxjax.transforms.BlockMatrix`.

    Raises:
      CalibrationError: no statistics, a stack of them, or a Hessian that no damping makes positive definite.
      ConfigError: unknown options, or a rule with a transform.
      BlockShapeError: a contraction axis that is no multiple of the block (a transform has no padding).
      NonFiniteError: as ``quantize_array``.

    Example:
      >>> x = jax.random.normal(jax.random.key(0), (256, 64))
      >>> stats = LayerStats(hessian=x.T @ x, n_tokens=jnp.array(256), amax=jnp.abs(x).max(0))
      >>> wush_gptq(jnp.ones((64, 8)), WeightSpec(path="w", format=mxjax.get_format("mxfp4")), stats).shape
      (64, 8)
    """
    options = _parse_options(spec)
    if stats is None:
        raise CalibrationError(
            f"{spec.path}: wush_gptq needs calibration statistics for this weight; run stats = mxjax.calibrate(model, "
            f"params, batches, cfg) with the same config and pass mxjax.quantize(..., stats=stats)"
        )
    axis = spec.axis % w.ndim - w.ndim
    moved = jnp.moveaxis(jnp.asarray(w), axis, -1).astype(jnp.float32)  # [*out, K]
    size, block = moved.shape[-1], spec.format.block_size
    stats.check(size, spec.path)
    if stats.hessian.ndim != 2 or stats.transform is not None:
        raise CalibrationError(
            f"{spec.path}: wush_gptq takes one Hessian of the layer's own input, not a stack{NO_STACK}"
        )
    if size % block:
        raise BlockShapeError(
            f"{spec.path}: axis {axis} of shape {w.shape} is no multiple of the {spec.format} block of {block}, and a "
            f"transform has no padding; give this weight a rule with algorithm 'gptq', or exclude it"
        )
    h = stats.hessian.astype(jnp.float32)
    check_tokens(stats, h, spec)
    moved, bad = finite(moved, spec)
    rows = moved.reshape(-1, size)
    if stats.cross is not None and options["correction"]:
        cross = stats.cross.astype(jnp.float32)
        rows = correct(rows[None], h[None], cross[None], options["damping"], options["correction"])[0]
    solution = solve(
        rows,
        h,
        fmt=spec.format,
        policy=spec.scale,
        observer=options["observer"],
        damping=options["damping"],
        strength=options["strength"],
    )
    if not isinstance(solution.ok, jax.core.Tracer) and not bool(solution.ok):
        raise CalibrationError(
            f"{spec.path}: the Hessian is not positive definite even with {options['damping']} to 1 times its mean "
            f"diagonal added; the calibration data are degenerate, or the statistics are damaged"
        )
    scale_bytes = jnp.where(solution.ok, solution.bytes, NAN_BYTE)
    if bad is not None:
        scale_bytes = jnp.where(bad.reshape(*scale_bytes.shape, block).any(-1), NAN_BYTE, scale_bytes)
    out = moved.shape[:-1]
    stacked = min(max(w.ndim - 2, 0), w.ndim + axis)  # axes with a tensor scale each, as rtn stores them
    qtensor = QTensor(
        codes=packing.pack(solution.codes.reshape(moved.shape), spec.format.element.bits),
        scales=scale_bytes.astype(jnp.uint8).reshape(*out, -1),
        global_scale=None if solution.global_scale is None else jnp.broadcast_to(solution.global_scale, out[:stacked]),
        format=spec.format,
        axis=axis,
        size=size,
        dtype_name=jnp.dtype(w.dtype).name,
    )
    transform = BlockMatrix(solution.matrices, jnp.float32(options["strength"]))
    return QWeight(qtensor=qtensor, transform=transform, activation=spec.activation)


def _parse_options(spec: WeightSpec) -> dict:
    options = {**_DEFAULTS, **spec.options}
    if unknown := set(options) - set(_DEFAULTS):
        raise ConfigError(f"{spec.path}: wush_gptq knows no option {sorted(unknown)}; known: {', '.join(_DEFAULTS)}")
    if options["observer"] not in ("minmax", "mse"):
        raise ConfigError(f"{spec.path}: wush_gptq option observer is 'minmax' or 'mse', not {options['observer']!r}")
    if not options["damping"] > 0 or not 0 <= options["strength"] <= 1 or not 0 <= options["correction"] <= 1:
        raise ConfigError(f"{spec.path}: damping is positive, strength and correction within 0 and 1, not {options}")
    if spec.transform is not None:
        raise ConfigError(f"{spec.path}: wush_gptq finds its own transforms; a rule with it has transform=None")
    return options


class WushSolution(NamedTuple):
    """``codes`` uint8 [N, K] and ``bytes`` uint8 [N, K / b] in the transformed space, ``matrices`` [K / b, b, b],
    ``global_scale`` [] or None, the relative ``damping`` used, and whether the Hessian could be factorized."""

    codes: jax.Array
    bytes: jax.Array
    matrices: jax.Array
    global_scale: jax.Array | None
    damping: jax.Array
    ok: jax.Array


@partial(jax.jit, static_argnames=("fmt", "policy", "observer", "damping", "strength"))
def solve(
    w: jax.Array, h: jax.Array, *, fmt: BlockFormat, policy: str, observer: str, damping: float, strength: float
) -> WushSolution:
    """The solver on plain arrays: ``w`` float32 [N, K], ``h`` float32 [K, K]. One scan over blocks."""
    n, size = w.shape
    b = fmt.block_size
    lower, used, ok = damped_cholesky(h, damping)  # B^T
    wt = w.T

    def factor(start: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.dynamic_slice(lower.T, (start, start), (b, b)), lax.dynamic_slice(h, (start, start), (b, b))

    starts = jnp.arange(0, size, b)
    global_scale = None
    if fmt.scale == "e4m3":
        # The transformed weights are known only block by block; those of the float weight give the range.
        def largest(start):
            upper, gram = factor(start)
            y = _matmul(upper, lax.dynamic_slice(wt, (start, 0), (b, n)))
            return jnp.max(jnp.abs(_transform(y, upper, gram, strength)[2]))

        amax = jnp.max(lax.map(largest, starts))
        global_scale = scales.tensor_scale(codec.bits_of(amax * (scales.NV_MAX_SCALE / _NV_CEILING)), "even")
    elif policy == "third":
        global_scale = jnp.float32(1 / 3)
    to_unit = 1.0 if global_scale is None else (3.0 if policy == "third" else 1 / global_scale)

    def block_step(d, start):
        upper, gram = factor(start)
        y = _matmul(lax.dynamic_slice(lower, (0, start), (size, b)).T, d)
        m, metric, turned = _transform(y, upper, gram, strength)
        unit = (turned * to_unit).T[:, None, :]
        if observer == "mse":
            byte = best_bytes(unit, fmt)[:, 0]
        else:
            one = jnp.ones((), jnp.float32) if fmt.scale == "e4m3" else None
            blocks = turned.T[:, None, :] if policy == "third" else unit
            byte = quantize_blocks(blocks, fmt, policy, 0, one)[1][:, 0]
        codes, values = _nearest_plane(y * to_unit, metric, byte, fmt)
        w_block = lax.dynamic_slice(wt, (start, 0), (b, n))
        d = lax.dynamic_update_slice(d, w_block - _matmul(m, values / to_unit), (start, 0))
        return d, (codes, byte, m)

    _, (codes, byte, m) = lax.scan(block_step, wt, starts, reverse=True)
    return WushSolution(
        codes=jnp.moveaxis(codes, -1, 0).reshape(n, size),
        bytes=byte.T,
        matrices=m,
        global_scale=global_scale,
        damping=used,
        ok=ok & jnp.all(jnp.isfinite(m)),
    )


def _transform(
    y: jax.Array, upper: jax.Array, gram: jax.Array, strength: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of one block: ``M``, the metric ``B_bb M``, and the transformed compensated weight ``(B_bb M)^-1 y`` [b, N]."""
    b, n = y.shape
    squares, v = jnp.linalg.eigh(_matmul(y, y.T) / n)
    v = v * jnp.where(jnp.sum(v, axis=0) < 0, -1.0, 1.0)  # a sign of their own, not the linear algebra library's
    s = jnp.sqrt(jnp.maximum(squares, 0.0))
    s = s + _SPECTRUM_DAMPING * jnp.mean(s)
    s = jnp.where(jnp.max(s) > 0, s, 1.0)  # a block of zeros
    hadamard = jnp.asarray(hadamard_matrix(b))
    metric = _matmul(v * s ** (1 - strength / 2), hadamard)
    m = jax.scipy.linalg.solve_triangular(upper, metric, lower=False)
    # The scale of M is free; keep the second moment of the activations in this block, so that blocks stay as large
    # beside each other as they were.
    before, after = jnp.trace(gram), jnp.sum(m * _matmul(gram, m))
    norm = jnp.where(before > 0, jnp.sqrt(after / jnp.where(before > 0, before, 1.0)), 1.0)
    inverse = _matmul(hadamard, _matmul((v * s ** (strength / 2 - 1)).T, y))
    return m / norm, metric / norm, inverse * norm


def _nearest_plane(y: jax.Array, metric: jax.Array, byte: jax.Array, fmt: BlockFormat) -> tuple[jax.Array, jax.Array]:
    """Codes and values [b, N] of unit-space columns, rounded last to first: Babai's nearest plane for ``metric``."""
    q, r = jnp.linalg.qr(metric)
    z = _matmul(q.T, y)

    def element(step, state):
        codes, values = state
        i = y.shape[0] - 1 - step
        # Rows of `values` up to i are still zero, so the whole row of r may take part.
        wanted = (z[i] - _matmul(r[i], values)) / r[i, i]
        code, value = round_unit(wanted, byte, fmt)
        return codes.at[i].set(code), values.at[i].set(value)

    init = (jnp.zeros(y.shape, jnp.uint8), jnp.zeros_like(y))
    return lax.fori_loop(0, y.shape[0], element, init)
