"""Statistics of everything that a function taps, in one pass over the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any

import jax

from mxjax.calibration.accumulate import SAMPLE_ROWS, GramSum, stats_of
from mxjax.calibration.stats import LayerStats
from mxjax.errors import CalibrationError
from mxjax.ops.tap import Captured, capture


class PureCall:
    """A function ``f(params, *batch)`` that is equal to others that compute the same, and hashable: of equal ones
    :func:`gather` compiles one. Subclasses are frozen dataclasses that hold no arrays."""

    def __call__(self, params: Any, *batch: Any) -> Any:
        raise NotImplementedError


def gather(f: Callable[..., Any], params: Any, batches: Iterable[Any], paths: list[str]) -> dict[str, LayerStats]:
    """Run ``f(params, *batch)`` over the batches and accumulate what its taps see of ``paths``.

    Args:
      f: what to run. A :class:`PureCall` is compiled once for all its equals, anything else once a call of this.
      params, batches: its arguments.
      paths: of the weights whose inputs are wanted.

    Raises:
      CalibrationError: no batches, or paths that no tap saw.
    """
    look, step = (_compiled_once if isinstance(f, PureCall) else _compiled)(f, frozenset(paths))
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


def _compiled(f: Callable[..., Any], paths: frozenset[str]) -> tuple[Callable[..., Captured], Callable[..., Any]]:
    """What sees the inputs of the paths in one batch, and what adds it to the sums, which are donated."""

    def look(params: Any, batch: tuple) -> Captured:
        return capture(f, params, *batch, wanted=paths.__contains__)[1]

    @partial(jax.jit, donate_argnums=0)
    def step(sums: Any, params: Any, batch: tuple) -> Any:
        return [total.add(x) for total, x in zip(sums, look(params, batch).inputs, strict=True)]

    return look, step


_compiled_once = lru_cache(maxsize=8)(_compiled)
