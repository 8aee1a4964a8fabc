"""SANA and SANA-1.5, written to be read: linear attention, cross-attention to the text, and a convolution in the MLP.

Self-attention costs O(S): with k and q behind a ReLU, (v k^T) q is a matrix product of small matrices first. What
softmax and positions would give is left to the MLP's 3 x 3 convolution (mix-FFN). A block is modulated as PixArt's are.
Letters as in ``dit_layers``; F is the MLP's width.

Papers: SANA, arXiv:2410.10629; SANA-1.5, arXiv:2501.18427.
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
    MLPEmbedding,
    PatchEmbed,
    RMSNorm,
    attention,
    gelu_tanh,
    layer_norm,
    modulate,
    sincos_positions,
    unpatchify,
)

from mxjax.errors import ConfigError

# What published recipes keep in high precision, and what that is; patterns are searched in the lower-cased path.
KEEP: Mapping[str, str] = {
    r"^patch_embed/": "patch embedder",
    r"^time_embed/": "timestep embedder, and the adaLN modulation of all blocks",
    r"^caption_projection/": "text embedder",
    r"(^|/)\w*norm\w*/": "norm",
    r"/conv_depth/": "3 x 3 convolution, each channel alone: no matrix",
    r"^proj_out/": "final projection",
    r"(^|/)scale_shift_table$": "adaLN table, no matrix",
}

ONLY: Mapping[str, tuple] = {  # of diffusers' config; the first value is its default
    "norm_elementwise_affine": (False,),
    "guidance_embeds": (False,),
    "guidance_embeds_scale": (0.1,),
}
_QK_NORMS = (None, "rms_norm_across_heads")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SanaConfig:
    """Sizes of one model; names and defaults are those of diffusers' ``SanaTransformer2DModel``.

    Example::

        config = SanaConfig.sana_1600m(1024)
        model = Sana(SanaConfig.tiny(), rngs=nnx.Rngs(0))

    Raises:
        ConfigError: sizes that do not fit together.
    """

    in_channels: int = 32
    out_channels: int | None = 32  # None: in_channels
    num_attention_heads: int = 70
    attention_head_dim: int = 32
    num_layers: int = 20
    num_cross_attention_heads: int = 20
    cross_attention_head_dim: int = 112
    cross_attention_dim: int = 2240  # the width of the projected text: the hidden size
    caption_channels: int = 2304  # of the text encoder
    mlp_ratio: float = 2.5
    attention_bias: bool = False  # of q, k and v in self-attention
    sample_size: int = 32  # latents of the training resolution
    patch_size: int = 1
    norm_eps: float = 1e-6
    interpolation_scale: float | None = None  # of positions; None: no positions
    qk_norm: str | None = None  # SANA-1.5: "rms_norm_across_heads"
    timestep_scale: float = 1.0  # the pipeline multiplies timesteps by it

    def __post_init__(self):
        _dit_config.check_sizes(self)
        if self.out_channels is None:
            object.__setattr__(self, "out_channels", self.in_channels)
        if self.qk_norm not in _QK_NORMS:
            raise ConfigError(f"qk_norm={self.qk_norm!r} is none of {_QK_NORMS}")
        cross = self.num_cross_attention_heads * self.cross_attention_head_dim
        if not cross == self.cross_attention_dim == self.hidden_size:
            raise ConfigError(
                f"hidden size num_attention_heads * attention_head_dim = {self.hidden_size}, cross-attention's {cross} "
                f"and cross_attention_dim={self.cross_attention_dim} must be equal"
            )

    @property
    def hidden_size(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @classmethod
    def sana_1600m(cls, resolution: int = 1024) -> "SanaConfig":
        """The published Sana_1600M of 512, 1024, 2048 or 4096 pixels."""
        scale = {512: None, 1024: None, 2048: 1.0, 4096: 2.0}[resolution]
        return cls(sample_size=resolution // 32, interpolation_scale=scale)

    @classmethod
    def sana_600m(cls, resolution: int = 1024) -> "SanaConfig":
        """The published Sana_600M of 512 or 1024 pixels."""
        sizes: Any = dict(num_attention_heads=36, num_layers=28, num_cross_attention_heads=16)
        return cls(**sizes, cross_attention_head_dim=72, cross_attention_dim=1152, sample_size=resolution // 32)

    @classmethod
    def sana_1_5_4800m(cls) -> "SanaConfig":
        """The published SANA1.5_4.8B of 1024 pixels."""
        return cls(num_layers=60, qk_norm="rms_norm_across_heads")

    @classmethod
    def tiny(cls, **overrides: Any) -> "SanaConfig":
        """A two-layer model of 0.2 million parameters for tests; every linear size is a multiple of 32."""
        sizes: dict[str, Any] = dict(num_attention_heads=4, attention_head_dim=16, num_layers=2, caption_channels=32)
        sizes |= dict(num_cross_attention_heads=2, cross_attention_head_dim=32, cross_attention_dim=64, sample_size=8)
        return cls(**{**sizes, **overrides})

    @classmethod
    def from_diffusers(cls, config: Mapping[str, Any]) -> "SanaConfig":
        """Reads ``transformer/config.json`` as a dict.

        Raises:
            ConfigError: a field that asks for something this file does not compute.
        """
        return _dit_config.from_diffusers(cls, config, ONLY)


class Attention(nnx.Module):
    """Linear self-attention, or softmax attention to a context."""

    def __init__(self, config: SanaConfig, dtype: Any, rngs: nnx.Rngs, implementation: str | None, cross: bool):
        c, width = config, config.hidden_size
        options: Any = dict(param_dtype=dtype, rngs=rngs)
        bias = cross or c.attention_bias
        self.to_q, self.to_k, self.to_v = (nnx.Linear(width, width, use_bias=bias, **options) for _ in range(3))
        self.to_out = nnx.List([nnx.Linear(width, width, **options)])
        self.normed = c.qk_norm is not None
        if self.normed:
            self.norm_q, self.norm_k = RMSNorm(width, 1e-5, dtype), RMSNorm(width, 1e-5, dtype)
        self.heads = c.num_cross_attention_heads if cross else c.num_attention_heads
        self.implementation = implementation

    def __call__(self, x, context=None, mask=None):  # (B, S, E), (B, T, E), bool (B, T) -> (B, S, E)
        source = x if context is None else context
        q, k, v = self.to_q(x), self.to_k(source), self.to_v(source)
        if self.normed:
            q, k = self.norm_q(q), self.norm_k(k)
        q, k, v = (y.reshape(*y.shape[:2], self.heads, -1) for y in (q, k, v))  # (B, S or T, H, D)
        y = linear_attention(q, k, v) if context is None else attention(q, k, v, mask, self.implementation)
        return self.to_out[0](y.astype(x.dtype))


def linear_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """y_s = sum_t v_t (k_t . q_s) / sum_t (k_t . q_s) with q and k behind a ReLU; (B, S, H, D) each -> (B, S, H * D).

    The sums over t come first, in float32: (D, D) numbers for each head, whatever S is.
    """
    q, k, v = (y.astype(jnp.float32) for y in (jax.nn.relu(q), jax.nn.relu(k), v))
    state = jnp.einsum("bthd,bthe->bhde", v, k)
    total = jnp.sum(k, axis=1)
    y = jnp.einsum("bhde,bshe->bshd", state, q) / (jnp.einsum("bhe,bshe->bsh", total, q)[..., None] + 1e-15)
    return y.reshape(*y.shape[:2], -1)


class GLUMBConv(nnx.Module):
    """The mix-FFN: conv_point(a * silu(b)) with [a, b] = conv_depth(silu(conv_inverted(x))).

    The two convolutions over single pixels are linear layers; the one in the middle sees 3 x 3 pixels of each channel.
    """

    def __init__(self, config: SanaConfig, dtype: Any, rngs: nnx.Rngs):
        width, inner = config.hidden_size, int(config.mlp_ratio * config.hidden_size)
        options: Any = dict(param_dtype=dtype, rngs=rngs)
        self.conv_inverted = nnx.Linear(width, 2 * inner, **options)
        self.conv_depth = nnx.Conv(2 * inner, 2 * inner, (3, 3), feature_group_count=2 * inner, **options)
        self.conv_point = nnx.Linear(inner, width, use_bias=False, **options)

    def __call__(self, x, height: int, width: int):  # (B, h * w, E) -> (B, h * w, E)
        y = jax.nn.silu(self.conv_inverted(x)).reshape(x.shape[0], height, width, -1)  # (B, h, w, 2F)
        a, b = jnp.split(self.conv_depth(y).reshape(*x.shape[:2], -1), 2, axis=-1)
        return self.conv_point(a * jax.nn.silu(b))


class Block(nnx.Module):
    """Linear attention and mix-FFN between adaLN modulations, and cross-attention, which is not modulated."""

    def __init__(self, config: SanaConfig, dtype: Any, rngs: nnx.Rngs, implementation: str | None):
        width = config.hidden_size
        self.scale_shift_table = nnx.Param(jax.random.normal(rngs.params(), (6, width), dtype) / width**0.5)
        self.attn1 = Attention(config, dtype, rngs, implementation, cross=False)
        self.attn2 = Attention(config, dtype, rngs, implementation, cross=True)
        self.ff = GLUMBConv(config, dtype, rngs)
        self.eps = config.norm_eps

    def __call__(self, x, context, modulation, height: int, width: int, mask=None):
        """x (B, h * w, E), context (B, T, E), modulation (B, 6, E) of the timestep, mask bool (B, T) -> like x."""
        table = self.scale_shift_table[...][None] + modulation
        shift1, scale1, gate1, shift2, scale2, gate2 = jnp.split(table, 6, axis=1)  # each (B, 1, E)
        x = x + gate1 * self.attn1(modulate(layer_norm(x, self.eps), shift1, scale1))
        x = x + self.attn2(x, context, mask)
        return x + gate2 * self.ff(modulate(layer_norm(x, self.eps), shift2, scale2), height, width)


class Sana(nnx.Module):
    """The velocity predictor of SANA and SANA-1.5.

    ``mxjax.nnx.quantize(model, "mxfp4")`` leaves what ``KEEP`` lists. To decide otherwise, give a config with an
    ``exclude`` of your own: ``mxjax.recipes.get("mxfp4").replace(exclude=(*KEEP, r"attn2/to_[kv]/"))`` leaves the
    caption's keys and values too.

    Example::

        model = Sana(SanaConfig.tiny(), rngs=nnx.Rngs(0))
        velocity = model(latents, timestep, caption, caption_mask)     # like the latents: (B, 32, 8, 8)
    """

    quantization_exclude = KEEP

    def __init__(self, config: SanaConfig, *, rngs: nnx.Rngs, dtype: Any = jnp.float32, attention: str | None = None):
        c = self.config = config
        width = c.hidden_size
        self.patch_embed = PatchEmbed(c.in_channels, c.patch_size, width, dtype, rngs)
        self.time_embed = AdaLayerNormSingle(width, dtype, rngs)
        self.caption_projection = MLPEmbedding(c.caption_channels, width, gelu_tanh, dtype, rngs)
        self.caption_norm = RMSNorm(width, 1e-5, dtype)
        self.transformer_blocks = nnx.List([Block(c, dtype, rngs, attention) for _ in range(c.num_layers)])
        self.scale_shift_table = nnx.Param(jax.random.normal(rngs.params(), (2, width), dtype) / width**0.5)
        self.proj_out = nnx.Linear(width, c.patch_size**2 * c.out_channels, param_dtype=dtype, rngs=rngs)

    def __call__(self, latents, timestep, caption, caption_mask=None):
        """The velocity dx/dt: from data towards noise.

        Args:
            latents: (B, in_channels, height, width).
            timestep: (B,), from 1000 (noise) to 0, times ``config.timestep_scale``.
            caption: (B, T, caption_channels), the text encoder's output.
            caption_mask: (B, T), true or 1 where there is text; default: everywhere.

        Returns:
            (B, out_channels, height, width).
        """
        c = self.config
        height, width = (n // c.patch_size for n in latents.shape[-2:])
        x = self.patch_embed(latents)
        if c.interpolation_scale is not None:
            base = c.sample_size // c.patch_size
            x = x + sincos_positions(height, width, c.hidden_size, base, c.interpolation_scale).astype(x.dtype)
        modulation, embedded = self.time_embed(timestep, x.dtype)
        context = self.caption_norm(self.caption_projection(caption))
        for block in self.transformer_blocks:
            x = block(x, context, modulation, height, width, caption_mask)
        shift, scale = jnp.split(self.scale_shift_table[...][None] + embedded[:, None], 2, axis=1)
        return unpatchify(self.proj_out(modulate(layer_norm(x), shift, scale)), c.patch_size, height, width)

    def torch_shape(self, path: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape of a parameter in diffusers' files where it is not just turned; None elsewhere."""
        c = self.config
        if path == "patch_embed/proj/kernel":
            return (c.hidden_size, c.in_channels, c.patch_size, c.patch_size)
        return (*shape[::-1], 1, 1) if path.endswith(("conv_inverted/kernel", "conv_point/kernel")) else None


def load(path: str | os.PathLike, dtype: Any = jnp.float32, **options: Any) -> Sana:
    """Loads a diffusers folder. See ``mxjax_models.diffusers_folder.load``."""
    from mxjax_models import diffusers_folder  # not at the top: it needs this file's classes

    return diffusers_folder.load(path, dtype, expect=Sana, **options)
