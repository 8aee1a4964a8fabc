"""Hugging Face folders: ``config.json`` and safetensors files whose tensors are named ``module.tensor``.

What every Hugging Face layout of quantized weights shares; each layout itself is a file of its own beside this one.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from mxjax.errors import CheckpointError
from mxjax.io import safetensors
from mxjax.io.placement import place, sharding_of

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# What a model needs beside its weights and its config: copied from folder to folder as it is.
COMPANIONS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.tiktoken", "*.jinja",
    "sentencepiece*.model", "spiece.model", "generation_config.json", "preprocessor_config.json",
    "processor_config.json",
)  # fmt: skip

Names = Callable[[str], str]


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json``."""
    return safetensors.read_json(folder / CONFIG)


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """A JSON file as ``transformers`` writes ``config.json``: sorted keys, two spaces."""
    try:
        text = json.dumps(dict(value), indent=2, sort_keys=True, allow_nan=False) + "\n"
    except (TypeError, ValueError) as e:
        raise CheckpointError(f"{file.name}: JSON cannot hold it: {e}") from None
    file.write_text(text, encoding="utf-8")


def companions(source: Path) -> list[Path]:
    """The files that a model needs beside its weights and its config.

    Raises:
      CheckpointError: one is a link that leaves the folder.
    """
    found = sorted(path.name for path in source.iterdir() if path.is_file())
    return [inside(source, name) for name in found if any(fnmatch.fnmatch(name, pattern) for pattern in COMPANIONS)]


def copy_companions(source: Path, folder: Path) -> None:
    """Copy the :func:`companions`."""
    for path in companions(source):
        shutil.copyfile(path, folder / path.name)


def read_entries(folder: Path, weights: str = WEIGHTS) -> dict[str, safetensors.Entry]:
    """Every tensor of the folder, from one file or from the shards that its index names.

    Args:
      folder: the checkpoint.
      weights: name of the one file; ``weights + ".index.json"`` is that of the index.

    Raises:
      CheckpointError: no weights; an index or a link that leaves the folder; an index that disagrees with the shards.
    """
    places = read_index(folder, weights)
    if places is None:
        return safetensors.read(inside(folder, weights))
    entries: dict[str, safetensors.Entry] = {}
    for file in sorted(set(places.values())):
        for name, entry in safetensors.read(inside(folder, file)).items():
            if places.get(name) != file:
                raise CheckpointError(f"{name} in {folder / file}: the index places it in {places.get(name)!r}")
            entries[name] = entry
    if missing := sorted(set(places) - set(entries)):
        raise CheckpointError(f"{missing[0]} in {folder / places[missing[0]]}: the index promises it")
    return entries


def read_index(folder: Path, weights: str = WEIGHTS) -> dict[str, str] | None:
    """Tensor name to file, of ``weights + ".index.json"``; None where there is no index.

    Raises:
      CheckpointError: no index of this form, or one that leaves the folder.
    """
    index = folder / f"{weights}.index.json"
    if not index.exists():
        return None
    places = safetensors.read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise CheckpointError(f"{index}: no weight_map")
    for name, file in places.items():
        # Checked by its parts, not resolved: in the Hub's cache good files are links that lead outside.
        parts = PurePosixPath(file).parts if isinstance(file, str) else ()
        if len(parts) != 1 or parts[0] in ("..", ".") or re.search(r"[\\:\0]", parts[0]):
            raise CheckpointError(f"{name} in {index}: {str(file)[:200]!r} is no file of this folder")
    return places


def inside(folder: Path, file: str) -> Path:
    """A file of the folder. A link may lead to another file of it, or to the blobs of its repository in the Hub's
    cache (``models--X/snapshots/REVISION/file`` -> ``models--X/blobs/HASH``)."""
    path, home = folder / file, Path(os.path.realpath(folder))
    real = Path(os.path.realpath(path))
    allowed = [home] + ([home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [])
    if os.path.islink(path) and real.parent not in allowed:
        raise CheckpointError(f"{path}: a link that leaves its folder, to {real}; put the file itself there")
    return path


@contextlib.contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Every CheckpointError of the block names the folder."""
    try:
        yield
    except CheckpointError as e:
        if str(folder) in str(e):
            raise
        raise CheckpointError(f"{folder}: {e}") from None


def default_names(path: str) -> str:
    """Tree path to tensor name: dots for slashes; a Flax ``kernel``, ``embedding`` or ``scale`` is a ``weight``.

    Example:
      >>> default_names("model/layers/0/mlp/up_proj/kernel")
      'model.layers.0.mlp.up_proj.weight'
    """
    head, _, last = path.rpartition("/")
    last = "weight" if last in ("kernel", "embedding", "scale") else last
    return f"{head}/{last}".lstrip("/").replace("/", ".")


def is_flax_kernel(path: str) -> bool:
    """Whether a matrix at this path is ``[in, out]``; every other leaf is as PyTorch has it, ``[out, in]``."""
    return path.rpartition("/")[2] == "kernel"


def nest(leaves: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Nested dicts from ``a/b/c`` paths.

    Raises:
      CheckpointError: two leaves with one path, or a leaf where another path goes through.
    """
    tree: dict[str, Any] = {}
    for path, leaf in leaves:
        *parents, last = path.split("/")
        node: Any = tree
        for key in parents:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise CheckpointError(f"{path}: {key} is a tensor already")
        if last in node:
            raise CheckpointError(f"{path}: two tensors go there")
        node[last] = leaf
    return tree


def read_dense(entry: safetensors.Entry, path: str, shardings: Any) -> Any:
    """One unquantized tensor as the leaf at ``path``, turned to ``[in, out]`` where it is a Flax kernel."""
    if entry.dtype.itemsize == 1 and entry.dtype != bool:
        raise CheckpointError(f"{entry.name} in {entry.file}: an unknown tensor of {entry.dtype}, which is no weight")
    view = entry.read()
    if is_flax_kernel(path):
        if view.ndim != 2:
            raise CheckpointError(f"{entry.name} in {entry.file}: {path} is a kernel, but the shape is {view.shape}")
        view = view.T
    return place(view, sharding_of(shardings, path.split("/"), path, view.shape))


def read_tree(entries: Iterable[safetensors.Entry], *, shardings: Any, names: Names) -> dict[str, Any]:
    """The tree of tensors that are not quantized."""
    named = [(apply_names(names, entry.name), entry) for entry in entries]
    return nest((path, read_dense(entry, path, shardings)) for path, entry in named)


def default_paths(name: str) -> str:
    """Tensor name to tree path: slashes for dots, nothing else."""
    return name.replace(".", "/")


def apply_names(names: Names, key: str) -> str:
    """``names(key)``; what it raises becomes an error about the tensor."""
    try:
        result = names(key)
    except Exception as e:  # a function of the caller
        raise CheckpointError(f"{key}: names() does not know it: {e}") from e
    if not isinstance(result, str) or not result:
        raise CheckpointError(f"{key}: names() gave {result!r}, not a name")
    return result
