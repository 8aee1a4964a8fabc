"""The weights of a tree that a config quantizes, those with one input together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from mxjax import api
from mxjax.algorithms.base import WeightSpec
from mxjax.calibration.stats import LayerStats
from mxjax.config import QuantConfig, Rule
from mxjax.errors import CalibrationError, ConfigError
from mxjax.ops.qweight import is_quantized


@dataclass(frozen=True)
class Member:
    """One weight: what the config says about it, and its values."""

    path: str
    rule: Rule
    spec: WeightSpec
    value: jax.Array


def groups_of(
    params: Any, stats: Mapping[str, LayerStats], cfg: QuantConfig, *, fuse: bool = True
) -> list[tuple[list[Member], LayerStats]]:
    """Members with one LayerStats object are one group (``fuse``), in the order of the tree; or each is its own.

    Raises:
      CalibrationError: weights without statistics, all listed; statistics of another size, or with a NaN in them.
      ConfigError: a config that quantizes nothing.
    """
    todo = api.plan(params, cfg)
    leaves = jax.tree_util.tree_flatten(params, is_leaf=is_quantized)[0]
    missing = [entry.path for entry in todo.quantized if entry.path not in stats]
    if missing:
        raise CalibrationError(
            f"no statistics for {', '.join(missing)}; run stats = mxjax.calibrate(model, params, batches, cfg) with a "
            f"config that quantizes the same weights"
        )
    found: dict[Any, tuple[list[Member], LayerStats]] = {}
    for entry, leaf in zip(todo.entries, leaves, strict=True):
        if entry.spec is None:
            continue
        rule = next(rule for rule in cfg.rules if rule.matches(entry.path))
        layer = stats[entry.path].check(leaf.shape[entry.spec.axis], entry.path).check_finite(entry.path)
        key = id(layer) if fuse else entry.path
        found.setdefault(key, ([], layer))[0].append(Member(entry.path, rule, entry.spec, leaf))
    if not found:
        raise ConfigError("the config quantizes no parameter; mxjax.plan(params, cfg) lists why")
    return list(found.values())
