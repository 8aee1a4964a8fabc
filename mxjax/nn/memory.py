"""How many bytes a run by block is expected to take on a device."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

import jax

from mxjax.nn.probes import forward
from mxjax.nn.stages import Group, Work, accumulate, first_pass, gathers, zero_sums
from mxjax.text import size_text


@dataclass(frozen=True)
class ExpectedBytes:
    """What one block is expected to take on a device, in bytes. It does not depend on the number of blocks.

    Attributes:
      weights: the block's float and quantized weights.
      statistics: running sums and Hessians of one stage.
      batch: one batch of activations and all that XLA computes from it.
      solver: quantizing the largest weight.
    """

    weights: int
    statistics: int
    batch: int
    solver: int

    @property
    def total(self) -> int:
        """Batches and solves take turns."""
        return self.weights + self.statistics + max(self.batch, self.solver)

    def __str__(self) -> str:
        parts = ", ".join(f"{f.name} {size_text(getattr(self, f.name))}" for f in fields(self))
        return f"{size_text(self.total)} on the device for one block at a time ({parts})"


def expected_bytes(work: Work, stages: tuple[tuple[Group, ...], ...]) -> ExpectedBytes:
    """The expectation for a block, before any of its work is done.

    Activations are what XLA says about the compiled programs; they are compiled here rather than at their first use.
    Quantizing is counted as seven K x K and eleven K x N float32 matrices, N over all weights that share an input, and
    groups of equal shape together.
    """
    copies = 2 if work.options.mismatch else 1
    stored, statistics, solver = 0, [0], [0]
    for stage in stages:
        # high, low, and the mean of both
        statistics.append(sum(4 * 3 * copies * math.prod(g.stack) * g.size**2 for g in stage))
        together: Counter[Any] = Counter()
        for group in stage:
            values = 0
            for path in group.paths:
                fmt, size = work.targets[path].spec.format, work.block.weight(path).size
                values += size
                stored += size * fmt.element.bits // 8 + size // fmt.block_size
            together[group.stack, group.size, values] += 4 * (7 * math.prod(group.stack) * group.size**2 + 12 * values)
        solver += together.values()
    return ExpectedBytes(
        weights=sum(x.nbytes for x in jax.tree.leaves(work.block.state)) + stored,
        statistics=max(statistics),
        batch=_program_bytes(work, stages[0]),
        solver=max(solver),
    )


def _program_bytes(work: Work, stage: tuple[Group, ...]) -> int:
    """Inputs, output and temporaries of the first program that runs on a batch; the others are no wider."""
    x, block = work.devices.batch(work.inputs[0]), work.block
    if not gathers(work, stage):
        return 2 * x.nbytes + _temporaries(forward.lower(block.graphdef, block.state, {}, x))
    asked = first_pass(work, stage)
    lowered = accumulate.lower(
        jax.eval_shape(lambda: zero_sums(stage, asked)),
        block.graphdef,
        block.state,
        {},
        x,
        x if asked.mismatch else None,
        asked.transforms,
        paths=tuple(group.paths[0] for group in stage),
        activations=tuple(asked.activations),
    )
    return (2 if work.options.mismatch else 1) * x.nbytes + _temporaries(lowered)


def _temporaries(lowered: Any) -> int:
    analysis = lowered.compile().memory_analysis()
    return 0 if analysis is None else analysis.temp_size_in_bytes
