"""Statistics of a whole model in one pass over the data: nnx modules, linen modules, plain functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

from mxjax.calibration.accumulate import GramSum, stats_of
from mxjax.calibration.blocks import probe
from mxjax.calibration.stats import LayerStats
from mxjax.errors import CalibrationError
from mxjax.ops.tap import Captured, TappedWeight, capture, tap


def tapped(model: Any, params: Any, axes: Mapping[str, int]) -> tuple[Callable[..., Any], Any]:
    """A pure function ``f(params, *batch)`` that taps the inputs of the paths in ``axes``, and its params."""
    if isinstance(model, nnx.Module):
        graphdef, state = nnx.split(probe(model, axes.__contains__))
        return (lambda state, *batch: nnx.merge(graphdef, state)(*batch)), state
    if isinstance(model, nn.Module):

        def apply(params: Any, *batch: Any) -> Any:
            with nn.intercept_methods(partial(_tap_linen, axes)):
                return model.apply({"params": params}, *batch)

        return apply, params

    def wrap(path: tuple, leaf: Any) -> Any:
        name = "/".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)
        return TappedWeight(value=leaf, path=name, axis=axes[name]) if name in axes else leaf

    return (lambda params, *batch: model(jax.tree_util.tree_map_with_path(wrap, params), *batch)), params


def _tap_linen(axes: Mapping[str, int], call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
    module = context.module
    path = "/".join((*module.path, "kernel"))
    if context.method_name == "__call__" and path in axes and args:
        tap(path, args[0])
    return call(*args, **kwargs)


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
                GramSum.zeros(x.shape[-1], x.shape[:stack])
                for x, stack in zip(shapes.inputs, shapes.stacks, strict=True)
            ]
        sums = step(sums, params, batch)
    if sums is None:
        raise CalibrationError("calibration got no batches")
    return {
        path: stats for group, total in zip(members, sums, strict=True) for stats in [stats_of(total)] for path in group
    }
