"""compressed-tensors' ``transform_config``: Hadamard rotations of the inputs of Linears, to JSON and back.

One group a block size; ``location: input`` is what a loader does online, ``weight_input`` with ``inverse`` says that
the weights have been turned already, as llm-compressor writes it. vLLM reads it; transformers 5 does not, so it would
run such a folder on unrotated inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mxjax.errors import CheckpointError
from mxjax.io.layouts.base import strings

Rotation = tuple[tuple[str, ...], tuple[str, ...], int]  # targets, ignored ones, block size
_FIXED = {"type": "hadamard", "randomize": False}


def write(rotations: Mapping[str, int]) -> dict[str, Any]:
    """The ``transform_config`` for modules by name -> block size; empty if there are none."""
    groups = {}
    for size in sorted(set(rotations.values())):
        modules = [name for name, s in rotations.items() if s == size]
        online = {"targets": modules, "location": "input", "inverse": False, "ignore": []}
        fused = {"targets": modules, "location": "weight_input", "inverse": True, "ignore": []}
        groups[f"hadamard_{size}"] = {
            **_FIXED,
            "apply": [online, fused],
            "head_dim": size,
            "precision": "torch.float32",
            "requires_grad": False,
        }
    return {"config_groups": groups} if groups else {}


def read(config: Any, matches: Callable[[str, str], bool]) -> Callable[[str], int | None]:
    """A function from module to block size, or None.

    Raises:
      CheckpointError: a transform that is no block Hadamard rotation of the inputs of named Linears.
    """
    rules: list[Rotation] = []
    if config is not None and not isinstance(config, dict):
        raise CheckpointError(f"quantization_config: transform_config is an object, not {str(config)[:100]}")
    groups = (config or {}).get("config_groups") if config else {}
    if not isinstance(groups, dict) or set(config or {}) - {"config_groups"}:
        raise CheckpointError("quantization_config: transform_config holds config_groups and nothing else")
    for name, group in groups.items():
        rules += _read_group(f"quantization_config: transform_config.{name}", group)

    def rotation(module: str) -> int | None:
        found = {
            size
            for targets, ignore, size in rules
            if any(t == "Linear" or matches(t, module) for t in targets) and not any(matches(i, module) for i in ignore)
        }
        if len(found) > 1:
            raise CheckpointError(f"quantization_config: transform_config turns the input of {module} several times")
        return found.pop() if found else None

    return rotation


def _read_group(where: str, group: Any) -> list[Rotation]:
    if not isinstance(group, dict) or not isinstance(group.get("apply"), list):
        raise CheckpointError(f"{where}: no object with a list 'apply'")
    for key, expected in _FIXED.items():
        if group.get(key, expected) != expected:
            raise CheckpointError(f"{where}: {key} is {str(group[key])[:50]!r}; mxjax reads {expected!r}")
    size = group.get("head_dim")
    if type(size) is not int or size < 2 or size > 1 << 20 or size & (size - 1):
        raise CheckpointError(f"{where}: head_dim is {str(size)[:50]!r}, not a power of two")
    rules: list[Rotation] = []
    fused: list[Rotation] = []
    for args in group["apply"]:
        if not isinstance(args, dict) or args.get("location") not in ("input", "weight_input"):
            raise CheckpointError(f"{where}: {str(args)[:100]}; mxjax reads the locations 'input' and 'weight_input'")
        ignore = strings(args.get("ignore"), f"{where}.ignore")
        rule = (strings(args.get("targets"), f"{where}.targets"), ignore, size)
        (rules if args["location"] == "input" else fused).append(rule)
    # H is its own inverse, so "inverse" changes nothing; but a weight that is turned without its input would be wrong.
    if sorted(fused) not in ([], sorted(rules)):
        raise CheckpointError(f"{where}: weights are turned that have no rotation of the input, or the reverse")
    return rules
