"""Quantized trees on disk: ``save(folder, tree, format)`` and ``load(folder)``.

=================== ==================================================== ===========================================
format              files                                                carries
=================== ==================================================== ===========================================
mxjax               mxjax.json, arrays.safetensors                       everything
orbax               mxjax.json, arrays.orbax/                            everything
compressed-tensors  config.json, model.safetensors                       MXFP4 and NVFP4 Linears (vLLM, transformers)
=================== ==================================================== ===========================================

A layout of somebody else is a ``write`` and a ``read``, and one line in each of the tables below.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mxjax.errors import CheckpointError, ConfigError

# format of save() -> module, keyword arguments of its write() that are fixed, and those that the caller may give
_WRITERS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "mxjax": ("mxjax.io.native", {"arrays": "safetensors"}, ("config",)),
    "orbax": ("mxjax.io.native", {"arrays": "orbax"}, ("config",)),
    "compressed-tensors": ("mxjax.io.ct_write", {}, ("config", "names", "dtype", "like")),
}
# quant_method in config.json -> module
_READERS = {"compressed-tensors": "mxjax.io.ct_read"}


def save(
    folder: str | os.PathLike[str],
    tree: Any,
    format: str = "mxjax",
    *,
    config: Mapping[str, Any] | None = None,
    names: Callable[[str], str] | None = None,
    dtype: Any = None,
    like: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a (quantized) tree to a folder, whole or not at all (:func:`mxjax.io.atomic.atomic_folder`).

    Args:
      folder: where; it must be absent or empty, or ``overwrite``.
      tree: dicts, lists and tuples of arrays, QWeights and QTensors; nnx State. An array object that appears twice is
        stored once.
      format: "mxjax", "orbax" or "compressed-tensors".
      config: the model's config (Hugging Face keys); written to ``config.json``.
      names: tree path -> tensor name, ``"layers/0/mlp/up_proj/kernel"`` -> ``"model.layers.0.mlp.up_proj.weight"``
        (compressed-tensors). Default: dots for slashes, and ``weight`` for kernel, embedding and scale.
      dtype: cast unquantized float tensors (compressed-tensors). Default: keep theirs.
      like: a folder of the same layout that the tree was read from (compressed-tensors): its config is the default of
        ``config``, and its global scales are written bit for bit where the tree still has them.
      overwrite: replace a checkpoint that is there already.

    Raises:
      CheckpointError: something that the format cannot carry (with path, reason and the formats that can), or a folder
        that is not empty, or that is to be overwritten and holds no checkpoint.
      ConfigError: an unknown format, or an option that it does not take.

    Example:
      >>> mxjax.save("out", mxjax.quantize(params, "mxfp4"), format="compressed-tensors", config=hf_config)
    """
    from mxjax.io.atomic import atomic_folder

    if format not in _WRITERS:
        raise ConfigError(f"unknown checkpoint format {format!r}; known: {', '.join(_WRITERS)}")
    module, fixed, allowed = _WRITERS[format]
    given = {"config": config, "names": names, "dtype": dtype, "like": None if like is None else Path(like)}
    options = {key: value for key, value in given.items() if value is not None}
    if unknown := sorted(set(options) - set(allowed)):
        raise ConfigError(f"save(format={format!r}) takes no {', '.join(unknown)}")
    target = Path(folder)
    if overwrite and target.is_dir() and any(target.iterdir()) and not _is_checkpoint(target):
        raise CheckpointError(f"{folder} holds no checkpoint; overwrite=True replaces checkpoints only")
    with atomic_folder(target, overwrite=overwrite) as temporary:
        importlib.import_module(module).write(temporary, tree, **fixed, **options)


def load(folder: str | os.PathLike[str], *, shardings: Any = None, names: Callable[[str], str] | None = None) -> Any:
    """The tree in a folder that :func:`save` or a compressed-tensors exporter wrote. What it is is read from its files.

    Args:
      folder: a checkpoint. A Hugging Face folder without quantization gives its float tree.
      shardings: where the arrays go: a Sharding, a callable from array names such as
        ``layers/0/up_proj/kernel.qtensor.codes`` to a Sharding or None, or a tree of these like the result (see
        :func:`mxjax.io.placement.sharding_of`). Every device reads its own shards.
      names: tensor name -> tree path (Hugging Face layouts). Default: slashes for dots. Matrices at a path that ends in
        ``kernel`` become Flax's ``[in, out]``: unquantized ones are transposed, quantized ones get ``axis=-2``.

    Returns:
      Nested dicts (and lists, tuples) with QWeight and QTensor as they were saved.

    Raises:
      CheckpointError: whatever is not as it should be, with tensor and file.

    Example:
      >>> qparams = mxjax.load("out")
    """
    path = Path(folder)
    if not path.is_dir():
        left = sorted(path.parent.glob(f".{path.name}.*.old")) if path.parent.is_dir() else []
        hint = f"; an interrupted save left the previous version in {left[-1]}" if left else ""
        raise CheckpointError(f"{folder} is no folder{hint}")
    if (path / "mxjax.json").exists():
        if names is not None:
            raise ConfigError(f"{folder} is an mxjax checkpoint with paths of its own; load it without names")
        from mxjax.io import native

        return native.read(path, shardings)
    if not (path / "config.json").exists():
        raise CheckpointError(f"{folder} has neither mxjax.json nor config.json: no checkpoint that mxjax reads")
    from mxjax.io import hf

    config = hf.read_config(path)
    quantization = config.get("quantization_config")
    if quantization is None:
        return hf.read_folder(path, shardings=shardings, names=names)
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if not isinstance(method, str) or method not in _READERS:
        raise CheckpointError(f"{folder}: quant_method {str(method)[:50]!r}; mxjax reads {', '.join(_READERS)}")
    reader = importlib.import_module(_READERS[method])
    return reader.read(path, config, shardings=shardings, names=names)


def _is_checkpoint(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("mxjax.json", "config.json"))


__all__ = ["load", "save"]
