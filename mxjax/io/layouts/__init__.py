"""Layouts of quantized weights in Hugging Face folders, by name. See :class:`mxjax.io.layouts.base.Layout`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mxjax.errors import ConfigError
from mxjax.io.layouts.base import Contents as Contents
from mxjax.io.layouts.base import Layout as Layout
from mxjax.io.layouts.base import Scheme as Scheme
from mxjax.io.layouts.base import Schemes as Schemes
from mxjax.io.layouts.base import Target as Target
from mxjax.io.layouts.compressed_tensors import CompressedTensors
from mxjax.io.layouts.fp_quant import FPQuant
from mxjax.io.layouts.gpt_oss import GptOss
from mxjax.io.layouts.modelopt import ModelOpt
from mxjax.io.layouts.quark import Quark

LAYOUTS: dict[str, Layout] = {
    layout.name: layout for layout in (CompressedTensors(), ModelOpt(), Quark(), GptOss(), FPQuant())
}


def get(name: str) -> Layout:
    """The layout of that name.

    Raises:
      ConfigError: no layout has it.

    Example:
      >>> get("compressed-tensors").writes
      True
    """
    if name not in LAYOUTS:
        raise ConfigError(f"unknown layout {name!r}; known: {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def detect(config: Mapping[str, Any], names: Iterable[str] = ()) -> Layout | None:
    """The layout of a folder with this ``config.json`` and these tensor names; None if nothing in it is quantized by
    one that mxjax knows."""
    return next((layout for layout in LAYOUTS.values() if layout.detect(config, names)), None)


def carriers(name: str, weight: Any) -> list[str]:
    """The layouts that can carry a weight under this tensor name."""
    return [layout.name for layout in LAYOUTS.values() if layout.writes and layout.why_not(name, weight) is None]
