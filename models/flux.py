"""FLUX.1, written to be read: two streams that attend together, then one stream; guidance is an input.

Double-stream blocks keep separate weights for text and image and concatenate both, text first, for one attention.
Single-stream blocks run attention and MLP side by side on the concatenation. Queries and keys are normalized per head
and rotated by three position axes (index, row, column). Letters as in ``dit_layers``.

References: FLUX.1, Black Forest Labs 2024 (github.com/black-forest-labs/flux); rectified flow transformers,
arXiv:2403.03206; parallel blocks, arXiv:2302.05442; RoPE, arXiv:2104.09864.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from mxjax_models import _dit_config
from mxjax_models.dit_layers import (
    FeedForward,
    MLPEmbedding,
    RMSNorm,
    attention,
    gelu_tanh,
    layer_norm,
    modulate,
    timestep_embedding,
)

import mxjax
from mxjax.errors import ConfigError

# What published recipes keep in high precision, and what that is; patterns are searched in the lower-cased path.
KEEP: Mapping[str, str] = {
    r"^x_embedder/|^context_embedder/|^time_text_embed/": "embedder of latents, text, time or guidance",
    r"(^|/)norm\w*/": "adaLN modulation",  # norm1/linear, norm1_context/linear, norm/linear, norm_out/linear
    r"^proj_out/": "final projection",  # a single block's own proj_out is quantized
}

ONLY: Mapping[str, tuple] = {"patch_size": (1,)}  # of diffusers' config


@dataclasses.dataclass(frozen=True, kw_only=True)
class FluxConfig:
    """Sizes of one model; names and defaults are those of diffusers' ``FluxTransformer2DModel``.

    Example::

        config = FluxConfig.dev()
        model = Flux(FluxConfig.tiny(), rngs=nnx.Rngs(0))

    Raises:
        ConfigError: sizes that do not fit together.
    """

    in_channels: int = 64  # 16 latent channels, 2 x 2 pixels of them
    out_channels: int | None = None  # None: in_channels
    num_layers: int = 19  # double-stream blocks
    num_single_layers: int = 38
    attention_head_dim: int = 128
    num_attention_heads: int = 24
    joint_attention_dim: int = 4096  # of the text encoder's tokens
    pooled_projection_dim: int = 768  # of the text encoder's one vector
    guidance_embeds: bool = False  # distilled guidance is an input (dev); without (schnell)
    axes_dims_rope: tuple[int, ...] = (16, 56, 56)  # head dimensions rotated by each axis of the ids

    def __post_init__(self):
        _dit_config.check_sizes(self)
        if self.out_channels is None:
            object.__setattr__(self, "out_channels", self.in_channels)
        if sum(self.axes_dims_rope) != self.attention_head_dim or any(n % 2 for n in self.axes_dims_rope):
            raise ConfigError(
                f"axes_dims_rope={self.axes_dims_rope}: even sizes whose sum is attention_head_dim="
                f"{self.attention_head_dim}"
            )

    @property
    def hidden_size(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @classmethod
    def dev(cls) -> "FluxConfig":
        """The published FLUX.1-dev."""
        return cls(guidance_embeds=True)

    @classmethod
    def schnell(cls) -> "FluxConfig":
        """The published FLUX.1-schnell."""
        return cls()

    @classmethod
    def tiny(cls, **overrides: Any) -> "FluxConfig":
        """Two double and two single blocks, 0.5 million parameters; every linear size is a multiple of 32."""
        sizes: dict[str, Any] = dict(num_layers=2, num_single_layers=2, num_attention_heads=4, attention_head_dim=16)
        sizes |= dict(in_channels=32, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 6, 6))
        return cls(**{**sizes, "guidance_embeds": True, **overrides})

    @classmethod
    def from_diffusers(cls, config: Mapping[str, Any]) -> "FluxConfig":
        """Reads ``transformer/config.json`` as a dict.

        Raises:
            ConfigError: a field that asks for something this file does not compute.
        """
        return _dit_config.from_diffusers(cls, config, ONLY)


def rope(ids: jax.Array, axes: tuple[int, ...], theta: float = 10000.0) -> tuple[jax.Array, jax.Array]:
    """cos and sin of the angle of every pair of head dimensions: ids (S, 3) -> float32 (S, D / 2) each.

    Axis a turns the next ``axes[a] / 2`` pairs by ids[:, a] * theta^(-2i / axes[a]).
    """
    angles = []
    for axis, size in enumerate(axes):
        frequencies = (theta ** (-np.arange(0, size, 2) / size)).astype(np.float32)
        angles.append(ids[:, axis, None].astype(jnp.float32) * frequencies[None, :])
    angle = jnp.concatenate(angles, axis=-1)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (x_2i, x_2i+1), neighbours, unlike Llama's; x (B, S, H, D), cos and sin (S, D / 2)."""
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    a, b, cos, sin = pairs[..., 0], pairs[..., 1], cos[None, :, None, :], sin[None, :, None, :]
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape).astype(x.dtype)


class AdaLayerNorm(nnx.Module):
    """Modulations of one block or stream: ``parts`` vectors from one linear layer of the conditioning."""

    def __init__(self, width: int, parts: int, dtype: Any, rngs: nnx.Rngs):
        self.linear = nnx.Linear(width, parts * width, param_dtype=dtype, rngs=rngs)
        self.parts = parts

    def __call__(self, condition):  # (B, E) -> parts times (B, 1, E)
        return jnp.split(self.linear(jax.nn.silu(condition))[:, None], self.parts, axis=-1)


class Attention(nnx.Module):
    """Attention of one stream, or of two concatenated ones that each have their own projections."""

    def __init__(self, config: FluxConfig, dtype: Any, rngs: nnx.Rngs, implementation: str | None, joint: bool):
        width, size = config.hidden_size, config.attention_head_dim
        options: Any = dict(param_dtype=dtype, rngs=rngs)
        self.norm_q, self.norm_k = RMSNorm(size, 1e-6, dtype), RMSNorm(size, 1e-6, dtype)
        self.to_q, self.to_k, self.to_v = (nnx.Linear(width, width, **options) for _ in range(3))
        if joint:  # in a single block, what would be here is part of its proj_out
            self.norm_added_q, self.norm_added_k = RMSNorm(size, 1e-6, dtype), RMSNorm(size, 1e-6, dtype)
            self.add_q_proj, self.add_k_proj, self.add_v_proj = (nnx.Linear(width, width, **options) for _ in range(3))
            self.to_out = nnx.List([nnx.Linear(width, width, **options)])
            self.to_add_out = nnx.Linear(width, width, **options)
        self.heads, self.implementation = config.num_attention_heads, implementation

    def _heads(self, x):  # (B, S, E) -> (B, S, H, D)
        return x.reshape(*x.shape[:2], self.heads, -1)

    def __call__(self, qkv, angles, text=None):
        """q, k and v (B, S, E) each and angles of ``rope`` -> (B, S, E); with text (B, T, E), x's part and text's."""
        q, k, v = map(self._heads, qkv)
        q, k = self.norm_q(q), self.norm_k(k)
        if text is not None:
            added = mxjax.nnx.shared_input(text, self.add_q_proj, self.add_k_proj, self.add_v_proj)
            text_q, text_k, text_v = map(self._heads, added)
            text_q, text_k = self.norm_added_q(text_q), self.norm_added_k(text_k)
            q, k, v = (jnp.concatenate(y, axis=1) for y in ((text_q, q), (text_k, k), (text_v, v)))  # text first
        y = attention(rotate(q, *angles), rotate(k, *angles), v, None, self.implementation)
        if text is None:
            return y
        t = text.shape[1]
        return self.to_out[0](y[:, t:]), self.to_add_out(y[:, :t])


class DoubleBlock(nnx.Module):
    """Image and text with weights of their own, one attention over both."""

    def __init__(self, config: FluxConfig, dtype: Any, rngs: nnx.Rngs, implementation: str | None):
        width = config.hidden_size
        self.norm1, self.norm1_context = AdaLayerNorm(width, 6, dtype, rngs), AdaLayerNorm(width, 6, dtype, rngs)
        self.attn = Attention(config, dtype, rngs, implementation, joint=True)
        self.ff, self.ff_context = FeedForward(width, dtype, rngs), FeedForward(width, dtype, rngs)

    def __call__(self, x, text, condition, angles):
        """x (B, S, E), text (B, T, E), condition (B, E), angles of T + S positions -> the new x and text."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.norm1(condition)
        c_shift1, c_scale1, c_gate1, c_shift2, c_scale2, c_gate2 = self.norm1_context(condition)
        y, a = modulate(layer_norm(x), shift1, scale1), self.attn
        qkv = mxjax.nnx.shared_input(y, a.to_q, a.to_k, a.to_v)
        y, text_y = a(qkv, angles, modulate(layer_norm(text), c_shift1, c_scale1))
        x, text = x + gate1 * y, text + c_gate1 * text_y
        x = x + gate2 * self.ff(modulate(layer_norm(x), shift2, scale2))
        return x, text + c_gate2 * self.ff_context(modulate(layer_norm(text), c_shift2, c_scale2))


class SingleBlock(nnx.Module):
    """x + gate proj_out([attention(y), gelu(proj_mlp(y))]) with y = mod(norm(x)), on text and image together."""

    def __init__(self, config: FluxConfig, dtype: Any, rngs: nnx.Rngs, implementation: str | None):
        width = config.hidden_size
        self.norm = AdaLayerNorm(width, 3, dtype, rngs)
        self.proj_mlp = nnx.Linear(width, 4 * width, param_dtype=dtype, rngs=rngs)
        self.proj_out = nnx.Linear(5 * width, width, param_dtype=dtype, rngs=rngs)
        self.attn = Attention(config, dtype, rngs, implementation, joint=False)

    def __call__(self, x, condition, angles):  # (B, T + S, E), (B, E) -> (B, T + S, E)
        shift, scale, gate = self.norm(condition)
        y, a = modulate(layer_norm(x), shift, scale), self.attn
        *qkv, y = mxjax.nnx.shared_input(y, a.to_q, a.to_k, a.to_v, self.proj_mlp)
        y = jnp.concatenate([a(qkv, angles), gelu_tanh(y)], axis=-1)
        return x + gate * self.proj_out(y)


class TimeTextEmbed(nnx.Module):
    """The conditioning of all blocks: time, guidance where the model has it, and the text's one vector, summed."""

    def __init__(self, config: FluxConfig, dtype: Any, rngs: nnx.Rngs):
        width = config.hidden_size
        self.timestep_embedder = MLPEmbedding(256, width, jax.nn.silu, dtype, rngs)
        if config.guidance_embeds:
            self.guidance_embedder = MLPEmbedding(256, width, jax.nn.silu, dtype, rngs)
        self.text_embedder = MLPEmbedding(config.pooled_projection_dim, width, jax.nn.silu, dtype, rngs)
        self.guided = config.guidance_embeds

    def __call__(self, timestep, guidance, pooled):  # (B,), (B,) or None, (B, pooled_projection_dim) -> (B, E)
        x = self.timestep_embedder(timestep_embedding(timestep).astype(pooled.dtype))
        if self.guided != (guidance is not None):
            raise ValueError(f"guidance_embeds={self.guided}: guidance is {'missing' if self.guided else 'no input'}")
        if guidance is not None:
            x = x + self.guidance_embedder(timestep_embedding(guidance).astype(pooled.dtype))
        return x + self.text_embedder(pooled)


class Flux(nnx.Module):
    """The velocity predictor of FLUX.1-dev and FLUX.1-schnell.

    ``mxjax.nnx.quantize(model, "mxfp4")`` leaves what ``KEEP`` lists. To decide otherwise, give a config with an
    ``exclude`` of your own: ``mxjax.recipes.get("mxfp4").replace(exclude=[p for p in KEEP if "norm" not in p])``
    quantizes adaLN too.

    Example::

        model = Flux(FluxConfig.tiny(), rngs=nnx.Rngs(0))
        velocity = model(x, text, pooled, t, image_ids(8, 8), jnp.zeros((T, 3)), guidance)   # like x: (B, 64, 32)
    """

    quantization_exclude = KEEP

    def __init__(self, config: FluxConfig, *, rngs: nnx.Rngs, dtype: Any = jnp.float32, attention: str | None = None):
        c = self.config = config
        width = c.hidden_size
        self.time_text_embed = TimeTextEmbed(c, dtype, rngs)
        self.context_embedder = nnx.Linear(c.joint_attention_dim, width, param_dtype=dtype, rngs=rngs)
        self.x_embedder = nnx.Linear(c.in_channels, width, param_dtype=dtype, rngs=rngs)
        self.transformer_blocks = nnx.List([DoubleBlock(c, dtype, rngs, attention) for _ in range(c.num_layers)])
        singles = [SingleBlock(c, dtype, rngs, attention) for _ in range(c.num_single_layers)]
        self.single_transformer_blocks = nnx.List(singles)
        self.norm_out = AdaLayerNorm(width, 2, dtype, rngs)
        self.proj_out = nnx.Linear(width, c.out_channels, param_dtype=dtype, rngs=rngs)

    def __call__(self, x, text, pooled, timestep, image_ids, text_ids, guidance=None):
        """The velocity dx/dt: from data towards noise.

        Args:
            x: latents (B, S, in_channels), 2 x 2 pixels a token.
            text: (B, T, joint_attention_dim), tokens of the text encoder.
            pooled: (B, pooled_projection_dim).
            timestep: (B,), from 1 (noise) to 0.
            image_ids, text_ids: (S, 3) and (T, 3), positions; see ``image_ids``; text has zeros.
            guidance: (B,), such as 3.5, for models with ``guidance_embeds``.

        Returns:
            (B, S, out_channels).
        """
        scaled = None if guidance is None else guidance.astype(jnp.float32) * 1000
        condition = self.time_text_embed(timestep.astype(jnp.float32) * 1000, scaled, pooled)
        x, text = self.x_embedder(x), self.context_embedder(text)
        angles = rope(jnp.concatenate([text_ids, image_ids]), self.config.axes_dims_rope)
        x = self.run_blocks(x, text, condition, angles)
        scale, shift = self.norm_out(condition)  # the other way round than in blocks
        return self.proj_out(modulate(layer_norm(x[:, text.shape[1] :]), shift, scale))

    def run_blocks(self, x, text, condition, angles):
        """All blocks: x (B, S, E) and text (B, T, E) -> (B, T + S, E), text first."""
        for block in self.transformer_blocks:
            x, text = block(x, text, condition, angles)
        x = jnp.concatenate([text, x], axis=1)
        for single in self.single_transformer_blocks:
            x = single(x, condition, angles)
        return x

    def attentions(self) -> list[Attention]:
        """Every attention of the model; ``implementation`` is an attribute of each."""
        return [block.attn for block in (*self.transformer_blocks, *self.single_transformer_blocks)]

    def torch_shape(self, path: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """No parameter has another shape in diffusers' files, beyond what holds for every kernel."""
        return None


def shared_inputs(config: FluxConfig) -> list[tuple[str, ...]]:
    """Layers that multiply the same input, for ``mxjax.nnx.fuse_shared_inputs``: x is transformed and quantized once.

    Example::

        qmodel = mxjax.nnx.fuse_shared_inputs(qmodel, shared_inputs(qmodel.config))
    """
    double = [f"transformer_blocks/{i}/attn" for i in range(config.num_layers)]
    single = [f"single_transformer_blocks/{i}" for i in range(config.num_single_layers)]
    image = [tuple(f"{block}/to_{name}" for name in "qkv") for block in double]
    text = [tuple(f"{block}/add_{name}_proj" for name in "qkv") for block in double]
    both = [(*(f"{block}/attn/to_{name}" for name in "qkv"), f"{block}/proj_mlp") for block in single]
    return [*image, *text, *both]


def image_ids(height: int, width: int) -> jax.Array:
    """Positions (0, row, column) of the tokens of an image: (height * width, 3), row after row.

    height and width count tokens, 2 x 2 latents or 16 x 16 pixels each.
    """
    rows, columns = jnp.meshgrid(jnp.arange(height), jnp.arange(width), indexing="ij")
    return jnp.stack([jnp.zeros_like(rows), rows, columns], axis=-1).reshape(-1, 3).astype(jnp.float32)


def load(path: str | os.PathLike, dtype: Any = jnp.float32, **options: Any) -> Flux:
    """Loads a diffusers folder. See ``mxjax_models.diffusers_folder.load``."""
    from mxjax_models import diffusers_folder  # not at the top: it needs this file's classes

    return diffusers_folder.load(path, dtype, expect=Flux, **options)
