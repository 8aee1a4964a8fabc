"""The multiple-choice knapsack: one choice for each group, the smallest total error within a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mxjax.errors import ConfigError

MAX_CELLS = 20_000  # of the table of costs; beyond it costs are rounded up to a coarser unit


def allocate(costs: Sequence[Sequence[int]], errors: Sequence[Sequence[float]], budget: int) -> list[int]:
    """Choices ``c_g`` with the least ``sum errors[g][c_g]`` among those with ``sum costs[g][c_g] <= budget``.

    Dynamic programming over the cost above the cheapest choices, in units of the greatest common divisor of all such
    differences: exact. Sizes of a real model share large factors, so the table is small; where it would have more than
    20,000 columns, costs are rounded up to a 20,000th of the room, so the result stays within the budget and is best up
    to that rounding.

    Args:
      costs: for each group the cost of each choice (bits).
      errors: the error of each choice.
      budget: in the unit of the costs.

    Raises:
      ConfigError: even the cheapest choices exceed the budget.

    Example:
      >>> allocate([[4, 8], [4, 8]], [[3.0, 0.0], [5.0, 0.0]], budget=12)
      [0, 1]
    """
    cheapest = [min(c) for c in costs]
    room = int(budget) - sum(cheapest)
    if room < 0:
        raise ConfigError(f"a budget of {budget} is below {sum(cheapest)}, the cost of the cheapest choices")
    extra = [[int(c - low) for c in group] for group, low in zip(costs, cheapest, strict=True)]
    unit = math.gcd(*(e for group in extra for e in group)) or 1
    if room // unit > MAX_CELLS:
        unit = -(-room // MAX_CELLS)
    cells = min(room // unit, sum(-(-max(group) // unit) for group in extra))
    best = np.zeros(cells + 1)
    taken = np.zeros((len(extra), cells + 1), np.int16)
    for g, (group, group_errors) in enumerate(zip(extra, errors, strict=True)):
        options = np.full((len(group), cells + 1), np.inf)
        for i, (e, error) in enumerate(zip(group, group_errors, strict=True)):
            steps = -(-e // unit)
            if steps <= cells:
                options[i, steps:] = best[: cells + 1 - steps] + error
        taken[g] = np.argmin(options, axis=0)
        best = np.min(options, axis=0)
    out, column = [0] * len(extra), cells
    for g in reversed(range(len(extra))):
        out[g] = int(taken[g, column])
        column -= -(-extra[g][out[g]] // unit)
    return out
