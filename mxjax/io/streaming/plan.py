"""What will be read, quantized and written, decided from headers alone: no tensor is touched."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import api
from mxjax.algorithms import ALGORITHMS, WeightSpec
from mxjax.config import QuantConfig
from mxjax.errors import CheckpointError, ConfigError, MxjaxWarning
from mxjax.io import hf, sharded
from mxjax.io.safetensors import Entry, Spec

_HEAD, _COMPARED = "lm_head.weight", 1 << 24


@dataclass(frozen=True)
class Item:
    """One tensor of the source.

    Attributes:
      entry: where its values are.
      path: its place in the tree that the recipe's rules see.
      turned: the tree holds the transpose of the stored matrix (a Flax kernel).
      spec: how it is quantized, or None: it is copied.
      algorithm: name of the algorithm.
      dtype: of the copy.
      leaf: stands for what will be in the tree: right shapes and dtypes, no memory, values of 1.
    """

    entry: Entry
    path: str
    turned: bool
    spec: WeightSpec | None
    algorithm: str
    dtype: np.dtype
    leaf: Any


@dataclass
class Shard:
    """One file of the result.

    Attributes:
      name: of the file.
      items: what goes into it, with the tensors that each becomes.
    """

    name: str
    items: list[tuple[Item, dict[str, Spec]]] = field(default_factory=list)

    @property
    def float_bytes(self) -> int:
        """Of the tensors that it is made from."""
        return sum(item.entry.nbytes for item, _ in self.items)

    @property
    def specs(self) -> dict[str, Spec]:
        return {name: spec for _, stored in self.items for name, spec in stored.items()}


def read_source(folder: Path) -> tuple[dict[str, Any], dict[str, Entry]]:
    """The config and the tensors of a float Hugging Face folder, in the order in which they lie on the disk.

    Raises:
      CheckpointError: no such folder, damaged, or quantized already.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder")
    config = hf.read_config(folder)
    if config.get("quantization_config") or (folder / "mxjax.json").exists():
        raise CheckpointError(f"{folder} is quantized already; only float models can be quantized")
    entries = hf.read_entries(folder)
    return config, dict(sorted(entries.items(), key=lambda pair: (pair[1].file, pair[1].offset)))


def plan_items(
    config: dict[str, Any], entries: Mapping[str, Entry], cfg: QuantConfig, names: hf.Names | None, dtype: Any
) -> list[Item]:
    """What happens to every tensor. The decisions are those of ``mxjax.plan`` on the tree of the folder.

    A head that the config ties to the embedding is left out where both are the same bytes, so one table is on the disk;
    where they are not, ``config`` is changed to say so.

    Raises:
      CheckpointError: a tensor that cannot be a weight, or that ``names`` does not know.
      ConfigError, BlockShapeError: as ``mxjax.plan``.
    """
    paths = {name: hf.apply_names(names or hf.default_paths, name) for name in entries}
    cast = None if dtype is None else jnp.dtype(dtype)
    leaves = {}
    for name, entry in entries.items():
        turned = hf.is_flax_kernel(paths[name])
        if turned and len(entry.shape) != 2:
            raise CheckpointError(f"{name} in {entry.file}: {paths[name]} is a kernel, but the shape is {entry.shape}")
        floating = jnp.issubdtype(entry.dtype, jnp.floating)
        if floating and entry.dtype.itemsize == 1:
            raise CheckpointError(f"{name} in {entry.file}: an unknown tensor of {entry.dtype}, which is no weight")
        kind = cast if cast is not None and floating else entry.dtype
        leaves[paths[name]] = _stand_in(entry.shape[::-1] if turned else entry.shape, kind)
    hf.nest(leaves.items())  # refuses paths that collide
    planned = api.plan(hf.nest((path, leaf) for path, leaf in leaves.items()), cfg)
    if not planned.quantized:
        raise ConfigError("nothing would be quantized: no tensor is a matrix that a rule matches and nothing excludes")
    for rule in planned.unused_rules:
        warnings.warn(f"rule {rule.path!r} matches no parameter", MxjaxWarning, stacklevel=4)
    decisions = {entry.path: entry for entry in planned.entries}
    items = []
    for name, entry in entries.items():
        path, decision = paths[name], decisions[paths[name]]
        leaf, algorithm = leaves[path], decision.algorithm or ""
        if decision.spec is not None:
            source = jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(entry.dtype))
            result = jax.eval_shape(lambda w, spec=decision.spec, run=ALGORITHMS[algorithm]: run(w, spec), source)
            leaf = jax.tree.map(lambda x: _stand_in(x.shape, x.dtype), result)
        items.append(Item(entry, path, hf.is_flax_kernel(path), decision.spec, algorithm, leaves[path].dtype, leaf))
    return _tied(config, items)


def scale_groups(items: list[Item], cfg: QuantConfig) -> list[list[Item]]:
    """The weights that share a tensor scale."""
    decisions = [api.PlanEntry(item.path, item.leaf.shape, "", item.spec, item.algorithm, "") for item in items]
    return [[items[i] for i in group] for group in api.sharing(decisions, [item.leaf for item in items], cfg)]


def _stand_in(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.broadcast_to(np.ones((), dtype), shape)


def _tied(config: dict[str, Any], items: list[Item]) -> list[Item]:
    head = next((item for item in items if item.entry.name == _HEAD and item.spec is None), None)
    tables = [item for item in items if item.entry.name.endswith("embed_tokens.weight") and item.spec is None]
    if not config.get("tie_word_embeddings") or head is None or len(tables) != 1:
        return items
    if _same(head.entry, tables[0].entry):
        return [item for item in items if item is not head]
    config["tie_word_embeddings"] = False
    return items


def _same(a: Entry, b: Entry) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    for at in range(0, a.size, _COMPARED):
        end = min(a.size, at + _COMPARED)
        if a.part(at, end).tobytes() != b.part(at, end).tobytes():
            return False
    return True


def into_shards(stored: list[tuple[Item, dict[str, Spec]]], weights: str, limit: int) -> list[Shard]:
    """The files of the result (:func:`mxjax.io.sharded.split`); what one tensor becomes stays together."""
    files = sharded.split([specs for _, specs in stored], weights, limit)
    return [Shard(name, [stored[i] for i in members]) for name, members in files]


def fingerprint(*parts: Any) -> str:
    """A short hash of what a run depends on; arrays (of transforms) count with their values."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(repr(part).encode())
        for x in jax.tree.leaves([getattr(part, "transform", None)]):
            digest.update(np.asarray(x).tobytes())
    return digest.hexdigest()[:16]


def source_fingerprint(entries: Mapping[str, Entry]) -> str:
    """Of the files as they are: names, sizes, times of change, and where every tensor lies."""
    files = sorted({entry.file for entry in entries.values()})
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return fingerprint(stats, [(e.name, e.file.name, e.offset, e.dtype.name, e.shape) for e in entries.values()])
