"""The two kinds of folders that can be streamed: Hugging Face layouts and our own."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from mxjax.errors import MxjaxWarning
from mxjax.io import hf, hf_write, manifest, native
from mxjax.io.layouts import Contents, get
from mxjax.io.safetensors import Spec
from mxjax.io.streaming.plan import Item
from mxjax.ops.qweight import QWeight


class Target(Protocol):
    """How items are stored, and what stands beside them.

    Attributes:
      weights: name of the file of tensors, where there is one.
      metadata: of every such file.
      turns: a Flax kernel is stored as the tree has it, ``[in, out]``.
    """

    weights: str
    metadata: Mapping[str, str]
    turns: bool

    def specs_of(self, item: Item) -> dict[str, Spec]:
        """The tensors that an item becomes."""
        ...

    def reserve(self, item: Item) -> int:
        """Bytes of metadata that an item may need."""
        ...

    def tensors_of(self, item: Item, weight: QWeight) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """The tensors of a quantized item, and the multipliers for the metadata."""
        ...

    def write_config(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Everything that says how to read the tensors."""
        ...


class HfTarget:
    """A layout of the registry (:mod:`mxjax.io.layouts`), under the tensor names of the source.

    Raises:
      CheckpointError: weights that it cannot carry.
    """

    weights = hf.WEIGHTS
    metadata: Mapping[str, str] = {"format": "pt"}
    turns = False

    def __init__(self, layout: str, items: list[Item]) -> None:
        self.layout = get(layout)
        self.contents = Contents()
        self.scales: dict[str, np.float32] = {}  # of what this run has quantized
        refused = hf_write.Refused(self.layout)
        notes: dict[str, list[str]] = {}
        for item in items:
            name = item.entry.name
            if item.spec is None:
                self.contents.add_dense(name, len(item.entry.shape))
                continue
            if not refused.check(item.path, name, item.leaf):
                continue
            self.contents.schemes[name.removesuffix(".weight")] = self.layout.scheme_of(item.leaf)
            self.contents.dtype_name = self.contents.dtype_name or item.leaf.qtensor.dtype_name
            for text in hf_write.notes(item.leaf):
                notes.setdefault(text, []).append(name.removesuffix(".weight"))
        refused.done()
        for text, modules in notes.items():
            warnings.warn(f"{len(modules)} {text} (first: {modules[0]})", MxjaxWarning, stacklevel=4)

    def specs_of(self, item: Item) -> dict[str, Spec]:
        if item.spec is None:
            return {item.entry.name: Spec(item.dtype, item.entry.shape)}
        q = item.leaf.qtensor
        shapes = self.layout.shapes_of(item.entry.name, self.layout.scheme_of(item.leaf), (*q.codes.shape[:-1], q.size))
        return {name: Spec(*spec) for name, spec in shapes.items()}

    def reserve(self, item: Item) -> int:
        names = self.layout.divisors_of(item.entry.name, item.leaf) if item.spec is not None else ()
        return sum(len(json.dumps(json.dumps({name: 0.0}))) + 32 for name in names)

    def tensors_of(self, item: Item, weight: QWeight) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        tensors = self.layout.tensors_of(item.entry.name, weight)
        scale = weight.qtensor.global_scale
        if weight.format.has_tensor_scale and scale is not None and scale.size == 1:
            self.scales[item.entry.name.removesuffix(".weight")] = np.float32(np.asarray(scale).reshape(-1)[0])
        return tensors, hf_write.exact_scales(self.layout, item.entry.name, weight, tensors)

    def write_config(self, folder: Path, config: Mapping[str, Any]) -> None:
        hf_write.warn_of_split_groups(self.scales, stacklevel=5)
        for file, value in self.layout.config_of(config, self.contents).items():
            hf.write_json(folder / file, value)


class NativeTarget:
    """Our own layout: ``mxjax.json`` beside the arrays, under the paths of the tree."""

    weights = native.SAFETENSORS
    metadata: Mapping[str, str] = {}
    turns = True

    def __init__(self, items: list[Item]) -> None:
        self.items = items  # names are found by identity: the stand-ins must live
        self.node, arrays = manifest.encode(hf.nest((item.path, item.leaf) for item in items))
        self.names = {id(x): name for name, x in arrays.items()}

    def specs_of(self, item: Item) -> dict[str, Spec]:
        leaves = [x for x in jax.tree.leaves(item.leaf) if id(x) in self.names]  # without those that have no values
        return {self.names[id(x)]: Spec.of(x) for x in leaves}

    def reserve(self, item: Item) -> int:
        return 0

    def tensors_of(self, item: Item, weight: QWeight) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        names = [self.names.get(id(x)) for x in jax.tree.leaves(item.leaf)]
        return {n: x for n, x in zip(names, jax.tree.leaves(weight), strict=True) if n is not None}, {}

    def write_config(self, folder: Path, config: Mapping[str, Any]) -> None:
        hf.write_json(folder / hf.CONFIG, config)
        native.write_manifest(folder, self.node, "safetensors")


def target_of(format: str, items: list[Item]) -> Target:
    """The target for a format of :func:`mxjax.save`."""
    return NativeTarget(items) if format == "mxjax" else HfTarget(format, items)
