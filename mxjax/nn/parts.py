"""Calibrate and quantize any nnx model, a part of its weights at a time, so that statistics fit into memory.

Public as ``mxjax.nnx.calibrate_and_quantize``. Where ``quantize_sequential`` walks the blocks of a language model, this
runs the whole float model, whatever its inputs are: a diffusion transformer takes latents, times and captions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mxjax import api
from mxjax.algorithms import ALGORITHMS
from mxjax.calibration.accumulate import SAMPLE_ROWS
from mxjax.calibration.gather import gather
from mxjax.calibration.stats import LayerStats
from mxjax.config import QuantConfig
from mxjax.errors import CalibrationError
from mxjax.nn.calibrate import tapped
from mxjax.nn.devices import to_host
from mxjax.nn.jobs import Target, jobs_of, solved, warn_of_unshared_scales
from mxjax.nn.nnx_graph import check, config_for, install, owners_of, params_of
from mxjax.nn.nnx_layers import QParam
from mxjax.nn.sequential import BlockProgress, Progress
from mxjax.ops.qweight import QWeight
from mxjax.ops.tap import capture
from mxjax.transforms.base import fit, needs_fit

STATISTICS_BYTES = 8 * 2**30


def calibrate_and_quantize(
    model: Any,
    batches: Iterable[Any],
    cfg: str | QuantConfig,
    *,
    statistics_bytes: int = STATISTICS_BYTES,
    host: bool = False,
    progress: Progress | None = None,
) -> Any:
    """A copy of the model with quantized weights, calibrated on the inputs that the float model's layers have.

    Weights that share an input (q, k, v) share its statistics and its transform, and with ``cfg.calibration.fuse`` are
    quantized as one wide weight with one branch, as SVDQuant does. Statistics of an input of K channels take ``8 K^2``
    bytes; where those of all inputs are more than ``statistics_bytes``, the weights are taken in parts, and the batches
    run through the float model once for each part.

    Args:
      model: an nnx Module. It is not changed.
      batches: what it is called with: one array, or a tuple of arguments, for each batch; NumPy arrays stay on the host
        until their turn. Equal shapes compile once.
      cfg: a recipe name or a QuantConfig; of its ``calibration`` only ``fuse`` is looked at.
      statistics_bytes: device memory for statistics.
      host: quantized weights are NumPy arrays: they leave the device at once.
      progress: called with a :class:`~mxjax.nn.sequential.BlockProgress` (weights done, and all) as weights are done.

    Raises:
      CalibrationError: matched weights whose input was never seen, or no batches.
      ConfigError: matched weights that cannot run quantized, or whose input cannot be seen.

    Warns:
      MxjaxWarning: rules that match nothing, a config that quantizes nothing, or ``share_scales`` for weights that are
        not solved as one: they keep tensor scales of their own.

    Example:
      >>> model = flax.nnx.Sequential(flax.nnx.Linear(64, 32, rngs=flax.nnx.Rngs(0)), flax.nnx.relu)
      >>> qmodel = calibrate_and_quantize(model, [jnp.ones((10, 64))], "mr_gptq_mxfp4")
      >>> qmodel(jnp.ones((1, 64))).shape
      (1, 32)
    """
    model, cfg, batches = nnx.clone(model), config_for(model, cfg), list(batches)
    variables, values, axes = params_of(model)
    todo = api.plan(values, cfg, axes=axes)
    check(todo, variables, owners_of(model))
    api.warn_unused(todo)
    targets = {}
    for entry in todo.quantized:
        needs_stats = next(rule for rule in cfg.rules if rule.matches(entry.path)).needs_data
        targets[entry.path] = Target(entry.path, entry.spec, ALGORITHMS[entry.algorithm or ""], needs_stats)
    out: dict[str, QWeight] = {}

    def keep(done: Mapping[str, QWeight]) -> None:
        for path, w in done.items():
            out[path] = to_host(w) if host else jax.block_until_ready(w)
        if progress is not None:
            progress(BlockProgress(len(out), len(targets), f"{len(out)} of {len(targets)} weights"))

    for part in _parts(_inputs(model, targets, batches), statistics_bytes):
        wanted = {path: targets[path].spec.axis for group in part for path in group if targets[path].needs_stats}
        stats: dict[str, LayerStats] = {}
        if wanted:
            stats = gather(*tapped(model, None, wanted), batches, list(wanted))
        for group in part:
            for sought in (True, False):
                members = [path for path in group if targets[path].needs_stats is sought]
                if members:
                    known = stats[members[0]] if sought else None
                    keep(_quantized({path: values[path] for path in members}, targets, known, cfg))
            for path in group:
                stats.pop(path, None)  # what is done needs no memory
    warn_of_unshared_scales(out, cfg)
    return install(model, {id(variables[path]): QParam(w) for path, w in out.items()})


def _inputs(model: Any, targets: Mapping[str, Target], batches: list[Any]) -> list[tuple[list[str], int]]:
    """The weights of each distinct input, and the bytes of its statistics."""
    if not targets:
        return []
    if not batches:
        raise CalibrationError("calibration got no batches")
    axes = {path: target.spec.axis for path, target in targets.items()}
    f, state = tapped(model, None, axes)
    batch = batches[0] if isinstance(batches[0], tuple) else (batches[0],)
    look: Callable[..., Any] = lambda state, batch: capture(f, state, *batch, wanted=axes.__contains__)[1]  # noqa: E731
    found = jax.eval_shape(look, state, batch)
    out = []
    for paths, x, stack in zip(found.members(), found.inputs, found.stacks, strict=True):
        k, gathered = x.shape[-1], any(targets[path].needs_stats for path in paths)
        out.append((paths, 4 * math.prod(x.shape[:stack]) * k * (2 * k + SAMPLE_ROWS) if gathered else 0))
    if missing := sorted(set(axes) - {path for paths, _ in out for path in paths}):
        raise CalibrationError(f"calibration never saw the input of {', '.join(missing)}; exclude these weights")
    return out


def _parts(inputs: list[tuple[list[str], int]], limit: int) -> list[list[list[str]]]:
    """Runs of inputs whose statistics fit together; one input alone may be larger."""
    parts: list[list[list[str]]] = []
    used = 0
    for paths, nbytes in inputs:
        if not parts or used + nbytes > limit:
            parts.append([])
            used = 0
        parts[-1].append(paths)
        used += nbytes
    return parts


def _quantized(
    kernels: dict[str, jax.Array], targets: Mapping[str, Target], stats: LayerStats | None, cfg: QuantConfig
) -> dict[str, QWeight]:
    """The weights of one input. Those whose rules ask for the same transform share it, fitted to all of them."""
    first = targets[next(iter(kernels))]
    mine = {path: jnp.asarray(w) for path, w in kernels.items() if first.sees_like(targets[path])}
    spec, transform = first.spec, first.spec.transform
    if needs_fit(transform):
        last = [jnp.moveaxis(w, targets[path].spec.axis, -1) for path, w in mine.items()]
        transform = fit(transform, stats, last, spec.path, spec.rounding)
    seen = stats
    if stats is not None and transform is not None:
        seen = replace(stats.through(transform), transform=transform)
    out: dict[str, QWeight] = {}
    for job in jobs_of(mine, targets, seen, cfg.calibration.fuse):
        out |= job.split(solved([job])[0])
    others = {path: w for path, w in kernels.items() if path not in mine}
    return out | (_quantized(others, targets, stats, cfg) if others else {})
