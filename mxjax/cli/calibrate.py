"""Calibration for the recipes that need it, and quantization of an opened model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mxjax.cli.console import Console
from mxjax.cli.models import OpenModel
from mxjax.config import QuantConfig
from mxjax.errors import ConfigError

FEW_TOKENS = 8192  # our own figures are with 32768; a Hessian of K channels has full rank from K tokens on


def quantized_params(
    opened: OpenModel,
    recipe: str,
    cfg: QuantConfig,
    calib: str | None,
    console: Console,
    **options: Any,
) -> Any:
    """The parameters of a float model, quantized with a recipe.

    Args:
      opened: the model.
      recipe: what the user calls it, for messages.
      cfg: what it stands for.
      calib: ``FILE.npz:KEY`` or ``FILE.txt``, or None.
      console: where notes go.
      **options: as in :func:`calibrated_params`.

    Raises:
      ConfigError: a model that is quantized already; a recipe that needs data and got none.
    """
    import mxjax

    if opened.quantized:
        raise ConfigError(f"{opened.name} is quantized already; --recipe is for float models")
    if not cfg.needs_data:
        if calib is not None:
            console.note(f"recipe {recipe!r} is data-free: --calib is not used")
        if options.get("resume") is not None:
            console.note(f"recipe {recipe!r} is quick: --resume is not used")
        return mxjax.quantize(opened.params, cfg)
    if calib is None:
        raise ConfigError(f"recipe {recipe!r} needs calibration data: --calib FILE.npz:KEY or --calib FILE.txt")
    from mxjax.cli.tokens import read_calibration

    return calibrated_params(opened, cfg, read_calibration(calib, opened.tokenizer), console, **options)


def calibrated_params(
    opened: OpenModel,
    cfg: QuantConfig,
    tokens: Any,
    console: Console,
    *,
    resume: str | None = None,
    host: bool = False,
    update: Callable[[int, int], None] | None = None,
) -> Any:
    """Block by block, every block seeing the errors of those before it; memory does not grow with the depth.

    Blocks compute in float32, whatever the parameters are stored in.

    Args:
      opened: the model.
      cfg: what to do.
      tokens: [sequences, length].
      console: where notes go.
      resume: folder that keeps finished blocks, or None.
      host: quantized weights are NumPy arrays; those of a finished block take no device memory.
      update: called with the blocks that are done, and all.
    """
    import jax.numpy as jnp

    import mxjax
    from mxjax.nn.calibrate import replace_leaves
    from mxjax.nn.sequential import BlockProgress

    few = "; that is few, and 64 sequences of 512 measured well" if tokens.size < FEW_TOKENS else ""
    console.note(f"calibrating on {tokens.size} tokens{few}")

    def progress(at: BlockProgress) -> None:
        if update is not None:
            update(at.done, at.total)
        console.note(str(at))

    weights = mxjax.quantize_sequential(
        opened.model, [tokens], cfg, resume=resume, host=host, dtype=jnp.float32, progress=progress
    )
    return replace_leaves(opened.params, weights)
