"""Quantized trees to compressed-tensors folders. The layouts: :mod:`mxjax.io.ct_scales`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.api import path_str
from mxjax.core.formats import MXFP4, NVFP4
from mxjax.errors import CheckpointError, MxjaxError, MxjaxWarning
from mxjax.io import hf, safetensors
from mxjax.io.ct_config import LAYOUTS, Scheme, to_json
from mxjax.io.ct_scales import GLOBAL, INPUT, ONE, PACKED, SCALE, SCALE_DTYPE, UNCALIBRATED, divisor, zero_blocks
from mxjax.ops.qweight import QWeight, is_quantized

_EMBEDDING = re.compile(r"(^|\.)(\w*embed\w*|wte|wpe)$")


@dataclass
class _Output:
    tensors: dict[str, Any] = field(default_factory=dict)
    schemes: dict[str, Scheme] = field(default_factory=dict)
    ignore: list[str] = field(default_factory=list)
    uncalibrated: list[str] = field(default_factory=list)
    other_policy: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    dtype_name: str | None = None
    tied: bool = False


def write(
    folder: Path,
    tree: Any,
    *,
    config: Mapping[str, Any] | None = None,
    names: hf.Names | None = None,
    dtype: Any = None,
    like: Path | None = None,
) -> None:
    """Write a quantized tree as ``config.json`` and ``model.safetensors``.

    Raises:
      CheckpointError: every weight that the layout cannot carry, with the reason.
    """
    base = dict(config if config is not None else hf.read_config(like) if like is not None else {})
    stored = {} if like is None else _stored_divisors(like)
    out = _collect(tree, names or hf.default_names, None if dtype is None else jnp.dtype(dtype), stored)
    if out.refused:
        raise CheckpointError(
            f"compressed-tensors ({', '.join(LAYOUTS)}) cannot carry {len(out.refused)} of the tensors:\n  "
            + "\n  ".join(out.refused)
            + "\nthe formats 'mxjax' and 'orbax' carry everything"
        )
    if not out.schemes:
        raise CheckpointError("nothing in the tree is quantized; mxjax.quantize it first")
    _warn(out)
    hf.write_config(folder, _config(base, out))
    safetensors.write(folder / hf.WEIGHTS, out.tensors, {"format": "pt"})


def _stored_divisors(folder: Path) -> dict[str, np.float32]:
    entries = hf.read_entries(folder)
    return {n: e.read().reshape(-1)[0] for n, e in entries.items() if n.endswith((GLOBAL, INPUT)) and e.shape == (1,)}


def _collect(tree: Any, names: hf.Names, dtype: np.dtype | None, stored: Mapping[str, np.float32]) -> _Output:
    out = _Output()
    seen: dict[int, str] = {}
    for key_path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_quantized)[0]:
        path = path_str(key_path)
        name = hf.apply_names(names, path)
        if is_quantized(leaf):
            weight = leaf if isinstance(leaf, QWeight) else QWeight(qtensor=leaf)
            reason = _why_not(weight, name, path)
            if reason:
                out.refused.append(f"{path}: {reason}")
            else:
                _add_weight(out, name.removesuffix(".weight"), weight, stored)
            continue
        if not isinstance(leaf, (jax.Array, np.ndarray)) or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            out.refused.append(f"{path}: {type(leaf).__name__} of {getattr(leaf, 'dtype', 'no dtype')} is no tensor")
            continue
        first = seen.setdefault(id(leaf), name)
        if first != name and "lm_head.weight" in (first, name):
            out.tensors.pop("lm_head.weight", None)  # one table on disk, under the embedding's name
            out.tied = True
            if name == "lm_head.weight":
                continue
        _add_dense(out, path, name, leaf, dtype)
    return out


def _why_not(w: QWeight, name: str, path: str) -> str | None:
    """Why the layout cannot hold this weight, or None."""
    q = w.qtensor
    if path.split("/")[-1] == "weight" and q.ndim == 2 and q.axis != -1:
        return "an array named weight is [out, in] here, and this one is quantized along axis -2; use Rule(axis=-1)"
    if not name.endswith(".weight"):
        return f"its name is {name!r}, not one that ends in .weight"
    if q.format not in LAYOUTS.values():
        return f"format {q.format}"
    if w.transform is not None:
        return f"its inputs go through a transform ({type(w.transform).__name__})"
    if w.a is not None:
        return "a low-rank branch"
    if q.ndim != 2:
        return f"{q.ndim} axes {q.shape}; a Linear has two: save the layers or experts one by one"
    if q.size != q.padded_size:
        return f"a contraction axis of {q.size} padded to {q.padded_size}"
    if q.format == MXFP4 and q.global_scale is not None:
        return "a global factor on MXFP4 (scale policy 'third')"
    if w.activation is not None and w.activation.format != q.format:
        return f"activations in {w.activation.format}"
    for what, scale in (("global_scale", q.global_scale), ("input_scale", w.input_scale)):
        if scale is None:
            continue
        value = np.asarray(scale, np.float32)
        if value.size != 1 or not (np.isfinite(value).all() and 2.0**-126 <= value.min() <= 2.0**126):
            return f"{what} is {value.tolist()}; a Linear has one, positive and finite"
    try:
        w.validate()
    except MxjaxError as e:
        return str(e)
    return None


def _add_weight(out: _Output, module: str, w: QWeight, stored: Mapping[str, np.float32]) -> None:
    q = w.qtensor
    scales = np.asarray(q.scales)
    tensors = {PACKED: q.codes, SCALE: scales}
    if q.format == NVFP4:
        scales = zero_blocks(scales, q.codes, 0, ONE)
        tensors[SCALE] = scales.view(SCALE_DTYPE[NVFP4])
        given = {GLOBAL: q.global_scale}
        if w.activation is not None:
            given[INPUT] = w.input_scale
        for tensor, scale in given.items():
            value = UNCALIBRATED
            if scale is None:
                out.uncalibrated.append(module)
            else:
                value = divisor(np.asarray(scale, np.float32).reshape(-1)[0], stored.get(f"{module}.{tensor}"))
            tensors[tensor] = np.array([value], np.float32)
    if w.activation is not None and w.activation.scale != "even":
        out.other_policy.append(module)
    out.schemes[module] = Scheme(q.format, w.activation is not None)
    out.dtype_name = out.dtype_name or q.dtype_name
    for tensor, x in tensors.items():
        _add(out, f"{module}.{tensor}", x)


def _add_dense(out: _Output, path: str, name: str, x: Any, dtype: np.dtype | None) -> None:
    if hf.is_flax_kernel(path):
        if x.ndim != 2:
            out.refused.append(f"{path}: a Flax kernel of {x.ndim} axes {x.shape} has no PyTorch orientation")
            return
        x = np.asarray(x).T
    if dtype is not None and jnp.issubdtype(x.dtype, jnp.floating):
        x = np.asarray(x).astype(dtype)
    module, _, last = name.rpartition(".")
    if last == "weight" and x.ndim == 2 and not path.endswith("/embedding") and not _EMBEDDING.search(module):
        out.ignore.append(module)  # perhaps a Linear, which "targets": ["Linear"] would claim
    _add(out, name, x)


def _add(out: _Output, name: str, x: Any) -> None:
    if name in out.tensors:
        out.refused.append(f"{name}: two leaves have this name")
    out.tensors[name] = x


def _config(base: dict[str, Any], out: _Output) -> dict[str, Any]:
    """The model's config with the quantization, and with ties that are true of the tensors."""
    config = {key: value for key, value in base.items() if key != "quantization_config"}
    if out.tied:
        config["tie_word_embeddings"] = True
    elif "lm_head.weight" in out.tensors or "lm_head" in out.schemes:
        config["tie_word_embeddings"] = False
    ignore = [module for module in out.ignore if f"{module}.weight" in out.tensors]
    if config.get("tie_word_embeddings"):
        ignore.append("lm_head")  # no tensor, but a Linear all the same
    if not config.get("dtype") and not config.get("torch_dtype"):
        config["dtype"] = out.dtype_name
    config["quantization_config"] = to_json(out.schemes, ignore)
    return config


def _warn(out: _Output) -> None:
    if out.uncalibrated:
        warnings.warn(
            f"{len(out.uncalibrated)} NVFP4 W4A4 layers have no calibrated input_scale; input_global_scale 1.0 was "
            f"written (first: {out.uncalibrated[0]})",
            MxjaxWarning,
            stacklevel=4,
        )
    if out.other_policy:
        warnings.warn(
            f"{len(out.other_policy)} layers quantize activations with a scale policy other than 'even', which the "
            f"layout cannot say: readers use their own (first: {out.other_policy[0]})",
            MxjaxWarning,
            stacklevel=4,
        )
