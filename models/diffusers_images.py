"""diffusers' pipelines as an ``ImageModel`` (see ``image_models``): images, and what the transformer sees meanwhile.

    source = open_pipeline("FLUX.1-schnell", height=768, width=1024)
    pixels = source.images(source.transformer, ["a cat"], seeds=[0])

Needs ``pip install 'mxjax[diffusers]'``.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mxjax_models import diffusers_folder
from mxjax_models.diffusers_pipeline import PipelineTransformer, for_pipeline
from mxjax_models.flux import Flux

from mxjax.calibration import calibration_steps, time_weights
from mxjax.errors import CheckpointError, MissingExtraError


class DiffusersImages:
    """A diffusers pipeline as an ``ImageModel``: everything of it but the transformer is diffusers' own.

    Attributes:
        pipe: ``FluxPipeline``, ``PixArtSigmaPipeline``, ``PixArtAlphaPipeline`` or ``SanaPipeline``, or what is called
            like one.
        transformer: the float transformer.
        conditions: what the pipeline is told for a prompt, arguments by name; the prompt itself, unless embeddings were
            made elsewhere.
        call: arguments of every call, such as ``height`` and ``width``.
        steps, guidance: None: the pipeline's own, and 4 steps for FLUX.1-schnell.
    """

    def __init__(
        self,
        pipe: Any,
        transformer: Any,
        *,
        conditions: Callable[[str], Mapping[str, Any]] | None = None,
        call: Mapping[str, Any] | None = None,
        steps: int | None = None,
        guidance: float | None = None,
    ):
        self.pipe, self.transformer = pipe, transformer
        self.conditions = conditions or (lambda prompt: {"prompt": prompt})
        self.call = {key: value for key, value in (call or {}).items() if value is not None}
        distilled = isinstance(transformer, Flux) and not transformer.config.guidance_embeds
        self.steps = 4 if steps is None and distilled else steps
        self.guidance = guidance
        self._stand_in: tuple[Any, PipelineTransformer] | None = None
        pipe.set_progress_bar_config(disable=True)

    def images(
        self,
        transformer: Any,
        prompts: Sequence[str],
        *,
        seeds: Sequence[int],
        steps: int | None = None,
        guidance: float | None = None,
    ) -> np.ndarray:
        """uint8 (B, height, width, 3), one image a prompt; the same seed gives the same noise to any transformer."""
        drawn = [
            self._draw(self._placed(transformer), prompt, seed, steps, guidance)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        return np.concatenate([np.round(255 * np.clip(x, 0, 1)).astype(np.uint8) for x in drawn])

    def calibration_batches(
        self,
        prompts: Sequence[str],
        *,
        seed: int = 0,
        steps: int | None = None,
        guidance: float | None = None,
        each: int | None = 4,
        times: str = "uniform",
        progress: Callable[[int, int], None] | None = None,
    ) -> list[tuple]:
        """The arguments of the float transformer at some steps of each prompt, NumPy arrays on the host.

        With guidance a call holds both halves, the prompt and nothing.

        Args:
            prompts: what to draw; the noise of the i-th is that of ``seed + i``.
            seed: of noise and steps.
            steps, guidance: as for ``images``.
            each: how many steps of each prompt; None: all. The steps that are left out are drawn, but not kept.
            times: "uniform" or "logit_normal" (see ``mxjax.calibration.time_weights``); stratified either way.
            progress: called with how many prompts are drawn, and all of them.
        """
        say = progress or (lambda done, total: None)
        stand_in = self._placed(self.transformer)
        out: list[tuple] = []
        seen: list[tuple] = []
        stand_in.watch = lambda args: seen.append(tuple(None if x is None else np.asarray(x) for x in args))
        try:
            for i, prompt in enumerate(prompts):
                say(i, len(prompts))
                seen.clear()
                self._draw(stand_in, prompt, seed + i, steps, guidance, output_type="latent")
                # How often a run calls its transformer only the run knows: the steps are chosen afterwards.
                kept = None if each is None else min(each, len(seen))
                scheduler = self.pipe.scheduler
                t = np.asarray(scheduler.timesteps.cpu(), np.float64) / scheduler.config.num_train_timesteps
                weights = time_weights(np.resize(t, len(seen)), times)
                chosen = calibration_steps(i + 1, len(seen), kept, weights=weights, seed=seed)[i]
                out += [seen[step] for step in chosen]
        finally:
            stand_in.watch = None
        say(len(prompts), len(prompts))
        return out

    def _placed(self, transformer: Any) -> PipelineTransformer:
        """The stand-in for a transformer; the last one is kept, and with it what was compiled."""
        if self._stand_in is None or self._stand_in[0] is not transformer:
            self._stand_in = (transformer, for_pipeline(transformer))
        return self._stand_in[1]

    def _draw(self, stand_in: PipelineTransformer, prompt: str, seed: int, steps: Any, guidance: Any, **more: Any):
        import torch

        self.pipe.transformer = stand_in
        steps = self.steps if steps is None else steps
        guidance = self.guidance if guidance is None else guidance
        asked = {"num_inference_steps": steps, "guidance_scale": guidance}
        options = {**self.call, **{key: value for key, value in asked.items() if value is not None}}
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            found = self.pipe(
                **self.conditions(prompt), **options, generator=generator, **{"output_type": "np", **more}
            )
        return found.images


PIPELINES = ("FluxPipeline", "PixArtAlphaPipeline", "PixArtSigmaPipeline", "SanaPipeline")


def open_pipeline(
    folder: str | os.PathLike,
    dtype: Any = None,
    *,
    height: int | None = None,
    width: int | None = None,
    attention: str | None = None,
) -> DiffusersImages:
    """A diffusers folder with our transformer in the place of its own.

    Args:
        folder: with ``model_index.json``, ``transformer/`` and the rest of the pipeline.
        dtype: of all of it; None: bfloat16 on a GPU, float32 elsewhere.
        height, width: of the images in pixels; default: the pipeline's own.
        attention: as in ``mxjax_models.diffusers_folder.load``.

    Raises:
        MissingExtraError: torch, diffusers or transformers is missing.
        CheckpointError: no pipeline, or another one; what ``diffusers_folder.load`` raises; parts that diffusers cannot
            load.
    """
    try:
        import diffusers
        import torch
        import transformers  # noqa: F401
    except ImportError as e:
        raise MissingExtraError(
            "diffusers folders need torch, diffusers and transformers: pip install 'mxjax[diffusers]'"
        ) from e
    path = Path(folder)
    try:
        name = json.loads((path / "model_index.json").read_text(encoding="utf-8"))["_class_name"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise CheckpointError(f"{path} is no diffusers pipeline: no readable model_index.json: {e}") from e
    if name not in PIPELINES:
        raise CheckpointError(f"{path} is a {name}; supported: {', '.join(PIPELINES)}")
    if dtype is None:
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    transformer = diffusers_folder.load(path, dtype, attention=attention)
    try:
        own = getattr(torch, jnp.dtype(dtype).name)
        pipe = getattr(diffusers, name).from_pretrained(path, transformer=None, torch_dtype=own)
    except (OSError, ValueError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{path}: diffusers cannot load the pipeline: {e}") from e
    if torch.cuda.is_available():  # text encoders and VAE; our stand-in takes tensors from anywhere
        pipe.to("cuda")
    call: dict[str, Any] = {"height": height, "width": width}
    if name != "FluxPipeline" and (height or width):  # otherwise these draw the nearest size of their training
        call["use_resolution_binning"] = False
    return DiffusersImages(pipe, transformer, call=call)
