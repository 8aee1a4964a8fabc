"""What PixArt, FLUX.1 and SANA have in common: embeddings of time and position, attention, MLP, patches.

Letters in shape comments, here and in the three models: B batch, S image tokens (h * w of them), T text tokens,
H heads, D head size, E hidden size, P patch size, C latent channels.

Every matrix is a plain ``nnx.Linear`` under the name that diffusers has for it
(``transformer_blocks/0/attn1/to_q/kernel``), so anything that swaps ``nnx.Linear`` modules by a path regex works.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from mxjax_models.llama import RMSNorm as RMSNorm


def timestep_embedding(t: jax.Array, features: int = 256) -> jax.Array:
    """[cos(t f_i), sin(t f_i)] with f_i = 10000^(-2i / features); t (B,) -> float32 (B, features)."""
    half = features // 2
    # In float32 as the models were trained: an ulp of f turns the angle by t * 2^-24, and t goes up to 1000.
    exponent = np.float32(-math.log(10000)) * np.arange(half, dtype=np.float32) / np.float32(half)
    angle = jnp.asarray(t, jnp.float32)[:, None] * np.exp(exponent)[None, :]
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)


def sincos_positions(height: int, width: int, features: int, base_size: int, interpolation_scale: float) -> jax.Array:
    """The fixed position of every patch, float32 (h * w, features): the first half from its column, then its row.

    Half of a half is sin(p f_i), half is cos(p f_i), f_i = 10000^(-4i / features). Positions are stretched so that
    every image spans ``base_size / interpolation_scale``, whatever its number of patches.
    """
    frequencies = 10000.0 ** (-np.arange(features // 4) / (features / 4))

    def axis(n: int) -> np.ndarray:  # (n, features / 2); a small table: the big one is made where it is used
        p = np.arange(n, dtype=np.float32) / np.float32(n / base_size) / np.float32(interpolation_scale)
        angle = p[:, None].astype(np.float64) * frequencies
        return np.concatenate([np.sin(angle), np.cos(angle)], axis=1).astype(np.float32)

    half = (height, width, features // 2)
    columns, rows = jnp.asarray(axis(width))[None], jnp.asarray(axis(height))[:, None]
    table = jnp.concatenate([jnp.broadcast_to(columns, half), jnp.broadcast_to(rows, half)], axis=-1)
    return table.reshape(height * width, features)


def layer_norm(x: jax.Array, eps: float = 1e-6) -> jax.Array:
    """(x - mean) / sqrt(variance + eps) over the last axis, in float32; scale and shift come from adaLN."""
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)).astype(x.dtype)


def modulate(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    """x (1 + scale) + shift, in the dtype of x."""
    return (x * (1 + scale) + shift).astype(x.dtype)


def patchify(x: jax.Array, p: int) -> jax.Array:
    """(B, C, h * P, w * P) -> (B, h * w, C * P * P), each patch flattened as a convolution's window is."""
    b, c, height, width = x.shape
    if height % p or width % p:
        raise ValueError(f"latents of {height} x {width} cannot be cut into patches of {p} x {p}")
    x = x.reshape(b, c, height // p, p, width // p, p)
    return x.transpose(0, 2, 4, 1, 3, 5).reshape(b, (height // p) * (width // p), c * p * p)


def unpatchify(x: jax.Array, p: int, height: int, width: int) -> jax.Array:
    """(B, h * w, P * P * C) -> (B, C, h * P, w * P): channels last inside a patch here, unlike in ``patchify``."""
    x = x.reshape(x.shape[0], height, width, p, p, -1)
    return x.transpose(0, 5, 1, 3, 2, 4).reshape(x.shape[0], -1, height * p, width * p)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, implementation: Any) -> jax.Array:
    """softmax(q k^T / sqrt(D)) v, softmax in float32; q (B, S, H, D), k and v (B, T, H, D) -> (B, S, H * D).

    Args:
        q, k, v: heads already apart.
        mask: bool (B, T), True where a key may be seen; None: everywhere. A row that sees none sees all alike.
        implementation: of ``jax.nn.dot_product_attention``: None or "xla", or "cudnn" (16 bits, on an NVIDIA GPU). Or
            a function of (q, k, v, mask) that is the attention, such as ``ulysses.Ulysses``.
    """
    if callable(implementation):
        return implementation(q, k, v, mask)
    mask = None if mask is None else mask.astype(bool)[:, None, None, :]
    y = jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=implementation)
    return y.reshape(*y.shape[:2], -1)


class PatchEmbed(nnx.Module):
    """A linear layer of every patch. diffusers stores it as the convolution that it is: (E, C, P, P)."""

    def __init__(self, channels: int, patch: int, width: int, dtype: Any, rngs: nnx.Rngs):
        self.proj = nnx.Linear(channels * patch * patch, width, param_dtype=dtype, rngs=rngs)
        self.patch = patch

    def __call__(self, x):  # (B, C, h * P, w * P) -> (B, h * w, E)
        return self.proj(patchify(x, self.patch))


class MLPEmbedding(nnx.Module):
    """linear_2(act(linear_1(x))): how time, guidance, sizes and captions enter."""

    def __init__(self, n_in: int, n_out: int, activation: Any, dtype: Any, rngs: nnx.Rngs):
        self.linear_1 = nnx.Linear(n_in, n_out, param_dtype=dtype, rngs=rngs)
        self.linear_2 = nnx.Linear(n_out, n_out, param_dtype=dtype, rngs=rngs)
        self.activation = activation

    def __call__(self, x):  # (..., n_in) -> (..., n_out)
        return self.linear_2(self.activation(self.linear_1(x)))


def gelu_tanh(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


class GELU(nnx.Module):
    """gelu(proj(x)), the tanh form."""

    def __init__(self, n_in: int, n_out: int, dtype: Any, rngs: nnx.Rngs):
        self.proj = nnx.Linear(n_in, n_out, param_dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return gelu_tanh(self.proj(x))


class FeedForward(nnx.Module):
    """net/2(gelu(net/0/proj(x))), four times as wide inside."""

    def __init__(self, width: int, dtype: Any, rngs: nnx.Rngs):
        up, down = GELU(width, 4 * width, dtype, rngs), nnx.Linear(4 * width, width, param_dtype=dtype, rngs=rngs)
        self.net = nnx.List([up, None, down])  # the dropout between them keeps its index in the names

    def __call__(self, x):  # (B, S, E) -> (B, S, E)
        return self.net[2](self.net[0](x))


class AdaLayerNormSingle(nnx.Module):
    """Time (and the image's size, where the model knows it) -> all modulations of all blocks, one linear layer.

    PixArt-alpha, arXiv:2310.00426, section 2.3: blocks add their own small table to what is shared here.
    """

    def __init__(self, width: int, dtype: Any, rngs: nnx.Rngs, sizes: bool = False):
        self.emb = TimeAndSize(width, dtype, rngs, sizes)
        self.linear = nnx.Linear(width, 6 * width, param_dtype=dtype, rngs=rngs)

    def __call__(self, timestep, dtype, resolution=None, aspect_ratio=None):
        """(B,) -> modulations (B, 6, E) and the embedding itself (B, E)."""
        embedded = self.emb(timestep, dtype, resolution, aspect_ratio)
        return self.linear(jax.nn.silu(embedded)).reshape(embedded.shape[0], 6, -1), embedded


class TimeAndSize(nnx.Module):
    """The embedding of the timestep plus, where ``sizes``, those of height, width and aspect ratio side by side."""

    def __init__(self, width: int, dtype: Any, rngs: nnx.Rngs, sizes: bool):
        self.timestep_embedder = MLPEmbedding(256, width, jax.nn.silu, dtype, rngs)
        self.sizes = sizes
        if sizes:
            self.resolution_embedder = MLPEmbedding(256, width // 3, jax.nn.silu, dtype, rngs)
            self.aspect_ratio_embedder = MLPEmbedding(256, width // 3, jax.nn.silu, dtype, rngs)

    def __call__(self, timestep, dtype, resolution, aspect_ratio):  # (B,), (B, 2), (B, 1) -> (B, E)
        x = self.timestep_embedder(timestep_embedding(timestep).astype(dtype))
        if not self.sizes:
            return x
        if resolution is None or aspect_ratio is None:
            raise ValueError("this model was trained with sizes: give resolution (B, 2) and aspect_ratio (B, 1)")
        b = x.shape[0]
        size = self.resolution_embedder(timestep_embedding(resolution.reshape(-1)).astype(dtype)).reshape(b, -1)
        ratio = self.aspect_ratio_embedder(timestep_embedding(aspect_ratio.reshape(-1)).astype(dtype)).reshape(b, -1)
        return x + jnp.concatenate([size, ratio], axis=1)
