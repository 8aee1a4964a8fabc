"""A text-to-image model small enough for tests, with the interface that PixArt-Mini has: random weights, no text."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from mxjax_models.pixart import PixArt, PixArtConfig
from mxjax_models.samplers import flow_schedule, sample

from mxjax.calibration import calibration_steps, time_weights

SIZE, TOKENS = 16, 6


class TinyImages:
    """A random PixArt of 64 channels that draws 16 x 16 pixels by flow matching; captions are numbers from letters."""

    calibration_prompts = ("a dog", "blue", "two birds")

    def __init__(self, seed=0):
        config = PixArtConfig.tiny(
            num_layers=1, in_channels=3, out_channels=3, sample_size=SIZE, use_additional_conditions=False
        )
        self.transformer = PixArt(config, rngs=nnx.Rngs(seed))
        self.calls = []
        self._velocity = nnx.jit(lambda model, x, t, caption: model(x, jnp.full(len(x), t), caption))
        self._sampled = nnx.jit(self._sample, static_argnums=3)

    def encode(self, prompts):
        rows = [np.frombuffer(p.encode()[:TOKENS].ljust(TOKENS), np.uint8) for p in prompts]
        return jnp.sin(jnp.asarray(np.stack(rows), jnp.float32)[..., None] * (1 + jnp.arange(32.0)))

    def _noise(self, seeds):
        return jnp.stack([jax.random.normal(jax.random.key(s), (3, SIZE, SIZE)) for s in seeds])

    @staticmethod
    def _sample(model, x, captions, steps, guidance):
        def velocity(x, t):
            return guidance * model(x, jnp.full(len(x), t), captions)

        return sample(velocity, x, flow_schedule(steps))

    def images(self, transformer, prompts, *, seeds, steps=3, guidance=1.0):
        self.calls.append((tuple(prompts), tuple(seeds), steps, guidance))
        x = self._sampled(transformer, self._noise(seeds), self.encode(prompts), steps, guidance)
        return np.asarray(jnp.clip(jnp.round(127.5 + 60 * x), 0, 255), np.uint8).transpose(0, 2, 3, 1)

    def calibration_batches(self, prompts, *, seed=0, steps=3, guidance=1.0, each=2, times="uniform", progress=None):
        captions, schedule = self.encode(prompts), flow_schedule(steps)
        weights = time_weights(schedule.sigmas[:-1], times)
        chosen = calibration_steps(len(prompts), steps, min(each, steps), weights=weights, seed=seed)
        out = []
        for i in range(len(prompts)):
            x, caption = self._noise([seed + i]), captions[i : i + 1]
            for step in range(steps):
                t = schedule.timesteps[step]
                if step in chosen[i]:
                    out.append((np.asarray(x), np.full(1, t, np.float32), np.asarray(caption)))
                dt = schedule.sigmas[step + 1] - schedule.sigmas[step]
                x = x + dt * guidance * self._velocity(self.transformer, x, t, caption)
            if progress is not None:
                progress(i + 1, len(prompts))
        return out
