"""What a layout is: how one quantized weight is stored, and how a config says so.

A layout reads and writes one weight at a time, and knows nothing of trees, files and shards: :mod:`mxjax.io.hf_read`
and :mod:`mxjax.io.hf_write` walk whole trees with it.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mxjax.core.formats import BlockFormat
from mxjax.errors import CheckpointError
from mxjax.io.safetensors import Entry
from mxjax.ops.qweight import QWeight


@dataclass(frozen=True)
class Scheme:
    """How one weight is stored and what happens to its input.

    Attributes:
      format: of the weight.
      activation: format that the input is quantized to, or None (W4A16).
      rotation: block size of a Hadamard rotation of the input, or None.
    """

    format: BlockFormat
    activation: BlockFormat | None = None
    rotation: int | None = None


@dataclass(frozen=True)
class Schemes:
    """The schemes of a config by module name.

    Attributes:
      groups: patterns and the scheme of the modules that they name; the first match wins.
      default: scheme of every Linear that nothing names, or None.
      ignore: patterns of modules that stay as they are, whatever the rest says.
      matches: ``matches(pattern, module)``; layouts disagree on what a pattern is.
    """

    groups: tuple[tuple[tuple[str, ...], Scheme], ...]
    default: Scheme | None
    ignore: tuple[str, ...]
    matches: Callable[[str, str], bool]

    def of(self, module: str) -> Scheme | None:
        """The scheme of a module whose weight is stored quantized, or None where the config leaves it."""
        named = self.named(module)
        return self.default if named is None and not self.ignored(module) else named

    def named(self, module: str) -> Scheme | None:
        """The scheme of a module that the config names, by itself or by a pattern: its weight has to be quantized."""
        if self.ignored(module):
            return None
        return next((s for patterns, s in self.groups if any(self.matches(p, module) for p in patterns)), None)

    def ignored(self, module: str) -> bool:
        return any(self.matches(pattern, module) for pattern in self.ignore)


@dataclass(frozen=True)
class Target:
    """Where a weight that is being read goes.

    Attributes:
      path: its path in the tree.
      axis: its contraction axis there, for a matrix.
      dtype_name: dtype of the model.
      put: ``put(array, *fields)``: a NumPy array on the device, as the field ``qtensor.codes`` say.
      exact: multipliers that a divisor in the file stands for, by tensor name, where its reciprocal is another number.
    """

    path: str
    axis: int
    dtype_name: str
    put: Callable[..., Any]
    exact: Mapping[str, np.float32] = field(default_factory=dict)


@dataclass
class Contents:
    """What a folder holds, as far as its config has to say: filled weight by weight, then given to ``config_of``.

    Attributes:
      schemes: module (or parameter) -> scheme of its weight.
      linears: modules with an unquantized matrix that is no embedding: perhaps a Linear.
      embeddings: modules with an embedding table.
      dtype_name: of the first quantized weight.
      tied: the head and the embedding are one array.
    """

    schemes: dict[str, Scheme] = field(default_factory=dict)
    linears: list[str] = field(default_factory=list)
    embeddings: list[str] = field(default_factory=list)
    dtype_name: str | None = None
    tied: bool = False

    def add_dense(self, name: str, ndim: int, *, embedding: bool = False) -> None:
        """Count a tensor that is not quantized.

        Args:
          name: its name in the file.
          ndim: its rank; only matrices named ``weight`` may be Linears.
          embedding: it is an embedding table (also found by its name).
        """
        module, _, last = name.rpartition(".")
        if last == "weight" and ndim == 2:
            (self.embeddings if embedding or _EMBEDDING.search(module) else self.linears).append(module)

    def unquantized(self, config: Mapping[str, Any]) -> list[str]:
        """Exact names of the Linears that stay as they are, for the exclusions of a :func:`model_config`."""
        tied = config.get("tie_word_embeddings")
        return self.linears + (["lm_head"] if tied else [])  # a tied head has no tensor, but is a Linear all the same


_EMBEDDING = re.compile(r"(^|\.)(\w*embed\w*|wte|wpe)$")


class Layout(Protocol):
    """One way to store quantized weights in Hugging Face folders. Stateless; one instance a layout, in the registry.

    Attributes:
      name: of the layout, as ``save(format=...)`` takes it.
      writes: False for a layout that is only read.
    """

    name: str
    writes: bool

    def detect(self, config: Mapping[str, Any], names: Iterable[str] = ()) -> bool:
        """Whether a folder with this ``config.json`` and these tensor names is of this layout."""
        ...

    def schemes(self, config: Mapping[str, Any], folder: Path) -> Schemes:
        """The schemes of a folder.

        Raises:
          CheckpointError: a scheme that mxjax does not read, with what it is.
        """
        ...

    def split(self, entry: Entry) -> tuple[str, str] | None:
        """Module and part, ``("model.layers.0.mlp.up_proj", "weight_scale")``, of a tensor that belongs to a quantized
        weight; None for all others."""
        ...

    def weight_name(self, module: str) -> str:
        """Tensor name that the weight of a module has where it is not quantized: what ``names`` maps to a path."""
        ...

    def read_weight(self, module: str, tensors: Mapping[str, Entry], scheme: Scheme, target: Target) -> QWeight:
        """One weight from its tensors by part.

        Raises:
          CheckpointError: a part that is missing, unknown, or not of the dtype and shape that the scheme implies; the
            message names tensor and file.
        """
        ...

    def why_not(self, name: str, weight: QWeight) -> str | None:
        """Why the layout cannot carry a weight under the tensor name ``name``, or None."""
        ...

    def scheme_of(self, weight: QWeight) -> Scheme:
        """The scheme of a weight that the layout can carry."""
        ...

    def shapes_of(
        self, name: str, scheme: Scheme, shape: tuple[int, ...]
    ) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """dtype and shape of every tensor of a weight ``[..., out, in]``, before it is quantized."""
        ...

    def tensors_of(self, name: str, weight: QWeight, stored: Mapping[str, np.float32] | None = None) -> dict[str, Any]:
        """The tensors of a weight by name.

        Args:
          name: what the weight is called where it is not quantized, ``model.layers.0.mlp.up_proj.weight``.
          weight: one that :meth:`why_not` has nothing against.
          stored: global scales of the file that the weight came from, which are written bit for bit if they still fit.
        """
        ...

    def divisors_of(self, name: str, weight: QWeight) -> dict[str, np.float32]:
        """The multipliers of a weight that :meth:`tensors_of` stores as divisors, by tensor name."""
        ...

    def config_of(self, base: Mapping[str, Any], contents: Contents) -> dict[str, dict[str, Any]]:
        """JSON files by name, ``config.json`` among them: the model's config ``base`` with the quantization.

        Everything is decided by ``contents``: a ``quantization_config`` in ``base`` is not looked at.
        """
        ...


def model_config(base: Mapping[str, Any], contents: Contents) -> dict[str, Any]:
    """The model's config without quantization, with a dtype, and with ties that are true of the tensors."""
    config = {key: value for key, value in base.items() if key != "quantization_config"}
    if contents.tied:
        config["tie_word_embeddings"] = True
    elif "lm_head" in contents.linears or "lm_head" in contents.schemes:
        config["tie_word_embeddings"] = False
    if not config.get("dtype") and not config.get("torch_dtype"):
        config["dtype"] = contents.dtype_name
    return config


def strings(value: Any, where: str) -> tuple[str, ...]:
    """A list of strings out of JSON; null is none."""
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(f"quantization_config: {where} is a list of names, not {str(value)[:200]}")
    return tuple(value)


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config["quantization_config"]`` if it is an object, else an empty one."""
    quantization = config.get("quantization_config")
    return quantization if isinstance(quantization, dict) else {}


def covers(pattern: str, module: str) -> bool:
    """Whether a pattern with stars stands for a module or for one around it."""
    parts = module.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:i]), pattern) for i in range(1, len(parts) + 1))
