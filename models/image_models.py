"""Text-to-image models under one interface, and the comparison of one with its quantized self.

    source = open_image_model("PixArt-Sigma-XL-2-1024-MS")
    found = compare(source, "svdquant_mxfp4", ["a cat"], seeds=[0], steps=20)
    found.report("report.html")

What an ``ImageModel`` is, a diffusers folder and our own PixArt-Mini are: they draw with any transformer that is put
in the place of their own, float or quantized, and they say what their transformer sees while they draw.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import mxjax
from mxjax.config import QuantConfig
from mxjax.data import calibration_prompts
from mxjax.errors import CheckpointError, ConfigError
from mxjax.eval import psnr, ssim
from mxjax.nn.nnx import Kept, QParam
from mxjax.nn.nnx_graph import config_for

ALIASES = ("pixart-mini",)


@runtime_checkable
class ImageModel(Protocol):
    """Draws images from prompts.

    Attributes:
        transformer: the float transformer, an nnx module.
    """

    transformer: Any

    def images(self, transformer: Any, prompts: Sequence[str], *, seeds: Sequence[int], **options: Any) -> np.ndarray:
        """uint8 (B, height, width, 3), one image a prompt, drawn with ``transformer`` from noise of the seeds.

        Options are ``steps`` and ``guidance``; left out, they are what the model is published with.
        """
        ...

    def calibration_batches(
        self,
        prompts: Sequence[str],
        *,
        seed: int = 0,
        progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> list[tuple]:
        """What the float transformer is called with at some of the steps of drawing the prompts.

        ``progress`` is called with how many prompts are drawn, and all of them.
        """
        ...


def open_image_model(name: str | os.PathLike, dtype: Any = None, **options: Any) -> ImageModel:
    """A diffusers folder of FLUX.1, PixArt-alpha, PixArt-Sigma or SANA; "pixart-mini", which ships, or a folder of it.

    Args:
        name: the folder, or the name.
        dtype: of the transformer; None: bfloat16 on a GPU, float32 elsewhere; PixArt-Mini: float32.
        options: of ``mxjax_models.diffusers_images.open_pipeline``: ``height`` and ``width``.

    Raises:
        CheckpointError: no such folder, or another pipeline.
        ConfigError: options that the model does not have.
        MissingExtraError: torch, diffusers or transformers is missing.
    """
    mini = str(name) in ALIASES or (Path(name) / "pixart_mini.safetensors").is_file()
    if mini:
        if given := [key for key, value in options.items() if value is not None]:
            raise ConfigError(f"{name} draws one size only: it takes no {', '.join(given)}")
        from mxjax_models import pixart_mini

        folder = pixart_mini.DATA if str(name) in ALIASES else name
        return pixart_mini.load(folder, dtype or jnp.float32)
    if not Path(name).is_dir():
        raise CheckpointError(f"{name} does not exist (a model is a diffusers folder, or {', '.join(ALIASES)})")
    from mxjax_models.diffusers_images import open_pipeline

    return open_pipeline(name, dtype, **options)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What quantizing made of a model's images.

    Attributes:
        name: of the recipe.
        prompts, seeds: one each for an image.
        images: uint8 (B, height, width, 3) of the quantized transformer.
        reference: the same of the float one, or None.
        model: the quantized transformer.
        kept: which matrices stayed in high precision, and why.
        summary: of the quantized parameters.
        params: the float parameters.
        cfg: the config, with the model's own list of what stays.
        stats: of the float transformer's inputs while it drew the prompts; None: not measured.
        seconds: of "quantize", and of "images" and "reference", each for one image (its second one, where there is
            one: the first compiles).
    """

    name: str
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    images: np.ndarray
    reference: np.ndarray | None
    model: Any = field(repr=False)
    kept: list[Kept] = field(repr=False)
    summary: Any = field(repr=False)
    params: Any = field(repr=False)
    cfg: QuantConfig = field(repr=False)
    stats: Any = field(repr=False)
    seconds: dict[str, float]

    @property
    def float_nbytes(self) -> int:
        """Bytes of the float parameters."""
        return mxjax.summary(self.params).nbytes

    @property
    def psnr(self) -> list[float]:
        """Of each image against the float one, in decibels; empty without these."""
        return [] if self.reference is None else [psnr(a, b) for a, b in zip(self.reference, self.images, strict=True)]

    @property
    def ssim(self) -> list[float]:
        """Of each image against the float one; empty without these."""
        return [] if self.reference is None else [ssim(a, b) for a, b in zip(self.reference, self.images, strict=True)]

    def report(self, path: str | os.PathLike, title: str = "Images before and after quantization") -> Path:
        """One self-contained HTML page: images side by side, sizes and times, what every layer got, and its errors."""
        from mxjax.report.images import image_report

        return image_report(
            path,
            title=title,
            label=self.name,
            prompts=self.prompts,
            images=self.images,
            reference=self.reference,
            quality={"PSNR (dB)": self.psnr, "SSIM": self.ssim},
            params=self.params,
            qparams=_parameters(self.model),
            cfg=self.cfg,
            stats=self.stats,
            seconds=self.seconds,
            kept=self.kept,
        )


def _parameters(model: Any) -> Any:
    return nnx.state(model, nnx.Any(nnx.Param, QParam))


def compare(
    source: ImageModel,
    recipe: str | QuantConfig,
    prompts: Sequence[str],
    *,
    seeds: Sequence[int] | int = 0,
    calibration: Sequence[str] | None = None,
    calibration_options: dict[str, Any] | None = None,
    reference: bool = True,
    inputs: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> Comparison:
    """Quantize a model's transformer, draw with it, and draw the same images with the float one.

    Recipes that need data are calibrated on what the float transformer sees while it draws ``calibration``: at some
    steps of each prompt, spread evenly over all timesteps (``mxjax.calibration.calibration_steps``).

    Args:
        source: the model.
        recipe: a recipe name or a QuantConfig.
        prompts: what to draw.
        seeds: of the noise, one a prompt; one number counts up from there.
        calibration: prompts; None: the model's own ``calibration_prompts``, or those that ship with mxjax. They should
            not be among ``prompts`` where the result is to say something about other prompts.
        calibration_options: of ``calibration_batches``, such as ``each`` and ``times``.
        reference: draw the float images, too.
        inputs: gather what the float transformer's layers see at some steps of drawing ``prompts``, for the report.
            Left out where the statistics would take more than a GiB (``mxjax.eval.worth_measuring``).
        progress: called with what is being done, how much is done and all of it.
        options: ``steps`` and ``guidance``; default: the model's own.

    Raises:
        ConfigError: no prompt, or not as many seeds as prompts.
        CalibrationError: as ``mxjax.nnx.calibrate_and_quantize``.
    """
    prompts = tuple(prompts)
    numbers = tuple(range(seeds, seeds + len(prompts))) if isinstance(seeds, int) else tuple(seeds)
    if not prompts or len(numbers) != len(prompts):
        raise ConfigError(f"{len(prompts)} prompts and {len(numbers)} seeds: give one prompt or more, a seed for each")
    say = progress or (lambda text, done, total: None)
    cfg = mxjax.recipes.get(recipe)
    options = {key: value for key, value in options.items() if value is not None}
    start = time.perf_counter()
    if cfg.needs_data:
        own = getattr(source, "calibration_prompts", None)
        texts = list(calibration or own or calibration_prompts())
        drawing = partial(say, f"drawing {len(texts)} calibration prompts")
        batches = source.calibration_batches(texts, progress=drawing, **{**options, **(calibration_options or {})})
        model = mxjax.nnx.calibrate_and_quantize(
            source.transformer, batches, cfg, progress=lambda at: say("quantizing", at.done, at.total)
        )
    else:
        say("quantizing", 0, 1)
        model = mxjax.nnx.quantize(source.transformer, cfg)
    params = _parameters(model)
    jax.block_until_ready(params)
    seconds = {"quantize": time.perf_counter() - start}

    def drawn(kind: str, transformer: Any) -> np.ndarray:
        out = []
        for i, (prompt, seed) in enumerate(zip(prompts, numbers, strict=True)):
            say(f"drawing with {kind}", i, len(prompts))
            start = time.perf_counter()
            out.append(source.images(transformer, [prompt], seeds=[seed], **options))
            if i < 2:
                seconds["reference" if transformer is source.transformer else "images"] = time.perf_counter() - start
        say(f"drawing with {kind}", len(prompts), len(prompts))
        return np.concatenate(out)

    images = drawn(cfg.name, model)
    stats = None
    if inputs and mxjax.eval.worth_measuring(params):
        say("inputs of the layers", 0, 1)
        batches = source.calibration_batches(prompts, **{**options, **(calibration_options or {})})
        stats = mxjax.calibrate(source.transformer, None, batches, cfg)
    return Comparison(
        name=cfg.name,
        prompts=prompts,
        seeds=numbers,
        images=images,
        reference=drawn("the float transformer", source.transformer) if reference else None,
        model=model,
        kept=mxjax.nnx.kept(source.transformer, cfg),
        summary=mxjax.summary(params),
        params=nnx.state(source.transformer, nnx.Param),
        cfg=config_for(source.transformer, cfg),
        stats=stats,
        seconds=seconds,
    )
