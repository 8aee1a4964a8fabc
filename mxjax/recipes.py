"""Named recipes: three-line compositions of the parts in :mod:`mxjax.config`.

``get("mxfp4")`` is W4A4 round-to-nearest; ``_a16`` keeps activations, ``_a8`` puts them in MXFP8.
``when_to_use("mxfp4")`` is a line on what it is for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from mxjax.algorithms.low_rank import BRANCHES
from mxjax.calibration.options import CalibrationOptions
from mxjax.config import QuantConfig, Rule
from mxjax.core.formats import FORMATS
from mxjax.errors import ConfigError
from mxjax.transforms.awq import Awq
from mxjax.transforms.base import Transform, TransformFitter
from mxjax.transforms.block_matrix import Wush
from mxjax.transforms.branch_smooth import BranchSmooth
from mxjax.transforms.choose import Choose
from mxjax.transforms.hadamard import Hadamard
from mxjax.transforms.kroquant import KroQuant
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


def awq(weight: str = "mxfp4", activation: str | None = None, *, grid: int = 20) -> QuantConfig:
    """AWQ: a scale of each channel, searched by the layer's own error, then round to nearest with MSE scales."""
    return _calibrated("awq", weight, activation, scale="mse", algorithm="rtn", transform=Awq(grid=grid))


def kbbq(weight: str = "mxfp4", activation: str | None = "mxfp4") -> QuantConfig:
    """KBBQ: WUSH with a brake of 0.25, 0.5, 0.75 or 1, or no transform, whichever measures best on the layer; GPTQ."""
    size = FORMATS[weight].block_size
    choice = Choose([Wush(size=size, strength=strength) for strength in (0.25, 0.5, 0.75, 1.0)])
    scale = "third" if weight == "mxfp4" else "even"
    return _calibrated("kbbq", weight, activation, scale=scale, options=_MR_OPTIONS, transform=choice)


def wush_gptq(weight: str = "mxfp4", activation: str | None = "mxfp4", *, strength: float = 1.0) -> QuantConfig:
    """WUSH's transforms found inside GPTQ, from the compensated weight. Needs calibration; online cost as wush."""
    scale, options = "third" if weight == "mxfp4" else "even", {"strength": strength}
    return _calibrated("wush_gptq", weight, activation, scale=scale, algorithm="wush_gptq", options=options)


def svdquant(weight: str = "mxfp4", activation: str | None = "mxfp4", *, residual: str = "rtn") -> QuantConfig:
    """SVDQuant: smoothing searched with the branch in place, a branch of rank 32 in 16 bits. Needs calibration.

    ``residual="gptq"``: GPTQ on what the branch leaves."""
    name = "svdquant" if residual == "rtn" else "svdquant_gptq"
    options, transform = {"residual": residual, **_gptq_options(residual)}, BranchSmooth()
    return _calibrated(
        name, weight, activation, scale="even", algorithm="svdquant", options=options, transform=transform
    )


def svdquant_gptq(weight: str = "mxfp4", activation: str | None = "mxfp4") -> QuantConfig:
    """SVDQuant, with GPTQ on what the branch leaves, its options those of MR-GPTQ. Needs calibration."""
    return svdquant(weight, activation, residual="gptq")


def loraq(weight: str = "mxfp4", activation: str | None = "mxfp4", *, branch: str = "w8a8") -> QuantConfig:
    """LoRaQ: a quantized branch of equal bytes and twice the rank, optimized for the weight error. Data-free."""
    options = {"branch": branch}
    return _calibrated("loraq", weight, activation, scale="even", algorithm="loraq", options=options)


def kroquant(weight: str = "mxfp4", activation: str | None = "mxfp4", *, residual: str = "gptq") -> QuantConfig:
    """KroQuant's learned Kronecker transform, then GPTQ (or ``residual="rtn"``): no branch. Needs calibration."""
    name, options = ("kroquant", _MR_OPTIONS) if residual == "gptq" else ("kroquant_rtn", {})
    return _calibrated(
        name, weight, activation, scale="even", algorithm=residual, options=options, transform=KroQuant(size=32)
    )


def kroquant_loraq(
    weight: str = "mxfp4", activation: str | None = "mxfp4", *, branch: str = "int8", residual: str = "rtn"
) -> QuantConfig:
    """KroQuant: the Kronecker transform learned beside a branch, then LoRaQ. Needs calibration.

    The data that the transform needs are there for the branch, too, so it is fitted to the layer's output; and its
    factors are MXINT8, at the bytes of MXFP8: a branch that carries most of the output feels the three bits of
    mantissa."""
    options: dict[str, object] = {"objective": "output", "branch": branch, "residual": residual}
    options |= {"iterations": 4, "steps": 30, **_gptq_options(residual)}
    transform = KroQuant(size=32, rank=BRANCHES[branch].equal_rank())
    name = "kroquant_loraq" if residual == "rtn" else "kroquant_gptq_loraq"
    return _calibrated(name, weight, activation, scale="even", algorithm="loraq", options=options, transform=transform)


def kroquant_rtn(weight: str = "mxfp4", activation: str | None = "mxfp4") -> QuantConfig:
    """KroQuant's transform alone, weights rounded to nearest. Needs calibration."""
    return kroquant(weight, activation, residual="rtn")


def kroquant_gptq_loraq(weight: str = "mxfp4", activation: str | None = "mxfp4") -> QuantConfig:
    """KroQuant and LoRaQ, with GPTQ on what the branch leaves at first. Needs calibration."""
    return kroquant_loraq(weight, activation, residual="gptq")


def auto(weight: str = "mxfp4", activation: str | None = "mxfp4") -> QuantConfig:
    """Each input gets what measures best on it: no transform, Hadamard, SmoothQuant, AWQ, or WUSH with or without a
    brake; then GPTQ."""
    size = FORMATS[weight].block_size
    choice = Choose([Hadamard(size), SmoothQuant(alpha=0.6), Awq(), Wush(size=size, strength=0.5), Wush(size=size)])
    scale = "third" if weight == "mxfp4" else "even"
    return _calibrated("auto", weight, activation, scale=scale, options=_MR_OPTIONS, transform=choice)


def quarot(weight: str = "mxfp4", activation: str | None = "mxfp4", *, size: int | None = None) -> QuantConfig:
    """QuaRot's layers: GPTQ, and an online block Hadamard before the last matrix of each MLP, where none folds.

    The rest of QuaRot is the model's: ``model = mxjax_models.rotate(model)`` first."""
    cfg = _calibrated("quarot", weight, activation, scale="even", options=_MR_OPTIONS)
    (plain,) = cfg.rules
    online = replace(plain, path=r"(^|/)down_proj(/|$)", transform=Hadamard(size or FORMATS[weight].block_size))
    return cfg.replace(rules=[online, plain])


def best(weight: str = "mxfp4", activation: str | None = "mxfp4") -> QuantConfig:
    """What measured best on held-out calibration text (SmolLM2-135M). Needs calibration by block.

    MXFP4: for each input WUSH, braked WUSH or no transform, whichever measures best (``kbbq``), and activation scales
    by squared error. NVFP4: no transform (rotation hurts it), activations under ``four_over_six``; each block's scale
    is chosen by replaying GPTQ on it, and the weights also make up for rounding the activations and the blocks before.
    """
    online = activation == weight
    if weight != "nvfp4":
        cfg = kbbq(weight, activation)
        rules = [replace(r, activation_scale="mse" if online else r.activation_scale) for r in cfg.rules]
        return cfg.replace(name="best_" + cfg.name.removeprefix("kbbq_"), rules=rules)
    options = {"observer": "mse", "act_order": "block", "scales": "replay", "correction": 0.5}
    cfg = _calibrated("best", weight, activation, scale="even", options=options)
    rules = [replace(r, activation_scale="four_over_six" if online else r.activation_scale) for r in cfg.rules]
    return cfg.replace(rules=rules, calibration=CalibrationOptions(inputs="quantized", mismatch=True))


_MR_OPTIONS = {"observer": "mse", "act_order": "column"}


def _gptq_options(residual: str) -> dict[str, object]:
    """GPTQ's options for algorithms that have GPTQ inside."""
    return {f"gptq_{key}": value for key, value in _MR_OPTIONS.items()} if residual == "gptq" else {}


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


@dataclass(frozen=True)
class Recipe:
    """A named recipe: call it for its QuantConfig.

    Attributes:
      make: builds the config.
      when: one line on when to use it.
    """

    make: Callable[[], QuantConfig]
    when: str

    def __call__(self) -> QuantConfig:
        return self.make()


# Factory, and when to use what it makes: for weights and activations in MXFP4, in NVFP4.
_CALIBRATED: tuple[tuple[Callable[..., QuantConfig], str, str], ...] = (
    (gptq, "baseline with calibration; mr_gptq and best are better", "a safe choice: rotations rarely help NVFP4"),
    (
        mr_gptq,
        "the published state of the art, and kernels know its rotation",
        "comparison with papers; gptq is usually better, since rotation hurts NVFP4",
    ),
    (smoothquant, "activation outliers, when there is no time for GPTQ", "activation outliers, without GPTQ"),
    (awq, "salient channels without GPTQ, mostly weight-only", "salient channels without GPTQ, mostly weight-only"),
    (wush, "better than mr_gptq; each input costs a small matmul", "rarely: transforms seldom help NVFP4"),
    (
        wush_gptq,
        "like wush, with transforms made for what GPTQ leaves to round",
        "weight-only NVFP4 where a small matmul online is affordable",
    ),
    (
        kbbq,
        "like wush, on models or layers where full WUSH measures worse than a braked one",
        "NVFP4 with transforms only where they measure better than none",
    ),
    (
        svdquant,
        "layers with a few hard directions; costs a 16-bit branch of rank 32",
        "layers with a few hard directions; costs a 16-bit branch of rank 32",
    ),
    (
        svdquant_gptq,
        "SVDQuant where calibration may take longer: GPTQ on what the branch leaves",
        "SVDQuant where calibration may take longer: GPTQ on what the branch leaves",
    ),
    (
        loraq,
        "a branch without calibration data, in 8 bits",
        "a branch without calibration data, in 8 bits",
    ),
    (
        kroquant,
        "diffusion transformers without a branch: a small learned transform for each input",
        "learned transforms where calibration may take minutes; gptq is close",
    ),
    (
        kroquant_rtn,
        "comparison: what the learned transform does by itself",
        "comparison: what the learned transform does by itself",
    ),
    (
        kroquant_loraq,
        "diffusion transformers: the smallest error, for a branch and a small transform online",
        "diffusion transformers: the smallest error, for a branch and a small transform online",
    ),
    (
        kroquant_gptq_loraq,
        "kroquant_loraq with GPTQ inside: better still on some layers, for a longer calibration",
        "kroquant_loraq with GPTQ inside: better still on some layers, for a longer calibration",
    ),
    (auto, "unknown models: each layer gets the transform that measures best", "unknown models: as for MXFP4"),
    (
        quarot,
        "a model turned by mxjax_models.rotate; global rotation is known to hurt MXFP4, so for comparison only",
        "a model turned by mxjax_models.rotate, to save online transforms; gptq is usually better",
    ),
    (best, "what measured best on held-out text", "what measured best on held-out text"),
)


# Weight-only, a branch costs more than the bits that it saves; the functions still take ``activation=None``.
_FOR_ROUNDED_INPUTS = (svdquant, svdquant_gptq, loraq, kroquant, kroquant_rtn, kroquant_loraq, kroquant_gptq_loraq)


def _calibrated_family() -> dict[str, Recipe]:
    recipes: dict[str, Recipe] = {}
    for make, *uses in _CALIBRATED:
        for fmt, when in zip(("mxfp4", "nvfp4"), uses, strict=True):
            name = f"{make.__name__}_{fmt}"
            recipes[name] = Recipe(partial(make, fmt, fmt), when)
            if make not in _FOR_ROUNDED_INPUTS:
                recipes[f"{name}_a16"] = Recipe(partial(make, fmt, None), f"{when}; weight-only")
    return recipes


def _rtn_family() -> dict[str, Recipe]:
    recipes: dict[str, Recipe] = {}
    for fmt, block in FORMATS.items():
        small = block.element.bits < 8
        quality = {
            4: "the data-free baseline; calibrated recipes are better",
            6: "nearly lossless at three quarters of 8 bits",
            8: "nearly lossless for most models, without data",
        }[block.element.bits]
        recipes[fmt] = Recipe(partial(rtn, fmt, fmt), quality)
        recipes[f"{fmt}_a16"] = Recipe(partial(rtn, fmt, None), "small batches, where reading weights is the cost")
        if small:
            recipes[f"{fmt}_a8"] = Recipe(partial(rtn, fmt, "mxfp8_e4m3"), "activations that 4 bits hurt too much")
    return recipes


RECIPES: dict[str, Recipe] = {
    **_rtn_family(),
    **_calibrated_family(),
    "hadamard_mxfp4": Recipe(partial(rtn_hadamard, "mxfp4", "mxfp4", size=32), "W4A4 without calibration data"),
    "hadamard_nvfp4": Recipe(
        partial(rtn_hadamard, "nvfp4", "nvfp4", size=16), "comparison only: plain nvfp4 is better"
    ),
}


def when_to_use(name: str) -> str:
    """One line on when to use the recipe of that name.

    Example:
      >>> when_to_use("hadamard_mxfp4")
      'W4A4 without calibration data'
    """
    return _named(name).when


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
    if not isinstance(recipe, str):
        raise ConfigError(f"a recipe is a name or a QuantConfig, not {type(recipe).__name__}")
    return _named(recipe)()


def _named(name: str) -> Recipe:
    if name not in RECIPES:
        raise ConfigError(f"unknown recipe {name!r}; known: {', '.join(sorted(RECIPES))}")
    return RECIPES[name]
