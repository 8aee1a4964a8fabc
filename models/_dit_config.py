"""How diffusers' ``config.json`` becomes one of the frozen configs of the diffusion transformers."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from mxjax.errors import ConfigError

T = TypeVar("T")

# Written by diffusers, of no effect on a forward pass at inference.
_IGNORED = ("dropout", "norm_num_groups", "num_embeds_ada_norm", "upcast_attention", "quantization_config")


def from_diffusers(cls: type[T], raw: Mapping[str, Any], only: Mapping[str, tuple]) -> T:
    """The config with diffusers' values in it; keys that the file leaves out keep the class's defaults, diffusers' own.

    Args:
        cls: a frozen dataclass whose fields have diffusers' names.
        raw: the JSON object.
        only: further keys, with the values that the model here computes; the first is diffusers' default.

    Raises:
        ConfigError: a missing size, or a key or value that asks for something else; all of them in one message.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    problems = [f"no {n}" for n, f in fields.items() if f.default is dataclasses.MISSING and raw.get(n) is None]
    for name, value in raw.items():
        if name.startswith("_") or name in fields or name in _IGNORED:
            continue
        if name not in only:
            problems.append(f"{name}={value!r} (unknown)")
        elif value not in only[name]:
            problems.append(f"{name}={value!r} (only {' or '.join(map(repr, only[name]))})")
    if problems:
        raise ConfigError(f"this config asks for what {cls.__name__} lacks: " + "; ".join(problems))
    # JSON has lists for tuples; a frozen config is hashable.
    return cls(**{n: tuple(raw[n]) if isinstance(raw[n], list) else raw[n] for n in fields if n in raw})


def check_sizes(config: Any) -> None:
    """Every field that is a size, or a tuple of them, is positive.

    Raises:
        ConfigError: one that is not.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        values = value if isinstance(value, tuple) else (value,)
        if any(type(n) is int and n < 1 for n in values):
            raise ConfigError(f"{type(config).__name__}: {field.name}={value} must be positive")


def to_diffusers(config: Any, only: Mapping[str, tuple], class_name: str) -> dict[str, Any]:
    """The JSON object that ``from_diffusers`` reads back into the same config.

    Example::

        (folder / "config.json").write_text(json.dumps(to_diffusers(config, ONLY, "FluxTransformer2DModel")))
    """
    values = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(config).items()}
    return {"_class_name": class_name, **values, **{k: v[0] for k, v in only.items()}}
