"""Quantized trees on disk: ``save(folder, tree, format)`` and ``load(folder)``.

=================== ==================================================== ===========================================
format              files                                                carries
=================== ==================================================== ===========================================
mxjax               mxjax.json, arrays.safetensors                       everything
orbax               mxjax.json, arrays.orbax/                            everything
compressed-tensors  config.json, model.safetensors                       Linears in MXFP4, NVFP4, MXFP6, MXFP8
modelopt            config.json, hf_quant_config.json, model.safetensors Linears in NVFP4, MXFP8
quark               config.json, model.safetensors                       Linears in MXFP4, NVFP4, MXFP6
gpt-oss             config.json, model.safetensors                       gpt-oss experts in MXFP4
=================== ==================================================== ===========================================

FP-Quant folders can be read, too. A layout of somebody else is one file in :mod:`mxjax.io.layouts`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from mxjax.core import processes
from mxjax.errors import CheckpointError, ConfigError
from mxjax.fusion import unfuse_shared_inputs
from mxjax.io import hashes
from mxjax.io.atomic import atomic_folder
from mxjax.io.conversion import convert, layout_of
from mxjax.io.hf import COMPANIONS, naming
from mxjax.io.placement import HOST
from mxjax.io.preflight import check_recipe
from mxjax.io.safetensors import read_json
from mxjax.io.sharded import check_size
from mxjax.io.streaming import FolderReport, quantize_folder
from mxjax.io.streaming.journal import JOURNALS, partial_folder
from mxjax.ops.fused import FusedWeight
from mxjax.ops.qweight import is_quantized

_HF_OPTIONS = ("config", "names", "dtype", "like", "shard_size")
# format of save() -> module, keyword arguments of its write() that are fixed, and those that the caller may give
_WRITERS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "mxjax": ("mxjax.io.native", {"arrays": "safetensors"}, ("config", "shard_size")),
    "orbax": ("mxjax.io.native", {"arrays": "orbax"}, ("config",)),
    **{
        layout: ("mxjax.io.hf_write", {"layout": layout}, _HF_OPTIONS)
        for layout in ("compressed-tensors", "modelopt", "quark", "gpt-oss")
    },
}
# What check_replaceable takes for part of a checkpoint.
_CHECKPOINT_FILES = (
    "mxjax.json", "arrays.safetensors", "arrays.orbax", "*.safetensors", "*.safetensors.index.json", "config.json",
    "recipe.yaml", "hf_quant_config.json", "SHA256SUMS", *COMPANIONS,
)  # fmt: skip


def save(
    folder: str | os.PathLike[str],
    tree: Any,
    format: str = "mxjax",
    *,
    config: Mapping[str, Any] | None = None,
    names: Callable[[str], str] | None = None,
    dtype: Any = None,
    like: str | os.PathLike[str] | None = None,
    shard_size: int | None = None,
    overwrite: bool = False,
) -> None:
    """Write a (quantized) tree to a folder, whole or not at all (:func:`mxjax.io.atomic.atomic_folder`).

    Arrays on a mesh are written as the whole arrays that they are; no file knows of a mesh. Where several processes
    share them (``jax.distributed``), all call this with a folder that all see. With "orbax" each writes its own shards;
    with the other formats the first process gathers the tree in its memory and writes it.

    Args:
      folder: where; it must be absent or empty, or ``overwrite``.
      tree: dicts, lists and tuples of arrays, QWeights and QTensors; nnx State. An array object that appears twice is
        stored once. Weights that ``fuse_shared_inputs`` put together are stored apart, as they were.
      format: "mxjax", "orbax", "compressed-tensors", "modelopt", "quark" or "gpt-oss".
      config: the model's config (Hugging Face keys); written to ``config.json``.
      names: tree path -> tensor name, ``"layers/0/mlp/up_proj/kernel"`` -> ``"model.layers.0.mlp.up_proj.weight"``
        (layouts of others). Default: dots for slashes, and ``weight`` for kernel, embedding and scale.
      dtype: cast unquantized float tensors (layouts of others). Default: keep theirs.
      like: a folder of the same layout that the tree was read from: its config is the default of ``config``, and its
        global scales are written bit for bit where the tree still has them.
      shard_size: bytes of tensors in a file, unless one weight is larger; more go into several files and an index.
        Default: 5 * 10**9. Orbax has files of its own.
      overwrite: replace a checkpoint that is there already.

    Raises:
      CheckpointError: something that the format cannot carry (with path, reason and the formats that can), or a folder
        that is not empty, or that is to be overwritten and holds no checkpoint.
      ConfigError: an unknown format, or an option that it does not take.

    Example:
      >>> import tempfile
      >>> qparams = mxjax.quantize({"layer": {"kernel": jnp.ones((64, 8))}}, "mxfp4")
      >>> mxjax.save(tempfile.mkdtemp() + "/out", qparams, format="compressed-tensors")
    """
    if format not in _WRITERS:
        raise ConfigError(f"unknown checkpoint format {format!r}; known: {', '.join(_WRITERS)}")
    module, fixed, allowed = _WRITERS[format]
    given = {"config": config, "names": names, "dtype": dtype, "like": None if like is None else Path(like)}
    given["shard_size"] = None if shard_size is None else check_size(shard_size)
    options = {key: value for key, value in given.items() if value is not None}
    if unknown := sorted(set(options) - set(allowed)):
        raise ConfigError(f"save(format={format!r}) takes no {', '.join(unknown)}")
    target = Path(folder)
    if overwrite:
        processes.one_for_all(lambda: check_replaceable(target))
    if any(
        isinstance(leaf, FusedWeight) for leaf in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, FusedWeight))
    ):
        tree = unfuse_shared_inputs(tree)
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_quantized)[0]:
        if is_quantized(leaf):
            leaf.validate(jax.tree_util.keystr(path))

    def write(together: bool) -> None:
        with atomic_folder(target, overwrite=overwrite, together=together) as temporary:
            importlib.import_module(module).write(temporary, tree, **fixed, **options)

    if format == "orbax" or not processes.several():
        write(together=processes.several())
        return
    # One process writes; the others send it their shards, an array at a time.
    tree = jax.tree.map(_sent_to_the_first, tree)
    processes.one_for_all(lambda: write(together=False))


def _sent_to_the_first(x: Any) -> Any:
    if not isinstance(x, jax.Array) or jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    whole = processes.on_host(x)
    return whole if processes.first() else x


def load(
    folder: str | os.PathLike[str],
    *,
    shardings: Any = None,
    mesh: Any = None,
    specs: Any = None,
    names: Callable[[str], str] | None = None,
    verify: bool = False,
) -> Any:
    """The tree in a folder that :func:`save` or one of the layouts' own exporters wrote: its files say what it is.

    Args:
      folder: a checkpoint. A Hugging Face folder without quantization gives its float tree.
      shardings: where the arrays go: ``mxjax.io.HOST`` (they stay in the file, as read-only memory maps of NumPy; an
        Orbax folder is read into memory), a Sharding, a callable from array names such as
        ``layers/0/up_proj/kernel.qtensor.codes`` to a Sharding or None, or a tree of these like the result (see
        :func:`mxjax.io.placement.sharding_of`). Every device reads its own shards.
      mesh, specs: in place of ``shardings``: a mesh, and the PartitionSpecs of the *float* weights, from which those of
        codes, scales and factors follow (:func:`mxjax.sharding.shard`; a tree, or a function of the path).
      names: tensor name -> tree path (Hugging Face layouts). Default: slashes for dots. Matrices at a path that ends in
        ``kernel`` become Flax's ``[in, out]``: unquantized ones are transposed, quantized ones get ``axis=-2``.
      verify: first compare every file with its hash in ``SHA256SUMS``.

    Returns:
      Nested dicts (and lists, tuples) with QWeight and QTensor as they were saved.

    Raises:
      CheckpointError: whatever is not as it should be, with tensor and file.
      BlockShapeError, ConfigError: ``specs`` that do not fit the tree or the mesh, as :func:`mxjax.sharding.specs`.

    Example:
      >>> import tempfile
      >>> folder = tempfile.mkdtemp() + "/out"
      >>> mxjax.save(folder, mxjax.quantize({"layer": {"kernel": jnp.ones((64, 8))}}, "mxfp4"))
      >>> mxjax.load(folder)["layer"]["kernel"].format
      <mxfp4>
    """
    path = Path(folder)
    if not path.is_dir():
        left = sorted(path.parent.glob(f".{path.name}.*.old")) if path.parent.is_dir() else []
        hint = f"; an interrupted save left the previous version in {left[-1]}" if left else ""
        if partial_folder(path).is_dir():
            hint = f"; {partial_folder(path)} holds an interrupted run: the same command finishes it"
        raise CheckpointError(f"{folder} is no folder{hint}")
    if any(path.glob(JOURNALS)):
        raise CheckpointError(f"{folder} is incomplete: the command that was interrupted while writing it finishes it")
    if verify:
        for _ in hashes.verify(path):
            pass
    own = (path / "mxjax.json").exists()
    if own and names is not None:
        raise ConfigError(f"{folder} is an mxjax checkpoint with paths of its own; load it without names")
    if mesh is not None or specs is not None:
        if mesh is None or shardings is not None:
            raise ConfigError("load takes shardings, or a mesh and specs")
        from mxjax import sharding
        from mxjax.io import native

        shapes = native.structure(path) if own else load(path, shardings=HOST, names=names)
        per_array = sharding.per_array(specs, shapes, mesh=mesh, on_uneven="reshard")
        return load(path, shardings=sharding.named(mesh, per_array), names=names)
    if own:
        from mxjax.io import native

        return native.read(path, shardings)
    if not (path / "config.json").exists():
        raise CheckpointError(f"{folder} has neither mxjax.json nor config.json: no checkpoint that mxjax reads")
    from mxjax.io import hf_read

    with naming(path):
        return hf_read.read(path, shardings=shardings, names=names)


def check_replaceable(folder: str | os.PathLike[str]) -> None:
    """Raise CheckpointError unless ``folder`` is absent, empty, or a quantized checkpoint and nothing else.

    A folder counts as one if it has ``mxjax.json`` or a ``quantization_config``, and every entry has a name that
    checkpoints use: a float model, or a folder with anything of somebody else's in it, is never replaced.
    """
    folder = Path(folder)
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if strange := sorted(p.name for p in folder.iterdir() if not any(p.match(known) for known in _CHECKPOINT_FILES)):
        raise CheckpointError(
            f"{folder} holds {strange[0]!r}, so it is no checkpoint alone; overwriting replaces checkpoints only"
        )
    config = folder / "config.json"
    quantized = config.is_file() and "quantization_config" in read_json(config)
    if not (folder / "mxjax.json").is_file() and not quantized:
        raise CheckpointError(f"{folder} holds no quantized checkpoint; overwriting replaces those only")


__all__ = [
    "HOST", "FolderReport", "check_recipe", "check_replaceable", "convert", "layout_of", "load", "quantize_folder",
    "save",
]  # fmt: skip
