"""The functions that walk trees: ``plan``, ``quantize``, ``dequantize``, ``summary``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from mxjax import recipes
from mxjax.algorithms import ALGORITHMS
from mxjax.algorithms.base import WeightSpec
from mxjax.algorithms.on_mesh import MeshWeight, lies_on_mesh, quantize_on_mesh
from mxjax.calibration.stats import LayerStats
from mxjax.config import QuantConfig, Rule
from mxjax.core.processes import on_host
from mxjax.core.qtensor import QTensor
from mxjax.errors import BlockShapeError, CalibrationError, MxjaxWarning
from mxjax.ops.qweight import QWeight, is_quantized
from mxjax.transforms.base import describe


@dataclass(frozen=True)
class PlanEntry:
    """What will happen to one leaf. ``spec`` is None where it stays, and ``reason`` says why."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: WeightSpec | None
    algorithm: str | None
    reason: str


@dataclass(frozen=True)
class Plan:
    """The decisions of a config on one tree, in the tree's order."""

    entries: tuple[PlanEntry, ...]
    unused_rules: tuple[Rule, ...]

    @property
    def quantized(self) -> list[PlanEntry]:
        return [e for e in self.entries if e.spec is not None]

    @property
    def kept(self) -> list[PlanEntry]:
        return [e for e in self.entries if e.spec is None]

    def __str__(self) -> str:
        lines = [f"{e.path}  {e.shape} {e.dtype}: {e.reason}" for e in self.entries]
        lines += [f"rule {rule.path!r} matches nothing" for rule in self.unused_rules]
        return "\n".join(lines)


def path_str(path: tuple) -> str:
    """A key path as text: ``layers/0/mlp/up_proj/kernel``. The ``value`` inside a Flax Variable is left out."""
    parts = []
    for key in path:
        for attribute in ("key", "idx", "name"):
            if hasattr(key, attribute):
                parts.append(str(getattr(key, attribute)))
                break
        else:
            parts.append(str(key))
    if len(parts) > 1 and isinstance(path[-1], jax.tree_util.GetAttrKey) and parts[-1] == "value":
        parts.pop()  # an attribute of a Variable, not a key of the user's
    return "/".join(parts)


def plan(params: Any, cfg: str | QuantConfig, *, axes: Mapping[str, int] | None = None) -> Plan:
    """What ``quantize(params, cfg)`` would do, leaf by leaf. Needs shapes and dtypes only (``eval_shape`` trees do).

    Args:
      params: any pytree of arrays.
      cfg: a recipe name or a QuantConfig.
      axes: contraction axes by path that the caller knows (``mxjax.nnx`` reads them off the modules), for rules that
        name none.

    Raises:
      ConfigError: an unknown recipe.
      BlockShapeError: contraction axes that the block does not divide (every one listed), under on_uneven="error".
    """
    cfg = recipes.get(cfg)
    used: set[Rule | int] = set()
    entries, uneven = [], []
    for key_path, leaf in jax.tree_util.tree_flatten_with_path(params, is_leaf=is_quantized)[0]:
        entry, rule_index, is_uneven = _plan_leaf(path_str(key_path), leaf, cfg, axes or {})
        if rule_index is not None:
            used.add(rule_index)
        if is_uneven:
            uneven.append(entry)
        entries.append(entry)
    if uneven and cfg.on_uneven == "error":
        listing = "\n".join(f"  {e.path} {e.shape}: {e.reason}" for e in uneven)
        raise BlockShapeError(
            f"{len(uneven)} contraction axes are no multiple of the block:\n{listing}\n"
            f"use QuantConfig(on_uneven='skip') to leave them, 'pad' to store them padded, or exclude them"
        )
    return Plan(tuple(entries), tuple(rule for i, rule in enumerate(cfg.rules) if i not in used))


def _plan_leaf(path: str, leaf: Any, cfg: QuantConfig, axes: Mapping[str, int]) -> tuple[PlanEntry, int | None, bool]:
    """The entry, the index of the rule that decided it, and whether the block leaves a rest."""
    shape = tuple(getattr(leaf, "shape", ()))
    dtype = getattr(leaf, "dtype", None)

    index = next((i for i, rule in enumerate(cfg.rules) if rule.matches(path)), None)

    def keep(reason: str, uneven: bool = False) -> tuple[PlanEntry, int | None, bool]:
        return PlanEntry(path, shape, str(dtype), None, None, reason), index, uneven

    if is_quantized(leaf):
        return keep("quantized already")
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return keep("not a float array")
    if len(shape) < 2:
        return keep(f"not a matrix: it has {len(shape)} axes")
    pattern = cfg.excluded_by(path)
    if pattern is not None:
        return keep(f"excluded by {pattern!r}")
    if index is None:
        return keep("no rule matches")
    rule = cfg.rules[index]
    if rule.weight is None:
        return keep(f"rule {rule.path!r} leaves it")
    if rule.axis is None and path in axes:
        rule = replace(rule, axis=axes[path])
    spec = rule.spec(path, len(shape), on_nonfinite=cfg.on_nonfinite, on_uneven=cfg.on_uneven)
    if -spec.axis > len(shape):
        raise BlockShapeError(f"{path}: rule {rule.path!r} names axis {spec.axis}, but the shape is {shape}")
    block = spec.format.block_size
    if shape[spec.axis] % block and cfg.on_uneven != "pad":
        reason = f"axis {spec.axis} of length {shape[spec.axis]} is no multiple of {block} ({spec.format})"
        return keep(reason, uneven=True)
    if spec.transform is not None:
        try:
            spec.transform.check(shape[spec.axis], path)
        except BlockShapeError as e:
            if cfg.on_uneven == "pad":
                raise
            return keep(str(e), uneven=True)
    activation = spec.activation.format.name if spec.activation else "float"
    reason = f"{rule.algorithm}: weight {spec.format}, activation {activation}, axis {spec.axis}"
    return PlanEntry(path, shape, str(dtype), spec, rule.algorithm, reason), index, False


def quantize(
    params: Any,
    cfg: str | QuantConfig = "mxfp4",
    stats: Mapping[str, Any] | None = None,
    *,
    axes: Mapping[str, int] | None = None,
) -> Any:
    """Quantize the weights of a tree: the same tree with a QWeight in the place of each matched leaf.

    Paths are walked in order; the first matching rule decides. Embeddings, output heads, norms, routers, convolutions,
    biases and scales are left by default (``QuantConfig.exclude``); :func:`plan` lists what happens to every leaf.
    Works on any pytree: Flax linen params, nnx State, nested dicts, dataclasses; under ``jit`` and ``eval_shape`` too
    (transforms that are found on the host, ``Wush`` and ``Choose``, only outside).

    Weights on a mesh (``NamedSharding``) stay as they are cut, and become the codes and scales that one device would
    make of them: plain rounding works on each shard where it is; what sums over a whole weight (GPTQ, branches, fitted
    transforms) is done for one weight a device, the weights spread over the devices by cost.

    Args:
      params: pytree of float arrays.
      cfg: a recipe name ("mxfp4", "nvfp4_a16", ...; see :mod:`mxjax.recipes`) or a QuantConfig.
      stats: calibration statistics by path, where an algorithm needs them.
      axes: as in :func:`plan`.

    Returns:
      A pytree of the same structure.

    Raises:
      ConfigError, BlockShapeError: as :func:`plan`.
      CalibrationError: statistics that are missing, broken, or of another layer; Wush or Choose fitted inside ``jit``.
      NonFiniteError: NaN or Inf in a weight (``QuantConfig.on_nonfinite="raise"``, concrete arrays).

    Warns:
      MxjaxWarning: rules that match nothing, a config that quantizes nothing, or a weight whose shards would cut a
        block, and that is therefore cut along another axis.

    Example:
      >>> qparams = quantize({"layer": {"kernel": jnp.ones((64, 8)), "bias": jnp.zeros(8)}}, "mxfp4")
      >>> qparams["layer"]["kernel"].qtensor.codes.shape
      (8, 32)

    Source of the formats: OCP Microscaling Formats (MX) v1.0; NVFP4.
    """
    todo = plan(params, cfg, axes=axes)
    stats = _checked_stats(stats, todo)
    warn_unused(todo)
    leaves, treedef = jax.tree_util.tree_flatten(params, is_leaf=is_quantized)
    out = _quantized(leaves, todo.entries, stats)
    again = list(todo.entries)
    for members in sharing(todo.entries, out, recipes.get(cfg)):
        own = [_values(out[i].qtensor.global_scale) for i in members]
        shared = jnp.max(jnp.stack(own), axis=0)
        for i, scale in zip(members, own, strict=True):
            if isinstance(shared, jax.core.Tracer) or not jnp.array_equal(scale, shared):
                spec = again[i].spec
                assert spec is not None
                again[i] = replace(again[i], spec=replace(spec, tensor_scale=shared))
    changed = [new if new is not old else replace(old, spec=None) for new, old in zip(again, todo.entries, strict=True)]
    return jax.tree_util.tree_unflatten(treedef, _quantized(leaves, changed, stats, out))


def _quantized(
    leaves: list[Any], entries: Sequence[PlanEntry], stats: Mapping[str, LayerStats], others: list[Any] | None = None
) -> list[Any]:
    """The leaves, those quantized whose entries say how; the rest as they are in ``others`` (default: ``leaves``)."""
    out = list(leaves if others is None else others)
    on_mesh: dict[int, MeshWeight] = {}
    for i, e in enumerate(entries):
        if e.spec is None:
            continue
        if lies_on_mesh(leaves[i]):
            on_mesh[i] = MeshWeight(leaves[i], e.spec, e.algorithm or "", stats.get(e.path))
        else:
            out[i] = ALGORITHMS[e.algorithm or ""](leaves[i], e.spec, stats.get(e.path))
    for i, q in zip(on_mesh, quantize_on_mesh(list(on_mesh.values())), strict=True):
        out[i] = q
    return out


def _values(scale: Any) -> jax.Array:
    """A tensor scale that can be compared with others, wherever on a mesh it lies."""
    return jnp.asarray(scale if isinstance(scale, jax.core.Tracer) else on_host(scale))


def warn_unused(todo: Plan) -> None:
    """Warn the caller of the calling function of rules that match nothing, and of a plan that quantizes nothing."""
    for rule in todo.unused_rules:
        warnings.warn(f"rule {rule.path!r} matches no parameter", MxjaxWarning, stacklevel=3)
    if not todo.quantized:
        warnings.warn("nothing was quantized; mxjax.plan(params, cfg) lists why", MxjaxWarning, stacklevel=3)


def _checked_stats(stats: Any, todo: Plan) -> Mapping[str, LayerStats]:
    """The statistics as a mapping by path, empty where there are none."""
    stats = {} if stats is None else stats
    if not isinstance(stats, Mapping):
        raise CalibrationError(f"stats are LayerStats by path, as mxjax.calibrate returns, not {type(stats).__name__}")
    for e in todo.quantized:
        if not isinstance(stats.get(e.path), LayerStats | None):
            raise CalibrationError(f"{e.path}: its statistics are {type(stats[e.path]).__name__}, not LayerStats")
    return stats


def sharing(entries: Sequence[PlanEntry], leaves: list[Any], cfg: QuantConfig) -> list[list[int]]:
    """Indices of the weights that share a tensor scale: same group, format, scale policy and stacking."""
    groups: dict[Any, list[int]] = {}
    for i, (e, leaf) in enumerate(zip(entries, leaves, strict=True)):
        group = None if e.spec is None else cfg.scale_group(e.path)
        if group is not None and e.spec is not None and e.spec.format.has_tensor_scale:
            key = (group, e.spec.format, e.spec.scale, leaf.qtensor.global_scale.shape)
            groups.setdefault(key, []).append(i)
    return [members for members in groups.values() if len(members) > 1]


def dequantize(tree: Any, dtype: Any = None) -> Any:
    """The tree with every QWeight and QTensor replaced by its float values, in the original space and shape.

    Args:
      tree: a quantized tree (other leaves stay).
      dtype: of the results; default: the dtype each was made from.
    """

    def one(leaf: Any) -> Any:
        if isinstance(leaf, QTensor):
            leaf = QWeight(qtensor=leaf)
        return leaf.dequantize(dtype) if isinstance(leaf, QWeight) else leaf

    return jax.tree.map(one, tree, is_leaf=is_quantized)


@dataclass(frozen=True)
class SummaryRow:
    """One leaf of a tree."""

    path: str
    shape: tuple[int, ...]
    weight: str
    activation: str
    extras: str
    nbytes: int
    bits_per_value: float
    quantized: bool


@dataclass(frozen=True)
class Summary:
    """Rows and totals of a quantized tree; ``print(summary)`` is a table."""

    rows: tuple[SummaryRow, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tree."""
        return sum(r.nbytes for r in self.rows)

    @property
    def quantized_nbytes(self) -> int:
        return sum(r.nbytes for r in self.rows if r.quantized)

    @property
    def bits_per_weight(self) -> float:
        """Mean stored bits of a value over the quantized weights, scales and low-rank branches included."""
        rows = [r for r in self.rows if r.quantized]
        values = sum(r.nbytes * 8 / r.bits_per_value for r in rows if r.bits_per_value)
        return sum(r.nbytes * 8 for r in rows) / values if values else 0.0

    def __str__(self) -> str:
        head = ("path", "shape", "weight", "activation", "extras", "bits", "bytes")
        cells = [
            (
                r.path,
                "x".join(map(str, r.shape)),
                r.weight,
                r.activation,
                r.extras,
                f"{r.bits_per_value:.2f}",
                f"{r.nbytes:,}",
            )
            for r in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in [head, *cells]
        ]
        quantized = sum(r.quantized for r in self.rows)
        lines.append(
            f"{quantized} of {len(self.rows)} leaves quantized, {self.bits_per_weight:.2f} bits a weight; "
            f"{self.nbytes:,} bytes in all"
        )
        return "\n".join(lines)


def summary(tree: Any) -> Summary:
    """What a (quantized) tree holds: format, size and bits a value of every leaf, and totals.

    Example:
      >>> summary(quantize({"a": {"kernel": jnp.ones((64, 8))}}, "mxfp4")).bits_per_weight
      4.25
    """
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_quantized)[0]
    return Summary(tuple(_summary_row(path_str(path), leaf) for path, leaf in flat))


def _summary_row(path: str, leaf: Any) -> SummaryRow:
    shape = tuple(getattr(leaf, "shape", ()))
    values = 1
    for n in shape:
        values *= n
    if isinstance(leaf, QTensor):
        leaf = QWeight(qtensor=leaf)
    if not isinstance(leaf, QWeight):
        nbytes = values * jnp.dtype(leaf.dtype).itemsize if hasattr(leaf, "dtype") else 0
        return SummaryRow(path, shape, str(getattr(leaf, "dtype", type(leaf).__name__)), "-", "kept", nbytes,
                          nbytes * 8 / values if values else 0.0, False)  # fmt: skip
    extras = [] if leaf.transform is None else [describe(leaf.transform)]
    if leaf.branch is not None:
        extras.append(f"rank {leaf.branch.rank}")
    activation = leaf.activation.format.name if leaf.activation else "float"
    return SummaryRow(path, shape, leaf.format.name, activation, ", ".join(extras), leaf.nbytes,
                      leaf.nbytes * 8 / values if values else 0.0, True)  # fmt: skip
