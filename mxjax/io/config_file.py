"""A QuantConfig as a JSON file: what a search found, kept to be read, edited and used again."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mxjax import transforms
from mxjax.calibration.options import CalibrationOptions
from mxjax.config import QuantConfig, Rule
from mxjax.core.formats import BlockFormat, get_format
from mxjax.errors import ConfigError

# Transforms that hold arrays were fitted to one layer: they belong into a checkpoint, not into a config.
_CLASSES: dict[str, type] = {
    **{name: cls for name, cls in vars(transforms).items() if isinstance(cls, type) and dataclasses.is_dataclass(cls)},
    "CalibrationOptions": CalibrationOptions,
    "QuantConfig": QuantConfig,
    "Rule": Rule,
}


def save_config(path: str | os.PathLike[str], cfg: QuantConfig) -> None:
    """Write a config as JSON, whole or not at all. Fields with their default value are left out.

    Raises:
      ConfigError: a part that is no number, text, format, or class of ``mxjax.transforms`` without arrays.

    Example:
      >>> save_config("best.json", mxjax.recipes.get("best_mxfp4"))
      >>> load_config("best.json") == mxjax.recipes.get("best_mxfp4")
      True
    """
    target = Path(path)
    text = json.dumps(_encode(cfg, "config"), indent=1)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def load_config(path: str | os.PathLike[str]) -> QuantConfig:
    """The config of a file that :func:`save_config` wrote (or a person, in the same form).

    Raises:
      ConfigError: a file that is none, unknown classes or fields, values that the classes refuse.
    """
    try:
        node = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(f"{path}: no readable config: {e}") from None
    try:
        cfg = _decode(node)
    except (TypeError, RecursionError) as e:
        raise ConfigError(f"{path}: {e}") from None
    if not isinstance(cfg, QuantConfig):
        raise ConfigError(f"{path}: it holds no QuantConfig")
    return cfg


def _encode(x: Any, where: str) -> Any:
    if isinstance(x, BlockFormat):
        if get_format(x.name) != x:
            raise ConfigError(f"{where}: {x!r} is no format that a name stands for")
        return x.name
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    if isinstance(x, (list, tuple)):
        return [_encode(item, f"{where}[{i}]") for i, item in enumerate(x)]
    if isinstance(x, Mapping) and all(isinstance(key, str) and key != "class" for key in x):
        return {key: _encode(value, f"{where}.{key}") for key, value in x.items()}
    cls: Any = _CLASSES.get(type(x).__name__)
    if cls is type(x):
        values = {f.name: getattr(x, f.name) for f in dataclasses.fields(cls)}
        kept = {name: value for name, value in values.items() if not _is_default(type(x), name, value)}
        return {
            "class": type(x).__name__,
            **{name: _encode(value, f"{where}.{name}") for name, value in kept.items()},
        }
    raise ConfigError(f"{where}: a config file holds no {type(x).__name__}; save a fitted transform with its weight")


def _is_default(cls: type, name: str, value: Any) -> bool:
    (f,) = (f for f in dataclasses.fields(cls) if f.name == name)
    if f.default_factory is not dataclasses.MISSING:
        return type(value) is type(f.default_factory()) and value == f.default_factory()
    return type(value) is type(f.default) and f.default is not dataclasses.MISSING and value == f.default


def _decode(node: Any) -> Any:
    if isinstance(node, list):
        return tuple(_decode(item) for item in node)
    if not isinstance(node, dict):
        return node
    if "class" not in node:
        return {key: _decode(value) for key, value in node.items()}
    cls = _CLASSES.get(node["class"]) if isinstance(node["class"], str) else None
    if cls is None:
        raise ConfigError(f"unknown class {str(node['class'])[:50]!r}; known: {', '.join(_CLASSES)}")
    return cls(**{key: _decode(value) for key, value in node.items() if key != "class"})
