"""GPTQ (arXiv 2210.17323) and MR-GPTQ (arXiv 2509.23202): rounding with error compensation on MX and NV grids."""

from __future__ import annotations

import math
import warnings
from dataclasses import fields
from functools import partial

import jax
import jax.numpy as jnp

from mxjax.algorithms.base import WeightSpec
from mxjax.algorithms.gptq_solver import ORDERS, SCALE_MODES, Solution, SolverOptions, inverse_factor, solve
from mxjax.algorithms.observers import OBSERVERS, observe
from mxjax.calibration.stats import LayerStats, check_finite, transform_gram
from mxjax.core import packing
from mxjax.core.formats import NAN_BYTE
from mxjax.core.qtensor import QTensor
from mxjax.errors import BlockShapeError, CalibrationError, ConfigError, MxjaxWarning, NonFiniteError
from mxjax.ops.qweight import QWeight
from mxjax.transforms.base import fit, needs_fit

_SOLVER_OPTIONS = {f.name for f in fields(SolverOptions)}


def gptq(w: jax.Array, spec: WeightSpec, stats: LayerStats | None = None) -> QWeight:
    """Quantize a weight so that the layer's *output* changes least: ``min tr (W - Q) H (W - Q)^T``.

    The weight is transformed, its scales are observed, and its columns are rounded one after the other, each column's
    error compensated in those to come (:mod:`mxjax.algorithms.gptq_solver`). With a block Hadamard transform, the
    observer ``mse`` and ``act_order="column"`` this is MR-GPTQ. With statistics of the input mismatch
    (``CalibrationOptions(mismatch=True)``) and ``correction`` it is asymmetric calibration, as in GPTAQ and Qronos.

    Args:
      w: the weight, float, any rank of 2 and more.
      spec: formats, axis and transform. Options (``Rule.options``): ``observer`` ("minmax", "mse", "alternating"; see
        :mod:`mxjax.algorithms.observers`), ``correction`` (0 to 1: how much of the mismatch between the float model's
        input and this one's is corrected first, as in GPTAQ and Qronos; needs ``stats.cross``), and those of
        :class:`~mxjax.algorithms.gptq_solver.SolverOptions`: ``damping``, ``block_size``, ``act_order``, ``scales``,
        ``guard``.
      stats: a :class:`~mxjax.calibration.stats.LayerStats`. Its Hessian may be stacked like the leading axes of the
        weight with the contraction axis moved last (experts: [E, K, K] for [E, in, out]), or serve all of them.

    Returns:
      A QWeight; codes and scales lie in the original column order whatever ``act_order`` was.

    Raises:
      CalibrationError: no statistics, statistics of another size, no token seen, or a Hessian that is not positive
        definite even with damping 1 (a NaN in it, for example). Never silently rounds to nearest. Where values cannot
        be looked at (inside ``jit``), a weight without a usable Hessian becomes NaN.
      ConfigError: unknown options.
      BlockShapeError, NonFiniteError: as ``quantize_array``.

    Warns:
      MxjaxWarning: more damping than asked for; members of a stack (experts) that saw no token, with all counts: those
        are rounded to nearest.

    Example:
      >>> x = jax.random.normal(jax.random.key(0), (256, 64))
      >>> stats = LayerStats(hessian=x.T @ x, n_tokens=jnp.array(256), amax=jnp.abs(x).max(0))
      >>> gptq(jnp.ones((64, 8)), WeightSpec(path="w", format=mxjax.get_format("mxfp4")), stats).shape
      (64, 8)
    """
    options, observer, correction = _parse_options(spec)
    if stats is None:
        raise CalibrationError(
            f"{spec.path}: gptq needs calibration statistics for this weight; run stats = mxjax.calibrate(model, "
            f"params, batches, cfg) with the same config and pass mxjax.quantize(..., stats=stats)"
        )
    axis = spec.axis % w.ndim - w.ndim
    moved = jnp.moveaxis(jnp.asarray(w), axis, -1).astype(jnp.float32)  # [*out, K]
    size = moved.shape[-1]
    stats.check(size, spec.path)
    if spec.transform is not None:
        spec.transform.check(size, spec.path)
    pad = -size % spec.format.block_size
    if pad and spec.on_uneven == "error":
        raise BlockShapeError(f"{spec.path}: axis {axis} of shape {w.shape} is no multiple of the {spec.format} block")
    moved, bad = finite(moved, spec)

    h = stats.hessian.astype(jnp.float32)
    cross = None if stats.cross is None or correction == 0 else stats.cross.astype(jnp.float32)
    if stats.transform is not None and spec.transform is None:
        raise CalibrationError(f"{spec.path}: the statistics were gathered after a transform that the rule lacks")
    transform = stats.transform if needs_fit(spec.transform) and stats.transform is not None else spec.transform
    transform = fit(transform, stats, [moved], spec.path, spec.rounding)
    if transform is not None:
        moved = transform.weight(moved)
        if stats.transform is None:
            h = transform_gram(transform, h)
            cross = None if cross is None else transform_gram(transform, cross)
    check_tokens(stats, h, spec)

    stack = h.shape[:-2]
    if moved.shape[: len(stack)] != stack:
        raise CalibrationError(
            f"{spec.path}: Hessians {h.shape} are stacked differently from the weight {w.shape} "
            f"(contraction axis {axis})"
        )
    flat_h = h.reshape(-1, size, size)
    rows = moved.reshape(math.prod(stack), -1, size)
    if cross is not None:
        rows = correct(rows, flat_h, cross.reshape(flat_h.shape), options.damping, correction)
    widen = ((0, 0), (0, 0), (0, pad))
    rows = jnp.pad(rows, widen)
    flat_h = jnp.pad(flat_h, ((0, 0), (0, pad), (0, pad)))

    batch_axes = min(max(w.ndim - 2, 0), w.ndim + axis)  # tensor scales as in rtn
    blocks = rows.reshape(*moved.shape[:-1], -1, spec.format.block_size)
    unit, byte, global_scale = _observe(blocks, spec.format, spec.scale, batch_axes, observer, spec.tensor_scale)
    solution = solve(
        unit.reshape(rows.shape), flat_h, byte.reshape(*rows.shape[:2], -1), fmt=spec.format, options=options
    )
    ok = _check_solution(solution, options, spec, stack)
    new_bytes = jnp.where(ok, solution.bytes, NAN_BYTE).reshape(byte.shape)
    if bad is not None:
        block_bad = jnp.pad(bad, [(0, 0)] * (bad.ndim - 1) + [(0, pad)]).reshape(blocks.shape).any(-1)
        new_bytes = jnp.where(block_bad, NAN_BYTE, new_bytes)
    codes = packing.pack(solution.codes.reshape(*moved.shape[:-1], size + pad), spec.format.element.bits)
    qtensor = QTensor(
        codes=codes,
        scales=new_bytes.astype(jnp.uint8),
        global_scale=global_scale,
        format=spec.format,
        axis=axis,
        size=size,
        dtype_name=jnp.dtype(w.dtype).name,
    )
    return QWeight(qtensor=qtensor, transform=transform, activation=spec.activation)


_observe = jax.jit(observe, static_argnums=(1, 2, 3, 4))


def _parse_options(spec: WeightSpec) -> tuple[SolverOptions, str, float]:
    options = dict(spec.options)
    observer, correction = options.pop("observer", "minmax"), float(options.pop("correction", 0.0))
    unknown = set(options) - _SOLVER_OPTIONS
    if unknown:
        known = sorted(_SOLVER_OPTIONS | {"observer", "correction"})
        raise ConfigError(f"{spec.path}: gptq knows no option {sorted(unknown)}; known: {', '.join(known)}")
    parsed = SolverOptions(**options)
    for name, value, choices in (
        ("observer", observer, OBSERVERS),
        ("act_order", parsed.act_order, ORDERS),
        ("scales", parsed.scales, SCALE_MODES),
    ):
        if value not in choices:
            raise ConfigError(f"{spec.path}: gptq option {name} is one of {choices}, not {value!r}")
    if parsed.scales != "frozen" and parsed.act_order == "column":
        raise ConfigError(
            f"{spec.path}: scales={parsed.scales!r} needs whole blocks in a row; use act_order 'block' or 'none'"
        )
    if not 0 < parsed.damping < math.inf or parsed.block_size < 1 or not 0 <= correction <= 1:  # NaN too
        raise ConfigError(
            f"{spec.path}: damping {parsed.damping} and block_size {parsed.block_size} are positive, correction "
            f"{correction} within 0 and 1"
        )
    return parsed, observer, correction


def finite(x: jax.Array, spec: WeightSpec) -> tuple[jax.Array, jax.Array | None]:
    """The weight without NaN and Inf, and where they were (under on_nonfinite "nan")."""
    good = jnp.isfinite(x)
    if spec.on_nonfinite == "raise" and not isinstance(x, jax.core.Tracer):
        if not bool(good.all()):
            raise NonFiniteError(
                f"{spec.path}: {int((~good).sum())} of {x.size} values are NaN or Inf (shape {x.shape}); "
                f"on_nonfinite='nan' marks their blocks, 'saturate' clamps them"
            )
        return x, None
    if spec.on_nonfinite == "saturate":
        return jnp.nan_to_num(x), None
    return jnp.where(good, x, 0.0), ~good


def check_tokens(stats: LayerStats, h: jax.Array, spec: WeightSpec) -> None:
    if isinstance(h, jax.core.Tracer):
        return
    check_finite(h, spec.path)
    counts = jnp.trace(h, axis1=-2, axis2=-1) > 0
    if not bool(counts.any()):
        raise CalibrationError(
            f"{spec.path}: calibration saw no nonzero input for this weight ({stats.n_tokens} tokens); "
            f"calibrate with data that reaches it, or give it algorithm 'rtn'"
        )
    if not bool(counts.all()):
        listing = jnp.broadcast_to(stats.n_tokens, counts.shape).tolist()
        warnings.warn(
            f"{spec.path}: {int((~counts).sum())} of {counts.size} stacked weights saw no calibration token and are "
            f"rounded to nearest; tokens: {listing}",
            MxjaxWarning,
            stacklevel=4,
        )


def _check_solution(solution: Solution, options: SolverOptions, spec: WeightSpec, stack: tuple[int, ...]) -> jax.Array:
    """Raise or warn about the factorization; returns ok, broadcastable against [B, N, blocks]."""
    if not isinstance(solution.ok, jax.core.Tracer):
        if not bool(solution.ok.all()):
            failed = [i for i, ok in enumerate(solution.ok.reshape(-1).tolist()) if not ok]
            where = f" (members {failed} of the stack {stack})" if stack else ""
            raise CalibrationError(
                f"{spec.path}{where}: the Hessian is not positive definite even with {options.damping} to 1 times its "
                f"mean diagonal added; the calibration data are degenerate, or the statistics are damaged"
            )
        most = float(solution.damping.max())
        if most > 1.5 * options.damping:
            warnings.warn(
                f"{spec.path}: the Hessian needed damping {most:.2g} instead of {options.damping:.2g}",
                MxjaxWarning,
                stacklevel=4,
            )
    return solution.ok[:, None, None]


@partial(jax.jit, static_argnames=("damping", "correction"))
def correct(rows: jax.Array, h: jax.Array, cross: jax.Array, damping: float, correction: float) -> jax.Array:
    """``W + c W (C - H) (H + d)^-1``: the weight that maps this layer's input to the float model's output best.

    Asymmetric calibration, as in GPTAQ (arXiv 2504.02692) and Qronos (arXiv 2505.11695): with ``H = x^T x`` and
    ``C = x_float^T x``, setting the gradient of ``|x W'^T - x_float W^T|^2 + d |W' - W|^2`` to zero gives
    ``W' (H + d) = W (C + d)``, which is this for ``c = 1``. With ``c = 0`` or ``C = H`` it is W itself.
    """

    def one(w, h, cross):
        seen = jnp.trace(h) > 0  # an expert that saw no token keeps its weight
        u, _, _ = inverse_factor(jnp.where(seen, h, jnp.eye(h.shape[-1])), damping)
        matmul = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
        return w + correction * matmul(matmul(matmul(w, cross - h), u.T), u)

    return jax.vmap(one)(rows, h, cross)
