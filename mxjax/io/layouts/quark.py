"""AMD Quark.

For each Linear ``[O, K]``: ``weight`` uint8 [O, K * bits / 8]; MXFP4 and MXFP6 have ``weight_scale`` uint8 [O, K / 32]
(E8M0); NVFP4 has ``weight_scale`` E4M3 [O, K/16], ``weight_scale_2`` and ``input_scale_2``, float32 scalars that
*multiply*. A spec says what happens to a tensor: one object for MX formats, two for NVFP4 (the elements, the scales).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from mxjax.core.formats import MXFP4, MXFP6_E2M3, MXFP6_E3M2, NVFP4, BlockFormat
from mxjax.errors import CheckpointError
from mxjax.io.layouts.base import Contents, Scheme, Schemes, model_config, strings
from mxjax.io.layouts.linear import E4M3, LinearLayout, Stored

_MX = (MXFP4, MXFP6_E2M3, MXFP6_E3M2)
_DTYPES = {"fp4": MXFP4, "fp6_e2m3": MXFP6_E2M3, "fp6_e3m2": MXFP6_E3M2}
_DTYPE_OF = {fmt: name for name, fmt in _DTYPES.items()} | {NVFP4: "fp4"}
VERSION = "0.13"  # of Quark, whose layout this is


class Quark(LinearLayout):
    name = "quark"
    method = "quark"
    stored: ClassVar = {
        **{fmt: Stored(activations=_MX) for fmt in _MX},
        NVFP4: Stored(
            scale_dtype=E4M3, global_scale="weight_scale_2", input_scale="input_scale_2", activations=(NVFP4,)
        ),
    }

    def schemes(self, config: Mapping[str, Any], folder: Path) -> Schemes:
        quantization = config["quantization_config"]
        export = quantization.get("export")
        if not isinstance(export, dict) or export.get("weight_format", "real_quantized") != "real_quantized":
            raise CheckpointError("quantization_config: export.weight_format is not 'real_quantized'")
        if export.get("pack_method", "reorder") != "reorder":
            raise CheckpointError(
                f"quantization_config: pack_method {str(export['pack_method'])[:50]!r}, not 'reorder'"
            )
        for key in ("kv_cache_quant_config", "softmax_quant_spec", "layer_type_quant_config"):
            if quantization.get(key):
                raise CheckpointError(f"quantization_config: {key} is set, which mxjax does not read")
        layers = quantization.get("layer_quant_config") or {}
        if not isinstance(layers, dict):
            raise CheckpointError("quantization_config: layer_quant_config is no object")
        named = [(n, _read_layer(f"layer_quant_config.{n}", layer)) for n, layer in layers.items()]
        groups = tuple(((name,), scheme) for name, scheme in named if scheme is not None)
        left = tuple(name for name, scheme in named if scheme is None)
        default = _read_layer("global_quant_config", quantization.get("global_quant_config"))
        return Schemes(groups, default, strings(quantization.get("exclude"), "exclude") + left, matches)

    def config_of(self, base: Mapping[str, Any], contents: Contents) -> dict[str, dict[str, Any]]:
        config = model_config(base, contents)
        kinds = list(contents.schemes.values())
        common = max(dict.fromkeys(kinds), key=kinds.count)
        config["quantization_config"] = {
            "algo_config": None,
            "exclude": contents.unquantized(config),
            "export": {
                "kv_cache_group": [],
                "min_kv_scale": 0.0,
                "pack_method": "reorder",
                "weight_format": "real_quantized",
                "weight_merge_groups": None,
            },
            "global_quant_config": _layer(common),
            "kv_cache_post_rope": False,
            "kv_cache_quant_config": {},
            "layer_quant_config": {name: _layer(s) for name, s in contents.schemes.items() if s != common},
            "layer_type_quant_config": {},
            "quant_method": "quark",
            "quant_mode": "eager_mode",
            "softmax_quant_spec": None,
            "version": VERSION,
        }
        return {"config.json": config}


def matches(pattern: str, module: str) -> bool:
    """Whether ``re:REGEX``, a pattern with stars, or an exact name stands for a module."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error as e:
            raise CheckpointError(f"quantization_config: {pattern!r} is no regular expression: {e}") from None
    return fnmatch.fnmatchcase(module, pattern)


def _layer(scheme: Scheme) -> dict[str, Any]:
    inputs = None if scheme.activation is None else _specs(scheme.activation, dynamic=True)
    weight = _specs(scheme.format, dynamic=False)
    return {"bias": None, "input_tensors": inputs, "output_tensors": None, "target_device": None, "weight": weight}


def _specs(fmt: BlockFormat, *, dynamic: bool) -> Any:
    spec = {
        "block_size": None,
        "ch_axis": -1,
        "dtype": _DTYPE_OF[fmt],
        "enable_buffer_reuse": False,
        "group_size": fmt.block_size,
        "is_dynamic": dynamic,
        "is_scale_quant": False,
        "max_input_numel": 4194304,
        "mx_element_dtype": None,
        "observer_cls": "PerBlockMXObserver",
        "qscheme": "per_group",
        "round_method": "half_even",
        "scale_calculation_mode": "even",
        "scale_format": "e8m0",
        "scale_type": "float",
        "symmetric": None,
        "zero_point_type": "int32",
    }
    if fmt != NVFP4:
        return spec
    elements = spec | {
        "scale_format": "float32",
        "scale_calculation_mode": None,
        "observer_cls": "PerGroupMinMaxObserver",
    }
    tensor = elements | {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "group_size": None, "ch_axis": None}
    tensor |= {"is_scale_quant": True, "is_dynamic": False, "observer_cls": "PerTensorMinMaxObserver"}
    return [elements, tensor]


def _read_layer(where: str, layer: Any) -> Scheme | None:
    """The scheme of a layer's config; None if its weight is not quantized."""
    where = f"quantization_config: {where}"
    if layer is None:
        return None
    if not isinstance(layer, dict):
        raise CheckpointError(f"{where} is no object")
    for key in ("output_tensors", "bias"):
        if layer.get(key):
            raise CheckpointError(f"{where}: {key} is set, which mxjax does not read")
    if layer.get("weight") is None:
        return None
    weight = _read_specs(f"{where}.weight", layer["weight"], dynamic=False)
    inputs = layer.get("input_tensors")
    activation = None if inputs is None else _read_specs(f"{where}.input_tensors", inputs, dynamic=True)
    if activation is not None and (activation == NVFP4) != (weight == NVFP4):
        raise CheckpointError(f"{where}: {weight} weights with {activation} inputs; Quark has no such scheme")
    return Scheme(weight, activation)


def _read_specs(where: str, specs: Any, *, dynamic: bool) -> BlockFormat:
    if isinstance(specs, list) and len(specs) == 2:
        elements = {"dtype": "fp4", "qscheme": "per_group", "group_size": 16, "is_dynamic": dynamic, "ch_axis": -1}
        tensor = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "is_scale_quant": True}
        _check(f"{where}[0]", specs[0], elements)
        _check(f"{where}[1]", specs[1], tensor)
        return NVFP4
    if not isinstance(specs, dict) or not isinstance(specs.get("dtype"), str) or specs["dtype"] not in _DTYPES:
        raise CheckpointError(f"{where}: {str(specs)[:200]}; mxjax reads {', '.join(_DTYPES)}, and NVFP4 as a pair")
    expected = {"qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": dynamic, "ch_axis": -1}
    _check(where, specs, expected)
    return _DTYPES[specs["dtype"]]


def _check(where: str, spec: Any, expected: Mapping[str, Any]) -> None:
    if not isinstance(spec, dict):
        raise CheckpointError(f"{where} is no object")
    for key, value in expected.items():
        if spec.get(key) != value:
            raise CheckpointError(f"{where}: {key} is {str(spec.get(key))[:50]!r}, not {value!r}")
