"""A quantized model as a folder that stands on its own: weights, config.json, tokenizer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mxjax.cli.console import Console
from mxjax.cli.models import OpenModel, read_config
from mxjax.errors import CheckpointError
from mxjax.text import size_text


def check_destination(folder: str | Path, overwrite: bool, source: str | Path | None = None) -> None:
    """Raise CheckpointError where ``write_model`` would, before an hour has been spent on the model.

    Args:
      folder: the destination.
      overwrite: whether a checkpoint there may be replaced.
      source: the model's folder or file: the destination may be neither it, nor inside it, nor around it.
    """
    if not str(folder).strip():
        raise CheckpointError("the destination is empty: name a folder")
    folder = Path(folder)
    if source is not None and Path(source).exists():
        here, there = folder.resolve(), Path(source).resolve()
        if here == there or here in there.parents or (there.is_dir() and there in here.parents):
            raise CheckpointError(f"{folder} and the source {source} must not contain each other; name another folder")
    parent = next(p for p in folder.absolute().parents if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise CheckpointError(f"{folder} cannot be made: {parent} is not a folder that can be written to")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file, not a folder")
    if any(folder.iterdir()) and not overwrite:
        raise CheckpointError(f"{folder} is there already and not empty; --overwrite replaces it")
    from mxjax.io import check_replaceable

    check_replaceable(folder)


def shard_option(file_format: str, shard_size: int | None) -> dict[str, Any]:
    """``shard_size`` for ``mxjax.save``; Orbax has files of its own."""
    return {} if file_format == "orbax" else {"shard_size": shard_size}


def write_model(
    folder: Path,
    opened: OpenModel,
    qparams: Any,
    file_format: str,
    console: Console,
    *,
    shard_size: int | None = None,
    overwrite: bool = False,
) -> None:
    """Write ``qparams`` with what a loader needs beside them: all of it, or nothing.

    Args:
      folder: the destination.
      opened: the float model that ``qparams`` came from.
      qparams: its quantized parameters.
      file_format: what ``mxjax.save`` takes.
      console: where notes go.
      shard_size: as in ``mxjax.save``.
      overwrite: replace a checkpoint.
    """
    from mxjax_models import params

    import mxjax
    from mxjax.io.atomic import atomic_folder
    from mxjax.io.hf import copy_companions
    from mxjax.io.preflight import OWN

    check_destination(folder, overwrite, opened.path)
    config = read_config(opened.path) if opened.path.is_dir() else params.hf_config(opened.model.config)
    options: dict[str, Any] = {"config": config}
    if file_format not in OWN:
        # Loaders unpack the weights of these layouts to bfloat16, so the rest of the model has to be that too.
        config = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
        options = {"config": config | {"dtype": "bfloat16"}, "names": params.hf_name, "dtype": "bfloat16"}
        console.note(f"{file_format}: arrays that are not quantized are written as bfloat16")
    options |= shard_option(file_format, shard_size)
    with atomic_folder(folder, overwrite=overwrite) as temporary:
        mxjax.save(temporary, qparams, format=file_format, **options)
        if opened.path.is_dir():
            copy_companions(opened.path, temporary)
        else:
            _write_tokenizer(opened, temporary, console)


def _write_tokenizer(opened: OpenModel, folder: Path, console: Console) -> None:
    """The tokenizer inside a GGUF file, as the two files that Hugging Face expects."""
    try:
        tokenizer = opened.tokenizer()
    except (ImportError, ValueError) as e:  # weights are worth having without it
        console.note(f"no tokenizer was written: {e}")
        return
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, token in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id)):
        if token is not None:
            config[name] = tokenizer.backend.id_to_token(token)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def outcome(
    src: str, dst: str, recipe: str, file_format: str, summary: Any, float_bytes: int, seconds: float
) -> tuple[dict[str, Any], str]:
    """What ``mxjax quantize`` says of its result: the fields of its JSON, and its line of text."""
    quantized = sum(row.quantized for row in summary.rows)
    data = {
        "source": src,
        "destination": dst,
        "recipe": recipe,
        "format": file_format,
        "quantized": quantized,
        "kept": len(summary.rows) - quantized,
        "bits_per_weight": summary.bits_per_weight,
        "float_bytes": float_bytes,
        "bytes": summary.nbytes,
        "seconds": seconds,
    }
    text = (
        f"{quantized} of {len(summary.rows)} arrays quantized to {summary.bits_per_weight:.2f} bits a weight: "
        f"{size_text(float_bytes)} -> {size_text(summary.nbytes)} in {seconds:.1f} s"
    )
    return data, text
