"""A rule for each input: transform, scale policies and solver together, by what they really give."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from mxjax import recipes
from mxjax.algorithms import ALGORITHMS
from mxjax.calibration.stats import LayerStats
from mxjax.config import DEFAULT_EXCLUDE, QuantConfig, Rule
from mxjax.errors import ConfigError
from mxjax.ops.qdot import qdot
from mxjax.search.groups import Member, groups_of
from mxjax.transforms.measure import sample_of


def search_rules(
    params: Any,
    stats: Mapping[str, LayerStats],
    candidates: Sequence[str | QuantConfig | Rule],
    *,
    exclude: Sequence[str] = DEFAULT_EXCLUDE,
    report: Any = None,
) -> QuantConfig:
    """For each input the candidate rule whose quantized layer is closest to the float one.

    Every candidate is carried out in full (calibrated transform, scales, solver) on all weights of the input at once,
    and ``|qdot(x, Q) - x W|^2 / |x W|^2`` is measured on the sampled inputs. So unlike ``Choose``, which looks at
    round-to-nearest only, it also compares scale policies and solvers. It costs as much as quantizing the model once
    with each candidate.

    Args:
      params: any pytree of float arrays.
      stats: of ``mxjax.calibrate``: each with a sample of its inputs.
      candidates: rules, or recipes by name or as configs (their first rule is meant). Their paths do not matter.
        Where none is free of transforms, round to nearest without one is added in front: it wins ties.
      exclude: as in QuantConfig.
      report: called with (paths, errors) for each input; errors in the order of the candidates, the added one first.

    Returns:
      A QuantConfig with a rule for each path; ``mxjax.save_config`` stores it.

    Raises:
      ConfigError: no candidates, or one that leaves the weight as it is.
      CalibrationError: weights without statistics or without sampled inputs.

    Example:
      >>> params = {"a": {"kernel": jax.random.normal(jax.random.key(0), (64, 8))}}
      >>> x = jax.random.normal(jax.random.key(1), (128, 64))
      >>> stats = mxjax.calibrate(lambda p, x: mxjax.qdot(x, p["a"]["kernel"]), params, [x], "mxfp4")
      >>> search_rules(params, stats, ["mxfp4_a16", "gptq_mxfp4_a16"]).rules[0].algorithm
      'gptq'
    """
    rules = [c if isinstance(c, Rule) else recipes.get(c).rules[0] for c in candidates]
    if not rules or any(rule.weight is None for rule in rules):
        raise ConfigError("search_rules takes one candidate rule or more, each with a weight format")
    if not any(rule.transform is None and rule.algorithm != "wush_gptq" for rule in rules):
        rules.insert(0, replace(rules[0], transform=None, algorithm="rtn", options={}))
    rules = [replace(rule, path="") for rule in rules]
    everywhere = QuantConfig(rules=[rules[0]], exclude=tuple(exclude))
    chosen: list[Rule] = []
    for members, layer in groups_of(params, stats, everywhere):
        parts = [members] if all(m.value.ndim == 2 for m in members) else [[m] for m in members]
        for part in parts:
            errors = [_error(part, layer, rule, everywhere) for rule in rules]
            if report is not None:
                report([m.path for m in part], errors)
            best = rules[min(range(len(rules)), key=errors.__getitem__)]
            chosen += [replace(best, path=f"^{re.escape(m.path)}$") for m in part]
    return everywhere.replace(rules=chosen, name="search_rules")


def _error(members: list[Member], layer: LayerStats, rule: Rule, cfg: QuantConfig) -> float:
    path = " + ".join(m.path for m in members)
    wide = jnp.concatenate([jnp.moveaxis(jnp.asarray(m.value), m.spec.axis, -1) for m in members])
    spec = replace(rule, axis=-1).spec(path, wide.ndim, on_nonfinite=cfg.on_nonfinite, on_uneven=cfg.on_uneven)
    x = sample_of(layer, "search_rules", path)
    return float(_relative_error(x, wide.astype(jnp.float32), ALGORITHMS[rule.algorithm](wide, spec, layer)))


@jax.jit
def _relative_error(x: jax.Array, w: jax.Array, q: Any) -> jax.Array:
    dot = partial(qdot, x, precision=jax.lax.Precision.HIGHEST)
    exact = jnp.tensordot(x, w, axes=(-1, -1), precision=jax.lax.Precision.HIGHEST)
    return jnp.sum(jnp.square(dot(q) - exact)) / jnp.maximum(jnp.sum(jnp.square(exact)), 1e-30)
