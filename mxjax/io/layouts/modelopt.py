"""NVIDIA ModelOpt's unified Hugging Face export.

For each Linear ``[O, K]``:

==================== ========================= ==================== ======================= ===================
``quant_algo``       ``weight``                ``weight_scale``     ``weight_scale_2``      ``input_scale``
==================== ========================= ==================== ======================= ===================
NVFP4                uint8 [O, K / 2]          E4M3 [O, K / 16]     float32, multiplies     float32, multiplies
W4A16_NVFP4          the same                  the same             the same                none
MXFP8                E4M3 [O, K]               uint8 [O, K / 32]    none                    none (dynamic)
mxfp4                uint8 [O, K / 2]          uint8 [O, K / 32]    none                    none (dynamic)
==================== ========================= ==================== ======================= ===================

The scheme is in ``quantization_config`` of config.json, in hf_quant_config.json, or in both. ``MIXED_PRECISION`` lists
its modules in ``quantized_layers``. Plain MXFP4 is read only: its export has no config that loaders understand.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from mxjax.core.formats import MXFP4, MXFP8_E4M3, NVFP4
from mxjax.errors import CheckpointError
from mxjax.io.layouts.base import Contents, Scheme, Schemes, model_config, quantization_of, strings
from mxjax.io.layouts.linear import E4M3, LinearLayout, Stored
from mxjax.io.safetensors import read_json
from mxjax.ops.qweight import QWeight

FILE = "hf_quant_config.json"
PRODUCER = {"name": "modelopt", "version": "0.47.0"}  # whose layout this is; loaders look for the name
MIXED = "MIXED_PRECISION"
_ALGORITHMS = {
    "NVFP4": Scheme(NVFP4, NVFP4),
    "W4A16_NVFP4": Scheme(NVFP4),
    "MXFP8": Scheme(MXFP8_E4M3, MXFP8_E4M3),
    "mxfp4": Scheme(MXFP4, MXFP4),
}
_NAMES = {scheme: name for name, scheme in _ALGORITHMS.items()}


class ModelOpt(LinearLayout):
    name = "modelopt"
    method = "modelopt"
    stored: ClassVar = {
        NVFP4: Stored(scale_dtype=E4M3, global_scale="weight_scale_2", input_scale="input_scale", activations=(NVFP4,)),
        MXFP8_E4M3: Stored(codes_dtype=E4M3, activations=(MXFP8_E4M3,)),
        MXFP4: Stored(activations=(MXFP4,)),
    }

    def schemes(self, config: Mapping[str, Any], folder: Path) -> Schemes:
        quantization = quantization_of(config)
        if (folder / FILE).exists():
            _compare(quantization, from_file(read_json(folder / FILE), folder / FILE))
        if quantization.get("kv_cache_quant_algo") or quantization.get("kv_cache_scheme"):
            raise CheckpointError("quantization_config: the KV cache is quantized, which mxjax does not read")
        ignore = strings(quantization.get("ignore"), "ignore")
        if quantization.get("quant_algo") != MIXED:
            return Schemes((), _scheme("quantization_config", quantization), ignore, fnmatch_)
        layers = quantization.get("quantized_layers")
        if not isinstance(layers, dict) or not layers:
            raise CheckpointError(f"quantization_config: {MIXED} without quantized_layers")
        groups = tuple(((name,), _scheme(f"quantized_layers.{name}", layer)) for name, layer in layers.items())
        return Schemes(groups, None, ignore, fnmatch_)

    def why_not(self, name: str, weight: QWeight) -> str | None:
        reason = super().why_not(name, weight)
        if reason is None and weight.format == MXFP4:
            return "format mxfp4: ModelOpt's own export of it has no config that a loader reads"
        if reason is None and self.scheme_of(weight) not in _NAMES:
            return f"{weight.format} weights with float inputs"
        return reason

    def config_of(self, base: Mapping[str, Any], contents: Contents) -> dict[str, dict[str, Any]]:
        config = model_config(base, contents)
        ignore = contents.unquantized(config) + contents.embeddings
        kinds = sorted(set(contents.schemes.values()), key=lambda s: _NAMES[s])
        algo = _NAMES[kinds[0]] if len(kinds) == 1 else MIXED
        layers = {
            name: {"quant_algo": _NAMES[s], "group_size": s.format.block_size} for name, s in contents.schemes.items()
        }
        per_kind = {"quantized_layers": layers} if algo == MIXED else {}
        groups = {
            f"group_{i}": {
                "input_activations": None if kind.activation is None else _args(kind),
                "weights": _args(kind),
                "targets": ["Linear"] if len(kinds) == 1 else [n for n, s in contents.schemes.items() if s == kind],
            }
            for i, kind in enumerate(kinds)
        }
        config["quantization_config"] = {
            "config_groups": groups,
            "ignore": ignore,
            "quant_algo": algo,
            **per_kind,
            "producer": dict(PRODUCER),
            "quant_method": "modelopt",
        }
        group_size = {} if algo == MIXED else {"group_size": kinds[0].format.block_size}
        inner = {"quant_algo": algo, "kv_cache_quant_algo": None, **group_size, **per_kind, "exclude_modules": ignore}
        return {"config.json": config, FILE: {"producer": dict(PRODUCER), "quantization": inner}}


def from_file(value: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What hf_quant_config.json says, in the words of config.json: older exports have that file alone.

    Raises:
      CheckpointError: no object ``quantization`` in it.
    """
    inner = value.get("quantization")
    if not isinstance(inner, dict):
        raise CheckpointError(f"{path}: no object 'quantization'")
    out = {"quant_method": "modelopt", "ignore": inner.get("exclude_modules"), "producer": value.get("producer")}
    for key in ("quant_algo", "kv_cache_quant_algo", "group_size", "quantized_layers"):
        if inner.get(key) is not None:
            out[key] = inner[key]
    return out


def fnmatch_(pattern: str, module: str) -> bool:
    """Whether a pattern with stars, or an exact name, stands for a module."""
    return fnmatch.fnmatchcase(module, pattern)


def _compare(config: Mapping[str, Any], file: Mapping[str, Any]) -> None:
    for key in ("quant_algo", "ignore", "quantized_layers"):
        ours, theirs = config.get(key), file.get(key)
        if isinstance(ours, list) and isinstance(theirs, list):
            ours, theirs = sorted(map(str, ours)), sorted(map(str, theirs))
        if (ours or None) != (theirs or None):
            raise CheckpointError(
                f"quantization_config: {key} is not what {FILE} says: {str(ours)[:100]}, {str(theirs)[:100]}"
            )


def _scheme(where: str, layer: Any) -> Scheme:
    algo = layer.get("quant_algo") if isinstance(layer, dict) else layer
    if not isinstance(algo, str) or algo not in _ALGORITHMS:
        known = ", ".join([*_ALGORITHMS, MIXED])
        raise CheckpointError(f"{where}: quant_algo {str(algo)[:50]!r}; mxjax reads {known}")
    scheme = _ALGORITHMS[algo]
    sizes = [layer.get("group_size")]
    groups = layer.get("config_groups")
    if groups is not None and not (isinstance(groups, dict) and all(isinstance(g, dict) for g in groups.values())):
        raise CheckpointError(f"{where}: config_groups holds objects by name, not {str(groups)[:100]}")
    for group in (groups or {}).values():
        sizes += [a.get("group_size") for a in map(group.get, ("weights", "input_activations")) if isinstance(a, dict)]
    if wrong := [s for s in sizes if s is not None and s != scheme.format.block_size]:
        raise CheckpointError(f"{where}: group_size {str(wrong[0])[:50]!r}; {algo} has {scheme.format.block_size}")
    return scheme


def _args(scheme: Scheme) -> dict[str, Any]:
    fmt = scheme.format
    return {"dynamic": False, "num_bits": fmt.element.bits, "type": "float", "group_size": fmt.block_size}
