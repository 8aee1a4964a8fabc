"""Quantized trees to Hugging Face folders, whatever the layout (:mod:`mxjax.io.layouts`)."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.api import path_str
from mxjax.config import scale_group
from mxjax.errors import CheckpointError, MxjaxWarning
from mxjax.io import hf, sharded
from mxjax.io.hf_read import EXACT
from mxjax.io.layouts import Contents, Layout, carriers, get
from mxjax.io.layouts.scales import multiplier
from mxjax.ops.qweight import QWeight, is_quantized


@dataclass
class Refused:
    """Weights that a layout cannot carry, and the layouts that can."""

    layout: Layout
    reasons: list[str] = field(default_factory=list)
    others: set[str] | None = None

    def check(self, path: str, name: str, weight: QWeight) -> bool:
        """Whether the layout can carry a weight; if not, its reason is noted."""
        reason = misnamed(weight, path) or self.layout.why_not(name, weight)
        if reason:
            self.reasons.append(f"{path}: {reason}")
            able = set(carriers(name, weight))
            self.others = able if self.others is None else self.others & able
        return not reason

    def done(self) -> None:
        """Raise CheckpointError if anything was refused."""
        if not self.reasons:
            return
        others = ", ".join(sorted(self.others or ()))
        raise CheckpointError(
            f"{self.layout.name} cannot carry {len(self.reasons)} of the tensors:\n  "
            + "\n  ".join(self.reasons)
            + "\nthe formats 'mxjax' and 'orbax' carry everything"
            + (f"; {others} can carry these weights" if others else "")
        )


@dataclass
class _Output:
    refused: Refused
    tensors: dict[str, Any] = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)  # names of tensors that belong together
    contents: Contents = field(default_factory=Contents)
    scales: dict[str, np.float32] = field(default_factory=dict)  # module -> tensor scale, NVFP4
    exact: dict[str, float] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)  # what to warn of -> modules


def write(
    folder: Path,
    tree: Any,
    *,
    layout: str,
    config: Mapping[str, Any] | None = None,
    names: hf.Names | None = None,
    dtype: Any = None,
    like: Path | None = None,
    shard_size: int = sharded.SHARD_SIZE,
) -> None:
    """Write a quantized tree as ``config.json`` and ``model.safetensors``, or shards of it with an index.

    Raises:
      CheckpointError: every weight that the layout cannot carry, with the reason and the layouts that can.
    """
    target = get(layout)
    base = dict(config if config is not None else hf.read_config(like) if like is not None else {})
    stored = {} if like is None else stored_scales(like)
    out = _collect(tree, target, names or hf.default_names, None if dtype is None else jnp.dtype(dtype), stored)
    out.refused.done()
    if not out.contents.schemes:
        raise CheckpointError("nothing in the tree is quantized; mxjax.quantize it first")
    warn_of_split_groups(out.scales, stacklevel=4)
    for text, modules in out.notes.items():
        warnings.warn(f"{len(modules)} {text} (first: {modules[0]})", MxjaxWarning, stacklevel=3)
    for file, value in target.config_of(base, out.contents).items():
        hf.write_json(folder / file, value)
    metadata = {"format": "pt"} | ({EXACT: json.dumps(out.exact)} if out.exact else {})
    groups = [{name: out.tensors[name] for name in group if name in out.tensors} for group in out.groups]
    sharded.write(folder, hf.WEIGHTS, groups, shard_size, metadata)


def stored_scales(folder: Path) -> dict[str, np.float32]:
    """Every float32 scalar of a folder by name: its global scales, bit for bit."""
    entries = hf.read_entries(folder)
    return {n: e.read().reshape(-1)[0] for n, e in entries.items() if e.dtype == np.float32 and e.shape in ((1,), ())}


def _collect(
    tree: Any, layout: Layout, names: hf.Names, dtype: np.dtype | None, stored: Mapping[str, np.float32]
) -> _Output:
    out = _Output(Refused(layout))
    seen: dict[int, str] = {}
    for key_path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_quantized)[0]:
        path = path_str(key_path)
        name = hf.apply_names(names, path)
        if is_quantized(leaf):
            weight = leaf if isinstance(leaf, QWeight) else QWeight(qtensor=leaf)
            if out.refused.check(path, name, weight):
                _add_weight(out, layout, name, weight, stored)
            continue
        if not isinstance(leaf, (jax.Array, np.ndarray)) or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            out.refused.reasons.append(
                f"{path}: {type(leaf).__name__} of {getattr(leaf, 'dtype', 'no dtype')} is no tensor"
            )
            continue
        first = seen.setdefault(id(leaf), name)
        if first != name and "lm_head.weight" in (first, name):
            out.contents.tied = True  # one table on disk, under the embedding's name
            if out.tensors.pop("lm_head.weight", None) is not None:
                out.contents.linears.remove("lm_head")
            if name == "lm_head.weight":
                continue
        _add_dense(out, path, name, leaf, dtype)
    return out


def misnamed(w: QWeight, path: str) -> str | None:
    """Why the path of a weight contradicts its orientation, or None."""
    if path.split("/")[-1] == "weight" and w.ndim == 2 and w.qtensor.axis != -1:
        return "an array named weight is [out, in] here, and this one is quantized along axis -2; use Rule(axis=-1)"
    return None


def _add_weight(out: _Output, layout: Layout, name: str, w: QWeight, stored: Mapping[str, np.float32]) -> None:
    module = name.removesuffix(".weight")
    scheme = layout.scheme_of(w)
    out.contents.schemes[module] = scheme
    out.contents.dtype_name = out.contents.dtype_name or w.qtensor.dtype_name
    if w.format.has_tensor_scale:
        out.scales[module] = np.float32(np.asarray(w.qtensor.global_scale).reshape(-1)[0])
    for text in notes(w):
        out.notes.setdefault(text, []).append(module)
    _add(out, layout.tensors_of(name, w, stored))
    out.exact |= exact_scales(layout, name, w, out.tensors)


def notes(w: QWeight) -> list[str]:
    """What a layout of somebody else cannot say about a weight that it carries."""
    out = []
    if w.activation is not None and w.activation.format.has_tensor_scale and w.input_scale is None:
        out.append(
            "NVFP4 W4A4 layers have no calibrated input_scale; an input scale of 1.0 was written, which stands for none"
        )
    if w.transform is not None:
        out.append(
            "layers have inputs that a loader must rotate (transform_config): vLLM does, transformers 5 does not"
        )
    if w.activation is not None and w.activation.scale != "even":
        out.append(
            "layers quantize activations with a scale policy other than 'even', which the layout cannot say: readers "
            "use their own"
        )
    return out


def warn_of_split_groups(scales: Mapping[str, np.float32], stacklevel: int) -> None:
    """Warn of tensor scales by module that inference engines would change."""
    if split := split_groups(scales):
        text = (
            "groups of NVFP4 weights that engines fuse (q/k/v, gate/up) have different tensor scales: vLLM takes the "
            "largest for all of a group, which changes values; quantize with share_scales=mxjax.config.FUSED"
        )
        warnings.warn(f"{len(split)} {text} (first: {split[0]})", MxjaxWarning, stacklevel=stacklevel)


def split_groups(scales: Mapping[str, np.float32]) -> list[str]:
    """Groups of :data:`mxjax.config.FUSED` in which tensor scales by module differ."""
    groups: dict[str, set[float]] = {}
    for module, scale in scales.items():
        group = scale_group(module.replace(".", "/") + "/")
        if group is not None:
            groups.setdefault(group.strip("/").replace("/", "."), set()).add(float(scale))
    return [group for group, values in groups.items() if len(values) > 1]


def exact_scales(layout: Layout, name: str, w: QWeight, tensors: Mapping[str, Any]) -> dict[str, float]:
    """Global scales whose divisor in the file stands for another multiplier, by tensor name.

    About one multiplier in seven is nobody's reciprocal. mxjax finds it again in the metadata of the file, so that no
    conversion changes a value; other readers are off by half a step of float32.
    """
    out = {}
    for tensor, scale in layout.divisors_of(name, w).items():
        if multiplier(tensors[tensor][0]) != scale:
            out[tensor] = float(scale)
    return out


def _add_dense(out: _Output, path: str, name: str, x: Any, dtype: np.dtype | None) -> None:
    if hf.is_flax_kernel(path):
        if x.ndim != 2:
            out.refused.reasons.append(f"{path}: a Flax kernel of {x.ndim} axes {x.shape} has no PyTorch orientation")
            return
        x = np.asarray(x).T
    if dtype is not None and jnp.issubdtype(x.dtype, jnp.floating):
        x = np.asarray(x).astype(dtype, copy=False)  # a memory map stays one
    out.contents.add_dense(name, x.ndim, embedding=path.endswith("/embedding"))
    _add(out, {name: x})


def _add(out: _Output, tensors: Mapping[str, Any]) -> None:
    out.refused.reasons += [f"{name}: two leaves have this name" for name in tensors if name in out.tensors]
    out.tensors |= tensors
    out.groups.append(list(tensors))
