"""Named recipes: three-line compositions of the parts in :mod:`mxjax.config`.

``get("mxfp4")`` is W4A4 round-to-nearest; ``_a16`` keeps activations, ``_a8`` puts them in MXFP8.
"""

from __future__ import annotations

from collections.abc import Callable

from mxjax.config import QuantConfig, Rule
from mxjax.core.formats import FORMATS
from mxjax.errors import ConfigError
from mxjax.transforms.hadamard import Hadamard


def rtn(weight: str = "mxfp4", activation: str | None = "mxfp4", *, scale: str = "even") -> QuantConfig:
    """Round to nearest, data-free: the baseline, and enough for 8-bit formats."""
    name = f"rtn_{weight}" + (f"_{activation}" if activation else "_a16")
    return QuantConfig(
        name=name,
        rules=[Rule(weight=weight, activation=activation, weight_scale=scale, activation_scale=scale)],
    )


def rtn_hadamard(weight: str = "mxfp4", activation: str | None = "mxfp4", *, size: int = 32) -> QuantConfig:
    """Round to nearest after a block Hadamard rotation: helps W4A4 MXFP4, mostly hurts NVFP4 and weight-only."""
    name = f"rtn_hadamard{size}_{weight}" + (f"_{activation}" if activation else "_a16")
    return QuantConfig(name=name, rules=[Rule(weight=weight, activation=activation, transform=Hadamard(size))])


def _rtn_family() -> dict[str, Callable[[], QuantConfig]]:
    recipes: dict[str, Callable[[], QuantConfig]] = {}
    for fmt in FORMATS:
        recipes[fmt] = lambda fmt=fmt: rtn(fmt, fmt)  # type: ignore[misc]
        recipes[f"{fmt}_a16"] = lambda fmt=fmt: rtn(fmt, None)  # type: ignore[misc]
        if FORMATS[fmt].element.bits < 8:
            recipes[f"{fmt}_a8"] = lambda fmt=fmt: rtn(fmt, "mxfp8_e4m3")  # type: ignore[misc]
    return recipes


RECIPES: dict[str, Callable[[], QuantConfig]] = {
    **_rtn_family(),
    "hadamard_mxfp4": lambda: rtn_hadamard("mxfp4", "mxfp4", size=32),
    "hadamard_nvfp4": lambda: rtn_hadamard("nvfp4", "nvfp4", size=16),
}


def get(recipe: str | QuantConfig) -> QuantConfig:
    """The recipe of that name (a QuantConfig is returned as it is).

    Raises:
      ConfigError: no recipe has that name.

    Example:
      >>> get("mxfp4_a16").rules[0].activation is None
      True
    """
    if isinstance(recipe, QuantConfig):
        return recipe
    if recipe not in RECIPES:
        raise ConfigError(f"unknown recipe {recipe!r}; known: {', '.join(sorted(RECIPES))}")
    return RECIPES[recipe]()
