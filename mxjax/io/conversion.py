"""From one layout to another: ``convert(source, folder, to)``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mxjax.errors import CheckpointError
from mxjax.io import hf, hf_read, safetensors
from mxjax.io.atomic import atomic_folder
from mxjax.io.placement import HOST
from mxjax.io.preflight import OWN


def convert(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    to: str,
    *,
    names: Callable[[str], str] | None = None,
    paths: Callable[[str], str] | None = None,
    dtype: Any = None,
    shard_size: int | None = None,
    overwrite: bool = False,
) -> None:
    """Write a quantized checkpoint in another layout. No value changes, and no weight is dequantized on the way.

    Arrays are read through memory maps and written one at a time, so that a checkpoint may be larger than memory. The
    tokenizer and its like come along.

    Args:
      source: a folder that :func:`mxjax.load` reads.
      folder: where the result should be; absent or empty, or ``overwrite``.
      to: "compressed-tensors", "modelopt", "quark", "gpt-oss", "mxjax" or "orbax".
      names: tree path -> tensor name, as in :func:`mxjax.save`, where the source is mxjax's own.
      paths: tensor name -> tree path, as in :func:`mxjax.load`, where the source is somebody else's.
      dtype: cast unquantized float tensors (layouts of others).
      shard_size: as in :func:`mxjax.save`.
      overwrite: replace a quantized checkpoint that is there already.

    Raises:
      CheckpointError: a source that is damaged; a weight that the layout cannot carry, with the reason and the layouts
        that can, before anything is written.
      ConfigError: an unknown layout, or an option that it does not take.

    Example:
      >>> import tempfile
      >>> a, b = tempfile.mkdtemp() + "/a", tempfile.mkdtemp() + "/b"
      >>> tree = {"layer": {"kernel": jnp.ones((64, 8))}}
      >>> mxjax.save(a, mxjax.quantize(tree, "mxfp4"), format="compressed-tensors")
      >>> mxjax.io.convert(a, b, "quark")
      >>> mxjax.load(b)["layer"]["weight"].format
      <mxfp4>
    """
    from mxjax.io import check_replaceable, load, save

    source = Path(source)
    own = (source / "mxjax.json").exists()
    if Path(os.path.realpath(source)) == Path(os.path.realpath(folder)):
        raise CheckpointError(f"{folder} is the source itself; name another folder")
    if overwrite:
        check_replaceable(folder)
    if source.is_dir():
        hf.companions(source)  # what they refuse should be known before the work, not after it
    tree = load(source, shardings=HOST, names=None if own else paths)
    options: dict[str, Any] = {"config": _config(source), "shard_size": shard_size}
    if to not in OWN:
        back = _inverse(paths, source) if paths is not None and not own else None
        options |= {"names": names or back, "dtype": dtype, "like": None if own else source}
    with atomic_folder(folder, overwrite=overwrite) as temporary:
        save(temporary, tree, format=to, **options)
        hf.copy_companions(source, temporary)


def layout_of(folder: str | os.PathLike[str]) -> str | None:
    """The name of the layout of a folder, or None: a Hugging Face folder without quantization.

    Raises:
      CheckpointError: no checkpoint that mxjax reads.
    """
    folder = Path(folder)
    if (folder / "mxjax.json").exists():
        return "orbax" if safetensors.read_json(folder / "mxjax.json").get("arrays") == "orbax" else "mxjax"
    layout = hf_read.layout_of(folder, hf_read.read_config(folder), hf.read_entries(folder))
    return None if layout is None else layout.name


def _config(source: Path) -> dict[str, Any] | None:
    """The model's config; what it says of quantization is the source's, not the result's."""
    if not (source / hf.CONFIG).exists():
        return None
    config = safetensors.read_json(source / hf.CONFIG)
    return {key: value for key, value in config.items() if key != "quantization_config"}


def _inverse(paths: Callable[[str], str], source: Path) -> Callable[[str], str]:
    """Tree path -> the tensor name that it came from."""
    entries = hf.read_entries(source)
    layout = hf_read.layout_of(source, hf_read.read_config(source), entries)
    modules, dense = ({}, list(entries.values())) if layout is None else hf_read.split(entries, layout)
    names = [entry.name for entry in dense]
    names += [] if layout is None else [layout.weight_name(module) for module in modules]
    return {hf.apply_names(paths, name): name for name in names}.__getitem__
