"""PixArt-Mini: a text-to-image transformer of 12 million parameters that draws clip art of 64x64 pixels.

The architecture is PixArt's (``mxjax_models.pixart``) on pixels in place of latents: patches of 4x4, 256 tokens, so
that every experiment with a diffusion transformer can be made on a laptop. It is a flow: x_t = t noise + (1 - t) image,
and the model predicts the velocity noise - image at the timestep 1000 t (``mxjax_models.samplers``).

    mini = load()
    images = mini.images(mini.transformer, ["a red apple"], seeds=[0])          # uint8 (1, 64, 64, 3)
    small = mxjax.nnx.quantize(mini.transformer, "mxfp4")
    images = mini.images(small, ["a red apple"], seeds=[0])                     # the same noise

Papers: PixArt-alpha, arXiv:2310.00426; flow matching, arXiv:2210.02747; classifier-free guidance, arXiv:2207.12598.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from mxjax_models.pixart import PixArt, PixArtConfig
from mxjax_models.pixart_mini_text import TextConfig, TextEncoder
from mxjax_models.samplers import FlowSchedule, flow_schedule, sample

from mxjax.calibration import calibration_steps, time_weights
from mxjax.errors import ConfigError

DATA = Path(__file__).parent / "data"  # what ships: the weights, the evaluation kit, NOTICE.txt
SIZE = 64
GUIDANCE = 3.0  # outlines are clearer than at 2 on the prompts of benchmarks/pixart_mini
STEPS = 20
CHUNK = 8  # calibration prompts drawn at a time (with guidance 16 images); 32 take a third more CPU time


def config(**overrides: Any) -> PixArtConfig:
    """The sizes of the shipped transformer.

    Example::

        config(num_layers=2, num_attention_heads=2, cross_attention_dim=128)     # for tests
    """
    sizes: dict[str, Any] = dict(num_attention_heads=5, attention_head_dim=64, cross_attention_dim=320, num_layers=7)
    sizes |= dict(in_channels=3, out_channels=3, patch_size=4, sample_size=SIZE, caption_channels=192)
    return PixArtConfig(**{**sizes, "interpolation_scale": 1.0, "use_additional_conditions": False, **overrides})


class Network(nnx.Module):
    """What is trained together: the text encoder and the transformer."""

    def __init__(self, config: PixArtConfig, text: TextConfig, *, rngs: nnx.Rngs, dtype: Any = jnp.float32,
                 attention: str | None = None):  # fmt: skip
        self.transformer = PixArt(config, rngs=rngs, dtype=dtype, attention=attention)
        for block in self.transformer.transformer_blocks:
            block.attn2.implementation = None  # a prompt is too short for cuDNN to be worth its mask
        self.text = TextEncoder(text, rngs=rngs, dtype=dtype)


def to_pixels(x: jax.Array) -> jax.Array:
    """(B, 3, H, W) around [-1, 1] -> uint8 (B, H, W, 3)."""
    return jnp.round((jnp.clip(x, -1, 1) + 1) * 127.5).astype(jnp.uint8).transpose(0, 2, 3, 1)


def from_pixels(pixels: jax.Array) -> jax.Array:
    """uint8 (B, H, W, 3) -> float32 (B, 3, H, W) in [-1, 1]."""
    return jnp.asarray(pixels).transpose(0, 3, 1, 2).astype(jnp.float32) / 127.5 - 1


@jax.jit
def _noises(seeds):  # uint32 (B,) -> (B, 3, H, W): an image's noise does not depend on its neighbours
    return jax.vmap(lambda seed: jax.random.normal(jax.random.key(seed), (3, SIZE, SIZE)))(seeds)


def noise(seeds: Sequence[int]) -> jax.Array:
    """Standard normal float32 (B, 3, 64, 64), each image from its own seed.

    Raises:
        ConfigError: seeds that are no integers in 0 to 2^32 - 1.
    """
    array = np.asarray(seeds)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer) or array.min(initial=0) < 0 or array.max() >> 32:
        raise ConfigError(f"seeds are a sequence of integers in 0 to 2^32 - 1, not {seeds!r}")
    return _noises(array.astype(np.uint32))


@partial(jax.jit, static_argnames="graph")
def _encode(graph, state, ids, mask):
    return nnx.merge(graph, state)(ids, mask)


def guided(transformer: Any, caption: jax.Array, mask: jax.Array, nothing: tuple[jax.Array, jax.Array], guidance: Any):
    """``predict(x, timestep)`` for ``samplers.sample``: v_0 + guidance (v - v_0), both in one call."""
    dtype, b = caption.dtype, len(caption)
    captions = jnp.concatenate([jnp.broadcast_to(nothing[0], caption.shape), caption])
    masks = jnp.concatenate([jnp.broadcast_to(nothing[1], mask.shape), mask])

    def predict(x: jax.Array, timestep: jax.Array) -> jax.Array:
        both = transformer(jnp.concatenate([x, x]).astype(dtype), jnp.full(2 * b, timestep), captions, masks)
        free, asked = jnp.split(both.astype(jnp.float32), 2)
        return free + guidance * (asked - free)

    return predict


@partial(jax.jit, static_argnames="graph")
def _draw(graph, state, captions, masks, nothing, x, sigmas, guidance):
    predict = guided(nnx.merge(graph, state), captions, masks, nothing, guidance)
    return to_pixels(sample(predict, x, FlowSchedule(sigmas)))


@partial(jax.jit, static_argnames="graph")
def _trajectory(graph, state, captions, masks, nothing, x, sigmas, guidance):
    """What ``_draw`` calls the model with: (steps, B, 3, H, W)."""
    predict = guided(nnx.merge(graph, state), captions, masks, nothing, guidance)

    def body(x, pair):
        return x + (pair[1] - pair[0]) * predict(x, 1000 * pair[0]), x

    return jax.lax.scan(body, x, jnp.stack([sigmas[:-1], sigmas[1:]], axis=1))[1]


@dataclasses.dataclass(frozen=True)
class PixArtMini:
    """The transformer, and what turns prompts into its inputs.

    Attributes:
        transformer: ``PixArt``. Quantize it and hand the result to ``images``.
        text: the text encoder.
        tokenizer: texts to ids.
        provenance: what the weights were trained on, how, and their licence.
        calibration_prompts: captions from training, none of the evaluation kit's.
    """

    transformer: PixArt
    text: TextEncoder
    tokenizer: Any
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    calibration_prompts: tuple[str, ...] = dataclasses.field(default=(), repr=False)

    def encode(self, prompts: Sequence[str]) -> tuple[jax.Array, jax.Array]:
        """Captions (B, T, E) and mask bool (B, T), for the transformer; "" is what guidance starts from.

        Raises:
            ConfigError: a single string, or no prompt.
        """
        if isinstance(prompts, str) or not len(prompts):
            raise ConfigError(f"prompts are a list of one text or more, not {prompts!r}")
        ids, mask = self.tokenizer(prompts, self.text.config.length)
        return _encode(*nnx.split(self.text), ids, mask), jnp.asarray(mask)

    def images(self, transformer: Any, prompts: Sequence[str], *, seeds: Sequence[int], steps: int = STEPS,
               guidance: float = GUIDANCE) -> np.ndarray:  # fmt: skip
        """Draws one image a prompt by Euler steps.

        One compilation for each number of prompts, number of steps, and kind of transformer.

        Args:
            transformer: ``self.transformer``, or a quantized copy of it.
            prompts: B texts.
            seeds: B numbers, of the noise of each image alone.
            steps: how often the transformer is called (with 2 B images).
            guidance: 1 is none.

        Example::

            mini.images(mini.transformer, ["a red apple", "a cat"], seeds=[0, 1], steps=50)

        Returns:
            uint8 (B, 64, 64, 3).

        Raises:
            ConfigError: not as many seeds as prompts, or fewer than one step.
        """
        captions, masks, x, sigmas = self._inputs(prompts, seeds, steps)
        state = nnx.split(transformer)
        return np.asarray(_draw(*state, captions, masks, self.encode([""]), x, sigmas, jnp.float32(guidance)))

    def calibration_batches(self, prompts: Sequence[str], *, seed: int = 0, steps: int = STEPS,
                            guidance: float = GUIDANCE, each: int | None = 4, times: Any = "uniform",
                            batch: int = 32, chunk: int = CHUNK,
                            progress: Callable[[int, int], None] | None = None) -> list[tuple]:  # fmt: skip
        """Arguments of the float transformer at some steps of drawing each prompt, for ``mxjax.calibrate``.

        Every batch holds all timesteps in their proportion, and half of it has no prompt, as guidance calls it.

        Args:
            prompts: what to draw; the noise of the i-th is that of ``seed + i``.
            seed: of noise and choice of steps.
            steps, guidance: as for ``images``.
            each: how many steps of each prompt; None: all of them.
            times: how steps are chosen: "uniform", each as often as any other; "logit_normal", as often as training saw
                their times (fewer at both ends); or a weight for each step. Whatever it is, the choice is stratified
                over steps, and moves on from prompt to prompt.
            batch: images a call, fewer if there are fewer in all; what is left over is not used.
            chunk: prompts drawn at a time, which bounds the memory; images depend on it by float32 roundings at most.
            progress: called with how many prompts are drawn, and all of them.

        Example::

            batches = mini.calibration_batches(mini.calibration_prompts)
            stats = mxjax.calibrate(mini.transformer, None, batches, "mr_gptq_mxfp4")

        Returns:
            Tuples (latents (batch, 3, 64, 64), timestep (batch,), captions (batch, T, E), mask (batch, T)).

        Raises:
            ConfigError: weights that are not ``steps`` positive numbers.
        """
        if chunk < 1:
            raise ConfigError(f"chunk={chunk} prompts at a time: at least 1")
        captions, masks, x, sigmas = self._inputs(prompts, range(seed, seed + len(prompts)), steps)
        nothing = self.encode([""])
        state = nnx.split(self.transformer)
        weights = time_weights(sigmas[:-1], times) if isinstance(times, str) else times
        chosen = calibration_steps(len(prompts), steps, each, weights=weights, seed=seed)
        chunks = np.array_split(np.arange(len(prompts)), -(-len(prompts) // chunk))
        path = []  # what was chosen of each prompt
        for rows in chunks:
            if progress is not None:
                progress(int(rows[0]), len(prompts))
            own = np.resize(rows, len(chunks[0]))  # equal shapes: one program; what is repeated is left out again
            args = captions[own], masks[own], nothing, x[own], sigmas, jnp.float32(guidance)
            seen = np.asarray(_trajectory(*state, *args))
            path += [seen[chosen[row], i] for i, row in enumerate(rows)]
        if progress is not None:
            progress(len(prompts), len(prompts))
        latents = np.concatenate(path)
        who, when = np.repeat(np.arange(len(prompts)), chosen.shape[1]), chosen.reshape(-1)
        order = np.random.default_rng(seed).permutation(len(who))
        batch = min(batch, len(order))
        out = []
        for start in range(0, len(order) - batch + 1, batch):
            rows = order[start : start + batch]
            free = (np.arange(batch) % 2 == 0)[:, None]
            out.append((latents[rows].astype(captions.dtype), 1000 * np.asarray(sigmas)[when[rows]],
                        jnp.where(free[..., None], nothing[0], captions[who[rows]]),
                        jnp.where(free, nothing[1], masks[who[rows]])))  # fmt: skip
        return out

    def _inputs(self, prompts, seeds, steps):
        if len(seeds) != len(prompts) or steps < 1:
            raise ConfigError(f"{len(prompts)} prompts need as many seeds, not {len(seeds)}, and one step or more")
        captions, masks = self.encode(prompts)
        return captions, masks, noise(list(seeds)), flow_schedule(steps).sigmas


def load(folder: str | os.PathLike = DATA, dtype: Any = jnp.float32, *, attention: str | None = None) -> PixArtMini:
    """Loads the model's two files, by default those that ship. See ``mxjax_models.pixart_mini_file.load``."""
    from mxjax_models import pixart_mini_file  # not at the top: it needs this file's classes

    return pixart_mini_file.load(folder, dtype, attention=attention)
