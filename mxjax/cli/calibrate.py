"""Calibration for the recipes that need it, and quantization of an opened model."""

from __future__ import annotations

from typing import Any

from mxjax.cli.console import Console
from mxjax.cli.models import OpenModel
from mxjax.config import QuantConfig
from mxjax.errors import ConfigError
from mxjax.transforms import Transform

DATA_FREE = ("rtn",)
BATCH = 4  # calibration sequences at a time


def needs_data(cfg: QuantConfig) -> bool:
    """Whether a rule of the recipe looks at the inputs of a layer: its algorithm, or a transform yet to be fitted."""
    rules = [rule for rule in cfg.rules if rule.weight is not None]
    fitted = all(rule.transform is None or isinstance(rule.transform, Transform) for rule in rules)
    return not fitted or any(rule.algorithm not in DATA_FREE for rule in rules)


def quantized_params(opened: OpenModel, recipe: str, calib: str | None, console: Console) -> Any:
    """The parameters of a float model, quantized with a recipe.

    Args:
      opened: the model.
      recipe: a recipe name.
      calib: ``FILE.npz:KEY`` or ``FILE.txt``, or None.
      console: where notes go.

    Raises:
      ConfigError: a model that is quantized already; an unknown recipe; a recipe that needs data and got none.
    """
    import mxjax

    cfg = mxjax.recipes.get(recipe)
    if opened.quantized:
        raise ConfigError(f"{opened.name} is quantized already; --recipe is for float models")
    stats = None
    if needs_data(cfg):
        if calib is None:
            raise ConfigError(f"recipe {recipe!r} needs calibration data: --calib FILE.npz:KEY or --calib FILE.txt")
        stats = _calibrate(opened, cfg, calib, console)
    elif calib is not None:
        console.note(f"recipe {recipe!r} is data-free: --calib is not used")
    return mxjax.quantize(opened.params, cfg, stats=stats)


def _calibrate(opened: OpenModel, cfg: QuantConfig, calib: str, console: Console) -> Any:
    import mxjax
    from mxjax.cli.tokens import read_calibration

    tokens = read_calibration(calib, opened.tokenizer)
    batches = [tokens[i : i + BATCH] for i in range(0, len(tokens), BATCH)]
    console.note(f"calibrating on {tokens.size} tokens")
    return mxjax.calibrate(opened.model, opened.params, batches, cfg)
