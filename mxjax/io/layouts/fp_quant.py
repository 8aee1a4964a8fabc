"""FP-Quant's real quantization (MR-GPTQ's authors): read only.

For each Linear ``[O, K]``: ``qweight`` uint8 [O, K / 2], ``scales`` uint8 [O, K / block] (E8M0, or E4M3 as bytes),
``weight_global_scale`` and ``act_global_scale`` float32 [1], which *divide* (3 for MXFP4, the paper's 4/3 rule), and
``forward_hadamard_matrix`` [h, h]: weights were, and inputs are, multiplied by it in groups of h along K. A matrix that
is the Hadamard matrix becomes :class:`mxjax.transforms.Hadamard`, any other orthogonal one a BlockMatrix.
``backward_hadamard_matrix`` serves training and is not kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mxjax.core.formats import MXFP4, NVFP4
from mxjax.errors import CheckpointError
from mxjax.io.layouts.base import Contents, Scheme, Schemes, Target, covers, quantization_of, strings
from mxjax.io.layouts.linear import LinearLayout, Stored
from mxjax.io.safetensors import Entry
from mxjax.ops.qweight import ActivationFormat, QWeight
from mxjax.transforms import BlockMatrix, Hadamard, hadamard_matrix

_FORMATS = {"mxfp4": MXFP4, "nvfp4": NVFP4}
_FORWARD, _BACKWARD = "forward_hadamard_matrix", "backward_hadamard_matrix"
_SIZES = {MXFP4: (32, 64, 128), NVFP4: (16, 32, 64, 128)}
_TABLE = Stored(
    codes="qweight", scale="scales", global_scale="weight_global_scale", input_scale="act_global_scale", divisor=True
)
_THIRD = np.float32(3)


class FPQuant(LinearLayout):
    name = "fp-quant"
    method = "fp_quant"
    writes = False
    stored: ClassVar = {MXFP4: replace(_TABLE, activations=(MXFP4,)), NVFP4: replace(_TABLE, activations=(NVFP4,))}

    def schemes(self, config: Mapping[str, Any], folder: Path) -> Schemes:
        quantization = quantization_of(config)
        dtype, method = quantization.get("forward_dtype"), quantization.get("forward_method", "abs_max")
        if not isinstance(dtype, str) or dtype not in _FORMATS:
            raise CheckpointError(f"quantization_config: forward_dtype {str(dtype)[:50]!r}, not mxfp4 or nvfp4")
        if quantization.get("pseudoquantization") or quantization.get("store_master_weights"):
            raise CheckpointError("quantization_config: pseudoquantization or master weights: nothing is packed")
        if method != "abs_max":
            raise CheckpointError(f"quantization_config: forward_method {str(method)[:50]!r}; mxjax has 'abs_max' only")
        fmt = _FORMATS[dtype]
        size = quantization.get("hadamard_group_size") or fmt.block_size
        if size not in _SIZES[fmt]:
            raise CheckpointError(f"quantization_config: hadamard_group_size {str(size)[:50]!r}, not of {_SIZES[fmt]}")
        ignore = strings(quantization.get("modules_to_not_convert"), "modules_to_not_convert")
        return Schemes((), Scheme(fmt, fmt, size), ignore, covers)

    def split(self, entry: Entry) -> tuple[str, str] | None:
        module, _, part = entry.name.rpartition(".")
        known = part in (_FORWARD, _BACKWARD, "dqweight", "qweight", "scales")
        return (module, part) if known or part in (_TABLE.global_scale, _TABLE.input_scale) else None

    def read_weight(self, module: str, tensors: Mapping[str, Entry], scheme: Scheme, target: Target) -> QWeight:
        for part in (_FORWARD, _BACKWARD):
            if part not in tensors:
                there = next(iter(tensors.values()))
                raise CheckpointError(f"{module}.{part} is missing from {there.file.parent}")
        packed = {k: v for k, v in tensors.items() if k not in (_FORWARD, _BACKWARD)}
        weight = super().read_weight(module, packed, replace(scheme, rotation=None), target)
        transform = _transform(tensors[_FORWARD], scheme.rotation or 0, weight.qtensor.size, target)
        if scheme.format == NVFP4:
            return replace(weight, transform=transform)
        entry = tensors["act_global_scale"]
        if entry.read()[0] != _THIRD:
            raise CheckpointError(f"{entry.name} in {entry.file}: {entry.read()[0]}; the rule of MXFP4 inputs has 3")
        activation = ActivationFormat(format=MXFP4, scale="third")
        return replace(weight, transform=transform, activation=activation, input_scale=None)

    def why_not(self, name: str, weight: QWeight) -> str | None:
        return "mxjax only reads this layout"

    def config_of(self, base: Mapping[str, Any], contents: Contents) -> dict[str, dict[str, Any]]:
        raise CheckpointError("mxjax only reads this layout")


def _transform(entry: Entry, size: int, length: int, target: Target) -> Any:
    """The transform that multiplies groups of ``size`` by a stored matrix; None for the identity."""
    if entry.shape != (size, size) or entry.dtype.kind not in "fV" or length % size:
        raise CheckpointError(
            f"{entry.name} in {entry.file}: {entry.dtype} {entry.shape}; the config says [{size}, {size}], and inputs "
            f"are {length} long"
        )
    matrix = entry.read().astype(np.float32)
    h = hadamard_matrix(size)
    if np.array_equal(matrix, h.astype(entry.dtype).astype(np.float32)):
        return Hadamard(size)
    if np.array_equal(matrix, np.eye(size)):
        return None
    # A matrix in bfloat16 is off by 2^-9 an element relative to the exact one, so by 2^-8 in a product of two rows.
    if not np.allclose(matrix @ matrix.T, np.eye(size), atol=2.0**-7):
        raise CheckpointError(f"{entry.name} in {entry.file}: no orthogonal matrix")
    return BlockMatrix(target.put(np.repeat(matrix[None], length // size, 0), "transform", "matrices"))
