"""Calibrate and quantize block by block: each block sees the errors of the quantized blocks before it.

The device holds one block's weights, its statistics, and one batch of activations; the activations of all calibration
sequences wait on the host. Memory does not depend on the number of blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mxjax.calibration.accumulate import SAMPLE_ROWS, GramSum, stats_of
from mxjax.calibration.options import CalibrationOptions
from mxjax.calibration.stats import LayerStats
from mxjax.core import codec, scales
from mxjax.errors import ConfigError
from mxjax.nn.probes import Block, run_block
from mxjax.ops.qweight import QWeight
from mxjax.ops.tap import capture
from mxjax.transforms.base import fit, needs_fit


@dataclass(frozen=True)
class Target:
    """One weight of a block: how it will be quantized (a WeightSpec) and by what."""

    path: str  # inside the block
    spec: Any
    algorithm: Callable[..., QWeight]
    needs_stats: bool  # plain rounding does not


def quantize_blocks_in_order(
    model: Any,
    batches: Iterable[Any],
    targets: list[dict[str, Target]],
    options: CalibrationOptions,
    progress: Callable[[str], None] | None = None,
) -> dict[str, QWeight]:
    """Quantize the blocks of ``model`` one after the other. ``mxjax.quantize_sequential`` is the door to this.

    Args:
      model: an nnx module with ``embed``, ``layers`` and ``head``.
      batches: token arrays [B, S].
      targets: for each block, its weights by path inside the block.
      options: see :class:`CalibrationOptions`.
      progress: called with a line of text after each block.

    Returns:
      Quantized weights by full path (``layers/3/mlp/up_proj/kernel``).
    """
    embed = nnx.jit(lambda m, t: m.embed(t))
    streams = [np.asarray(embed(model, jnp.asarray(b))) for b in batches]
    quantized_stream = _rebatch(streams, options.batch_size)
    float_stream = quantized_stream
    needs_float = options.mismatch or not options.upstream
    out: dict[str, QWeight] = {}
    begin = time.perf_counter()
    for i, layer in enumerate(model.layers):
        block = Block(layer, targets[i].__contains__)
        table: dict[str, QWeight] = {}
        inputs = quantized_stream if options.upstream else float_stream
        for stage in _stages(block, inputs[0], targets[i], options):
            table |= _quantize_stage(block, table, inputs, float_stream, targets[i], stage, options)
        out |= {f"layers/{i}/{path}": w for path, w in table.items()}
        if options.upstream:
            quantized_stream = [np.asarray(block(jnp.asarray(x), table)) for x in quantized_stream]
        if needs_float:
            float_stream = [np.asarray(block(jnp.asarray(x))) for x in float_stream]
        if progress is not None:
            spent = time.perf_counter() - begin
            left = spent / (i + 1) * (len(model.layers) - i - 1)
            progress(f"block {i + 1}/{len(model.layers)}: {spent:.0f} s, {left:.0f} s left")
    return out


def _rebatch(streams: list[np.ndarray], size: int) -> list[np.ndarray]:
    """Equal batches of ``size`` sequences (one compilation); a smaller rest at the end."""
    if not streams:
        raise ConfigError("calibration got no batches")
    x = np.concatenate(streams)
    return [x[i : i + size] for i in range(0, len(x), size)]


def _stages(block: Block, x: Any, targets: dict[str, Target], options: CalibrationOptions) -> list[list[list[str]]]:
    """Groups of paths that share an input, in order of appearance; one stage for all, or one stage a group."""
    shapes = jax.eval_shape(
        lambda state, x: capture(run_block, block.graphdef, state, {}, x)[1],
        block.state,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
    )
    members = [[p for p in group if p in targets] for group in shapes.members()]
    members = [group for group in members if group]
    return [[group] for group in members] if options.true_sequential else [members]


def _quantize_stage(
    block: Block,
    table: dict[str, QWeight],
    inputs: list[np.ndarray],
    float_inputs: list[np.ndarray],
    targets: dict[str, Target],
    stage: list[list[str]],
    options: CalibrationOptions,
) -> dict[str, QWeight]:
    kernels = {path: _kernel(block, path) for group in stage for path in group}
    if not options.static_input_scale and not any(targets[path].needs_stats for path in kernels):
        return {path: targets[path].algorithm(kernel, targets[path].spec) for path, kernel in kernels.items()}
    firsts = [targets[group[0]].spec for group in stage]
    fits = [needs_fit(spec.transform) for spec in firsts]
    gather = partial(_gather, block, table, inputs, float_inputs, stage)
    quantized = options.inputs == "quantized" and any(spec.activation is not None for spec in firsts)
    transforms = [spec.transform for spec in firsts]
    off = [None] * len(stage)
    if any(fits):
        # The transform is chosen from the layer's own inputs; only then can anything be gathered in its space.
        fixed = [None if f else t for f, t in zip(fits, transforms, strict=True)]
        raw = gather(fixed, off, mismatch=False, sample=SAMPLE_ROWS)
        transforms = [
            fit(t, s, [_last(kernels[p], targets[p]) for p in group], group[0], spec.rounding)
            for t, s, spec, group in zip(transforms, raw, firsts, stage, strict=True)
        ]
    stats = gather(transforms, [s.activation for s in firsts] if quantized else off, mismatch=options.mismatch)
    out: dict[str, QWeight] = {}
    for group, s, transform in zip(stage, stats, transforms, strict=True):
        out |= _quantize_group({p: kernels[p] for p in group}, targets, transform, s, options.fuse)
        for path in group:
            spec = targets[path].spec
            if options.static_input_scale and spec.activation is not None and spec.activation.format.has_tensor_scale:
                amax = codec.bits_of(jnp.max(s.amax))
                out[path] = replace(out[path], input_scale=scales.tensor_scale(amax, spec.activation.scale))
    return out


def _quantize_group(
    kernels: dict[str, jax.Array], targets: dict[str, Target], transform: Any, stats: LayerStats, fuse: bool
) -> dict[str, QWeight]:
    """Weights with one input: as one wide weight where they are treated alike, so the Hessian is factorized once."""
    specs = {path: replace(targets[path].spec, transform=transform) for path in kernels}
    first = next(iter(specs))
    alike = all(
        replace(spec, path="") == replace(specs[first], path="") and targets[path].algorithm is targets[first].algorithm
        for path, spec in specs.items()
    )
    if not fuse or not alike or any(w.ndim != 2 or specs[p].axis != -2 for p, w in kernels.items()):
        return {path: targets[path].algorithm(w, specs[path], stats) for path, w in kernels.items()}
    spec = replace(specs[first], path=" + ".join(specs))
    wide = targets[first].algorithm(jnp.concatenate(list(kernels.values()), axis=1), spec, stats)
    out: dict[str, QWeight] = {}
    start = 0
    for path, w in kernels.items():
        rows = slice(start, start := start + w.shape[1])
        q = wide.qtensor
        out[path] = replace(wide, qtensor=replace(q, codes=q.codes[rows], scales=q.scales[rows]))
    return out


def _kernel(block: Block, path: str) -> jax.Array:
    node: Any = block.state
    for part in path.split("/")[:-1]:
        node = node[int(part) if part.isdigit() else part]
    return node["inner"]["kernel"][...]


def _last(kernel: jax.Array, target: Target) -> jax.Array:
    return jnp.moveaxis(kernel, target.spec.axis, -1)


def _gather(
    block: Block,
    table: dict[str, QWeight],
    inputs: list[np.ndarray],
    float_inputs: list[np.ndarray],
    stage: list[list[str]],
    transforms: list[Any],
    activations: list[Any],
    mismatch: bool,
    sample: int = 0,
) -> list[LayerStats]:
    sizes = [_kernel(block, group[0]).shape[-2] for group in stage]
    sums = [(GramSum.zeros(k, sample=sample), GramSum.zeros(k) if mismatch else None) for k in sizes]
    for x, x_float in zip(inputs, float_inputs, strict=True):
        sums = _accumulate(
            sums,
            block.graphdef,
            block.state,
            table,
            jnp.asarray(x),
            jnp.asarray(x_float) if mismatch else None,
            transforms,
            paths=tuple(group[0] for group in stage),
            activations=tuple(activations),
        )
    return [stats_of(total, cross, transform) for (total, cross), transform in zip(sums, transforms, strict=True)]


@partial(jax.jit, static_argnums=1, static_argnames=("paths", "activations"), donate_argnums=0)
def _accumulate(sums, graphdef, state, table, x, x_float, transforms, *, paths, activations):
    """Every group's sums with one batch added; paths are the groups' first members."""

    def inputs_of(table, x):
        seen = capture(run_block, graphdef, state, table, x, wanted=paths.__contains__)[1]
        return [seen.inputs[seen.groups[path]] for path in paths]

    mine = inputs_of(table, x)
    floats = mine if x_float is None else inputs_of({}, x_float)
    out = []
    for (total, cross), a, b, transform, activation in zip(sums, mine, floats, transforms, activations, strict=True):
        if transform is not None:
            a, b = transform.activation(a), transform.activation(b)
        if activation is not None:
            a = activation.quantize(a)
        out.append((total.add(a), None if cross is None else cross.add(b, a)))
    return out
