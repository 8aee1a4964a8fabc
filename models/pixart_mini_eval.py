"""How much a quantized PixArt-Mini differs from the float one: fixed held-out pictures, prompts, seeds, one dict.

    mini = pixart_mini.load()
    kit = load()
    kit.compare(mini, mxjax.nnx.quantize(mini.transformer, "mxfp4"))
    # {"velocity_error": ..., "psnr": ..., "ssim": ..., "feature_distance": ..., "frechet": ..., ...}

The pictures were held out of training (``held_out`` in ``benchmarks/pixart_mini/data.py``). The features are those of a
small classifier of the training pictures by their folder, or emoji group. Both ship in ``mxjax_models/data``.
"""

import dataclasses
import itertools
import json
import lzma
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from mxjax_models import _weights, image_metrics
from mxjax_models.pixart_mini import DATA, SIZE, PixArtMini, from_pixels, noise

from mxjax.errors import ConfigError
from mxjax.eval import psnr, ssim
from mxjax.io import safetensors

PICTURES, CLASSIFIER = "pixart_mini_eval.npz", "pixart_mini_classifier.safetensors"
CHANNELS = (24, 48, 96, 128)
TIMES = 8  # velocity errors are taken at the middles of as many equal stretches of t


class Classifier(nnx.Module):
    """Four stages, each half the size of the one before; their outputs are the features.

    Args:
        classes: how many.
    """

    def __init__(self, classes: int, *, rngs: nnx.Rngs, dtype: Any = jnp.float32):
        widths = (3, *CHANNELS)
        self.stages = nnx.List([Stage(n, m, dtype, rngs) for n, m in itertools.pairwise(widths)])
        self.head = nnx.Linear(CHANNELS[-1], classes, param_dtype=dtype, rngs=rngs)

    def features(self, pixels):
        """uint8 (B, 64, 64, 3) -> [(B, 32, 32, 24), ..., (B, 4, 4, 128)], none negative."""
        x, out = pixels.astype(jnp.float32) / 127.5 - 1, []
        for stage in self.stages:
            x = stage(x)
            out.append(x)
        return out

    def __call__(self, pixels):  # -> (B, classes) logits
        return self.head(jnp.mean(self.features(pixels)[-1], axis=(1, 2)))


class Stage(nnx.Module):
    """A convolution of stride 2, and a second one around which the first goes."""

    def __init__(self, n_in: int, n_out: int, dtype: Any, rngs: nnx.Rngs):
        options: Any = dict(param_dtype=dtype, rngs=rngs)
        self.down = nnx.Conv(n_in, n_out, (3, 3), strides=2, use_bias=False, **options)
        self.norm1 = nnx.GroupNorm(n_out, num_groups=8, **options)
        self.conv = nnx.Conv(n_out, n_out, (3, 3), use_bias=False, **options)
        self.norm2 = nnx.GroupNorm(n_out, num_groups=8, **options)

    def __call__(self, x):
        x = jax.nn.relu(self.norm1(self.down(x)))
        return jax.nn.relu(x + self.norm2(self.conv(x)))


def save_classifier(path: str | os.PathLike, model: Classifier, classes: Sequence[str]) -> None:
    """bfloat16 parameters under their paths; the names of the classes in the header."""
    safetensors.write(Path(path), _weights.by_path(model, jnp.bfloat16), {"classes": json.dumps(list(classes))})


def load_classifier(path: str | os.PathLike) -> tuple[Classifier, list[str]]:
    """The classifier, float32, and its classes.

    Raises:
        CheckpointError: no such file, or other tensors than a classifier's.
    """
    classes = json.loads(safetensors.read_metadata(Path(path)).get("classes", "[]"))
    model = _weights.abstract(lambda rngs: Classifier(len(classes), rngs=rngs))
    return _weights.read_by_path(model, Path(path), jnp.float32), classes


@partial(jax.jit, static_argnames="graph")
def _features(graph, state, pixels):
    return nnx.merge(graph, state).features(pixels)


@partial(jax.jit, static_argnames="graph")
def _velocity(graph, state, latents, timestep, captions, masks):
    return nnx.merge(graph, state)(latents, timestep, captions, masks).astype(jnp.float32)


@jax.jit
def _squares(v, v0):
    """Sums of squares of the difference and of the second, in float32."""
    return jnp.sum(jnp.square(v - v0)), jnp.sum(jnp.square(v0))


@dataclasses.dataclass(frozen=True)
class Kit:
    """Held-out pictures with their prompts, and what measures.

    Attributes:
        pixels: uint8 (N, 64, 64, 3).
        prompts: N captions. The i-th is drawn from noise of seed i.
        classifier: of features.
    """

    pixels: np.ndarray
    prompts: list[str]
    classifier: Classifier

    def samples(self, mini: PixArtMini, transformer: Any, *, count: int = 64, batch: int = 32,
                **options: Any) -> np.ndarray:  # fmt: skip
        """Images of the first ``count`` prompts, uint8 (count, 64, 64, 3), a batch at a time.

        Raises:
            ConfigError: a count that is no multiple of the batch, or more than there are.
        """
        self._check(count, batch)
        rows = [range(i, i + batch) for i in range(0, count, batch)]
        return np.concatenate([mini.images(transformer, [self.prompts[i] for i in r], seeds=list(r), **options)
                               for r in rows])  # fmt: skip

    def velocity_error(self, mini: PixArtMini, transformer: Any, *, count: int = 64, batch: int = 32) -> np.ndarray:
        """|v - v_float|^2 / |v_float|^2 at ``TIMES`` times, float64 (TIMES,).

        At each time, x_t of the first ``count`` pictures with fixed noise, and their prompts.
        """
        self._check(count, batch)
        new, old = nnx.split(transformer), nnx.split(mini.transformer)
        sums = np.zeros((TIMES, 2))
        for start in range(0, count, batch):
            rows = slice(start, start + batch)
            captions, masks = mini.encode(self.prompts[rows])
            image = from_pixels(self.pixels[rows])
            for i in range(TIMES):
                t = (i + 0.5) / TIMES
                x = t * noise(range(1000 * (i + 1) + start, 1000 * (i + 1) + start + batch)) + (1 - t) * image
                args = (x.astype(captions.dtype), jnp.full(batch, 1000 * t), captions, masks)
                sums[i] += _squares(_velocity(*new, *args), _velocity(*old, *args))
        return sums[:, 0] / sums[:, 1]

    def features(self, pixels: np.ndarray, batch: int = 32) -> list[np.ndarray]:
        """The classifier's features of all images, one array a stage."""
        model = nnx.split(self.classifier)
        parts = [_features(*model, pixels[i : i + batch]) for i in range(0, len(pixels), batch)]
        return [np.concatenate([np.asarray(p[k]) for p in parts]) for k in range(len(CHANNELS))]

    def frechet(self, a: np.ndarray, b: np.ndarray) -> float:
        """Fréchet distance of two sets of images in the last stage's means."""
        x, y = (self.features(p)[-1].mean((1, 2)) for p in (a, b))
        return float(image_metrics.frechet_distance(jnp.asarray(x), jnp.asarray(y)))

    def compare(self, mini: PixArtMini, transformer: Any, *, reference: np.ndarray | None = None, count: int = 64,
                batch: int = 32, **options: Any) -> dict[str, Any]:  # fmt: skip
        """Everything about a transformer in the place of ``mini.transformer``.

        Args:
            mini: the float model.
            transformer: its quantized copy.
            reference: what ``samples(mini, mini.transformer, ...)`` gave with the same options; None: drawn here.
            count, batch: how many prompts, and how many of them at a time.
            options: ``steps`` and ``guidance`` of ``PixArtMini.images``.

        Returns:
            velocity_error: the mean over times of what the method of that name gives, and ``velocity_by_time``.
            psnr, ssim, feature_distance: means over pairs of images from the same seed.
            frechet: distance of the two sets of images; ``frechet_held_out``: of the new images to the pictures.
            images: the new images.
        """
        if reference is None:
            reference = self.samples(mini, mini.transformer, count=count, batch=batch, **options)
        images = self.samples(mini, transformer, count=count, batch=batch, **options)
        errors = self.velocity_error(mini, transformer, count=count, batch=batch)
        distance = image_metrics.feature_distance(self.features(reference), self.features(images))
        return {
            "velocity_error": float(errors.mean()),
            "velocity_by_time": errors.tolist(),
            "psnr": float(np.mean([psnr(a, b) for a, b in zip(reference, images, strict=True)])),
            "ssim": float(np.mean([ssim(a, b) for a, b in zip(reference, images, strict=True)])),
            "feature_distance": float(distance.mean()),
            "frechet": self.frechet(reference, images),
            "frechet_held_out": self.frechet(self.pixels[:count], images),
            "images": images,
        }

    def _check(self, count: int, batch: int) -> None:
        if not 0 < count <= len(self.prompts) or count % batch:
            raise ConfigError(f"count={count}: a multiple of batch={batch}, at most {len(self.prompts)}")


def load(folder: str | os.PathLike = DATA) -> Kit:
    """The kit that ships, or one that ``benchmarks/pixart_mini/kit.py`` wrote elsewhere.

    Raises:
        FileNotFoundError: no pictures there.
        CheckpointError: no classifier there.
    """
    with np.load(Path(folder) / PICTURES) as z:
        raw = lzma.decompress(z["pixels"].tobytes(), lzma.FORMAT_XZ)
        prompts = z["prompts"].tobytes().decode().split("\n")
    pixels = np.frombuffer(raw, np.uint8).reshape(-1, SIZE, SIZE, 3)
    return Kit(pixels, prompts, load_classifier(Path(folder) / CLASSIFIER)[0])
