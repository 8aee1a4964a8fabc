"""One stage of a block: gather the statistics of its inputs, choose transforms, quantize its weights.

A stage holds groups of weights; the weights of a group multiply the same input under the same transform.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.algorithms.loraq import loraq
from mxjax.algorithms.svdquant import svdquant
from mxjax.calibration.accumulate import SAMPLE_ROWS, GramSum, stats_of
from mxjax.calibration.options import CalibrationOptions
from mxjax.calibration.stats import LayerStats
from mxjax.core import codec, scales
from mxjax.nn.devices import Devices
from mxjax.nn.jobs import Target, jobs_of, solved
from mxjax.nn.probes import Block, run_block
from mxjax.ops.qweight import QWeight
from mxjax.ops.tap import capture
from mxjax.transforms.base import fit, needs_fit


@dataclass(frozen=True)
class Group:
    """Weights of a block that multiply the same input, and see it in the same space (:meth:`Target.sees_like`).

    Attributes:
      paths: inside the block.
      size: length of the contraction axis.
      stack: leading axes of the input that number separate weights (experts).
    """

    paths: tuple[str, ...]
    size: int
    stack: tuple[int, ...]


@dataclass(frozen=True)
class Work:
    """A block and all that its stages need.

    Attributes:
      block: the block with its float weights.
      targets: its weights by path.
      inputs, float_inputs: batches of its inputs, on the host; the second as the float model has them.
      options: how inputs are gathered.
      devices: where arrays go.
    """

    block: Block
    targets: Mapping[str, Target]
    inputs: Sequence[np.ndarray]
    float_inputs: Sequence[np.ndarray]
    options: CalibrationOptions
    devices: Devices


class Pass(NamedTuple):
    """What one pass over the data gathers: for each group, the space that its inputs are seen in; with how many rows
    of the inputs themselves."""

    transforms: list[Any]
    activations: list[Any]
    mismatch: bool
    sample: int = 0


def stages_of(work: Work) -> tuple[tuple[Group, ...], ...]:
    """The groups of a block in order of appearance: all in one stage, or with ``true_sequential`` each in its own."""
    block, x = work.block, work.inputs[0]
    seen = jax.eval_shape(
        lambda state, x: capture(run_block, block.graphdef, state, {}, x)[1],
        block.state,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
    )
    groups = []
    for members, shape, stack in zip(seen.members(), seen.inputs, seen.stacks, strict=True):
        left = [path for path in members if path in work.targets]
        while left:
            paths = tuple(p for p in left if _alike(work, left[0], p))
            groups.append(Group(paths, shape.shape[-1], shape.shape[:stack]))
            left = [path for path in left if path not in paths]
    return tuple((group,) for group in groups) if work.options.true_sequential else (tuple(groups),)


def _alike(work: Work, a: str, b: str) -> bool:
    return work.targets[a].sees_like(work.targets[b], rounded=work.options.inputs == "quantized")


def gathers(work: Work, stage: tuple[Group, ...]) -> bool:
    """Whether the stage looks at data at all."""
    return work.options.static_input_scale or any(work.targets[p].needs_stats for group in stage for p in group.paths)


def first_pass(work: Work, stage: tuple[Group, ...]) -> Pass:
    """The first pass over the data; the only one, unless transforms have to be chosen from what it sees."""
    final = _final_pass(work, stage, [_spec(work, group).transform for group in stage])
    if not any(map(needs_fit, final.transforms)):
        return final
    fixed = [None if needs_fit(t) else t for t in final.transforms]
    return Pass(fixed, [None] * len(stage), mismatch=False, sample=SAMPLE_ROWS)


def _final_pass(work: Work, stage: tuple[Group, ...], transforms: list[Any]) -> Pass:
    quantized = work.options.inputs == "quantized"
    activations = [_spec(work, group).activation if quantized else None for group in stage]
    # Float inputs are judged by the Hessian; rounded ones on rows of the input itself.
    measuring = any(work.targets[p].algorithm in (svdquant, loraq) for group in stage for p in group.paths)
    return Pass(transforms, activations, work.options.mismatch, SAMPLE_ROWS if measuring else 0)


def _spec(work: Work, group: Group) -> Any:
    return work.targets[group.paths[0]].spec


def quantize_stage(work: Work, table: dict[str, QWeight], stage: tuple[Group, ...]) -> dict[str, QWeight]:
    """The quantized weights of one stage.

    Args:
      work: the block, its weights and its inputs.
      table: weights of the block that are quantized already; later inputs come through them.
      stage: what to quantize now.
    """
    targets, options = work.targets, work.options
    kernels = {path: work.devices.one(work.block.weight(path)) for group in stage for path in group.paths}
    if not gathers(work, stage):
        return {path: targets[path].algorithm(kernel, targets[path].spec) for path, kernel in kernels.items()}
    asked = first_pass(work, stage)
    stats = _gather(work, table, stage, asked)
    wanted = [_spec(work, group).transform for group in stage]
    if any(map(needs_fit, wanted)):
        # A transform is chosen from the layer's own inputs; only then can anything be gathered in its space.
        transforms = [
            fit(t, s, [_last(kernels[p], targets[p]) for p in group.paths], spec.path, spec.rounding)
            for t, s, group in zip(wanted, stats, stage, strict=True)
            for spec in [_spec(work, group)]
        ]
        stats = _gather(work, table, stage, _final_pass(work, stage, transforms))
    jobs = [
        job
        for group, s in zip(stage, stats, strict=True)
        for job in jobs_of({p: kernels[p] for p in group.paths}, targets, s, options.fuse)
    ]
    solutions = zip(jobs, solved(jobs, work.devices.all), strict=True)
    out = {path: w for job, wide in solutions for path, w in job.split(wide).items()}
    if options.static_input_scale:
        for group, s in zip(stage, stats, strict=True):
            out |= {path: _with_input_scale(out[path], s) for path in group.paths}
    work.devices.look()
    return out


def _with_input_scale(w: QWeight, stats: LayerStats) -> QWeight:
    if w.activation is None or not w.activation.format.has_tensor_scale:
        return w
    return replace(w, input_scale=scales.tensor_scale(codec.bits_of(jnp.max(stats.amax)), w.activation.scale))


def _last(kernel: jax.Array, target: Target) -> jax.Array:
    return jnp.moveaxis(kernel, target.spec.axis, -1)


def _gather(work: Work, table: dict[str, QWeight], stage: tuple[Group, ...], asked: Pass) -> list[LayerStats]:
    """Statistics for each group, in one pass over all batches."""
    block, devices = work.block, work.devices
    sums = devices.whole(zero_sums(stage, asked))
    table, transforms = devices.whole(table), devices.whole(asked.transforms)
    for x, x_float in zip(work.inputs, work.float_inputs, strict=True):
        sums = accumulate(
            sums,
            block.graphdef,
            block.state,
            table,
            devices.batch(x),
            devices.batch(x_float) if asked.mismatch else None,
            transforms,
            paths=tuple(group.paths[0] for group in stage),
            activations=tuple(asked.activations),
        )
        devices.look()
    stats = [stats_of(total, cross) for total, cross in sums]
    return [replace(devices.one(s), transform=t) for s, t in zip(stats, asked.transforms, strict=True)]


def zero_sums(stage: tuple[Group, ...], asked: Pass) -> list[tuple[GramSum, GramSum | None]]:
    """Where :func:`accumulate` starts: a sum for each group, and one for the mismatch if it is wanted."""
    return [
        (GramSum.zeros(g.size, g.stack, asked.sample), GramSum.zeros(g.size, g.stack) if asked.mismatch else None)
        for g in stage
    ]


@partial(jax.jit, static_argnums=1, static_argnames=("paths", "activations"), donate_argnums=0)
def accumulate(sums, graphdef, state, table, x, x_float, transforms, *, paths, activations):
    """Every group's sums with one batch added; paths are the groups' first members. The old sums are donated."""

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
