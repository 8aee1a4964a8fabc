"""Quantized trees on a mesh: from the PartitionSpecs of the float weights to those of codes, scales and factors.

    rules = {"up": {"kernel": P(None, "model")}, "down": {"kernel": P("model", None)}}     # as for the float model
    params = mxjax.sharding.shard(params, mesh, rules)
    qparams = mxjax.quantize(params, "mxfp4")                               # keeps the shardings
    qspecs = mxjax.sharding.specs(rules, "mxfp4", qparams, mesh=mesh)       # for shard_map, jit, device_put

Everything below this is JAX's own: ``NamedSharding``, ``jit``, ``shard_map``. docs/sharding.md has whole examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mxjax import api, recipes
from mxjax.algorithms import ALGORITHMS, gptq, rtn
from mxjax.config import QuantConfig
from mxjax.core.qtensor import QTensor
from mxjax.errors import ConfigError
from mxjax.ops.qweight import is_quantized
from mxjax.ops.shard_weight import shard_weight as shard_weight
from mxjax.ops.sharded import ShardedWeight as ShardedWeight
from mxjax.ops.specs import check_even, entries_of, shards_of, weight_specs
from mxjax.transforms.base import needs_fit

_ANY = 1 << 14  # stands for the length of an axis that nobody said: a multiple of every block


def specs(
    tree_specs: Any,
    cfg: str | QuantConfig = "mxfp4",
    tree: Any = None,
    *,
    mesh: Any = None,
    axes: Mapping[str, int] | None = None,
    on_uneven: str = "error",
) -> Any:
    """PartitionSpecs of the quantized tree, from those of the float tree.

    Codes, scales, tensor scales, low-rank factors and transforms of a weight are cut where the weight is
    (:func:`mxjax.ops.specs.weight_specs` has the table); what is not quantized keeps its spec.

    Args:
      tree_specs: a PartitionSpec for each float weight: a tree like ``tree``, in which a spec (None: replicated) may
        stand for a whole branch; or a function from a path, ``"layers/0/up/kernel"``, to a spec. Or the float tree
        itself on its mesh (arrays or ``jax.ShapeDtypeStruct`` with a NamedSharding), which is ``tree`` and ``mesh``
        as well.
      cfg: the recipe; not looked at for weights of ``tree`` that are quantized.
      tree: the float tree or the quantized one; ``jax.eval_shape`` of either will do. Recipes whose transforms or
        branches depend on data need the quantized one. None: the specs name every axis of their arrays, and the
        QWeights of the result, whose ``size`` is 0, are for looking up specs by path.
      mesh: whose sizes decide whether shards hold whole blocks. None, or no sizes (``tree`` is None): not checked.
      axes: as in :func:`mxjax.plan`.
      on_uneven: "error", or "reshard", where a shard of a contraction axis would cut a block.

    Returns:
      A tree like the quantized one, with a PartitionSpec for each array.

    Raises:
      BlockShapeError: a block that would cross a shard, or an axis that is not cut evenly, with path, axis, mesh and
        the way out.
      ConfigError: specs that do not fit the tree or the mesh, or a recipe whose result only data can tell.

    Example:
      >>> P = PartitionSpec
      >>> params = {"up": {"kernel": jnp.ones((64, 8)), "bias": jnp.zeros(8)}}
      >>> out = specs({"up": {"kernel": P(None, "model"), "bias": P("model")}}, "mxfp4", params)
      >>> out["up"]["kernel"].qtensor.codes == P("model", None), out["up"]["bias"] == P("model")
      (True, True)
    """
    sized = tree is not None
    if tree is None:
        tree_specs, tree, mesh, sized = _read_off(tree_specs, mesh)
    entries = {entry.path: entry for entry in api.plan(tree, recipes.get(cfg), axes=axes).entries}

    def one(path: str, spec: PartitionSpec | None, leaf: Any) -> Any:
        for entry in spec or () if mesh is not None else ():
            shards_of(entry, mesh, path)
        if not is_quantized(leaf):
            if entries[path].spec is None:
                return _plain(spec, leaf, mesh if sized else None, path)
            leaf = _structure(leaf, entries[path])
        out = weight_specs(spec, leaf, mesh=mesh if sized else None, path=path, on_uneven=on_uneven)
        return out if sized else jax.tree.map(_unsized, out, is_leaf=lambda x: isinstance(x, QTensor))

    return _each(one, tree_specs, tree)


def shard(tree: Any, mesh: Any, tree_specs: Any, *, on_uneven: str = "reshard") -> Any:
    """The tree on a mesh: float, quantized, or with both kinds of leaves.

    NumPy arrays and memory maps (``mxjax.load(folder, shardings=mxjax.io.HOST)``) are read by shards: a process touches
    only what its own devices get. JAX arrays move as ``jax.device_put`` moves them.

    Args:
      tree: arrays, QWeights, QTensors.
      mesh: a ``jax.sharding.Mesh``.
      tree_specs: as in :func:`specs`; a QWeight may have a QWeight of specs, or the spec of its float weight.
      on_uneven: "reshard", or "error".

    Raises:
      BlockShapeError, ConfigError: as :func:`specs`. JAX cuts evenly, so float arrays are never resharded here.

    Example:
      >>> mesh = jax.make_mesh((1,), ("model",))
      >>> qparams = mxjax.quantize({"up": {"kernel": jnp.ones((64, 8))}}, "mxfp4")
      >>> shard(qparams, mesh, PartitionSpec(None, "model"))["up"]["kernel"].qtensor.codes.sharding.spec[0]
      'model'
    """
    return jax.tree.map(_put, tree, named(mesh, per_array(tree_specs, tree, mesh=mesh, on_uneven=on_uneven)))


def constrain(tree: Any, tree_specs: Any, *, mesh: Any = None) -> Any:
    """``jax.lax.with_sharding_constraint`` on every array of a tree, inside ``jit``.

    Args:
      tree: arrays, QWeights, QTensors.
      tree_specs: as in :func:`shard`.
      mesh: None: the mesh of ``jax.set_mesh``.

    Raises:
      BlockShapeError, ConfigError: as :func:`specs`.
    """
    out = per_array(tree_specs, tree, mesh=mesh)
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, out if mesh is None else named(mesh, out))


def named(mesh: Any, tree_specs: Any) -> Any:
    """A NamedSharding for each PartitionSpec of a tree: for ``jax.device_put``, ``jit`` and ``mxjax.load``.

    Example:
      >>> named(jax.make_mesh((1,), ("data",)), {"a": PartitionSpec("data")})["a"].spec[0]
      'data'
    """
    return jax.tree.map(partial(NamedSharding, mesh), tree_specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def per_array(tree_specs: Any, tree: Any, *, mesh: Any = None, on_uneven: str = "error") -> Any:
    """A PartitionSpec for each array of ``tree``, which may be float, quantized, or both, as it is.

    Args:
      tree_specs, mesh, on_uneven: as in :func:`specs`; a QWeight may have a QWeight of specs.
      tree: of arrays or of ``jax.ShapeDtypeStruct``.
    """

    def one(path: str, spec: Any, leaf: Any) -> Any:
        if not is_quantized(leaf):
            return _plain(spec, leaf, mesh, path)
        if is_quantized(spec):
            return jax.tree_util.tree_map_with_path(lambda keys, _: _at(spec, keys, path), leaf)
        return weight_specs(spec, leaf, mesh=mesh, path=path, on_uneven=on_uneven)

    return _each(one, tree_specs, tree)


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, (PartitionSpec, NamedSharding)) or is_quantized(x)


def _each(one: Callable[[str, Any, Any], Any], tree_specs: Any, tree: Any) -> Any:
    """``one(path, spec, leaf)`` for every leaf of the tree, a QWeight being one leaf."""

    def branch(keys: tuple, spec: Any, below: Any) -> Any:
        def leaf(more: tuple, x: Any) -> Any:
            path = api.path_str((*keys, *more))
            found = spec(path) if callable(spec) else spec
            return one(path, found.spec if isinstance(found, NamedSharding) else found, x)

        return jax.tree_util.tree_map_with_path(leaf, below, is_leaf=is_quantized)

    if callable(tree_specs):
        return branch((), tree_specs, tree)
    try:
        return jax.tree_util.tree_map_with_path(branch, tree_specs, tree, is_leaf=_is_spec)
    except ValueError as e:
        if isinstance(e, ConfigError) or type(e) is not ValueError:
            raise
        raise ConfigError(f"the specs do not have the structure of the tree: {e}") from None


def _plain(spec: PartitionSpec | None, leaf: Any, mesh: Any, path: str) -> PartitionSpec:
    """The spec of an array that is not quantized, after a look at the mesh."""
    if is_quantized(spec):
        raise ConfigError(f"{path}: specs of a quantized weight for an array that is none")
    entries = entries_of(spec, len(getattr(leaf, "shape", ())), path)
    check_even(entries, getattr(leaf, "shape", ()), mesh, path)
    return PartitionSpec() if spec is None else spec


def _structure(leaf: Any, entry: api.PlanEntry) -> Any:
    """The QWeight that an algorithm will make, without values."""
    assert entry.spec is not None
    run = ALGORITHMS[entry.algorithm or ""]
    run = rtn if run is gptq else run  # the same fields
    if needs_fit(entry.spec.transform) or entry.algorithm in ("svdquant", "wush_gptq"):
        raise ConfigError(
            f"{entry.path}: what {entry.algorithm} with the transform {entry.spec.transform} makes depends on data; "
            f"give specs the quantized tree (or jax.eval_shape of it) as tree"
        )
    spec = replace(entry.spec, options={**entry.spec.options, "residual": "rtn"} if run is not rtn else {})
    return jax.eval_shape(lambda w: run(w, spec), jax.ShapeDtypeStruct(entry.shape, leaf.dtype))


def _read_off(tree_specs: Any, mesh: Any) -> tuple[Any, Any, Any, bool]:
    """Specs, tree, mesh, and whether sizes are known, where the caller gave one tree only."""
    if callable(tree_specs):
        raise ConfigError("specs from a function need the tree itself: specs(function, cfg, tree)")
    leaves, treedef = jax.tree_util.tree_flatten(tree_specs, is_leaf=_is_spec)
    if all(x is None or isinstance(x, PartitionSpec) for x in leaves):
        shapes = [jax.ShapeDtypeStruct((_ANY,) * len(x or ()), "float32") for x in leaves]
        return tree_specs, jax.tree.unflatten(treedef, shapes), mesh, False
    found = []
    for x in leaves:
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding):
            mesh = mesh if mesh is not None else sharding.mesh
        elif x is None or isinstance(x, PartitionSpec):
            raise ConfigError("specs takes PartitionSpecs, or arrays with shardings, not both in one tree")
        found.append(sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec())
    return jax.tree.unflatten(treedef, found), tree_specs, mesh, True


def _unsized(x: Any) -> Any:
    return replace(x, size=0) if isinstance(x, QTensor) else x


def _at(spec: Any, keys: tuple, path: str) -> PartitionSpec:
    """The spec of one array of a QWeight, by the names that lead to it."""
    for key in keys:
        name = getattr(key, "name", None)
        spec = getattr(spec, name, None) if name is not None else spec[key.idx]
        if spec is None:
            raise ConfigError(f"{path}: the specs have nothing at {jax.tree_util.keystr(keys)}")
    return spec


def _put(x: Any, sharding: NamedSharding) -> Any:
    if isinstance(x, jax.Array):
        return jax.device_put(x, sharding)
    x = x if isinstance(x, np.ndarray) else np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: np.asarray(x[index]))
