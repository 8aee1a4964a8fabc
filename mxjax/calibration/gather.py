"""Statistics of everything that a function taps, in one pass over the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax

from mxjax.calibration.accumulate import SAMPLE_ROWS, GramSum, stats_of
from mxjax.calibration.stats import LayerStats
from mxjax.errors import CalibrationError
from mxjax.ops.tap import Captured, capture


def gather(f: Callable[..., Any], params: Any, batches: Iterable[Any], paths: list[str]) -> dict[str, LayerStats]:
    """Run ``f(params, *batch)`` over the batches and accumulate what its taps see of ``paths``.

    Raises:
      CalibrationError: no batches, or paths that no tap saw.
    """

    @partial(jax.jit, donate_argnums=0)
    def step(sums: Any, params: Any, batch: tuple) -> Any:
        seen = look(params, batch)
        return [total.add(x) for total, x in zip(sums, seen.inputs, strict=True)]

    def look(params: Any, batch: tuple) -> Captured:
        return capture(f, params, *batch, wanted=set(paths).__contains__)[1]

    sums: list[GramSum] | None = None
    members: list[list[str]] = []
    for batch in batches:
        batch = batch if isinstance(batch, tuple) else (batch,)
        if sums is None:
            shapes = jax.eval_shape(look, params, batch)
            members = shapes.members()
            missing = sorted(set(paths) - set(shapes.groups))
            if missing:
                raise CalibrationError(
                    f"calibration never saw the input of {', '.join(missing)}; multiply with mxjax.qdot, call "
                    f"mxjax.calibration.tap(path, x) before the product, or exclude these weights"
                )
            sums = [
                GramSum.zeros(x.shape[-1], x.shape[:stack], SAMPLE_ROWS)
                for x, stack in zip(shapes.inputs, shapes.stacks, strict=True)
            ]
        sums = step(sums, params, batch)
    if sums is None:
        raise CalibrationError("calibration got no batches")
    return {
        path: stats for group, total in zip(members, sums, strict=True) for stats in [stats_of(total)] for path in group
    }
