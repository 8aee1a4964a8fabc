"""The formats "mxjax" (``mxjax.json``, ``arrays.safetensors`` or shards of it) and "orbax" (``mxjax.json``, a folder).

They carry everything that a tree can hold, and need no template to be read. docs/format.md describes the files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mxjax import __version__
from mxjax.core import processes
from mxjax.errors import CheckpointError
from mxjax.io import hf, manifest, safetensors, sharded
from mxjax.io.placement import place, sharding_of, stays_numpy
from mxjax.ops.qweight import is_quantized

MANIFEST = "mxjax.json"
VERSION = 1
SAFETENSORS = "arrays.safetensors"
ORBAX = "arrays.orbax"


def write(
    folder: Path,
    tree: Any,
    *,
    arrays: str = "safetensors",
    config: Mapping[str, Any] | None = None,
    shard_size: int = sharded.SHARD_SIZE,
) -> None:
    """Write ``tree`` into an empty folder; ``arrays`` is "safetensors" or "orbax"."""
    node, found = manifest.encode(tree)
    if processes.first():  # of those that write an Orbax folder together
        if config is not None:
            hf.write_json(folder / hf.CONFIG, config)
        write_manifest(folder, node, arrays)
    if arrays == "orbax":
        _write_orbax(folder / ORBAX, found)
    else:
        stored = {name: _storable(name, x) for name, x in found.items()}
        sharded.write(folder, SAFETENSORS, _groups(tree, found, stored), shard_size)


def _groups(tree: Any, found: Mapping[str, Any], stored: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The arrays to store; those of one weight together, each where it was met first."""
    names, left = {id(x): name for name, x in found.items()}, dict(stored)
    leaves = jax.tree.leaves(tree, is_leaf=is_quantized)
    members = [[names.get(id(x)) for x in jax.tree.leaves(leaf)] for leaf in leaves]
    groups = [{name: left.pop(name) for name in group if name in left} for group in members]
    return [group for group in groups if group] + [{name: x} for name, x in left.items()]


def write_manifest(folder: Path, node: Mapping[str, Any], arrays: str) -> None:
    """``mxjax.json`` for the node of a tree."""
    top = {"format": "mxjax", "version": VERSION, "writer": f"mxjax {__version__}", "arrays": arrays, "tree": node}
    (folder / MANIFEST).write_text(json.dumps(top, allow_nan=False, separators=(",", ":")) + "\n", encoding="utf-8")


def structure(folder: Path) -> Any:
    """The tree in a folder with arrays that have a shape and a dtype and take no memory; no array is read.

    Raises:
      CheckpointError: as :func:`read`.
    """
    node = _manifest(folder).get("tree")
    wanted = manifest.specs(node)
    return manifest.decode(node, {k: np.broadcast_to(np.ones((), d), shape) for k, (d, shape, _) in wanted.items()})


def read(folder: Path, shardings: Any = None) -> Any:
    """The tree in a folder that :func:`write` made.

    Raises:
      CheckpointError: a version from the future, or anything that is not as written.
    """
    top = _manifest(folder)
    try:
        if top.get("arrays") == "safetensors":
            return _read_safetensors(folder, top.get("tree"), shardings)
        if top.get("arrays") == "orbax":
            return _read_orbax(folder / ORBAX, top.get("tree"), shardings)
    except CheckpointError as e:
        raise CheckpointError(f"{folder}: {e}") from None
    kept = str(top.get("arrays"))[:50]
    raise CheckpointError(f"{folder / MANIFEST}: arrays are kept in safetensors or orbax, not {kept!r}")


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    top = safetensors.read_json(path)
    if top.get("format") != "mxjax" or type(top.get("version")) is not int:
        raise CheckpointError(f"{path}: no mxjax checkpoint: format {str(top.get('format'))[:50]!r}")
    if top["version"] != VERSION:
        raise CheckpointError(f"{path}: version {top['version']}; this mxjax reads version {VERSION}: upgrade mxjax")
    return top


def _storable(name: str, x: Any) -> Any:
    """4-bit dtypes, which safetensors has no name for, as the bytes that NumPy keeps them in."""
    dtype = np.dtype(x.dtype)
    if dtype in safetensors.NAMES:
        return x
    if dtype.itemsize != 1:
        raise CheckpointError(f"{name}: cannot store the dtype {dtype}")
    return np.asarray(x).view(np.uint8)


def _read_safetensors(folder: Path, node: Any, shardings: Any) -> Any:
    path, entries = folder / SAFETENSORS, hf.read_entries(folder, SAFETENSORS)
    wanted = manifest.specs(node)
    _compare_names(set(wanted), set(entries), path)
    arrays = {}
    for name, (dtype, shape, keys) in wanted.items():
        entry = entries[name]
        stored = dtype if dtype in safetensors.NAMES else np.dtype(np.uint8)
        if entry.dtype != stored or entry.shape != shape or dtype.itemsize != stored.itemsize:
            says = f"{MANIFEST} says {dtype} {shape}"
            raise CheckpointError(f"{name} in {entry.file}: {entry.dtype} {entry.shape}, but {says}")
        arrays[name] = place(entry.read().view(dtype), sharding_of(shardings, keys, name, shape))
    return manifest.decode(node, arrays)


def _compare_names(wanted: set[str], found: set[str], path: Path) -> None:
    if missing := sorted(wanted - found):
        raise CheckpointError(f"{path}: {len(missing)} tensors are missing: {', '.join(missing[:5])}")
    if extra := sorted(found - wanted):
        raise CheckpointError(f"{path}: {len(extra)} tensors that {MANIFEST} does not know: {', '.join(extra[:5])}")


# --- Orbax ------------------------------------------------------------------------------------------------------------
# One flat dict of arrays: Orbax needs no knowledge of our classes, and its own tools list the same names as mxjax.json.


def _write_orbax(path: Path, arrays: Mapping[str, Any]) -> None:
    import orbax.checkpoint as ocp

    # Orbax refuses an empty tree, NumPy scalars, and beside other processes arrays that are one process's own.
    several = processes.several()
    shared = {name: isinstance(x, jax.Array) and not (several and x.is_fully_addressable) for name, x in arrays.items()}
    tree = {name: x if shared[name] else np.asarray(x) for name, x in arrays.items()}
    if not tree:
        return
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path.absolute(), tree)


def _read_orbax(path: Path, node: Any, shardings: Any) -> Any:
    wanted = manifest.specs(node)
    if not wanted:
        return manifest.decode(node, {})
    import orbax.checkpoint as ocp

    target: dict[str, Any] = {}
    for name, (dtype, shape, keys) in wanted.items():
        sharding = sharding_of(shardings, keys, name, shape)
        if not isinstance(sharding, jax.sharding.Sharding) or stays_numpy(dtype):
            target[name] = np.empty(shape, dtype)  # Orbax would commit it to a device
        else:
            target[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            metadata = checkpointer.metadata(path.absolute()).item_metadata
            stored = dict(metadata.tree)
            _compare_names(set(target), set(stored), path)
            for name, x in target.items():
                found = np.dtype(stored[name].dtype), tuple(stored[name].shape)
                if found != (x.dtype, x.shape):
                    says = f"{x.dtype} {x.shape}"
                    raise CheckpointError(f"{name} in {path}: {found[0]} {found[1]}, but {MANIFEST} says {says}")
            arrays = checkpointer.restore(path.absolute(), target)
    except CheckpointError:
        raise
    except Exception as e:  # Orbax and TensorStore have no error class of their own for a damaged folder
        raise CheckpointError(f"{path}: Orbax cannot read it: {type(e).__name__}: {str(e)[:500]}") from e
    placed = {name: place(x, None) if isinstance(x, np.ndarray) else x for name, x in arrays.items()}
    return manifest.decode(node, placed)
