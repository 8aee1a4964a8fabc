"""The ``quantization_config`` of compressed-tensors: which scheme each module has, to JSON and back."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mxjax.core.formats import MXFP4, MXFP6_E2M3, MXFP8_E4M3, NVFP4, BlockFormat
from mxjax.errors import CheckpointError
from mxjax.io.layouts import ct_transform
from mxjax.io.layouts.base import Scheme, Schemes, strings

VERSION = "0.19.0"  # of compressed-tensors, whose layout this is
MIXED = "mixed-precision"
FORMATS: dict[str, BlockFormat] = {
    "mxfp4-pack-quantized": MXFP4,
    "nvfp4-pack-quantized": NVFP4,
    "mxfp6-pack-quantized": MXFP6_E2M3,
    "mxfp8-quantized": MXFP8_E4M3,
}
_NAMES = {fmt: name for name, fmt in FORMATS.items()}
_CLASS = re.compile(r"[A-Z]\w*")  # "Linear" and other classes of modules, as opposed to names and patterns


def _known(fmt: BlockFormat) -> dict[str, Any]:
    """What a reader must know of a group's weights and input_activations; other keys do not change the tensors."""
    strategy = "tensor_group" if fmt == NVFP4 else "group"
    return {"num_bits": fmt.element.bits, "type": "float", "strategy": strategy, "group_size": fmt.block_size}


def _dynamic(fmt: BlockFormat) -> bool | str:
    return "local" if fmt == NVFP4 else True


def write(schemes: Mapping[str, Scheme], ignore: Iterable[str]) -> dict[str, Any]:
    """The ``quantization_config`` for modules by name.

    One scheme is written as its authors do (targets "Linear", the rest in ``ignore``); several as groups that list
    their modules by exact name.
    """
    members: dict[tuple[BlockFormat, BlockFormat | None], list[str]] = {}
    for name, scheme in schemes.items():
        members.setdefault((scheme.format, scheme.activation), []).append(name)
    groups = {}
    for i, (fmt, activation) in enumerate(sorted(members, key=lambda k: (_NAMES[k[0]], k[1] is None))):
        groups[f"group_{i}"] = {
            "format": _NAMES[fmt],
            "input_activations": None if activation is None else _args(activation, weight=False),
            "output_activations": None,
            "targets": ["Linear"] if len(members) == 1 else members[fmt, activation],
            "weights": _args(fmt, weight=True),
        }
    layouts = {_NAMES[fmt] for fmt, _ in members}
    return {
        "config_groups": groups,
        "format": layouts.pop() if len(layouts) == 1 else MIXED,
        "global_compression_ratio": None,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": ct_transform.write({name: s.rotation for name, s in schemes.items() if s.rotation}),
        "version": VERSION,
    }


def _args(fmt: BlockFormat, *, weight: bool) -> dict[str, Any]:
    observer = "memoryless_minmax" if weight else "static_minmax" if fmt == NVFP4 else None
    return {
        "actorder": None,
        "block_structure": None,
        "dynamic": False if weight else _dynamic(fmt),
        **_known(fmt),
        "observer": observer,
        "observer_kwargs": {},
        "scale_dtype": "torch.float8_e4m3fn" if fmt == NVFP4 else "torch.uint8",
        "symmetric": True,
        "zp_dtype": None,
    }


def read(config: Any) -> Schemes:
    """The schemes of a ``quantization_config``.

    A name or pattern wins over a class name ("Linear"), which stands for every Linear.

    Raises:
      CheckpointError: a scheme that mxjax does not read, with what it is.
    """
    if not isinstance(config, dict) or config.get("quant_method") != "compressed-tensors":
        raise CheckpointError("quantization_config: quant_method is not 'compressed-tensors'")
    status = config.get("quantization_status", "compressed")
    if status != "compressed":
        raise CheckpointError(f"quantization_config: quantization_status {status!r} has no packed weights")
    for key in ("sparsity_config", "kv_cache_scheme"):
        if config.get(key):
            raise CheckpointError(f"quantization_config: {key} is set, which mxjax does not read yet")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError("quantization_config: no config_groups")
    parsed = tuple(_read_group(name, group, config.get("format")) for name, group in groups.items())
    ignore = strings(config.get("ignore"), "ignore")
    for pattern in (p for patterns in (*(t for t, _ in parsed), ignore) for p in patterns):
        matches(pattern, "")
    by_class = [scheme for targets, scheme in parsed if any(_CLASS.fullmatch(t) for t in targets)]
    schemes = Schemes(parsed, by_class[0] if by_class else None, ignore, matches)
    rotation = ct_transform.read(config.get("transform_config"), matches)
    return _Rotated(**{f.name: getattr(schemes, f.name) for f in dataclasses.fields(schemes)}, rotation=rotation)


@dataclasses.dataclass(frozen=True)
class _Rotated(Schemes):
    """Schemes, and rotations that a list of their own gives to modules."""

    rotation: Any = None

    def of(self, module: str) -> Scheme | None:
        scheme = super().of(module)
        return None if scheme is None else dataclasses.replace(scheme, rotation=self.rotation(module))


def matches(pattern: str, module: str) -> bool:
    """Whether ``re:REGEX``, matched from the start, or an exact name stands for a module."""
    if not pattern.startswith("re:"):
        return pattern == module
    try:
        return re.match(pattern[3:], module) is not None
    except re.error as e:
        raise CheckpointError(f"quantization_config: {pattern!r} is no regular expression: {e}") from None


def _read_group(name: str, group: Any, top_format: Any) -> tuple[tuple[str, ...], Scheme]:
    where = f"quantization_config: {name}"
    if not isinstance(group, dict):
        raise CheckpointError(f"{where} is no object")
    layout = group.get("format") or top_format
    if not isinstance(layout, str) or layout not in FORMATS:
        raise CheckpointError(f"{where}: format {str(layout)[:100]!r}; mxjax reads {', '.join(FORMATS)}")
    fmt = FORMATS[layout]
    _check_args(f"{where}.weights", group.get("weights"), fmt, dynamic=False)
    inputs, activation = group.get("input_activations"), None
    if inputs is not None:
        activation = MXFP8_E4M3 if fmt == MXFP6_E2M3 else fmt
        _check_args(f"{where}.input_activations", inputs, activation, dynamic=_dynamic(activation))
    if group.get("output_activations") is not None:
        raise CheckpointError(f"{where}: output_activations are set, which mxjax does not read")
    return strings(group.get("targets"), f"{name}.targets"), Scheme(fmt, activation)


def _check_args(where: str, args: Any, fmt: BlockFormat, *, dynamic: bool | str) -> None:
    if not isinstance(args, dict):
        raise CheckpointError(f"{where} is no object")
    for key, expected in {**_known(fmt), "symmetric": True, "dynamic": dynamic}.items():
        if args.get(key, expected if key in ("symmetric", "dynamic") else None) != expected:
            raise CheckpointError(f"{where}: {key} is {str(args.get(key))[:50]!r}; for {fmt} it is {expected!r}")
    if args.get("actorder"):
        raise CheckpointError(f"{where}: actorder {str(args['actorder'])[:50]!r} needs a g_idx, which FP4 layouts lack")
