"""Quantized Hugging Face folders to trees, whatever their layout (:mod:`mxjax.io.layouts`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from mxjax.errors import CheckpointError, MxjaxError
from mxjax.io import hf, safetensors
from mxjax.io.layouts import LAYOUTS, Layout, Target, detect, modelopt
from mxjax.io.placement import place, sharding_of

EXACT = "mxjax.multipliers"  # in the metadata of a file: global scales that no divisor can say


def read(folder: Path, *, shardings: Any = None, names: hf.Names | None = None) -> Any:
    """The tree of a folder, quantized or not.

    Raises:
      CheckpointError: a layout or scheme that mxjax does not read, or any tensor that is missing, unknown, or not of
        the dtype and shape that the config implies.
    """
    config = read_config(folder)
    entries = hf.read_entries(folder)
    names = names or hf.default_paths
    layout = layout_of(folder, config, entries)
    if layout is None:
        return hf.read_tree(entries.values(), shardings=shardings, names=names)
    try:
        schemes = layout.schemes(config, folder)
        dtype_name = model_dtype(config)
    except CheckpointError as e:
        raise CheckpointError(f"{folder / hf.CONFIG}: {e}") from None
    modules, dense = split(entries, layout)
    for entry in dense:
        module, _, tensor = entry.name.rpartition(".")
        if module in modules and tensor != "bias":
            raise CheckpointError(f"{entry.name} in {entry.file}: {entry.dtype}, no tensor that a quantized Linear has")
        if tensor == "weight" and schemes.named(module) is not None:
            raise CheckpointError(
                f"{entry.name} in {entry.file}: {entry.dtype}, but the config quantizes it: packed weight is missing"
            )
    exact = read_exact(entries)
    leaves = []
    for module, tensors in modules.items():
        path = hf.apply_names(names, layout.weight_name(module))
        scheme = schemes.of(module)
        if scheme is None:
            entry = next(iter(tensors.values()))
            raise CheckpointError(f"{entry.name} in {entry.file}: the config does not quantize {module}")
        target = Target(path, -2 if hf.is_flax_kernel(path) else -1, dtype_name, _putter(path, shardings), exact)
        try:
            leaves.append((path, layout.read_weight(module, tensors, scheme, target).validate(path)))
        except CheckpointError:
            raise
        except MxjaxError as e:
            raise CheckpointError(f"{module} in {folder}: {e}") from None
    leaves += [(path, hf.read_dense(e, path, shardings)) for e in dense for path in [hf.apply_names(names, e.name)]]
    return hf.nest(leaves)


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json``, with the quantization that a file beside it may describe instead."""
    config = hf.read_config(folder)
    if config.get("quantization_config") is None and (folder / modelopt.FILE).exists():
        file = safetensors.read_json(folder / modelopt.FILE)
        config = {**config, "quantization_config": modelopt.from_file(file, folder / modelopt.FILE)}
    return config


def layout_of(folder: Path, config: Mapping[str, Any], entries: Mapping[str, safetensors.Entry]) -> Layout | None:
    """The layout of a folder, or None: nothing in it is quantized.

    Raises:
      CheckpointError: none that mxjax reads.
    """
    layout = detect(config, entries)
    quantization = config.get("quantization_config")
    if layout is None and quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise CheckpointError(f"{folder}: quant_method {str(method)[:50]!r}; mxjax reads {', '.join(LAYOUTS)}")
    return layout


def split(
    entries: Mapping[str, safetensors.Entry], layout: Layout
) -> tuple[dict[str, dict[str, safetensors.Entry]], list[safetensors.Entry]]:
    """The tensors of quantized weights by module and part, and all the others."""
    modules: dict[str, dict[str, safetensors.Entry]] = {}
    dense: list[safetensors.Entry] = []
    for entry in entries.values():
        at = layout.split(entry)
        if at is None:
            dense.append(entry)
        else:
            modules.setdefault(at[0], {})[at[1]] = entry
    return modules, dense


def read_exact(entries: Mapping[str, safetensors.Entry]) -> dict[str, np.float32]:
    """Multipliers by tensor name that :mod:`mxjax.io.hf_write` put into the metadata of the files."""
    found: dict[str, np.float32] = {}
    for file in sorted({entry.file for entry in entries.values()}):
        text = safetensors.read_metadata(file).get(EXACT)
        if text is None:
            continue
        values = safetensors.parse_json(text.encode(), file)
        for name, value in values.items():
            if type(value) is not float or not np.isfinite(np.float32(value)):
                raise CheckpointError(f"{name} in {file}: {json.dumps(value)[:50]} is no multiplier")
            found[name] = np.float32(value)
    return found


def model_dtype(config: Mapping[str, Any]) -> str:
    """The dtype that a config gives the model; bfloat16 if it does not say.

    Raises:
      CheckpointError: no float.
    """
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    try:
        dtype = jnp.dtype(str(name).removeprefix("torch."))
    except (TypeError, ValueError):
        dtype = np.dtype(bool)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise CheckpointError(f"dtype {str(name)[:50]!r} is no float")
    return dtype.name


def _putter(path: str, shardings: Any) -> Any:
    def put(x: np.ndarray, *keys: str) -> Any:
        name = ".".join((path, *keys))
        return place(x, sharding_of(shardings, (*path.split("/"), *keys), name, x.shape))

    return put
