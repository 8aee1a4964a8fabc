"""Named recipes: three-line compositions of the parts in :mod:`mxjax.config`.

``get("mxfp4")`` is W4A4 round-to-nearest; ``_a16`` keeps activations, ``_a8`` puts them in MXFP8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from mxjax.calibration.options import CalibrationOptions
from mxjax.config import QuantConfig, Rule
from mxjax.core.formats import FORMATS
from mxjax.errors import ConfigError
from mxjax.transforms.base import Transform, TransformFitter
from mxjax.transforms.block_matrix import Wush
from mxjax.transforms.hadamard import Hadamard
from mxjax.transforms.smooth import SmoothQuant


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


def gptq(weight: str = "mxfp4", activation: str | None = "mxfp4", *, scale: str = "even") -> QuantConfig:
    """GPTQ without rotation, MSE scales, static act-order. Needs calibration. Plain NVFP4 does best with this."""
    return _calibrated("gptq", weight, activation, scale=scale, options=_MR_OPTIONS)


def mr_gptq(weight: str = "mxfp4", activation: str | None = "mxfp4", *, size: int | None = None) -> QuantConfig:
    """MR-GPTQ: block Hadamard, MSE scales, static act-order; MXFP4 under the scale rule ``third``, NVFP4 with the
    alternating tensor and block scales of the paper. Needs calibration. The published state of the art for MXFP4."""
    if weight == "nvfp4":
        options, scale, size = {**_MR_OPTIONS, "observer": "alternating"}, "even", size or 16
    else:
        options, scale, size = _MR_OPTIONS, "third" if weight == "mxfp4" else "even", size or 32
    return _calibrated("mr_gptq", weight, activation, scale=scale, options=options, transform=Hadamard(size))


def smoothquant(weight: str = "mxfp4", activation: str | None = "mxfp4", *, alpha: float = 0.6) -> QuantConfig:
    """SmoothQuant with round to nearest: a cheap help against activation outliers. Needs calibration."""
    transform = SmoothQuant(alpha=alpha)
    return _calibrated("smoothquant", weight, activation, scale="even", algorithm="rtn", transform=transform)


def wush(weight: str = "mxfp4", activation: str | None = "mxfp4", *, strength: float = 1.0) -> QuantConfig:
    """WUSH: a closed-form matrix for each block, then GPTQ. Needs calibration; inputs cost one small matmul more."""
    transform = Wush(size=FORMATS[weight].block_size, strength=strength)
    scale = "third" if weight == "mxfp4" else "even"
    return _calibrated("wush", weight, activation, scale=scale, options=_MR_OPTIONS, transform=transform)


def best(weight: str = "mxfp4", activation: str | None = "mxfp4") -> QuantConfig:
    """What measured best on held-out calibration text (SmolLM2-135M). Needs calibration by block.

    MXFP4: WUSH, and activation scales by squared error. NVFP4: no transform (rotation hurts it); each block's scale is
    chosen by replaying GPTQ on it, and the weights also make up for rounding the activations and the blocks before."""
    if weight != "nvfp4":
        rule = wush(weight, activation).rules[0]
        rule = replace(rule, activation_scale="mse" if activation == weight else rule.activation_scale)
        return QuantConfig(name="best_" + wush(weight, activation).name.removeprefix("wush_"), rules=[rule])
    options = {"observer": "mse", "act_order": "block", "scales": "replay", "correction": 0.5}
    cfg = _calibrated("best", weight, activation, scale="even", options=options)
    return cfg.replace(calibration=CalibrationOptions(inputs="quantized", mismatch=True))


_MR_OPTIONS = {"observer": "mse", "act_order": "column"}


def _calibrated(
    name: str,
    weight: str,
    activation: str | None,
    *,
    scale: str,
    algorithm: str = "gptq",
    transform: Transform | TransformFitter | None = None,
    options: Mapping[str, object] | None = None,
) -> QuantConfig:
    rule = Rule(
        weight=weight,
        activation=activation,
        weight_scale=scale,
        activation_scale=scale if activation == weight else "even",
        algorithm=algorithm,
        transform=transform,
        options=options or {},
    )
    return QuantConfig(name=f"{name}_{weight}" + (f"_{activation}" if activation else "_a16"), rules=[rule])


def _calibrated_family() -> dict[str, Callable[[], QuantConfig]]:
    recipes: dict[str, Callable[[], QuantConfig]] = {}
    for name, make in (
        ("gptq", gptq),
        ("mr_gptq", mr_gptq),
        ("smoothquant", smoothquant),
        ("wush", wush),
        ("best", best),
    ):
        for fmt in ("mxfp4", "nvfp4"):
            name = f"{make.__name__}_{fmt}"
            recipes[name] = lambda make=make, fmt=fmt: make(fmt, fmt)  # type: ignore[misc]
            recipes[f"{name}_a16"] = lambda make=make, fmt=fmt: make(fmt, None)  # type: ignore[misc]
    return recipes


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
    **_calibrated_family(),
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
