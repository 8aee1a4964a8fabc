"""PixArt-alpha and PixArt-Sigma, written to be read: patches, adaLN-single, cross-attention to the caption.

A block is x + g1 attn1(mod(norm(x))), then + attn2(x, caption), then + g2 ff(mod(norm(x))); the six modulations of
all blocks come from one linear layer of the timestep (``adaln_single``) plus a table (6, E) of each block. Letters as
in ``dit_layers``.

Papers: PixArt-alpha, arXiv:2310.00426; PixArt-Sigma, arXiv:2403.04692; DiT, arXiv:2212.09748.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from mxjax_models import _dit_config
from mxjax_models.dit_layers import (
    AdaLayerNormSingle,
    FeedForward,
    MLPEmbedding,
    PatchEmbed,
    attention,
    gelu_tanh,
    layer_norm,
    modulate,
    sincos_positions,
    unpatchify,
)

import mxjax
from mxjax.errors import ConfigError

# Layers with one input, for ``mxjax.nnx.fuse_shared_inputs``: self-attention's, and the caption's keys and values.
SHARED_INPUTS = (("attn1/to_q", "attn1/to_k", "attn1/to_v"), ("attn2/to_k", "attn2/to_v"))

# What published recipes keep in high precision, and what that is; patterns are searched in the lower-cased path.
KEEP: Mapping[str, str] = {
    r"^pos_embed/": "patch embedder",
    r"^adaln_single/": "embedders of timestep and size, and the adaLN modulation of all blocks",
    r"^caption_projection/": "text embedder",
    r"^proj_out/": "final projection",
    r"(^|/)scale_shift_table$": "adaLN table, no matrix",
}

ONLY: Mapping[str, tuple] = {  # of diffusers' config; the first value is its default
    "activation_fn": ("gelu-approximate",),
    "norm_type": ("ada_norm_single",),
    "norm_elementwise_affine": (False,),
    "attention_type": ("default",),
    # Older files were written as Transformer2DModel:
    "double_self_attention": (False,),
    "only_cross_attention": (False,),
    "use_linear_projection": (False,),
    "num_vector_embeds": (None,),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PixArtConfig:
    """Sizes of one model; names and defaults are those of diffusers' ``PixArtTransformer2DModel``.

    Example::

        config = PixArtConfig.sigma(1024)      # PixArt-Sigma-XL-2-1024-MS
        model = PixArt(PixArtConfig.tiny(), rngs=nnx.Rngs(0))

    Raises:
        ConfigError: sizes that do not fit together.
    """

    num_attention_heads: int = 16
    attention_head_dim: int = 72
    in_channels: int = 4
    out_channels: int | None = 8  # noise and its variance; None: in_channels
    num_layers: int = 28
    cross_attention_dim: int = 1152  # the width of the projected caption: the hidden size
    caption_channels: int  # of the text encoder
    attention_bias: bool = True
    sample_size: int = 128  # latents of the training resolution
    patch_size: int = 2
    norm_eps: float = 1e-6
    interpolation_scale: float | None = None  # of positions; None: sample_size // 64, at least 1
    use_additional_conditions: bool | None = None  # resolution and aspect ratio; None: if sample_size is 128

    def __post_init__(self):
        _dit_config.check_sizes(self)
        for name, default in (
            ("out_channels", self.in_channels),
            ("interpolation_scale", max(self.sample_size // 64, 1)),
            ("use_additional_conditions", self.sample_size == 128),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        if self.cross_attention_dim != self.hidden_size:
            raise ConfigError(
                f"cross_attention_dim={self.cross_attention_dim}: the projected caption has the hidden size, "
                f"num_attention_heads * attention_head_dim = {self.hidden_size}"
            )
        if self.hidden_size % 4 or (self.use_additional_conditions and self.hidden_size % 3):
            raise ConfigError(f"hidden size {self.hidden_size}: positions need a multiple of 4, sizes one of 3")

    @property
    def hidden_size(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @classmethod
    def sigma(cls, resolution: int = 1024) -> "PixArtConfig":
        """The published PixArt-Sigma-XL-2 of 256, 512, 1024 or 2048 pixels."""
        scale = {256: 0.5, 512: 1, 1024: 2, 2048: 4}[resolution]
        sizes: Any = dict(sample_size=resolution // 8, interpolation_scale=scale)
        return cls(caption_channels=4096, use_additional_conditions=False, **sizes)

    @classmethod
    def tiny(cls, **overrides: Any) -> "PixArtConfig":
        """A two-layer model of about 0.2 million parameters for tests; every linear size is a multiple of 32."""
        sizes = dict(num_attention_heads=4, attention_head_dim=16, num_layers=2, cross_attention_dim=64)
        return cls(**{**sizes, "caption_channels": 32, "in_channels": 8, "sample_size": 8, **overrides})

    @classmethod
    def from_diffusers(cls, config: Mapping[str, Any]) -> "PixArtConfig":
        """Reads ``transformer/config.json`` as a dict.

        Raises:
            ConfigError: missing sizes, or a field that asks for something this file does not compute.
        """
        return _dit_config.from_diffusers(cls, config, ONLY)


class Attention(nnx.Module):
    """Multi-head attention, of x to itself or to a context."""

    def __init__(self, config: PixArtConfig, dtype: Any, rngs: nnx.Rngs, implementation: str | None):
        c, width = config, config.hidden_size
        options: Any = dict(param_dtype=dtype, rngs=rngs)
        self.to_q = nnx.Linear(width, width, use_bias=c.attention_bias, **options)
        self.to_k = nnx.Linear(width, width, use_bias=c.attention_bias, **options)
        self.to_v = nnx.Linear(width, width, use_bias=c.attention_bias, **options)
        self.to_out = nnx.List([nnx.Linear(width, width, **options)])
        self.heads, self.implementation = c.num_attention_heads, implementation

    def __call__(self, x, context=None, mask=None):  # (B, S, E), (B, T, E), bool (B, T) -> (B, S, E)
        if context is None:
            q, k, v = mxjax.nnx.shared_input(x, self.to_q, self.to_k, self.to_v)
        else:
            q, (k, v) = self.to_q(x), mxjax.nnx.shared_input(context, self.to_k, self.to_v)
        q, k, v = (y.reshape(*y.shape[:2], self.heads, -1) for y in (q, k, v))
        return self.to_out[0](attention(q, k, v, mask, self.implementation))


class Block(nnx.Module):
    """Self-attention and MLP between adaLN modulations, and cross-attention, which is not modulated."""

    def __init__(self, config: PixArtConfig, dtype: Any, rngs: nnx.Rngs, implementation: str | None):
        width = config.hidden_size
        self.scale_shift_table = nnx.Param(jax.random.normal(rngs.params(), (6, width), dtype) / width**0.5)
        self.attn1 = Attention(config, dtype, rngs, implementation)
        self.attn2 = Attention(config, dtype, rngs, implementation)
        self.ff = FeedForward(width, dtype, rngs)
        self.eps = config.norm_eps

    def __call__(self, x, context, modulation, mask=None):
        """x (B, S, E), context (B, T, E), modulation (B, 6, E) of the timestep, mask bool (B, T) -> (B, S, E)."""
        table = self.scale_shift_table[...][None] + modulation
        shift1, scale1, gate1, shift2, scale2, gate2 = jnp.split(table, 6, axis=1)  # each (B, 1, E)
        x = x + gate1 * self.attn1(modulate(layer_norm(x, self.eps), shift1, scale1))
        x = x + self.attn2(x, context, mask)
        return x + gate2 * self.ff(modulate(layer_norm(x, self.eps), shift2, scale2))


class PixArt(nnx.Module):
    """The noise predictor of PixArt-alpha and PixArt-Sigma.

    ``mxjax.nnx.quantize(model, "mxfp4")`` leaves what ``KEEP`` lists. To decide otherwise, give a config with an
    ``exclude`` of your own: ``mxjax.recipes.get("mxfp4").replace(exclude=(*KEEP, r"attn2/to_[kv]/"))`` leaves the
    caption's keys and values too.

    Example::

        model = PixArt(PixArtConfig.tiny(), rngs=nnx.Rngs(0))
        out = model(latents, timestep, caption, caption_mask)     # (B, 4, 8, 8), (B,), (B, T, 32), (B, T)
        noise, variance = jnp.split(out, 2, axis=1)
    """

    quantization_exclude = KEEP

    def __init__(self, config: PixArtConfig, *, rngs: nnx.Rngs, dtype: Any = jnp.float32, attention: str | None = None):
        c = self.config = config
        width = c.hidden_size
        self.pos_embed = PatchEmbed(c.in_channels, c.patch_size, width, dtype, rngs)
        self.adaln_single = AdaLayerNormSingle(width, dtype, rngs, sizes=bool(c.use_additional_conditions))
        self.caption_projection = MLPEmbedding(c.caption_channels, width, gelu_tanh, dtype, rngs)
        self.transformer_blocks = nnx.List([Block(c, dtype, rngs, attention) for _ in range(c.num_layers)])
        self.scale_shift_table = nnx.Param(jax.random.normal(rngs.params(), (2, width), dtype) / width**0.5)
        self.proj_out = nnx.Linear(width, c.patch_size**2 * c.out_channels, param_dtype=dtype, rngs=rngs)

    def embed(self, latents, timestep, caption, resolution=None, aspect_ratio=None):
        """-> x (B, S, E), the caption (B, T, E), modulations (B, 6, E), the timestep's embedding (B, E)."""
        c, (height, width) = self.config, latents.shape[-2:]
        x = self.pos_embed(latents)
        grid = (height // c.patch_size, width // c.patch_size)
        base = c.sample_size // c.patch_size
        x = x + sincos_positions(*grid, c.hidden_size, base, c.interpolation_scale).astype(x.dtype)
        modulation, embedded = self.adaln_single(timestep, x.dtype, resolution, aspect_ratio)
        return x, self.caption_projection(caption), modulation, embedded

    def head(self, x, embedded, height: int, width: int):
        """The last block's output (B, S, E) -> (B, out_channels, height, width)."""
        c = self.config
        shift, scale = jnp.split(self.scale_shift_table[...][None] + embedded[:, None], 2, axis=1)
        x = self.proj_out(modulate(layer_norm(x), shift, scale))
        return unpatchify(x, c.patch_size, height // c.patch_size, width // c.patch_size)

    def __call__(self, latents, timestep, caption, caption_mask=None, resolution=None, aspect_ratio=None):
        """Predicted noise, and its variance where ``out_channels`` is twice ``in_channels``.

        Args:
            latents: (B, in_channels, height, width).
            timestep: (B,), 0 to 999.
            caption: (B, T, caption_channels), the text encoder's output.
            caption_mask: (B, T), true or 1 where there is text; default: everywhere.
            resolution, aspect_ratio: (B, 2) height and width in pixels, and (B, 1), for models trained with them.

        Returns:
            (B, out_channels, height, width).
        """
        x, context, modulation, embedded = self.embed(latents, timestep, caption, resolution, aspect_ratio)
        x = self.run_blocks(x, context, modulation, caption_mask)
        return self.head(x, embedded, *latents.shape[-2:])

    def run_blocks(self, x, context, modulation, mask=None):
        """All blocks, arguments as of one."""
        for block in self.transformer_blocks:
            x = block(x, context, modulation, mask)
        return x

    def torch_shape(self, path: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape of a parameter in diffusers' files where it is not just turned; None elsewhere."""
        c = self.config
        return (c.hidden_size, c.in_channels, c.patch_size, c.patch_size) if path == "pos_embed/proj/kernel" else None


def load(path: str | os.PathLike, dtype: Any = jnp.float32, **options: Any) -> PixArt:
    """Loads a diffusers folder. See ``mxjax_models.diffusers_folder.load``."""
    from mxjax_models import diffusers_folder  # not at the top: it needs this file's classes

    return diffusers_folder.load(path, dtype, expect=PixArt, **options)
