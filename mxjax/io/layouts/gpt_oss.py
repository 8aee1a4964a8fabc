"""gpt-oss: the experts of a layer in MXFP4, all the rest in bfloat16.

A parameter that is ``[E, K, N]`` in Hugging Face's model, such as ``model.layers.0.mlp.experts.gate_up_proj``, is
stored as ``gate_up_proj_blocks`` uint8 [E, N, K / 32, 16] and ``gate_up_proj_scales`` uint8 [E, N, K / 32] (E8M0); 16
bytes hold 32 codes, low nibble first. OpenAI's own files call them ``block.0.mlp.mlp1_weight.blocks`` and ``.scales``;
there the parameter is [E, N, K]. Rows of gate and up take turns: even rows are gate. Weight-only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from mxjax.core.formats import MXFP4
from mxjax.core.qtensor import QTensor
from mxjax.errors import BlockShapeError, CheckpointError, MxjaxError
from mxjax.io.layouts.base import (
    Contents,
    Layout,
    Scheme,
    Schemes,
    Target,
    covers,
    model_config,
    quantization_of,
    strings,
)
from mxjax.io.layouts.linear import U8, check_parts
from mxjax.io.safetensors import Entry
from mxjax.ops.qweight import QWeight

# For QuantConfig.exclude: every path but those of the experts, which alone the layout can quantize.
OTHERS = r"^(?!.*/(mlp/experts/(gate_up_proj|down_proj)|mlp/mlp[12]_weight)$)"
_HF = re.compile(r"(^|.*\.)mlp\.experts\.(gate_up_proj|down_proj)")
_OPENAI = re.compile(r"block\.\d+\.mlp\.mlp[12]_weight")
_BLOCK_BYTES = 16


class GptOss(Layout):
    name = "gpt-oss"
    writes = True

    def detect(self, config: Mapping[str, Any], names: Iterable[str] = ()) -> bool:
        if config.get("quantization_config") is not None:
            return quantization_of(config).get("quant_method") == "mxfp4"
        return any(name.endswith(".blocks") and _OPENAI.fullmatch(name.removesuffix(".blocks")) for name in names)

    def schemes(self, config: Mapping[str, Any], folder: Path) -> Schemes:
        ignore = strings(quantization_of(config).get("modules_to_not_convert"), "modules_to_not_convert")
        return Schemes((), Scheme(MXFP4), ignore, covers)

    def split(self, entry: Entry) -> tuple[str, str] | None:
        match = re.fullmatch(r"(.+)[._](blocks|scales)", entry.name)
        return (match[1], match[2]) if match else None

    def weight_name(self, module: str) -> str:
        return module

    def read_weight(self, module: str, tensors: Mapping[str, Entry], scheme: Scheme, target: Target) -> QWeight:
        if "blocks" not in tensors:
            entry = tensors["scales"]
            raise CheckpointError(f"{module}: blocks are missing (there is {entry.name} in {entry.file})")
        blocks = tensors["blocks"]
        shape = blocks.shape
        if blocks.dtype != U8 or len(shape) != 4 or shape[3] != _BLOCK_BYTES or 0 in shape:
            raise CheckpointError(
                f"{blocks.name} in {blocks.file}: {blocks.dtype} {shape}; blocks are uint8 [E, N, K/32, {_BLOCK_BYTES}]"
            )
        check_parts(tensors, {"blocks": (U8, shape), "scales": (U8, shape[:3])}, scheme)
        codes = blocks.read().reshape(*shape[:2], shape[2] * _BLOCK_BYTES)
        q = QTensor(
            codes=target.put(codes, "qtensor", "codes"),
            scales=target.put(tensors["scales"].read(), "qtensor", "scales"),
            format=MXFP4,
            axis=-1 if target.path.endswith("weight") else -2,
            size=shape[2] * MXFP4.block_size,
            dtype_name=target.dtype_name,
        )
        return QWeight(qtensor=q)

    def why_not(self, name: str, weight: QWeight) -> str | None:
        q = weight.qtensor
        if not _HF.fullmatch(name) and not _OPENAI.fullmatch(name):
            return f"its name is {name!r}; only mlp.experts.gate_up_proj and down_proj are quantized in this layout"
        if q.format != MXFP4:
            return f"format {q.format}"
        if q.ndim != 3:
            return f"{q.ndim} axes {q.shape}; the experts of a layer are one array of three"
        if weight.activation is not None:
            return f"activations in {weight.activation.format}; the layout is weight-only"
        if weight.transform is not None:
            return f"its inputs go through a transform ({type(weight.transform).__name__})"
        if weight.branch is not None:
            return "a low-rank branch"
        if q.size != q.padded_size:
            return f"a contraction axis of {q.size} padded to {q.padded_size}"
        if q.global_scale is not None:
            return "a global factor on MXFP4 (scale policy 'third')"
        if q.axis != (-1 if _OPENAI.fullmatch(name) else -2):
            return f"it is {q.shape}, quantized along axis {q.axis}; {name} is quantized along the other one"
        try:
            weight.validate()
        except MxjaxError as e:
            return str(e)
        return None

    def scheme_of(self, weight: QWeight) -> Scheme:
        return Scheme(weight.format)

    def shapes_of(
        self, name: str, scheme: Scheme, shape: tuple[int, ...]
    ) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        e, n, k = shape
        scales = (e, n, k // MXFP4.block_size)
        return {_tensor(name, "blocks"): (U8, (*scales, _BLOCK_BYTES)), _tensor(name, "scales"): (U8, scales)}

    def tensors_of(self, name: str, weight: QWeight, stored: Mapping[str, np.float32] | None = None) -> dict[str, Any]:
        codes, scales = np.asarray(weight.qtensor.codes), np.asarray(weight.qtensor.scales)
        blocks = codes.reshape(*scales.shape, _BLOCK_BYTES)
        return {_tensor(name, "blocks"): blocks, _tensor(name, "scales"): scales}

    def divisors_of(self, name: str, weight: QWeight) -> dict[str, np.float32]:
        return {}

    def config_of(self, base: Mapping[str, Any], contents: Contents) -> dict[str, dict[str, Any]]:
        config = model_config(base, contents)
        left = contents.unquantized(config) + contents.embeddings
        config["quantization_config"] = {"modules_to_not_convert": left, "quant_method": "mxfp4"}
        return {"config.json": config}


def split_gate_up(weight: QWeight) -> tuple[QWeight, QWeight]:
    """Gate and up of interleaved experts: even and odd outputs, without a change of any code.

    Args:
      weight: ``[E, K, 2 I]`` (or ``[E, 2 I, K]``), blocks along K.

    Returns:
      Two QWeights of I outputs.

    Example:
      >>> w = mxjax.quantize({"w": {"kernel": jnp.ones((2, 32, 6))}}, "mxfp4_a16")["w"]["kernel"]
      >>> split_gate_up(w)[0].shape
      (2, 32, 3)
    """
    q = weight.qtensor

    def part(first: int) -> QWeight:
        codes, scales = q.codes[..., first::2, :], q.scales[..., first::2, :]
        return replace(weight, qtensor=replace(q, codes=codes, scales=scales))

    return part(0), part(1)


def join_gate_up(gate: QWeight, up: QWeight) -> QWeight:
    """The inverse of :func:`split_gate_up`.

    Raises:
      BlockShapeError: two weights that differ in more than their codes and scales.
    """
    a, b = gate.qtensor, up.qtensor
    if a.shape != b.shape or replace(a, codes=b.codes, scales=b.scales).axis != b.axis or a.format != b.format:
        raise BlockShapeError(f"gate {a} and up {b} are no pair")

    def merge(x: Any, y: Any) -> Any:
        stacked = jnp.stack([jnp.asarray(x), jnp.asarray(y)], axis=-2)
        return stacked.reshape(*x.shape[:-2], 2 * x.shape[-2], x.shape[-1])

    q = replace(a, codes=merge(a.codes, b.codes), scales=merge(a.scales, b.scales))
    return replace(gate, qtensor=q)


def _tensor(name: str, part: str) -> str:
    return f"{name}.{part}" if _OPENAI.fullmatch(name) else f"{name}_{part}"
