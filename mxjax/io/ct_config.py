"""The ``quantization_config`` of compressed-tensors: which scheme each module has, to JSON and back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mxjax.core.formats import MXFP4, NVFP4, BlockFormat
from mxjax.errors import CheckpointError

VERSION = "0.19.0"  # of compressed-tensors, whose layout this is
MIXED = "mixed-precision"
LAYOUTS: dict[str, BlockFormat] = {"mxfp4-pack-quantized": MXFP4, "nvfp4-pack-quantized": NVFP4}
_NAMES = {fmt: name for name, fmt in LAYOUTS.items()}
# What a reader must know of a group's weights and input_activations; other keys do not change the tensors.
_KNOWN = {
    MXFP4: {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
    NVFP4: {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
}
_DYNAMIC: dict[BlockFormat, bool | str] = {MXFP4: True, NVFP4: "local"}


@dataclass(frozen=True)
class Scheme:
    """How the weight of one module is stored and whether its input is quantized alike (W4A4) or not (W4A16)."""

    format: BlockFormat
    activation: bool


def to_json(schemes: Mapping[str, Scheme], ignore: Iterable[str]) -> dict[str, Any]:
    """The ``quantization_config`` for modules by name.

    One scheme is written as its authors do (targets "Linear", the rest in ``ignore``); several as groups that list
    their modules by exact name.
    """
    kinds = sorted(set(schemes.values()), key=lambda s: (_NAMES[s.format], not s.activation))
    groups = {}
    for i, kind in enumerate(kinds):
        members = [name for name, scheme in schemes.items() if scheme == kind]
        groups[f"group_{i}"] = {
            "format": _NAMES[kind.format],
            "input_activations": _args(kind.format, weight=False) if kind.activation else None,
            "output_activations": None,
            "targets": ["Linear"] if len(kinds) == 1 else members,
            "weights": _args(kind.format, weight=True),
        }
    layouts = {_NAMES[kind.format] for kind in kinds}
    return {
        "config_groups": groups,
        "format": layouts.pop() if len(layouts) == 1 else MIXED,
        "global_compression_ratio": None,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": VERSION,
    }


def _args(fmt: BlockFormat, *, weight: bool) -> dict[str, Any]:
    observer = "memoryless_minmax" if weight else "static_minmax" if fmt == NVFP4 else None
    return {
        "actorder": None,
        "block_structure": None,
        "dynamic": False if weight else _DYNAMIC[fmt],
        **_KNOWN[fmt],
        "observer": observer,
        "observer_kwargs": {},
        "scale_dtype": "torch.uint8" if fmt == MXFP4 else "torch.float8_e4m3fn",
        "symmetric": True,
        "zp_dtype": None,
    }


class Schemes:
    """The schemes of a ``quantization_config``: ``schemes.of(module)``.

    Raises:
      CheckpointError: a scheme that mxjax does not read, with what it is.
    """

    def __init__(self, config: Any) -> None:
        if not isinstance(config, dict) or config.get("quant_method") != "compressed-tensors":
            raise CheckpointError("quantization_config: quant_method is not 'compressed-tensors'")
        status = config.get("quantization_status", "compressed")
        if status != "compressed":
            raise CheckpointError(f"quantization_config: quantization_status {status!r} has no packed weights")
        for key in ("sparsity_config", "transform_config", "kv_cache_scheme"):
            if config.get(key):
                raise CheckpointError(f"quantization_config: {key} is set, which mxjax does not read yet")
        self.ignore = _strings(config.get("ignore"), "ignore")
        groups = config.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise CheckpointError("quantization_config: no config_groups")
        self.groups = [_read_group(name, group, config.get("format")) for name, group in groups.items()]

    def of(self, module: str) -> Scheme | None:
        """The scheme that the config gives to a module with packed weights, or None: ignored or in no group.

        A name or pattern wins over a class name ("Linear"), which stands for every such module.
        """
        by_class = [scheme for targets, scheme in self.groups if any(re.fullmatch(r"[A-Z]\w*", t) for t in targets)]
        named = self.named(module)
        if named is None and by_class and not self.ignored(module):
            return by_class[0]
        return named

    def named(self, module: str) -> Scheme | None:
        """The scheme of a module that a group names, by itself or by a pattern."""
        if self.ignored(module):
            return None
        return next((s for targets, s in self.groups if any(_matches(t, module) for t in targets)), None)

    def ignored(self, module: str) -> bool:
        return any(_matches(pattern, module) for pattern in self.ignore)


def _matches(pattern: str, module: str) -> bool:
    if not pattern.startswith("re:"):
        return pattern == module
    try:
        return re.match(pattern[3:], module) is not None
    except re.error as e:
        raise CheckpointError(f"quantization_config: {pattern!r} is no regular expression: {e}") from None


def _strings(value: Any, where: str) -> list[str]:
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(f"quantization_config: {where} is a list of names, not {str(value)[:200]}")
    return value


def _read_group(name: str, group: Any, top_format: Any) -> tuple[list[str], Scheme]:
    where = f"quantization_config: {name}"
    if not isinstance(group, dict):
        raise CheckpointError(f"{where} is no object")
    layout = group.get("format") or top_format
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise CheckpointError(f"{where}: format {str(layout)[:100]!r}; mxjax reads {', '.join(LAYOUTS)}")
    fmt = LAYOUTS[layout]
    _check_args(f"{where}.weights", group.get("weights"), fmt, dynamic=False)
    inputs = group.get("input_activations")
    if inputs is not None:
        _check_args(f"{where}.input_activations", inputs, fmt, dynamic=_DYNAMIC[fmt])
    if group.get("output_activations") is not None:
        raise CheckpointError(f"{where}: output_activations are set, which mxjax does not read")
    return _strings(group.get("targets"), f"{name}.targets"), Scheme(fmt, inputs is not None)


def _check_args(where: str, args: Any, fmt: BlockFormat, *, dynamic: bool | str) -> None:
    if not isinstance(args, dict):
        raise CheckpointError(f"{where} is no object")
    for key, expected in {**_KNOWN[fmt], "symmetric": True, "dynamic": dynamic}.items():
        if args.get(key, expected if key in ("symmetric", "dynamic") else None) != expected:
            raise CheckpointError(f"{where}: {key} is {str(args.get(key))[:50]!r}; for {fmt} it is {expected!r}")
    if args.get("actorder"):
        raise CheckpointError(f"{where}: actorder {str(args['actorder'])[:50]!r} needs a g_idx, which FP4 layouts lack")
