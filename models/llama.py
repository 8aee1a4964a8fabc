"""Llama 3 and Qwen3, written to be read: RoPE, cache, attention, MLP, block, model.

Letters in shape comments: B batch, S tokens in this call, T keys (S without a cache, the cache's length with one),
H query heads, K key/value heads, G = H / K, D head size, E hidden size, F MLP size, V vocabulary.

Every matrix is a plain ``nnx.Linear`` under its Hugging Face name (``layers/0/self_attn/q_proj/kernel``, (in, out)),
so anything that swaps ``nnx.Linear`` modules by a path regex works here without knowing this file. Layers with one
input are called together (``mxjax.nnx.shared_input``): one by one unless ``mxjax.nnx.fuse_shared_inputs`` was here.

Papers: Llama 3, arXiv:2407.21783; Qwen3, arXiv:2505.09388; RoPE, arXiv:2104.09864; GQA, arXiv:2305.13245.
"""

import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from mxjax_models._llama_config import Llama3Rope as Llama3Rope
from mxjax_models._llama_config import LlamaConfig as LlamaConfig

import mxjax


def rope_frequencies(config: LlamaConfig) -> np.ndarray:
    """Angles per position, float32 (D/2,): theta^(-2i/D), with Llama 3.1's scaling if the config has one.

    With wavelength w = 2 pi / f and original length L: w > L / low is divided by ``factor``, w < L / high is kept, and
    in between f (1 - s) / factor + f s with s = (L / w - low) / (high - low).
    """
    f = config.rope_theta ** (-np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    if (r := config.rope_scaling) is not None:
        s = (r.original_max_position_embeddings * f / (2 * np.pi) - r.low_freq_factor) / (
            r.high_freq_factor - r.low_freq_factor
        )
        s = np.clip(s, 0.0, 1.0)  # 0: divided by factor, 1: kept
        f = f * (1 - s) / r.factor + f * s
    return f.astype(np.float32)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (x_i, x_{i+D/2}); x (B, S, heads, D), cos and sin (1 or B, S, 1, D/2). float32 inside."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class LayerCache(NamedTuple):
    """Keys (after RoPE) and values of one layer; ``length`` slots are filled, the rest is zero."""

    k: jax.Array  # (B, K, T, D): heads before slots, so that attention reads it as it lies
    v: jax.Array  # (B, K, T, D)
    length: jax.Array  # () int32

    @property
    def max_length(self) -> int:
        return self.k.shape[-2]

    def append(self, k: jax.Array, v: jax.Array) -> "LayerCache":
        """Writes (B, K, S, D) at ``length``. The caller has checked that they fit: XLA would clamp the offset."""
        at = (0, 0, self.length, 0)
        new_k = jax.lax.dynamic_update_slice(self.k, k.astype(self.k.dtype), at)
        new_v = jax.lax.dynamic_update_slice(self.v, v.astype(self.v.dtype), at)
        return LayerCache(new_k, new_v, self.length + jnp.int32(k.shape[2]))


class Cache(NamedTuple):
    """The model's key/value cache: a pytree of static shape. ``start`` counts the left-pad slots of each sequence."""

    layers: tuple[LayerCache, ...]
    start: jax.Array  # (B,) int32

    @property
    def length(self) -> jax.Array:
        return self.layers[0].length

    @property
    def max_length(self) -> int:
        return self.layers[0].max_length


class RMSNorm(nnx.Module):
    """y = scale * x / sqrt(mean(x^2) + eps), statistics in float32, over the last axis."""

    def __init__(self, features: int, eps: float, dtype: Any):
        self.scale = nnx.Param(jnp.ones((features,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return y.astype(x.dtype) * jnp.expand_dims(self.scale[...].astype(x.dtype), range(x.ndim - 1))


class Attention(nnx.Module):
    """Grouped-query attention with RoPE, softmax in float32."""

    def __init__(self, config: LlamaConfig, dtype: Any, rngs: nnx.Rngs):
        c = self.config = config
        width, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        options: Any = dict(use_bias=c.attention_bias, param_dtype=dtype, rngs=rngs)
        self.q_proj = nnx.Linear(c.hidden_size, width, **options)
        self.k_proj = nnx.Linear(c.hidden_size, kv, **options)
        self.v_proj = nnx.Linear(c.hidden_size, kv, **options)
        self.o_proj = nnx.Linear(width, c.hidden_size, **options)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype)
            self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype)

    def __call__(self, x, positions, mask, cache):  # (B, S, E), (1|B, S), (1|B, S, T), LayerCache | None
        c, (b, s, _) = self.config, x.shape
        q, k, v = mxjax.nnx.shared_input(x, self.q_proj, self.k_proj, self.v_proj)
        q = q.reshape(b, s, c.num_attention_heads, c.head_dim)
        k = k.reshape(b, s, c.num_key_value_heads, c.head_dim)
        v = v.reshape(b, s, c.num_key_value_heads, c.head_dim)
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        # Each layer recomputes the small table: under jit XLA keeps one copy, and a layer stays callable on its own.
        angle = positions.astype(jnp.float32)[:, :, None, None] * rope_frequencies(c)[None, None, None, :]
        cos, sin = jnp.cos(angle), jnp.sin(angle)  # (1|B, S, 1, D/2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)  # (B, K, S, D)
        if cache is not None:
            cache = cache.append(k, v)
            k, v = cache.k.astype(q.dtype), cache.v.astype(q.dtype)  # (B, K, T, D)
        q = q.reshape(b, s, c.num_key_value_heads, -1, c.head_dim)  # (B, S, K, G, D)
        scores = jnp.einsum("bskgd,bktd->bkgst", q, k, preferred_element_type=jnp.float32) * c.head_dim**-0.5
        # Finite, not -inf: a left-pad row sees no key at all and must not turn into NaN.
        scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
        p = jax.nn.softmax(scores, axis=-1).astype(v.dtype)  # (B, K, G, S, T)
        y = jnp.einsum("bkgst,bktd->bskgd", p, v).reshape(b, s, -1)  # (B, S, H*D)
        return self.o_proj(y), cache


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig, dtype: Any, rngs: nnx.Rngs):
        options: Any = dict(use_bias=config.mlp_bias, param_dtype=dtype, rngs=rngs)
        self.gate_proj = nnx.Linear(config.hidden_size, config.intermediate_size, **options)
        self.up_proj = nnx.Linear(config.hidden_size, config.intermediate_size, **options)
        self.down_proj = nnx.Linear(config.intermediate_size, config.hidden_size, **options)

    def __call__(self, x):  # (B, S, E) -> (B, S, E)
        gate, up = mxjax.nnx.shared_input(x, self.gate_proj, self.up_proj)
        return self.down_proj(jax.nn.silu(gate) * up)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Callable alone: ``x = layer(x)`` is causal from position 0."""

    def __init__(self, config: LlamaConfig, dtype: Any, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = Attention(config, dtype, rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, dtype, rngs)

    def __call__(self, x, positions=None, mask=None, cache: LayerCache | None = None):
        """x (B, S, E) -> (B, S, E), and the new LayerCache if one was given.

        Args:
            x: the previous block's output, or ``model.embed(tokens)``.
            positions: (S,) or (B, S) integers for RoPE; default 0..S-1 after the cache's length.
            mask: bool (1 or B, S, T), True where a query may look; default causal.
            cache: this layer's cache, which must have room for S more.
        """
        s = x.shape[1]
        slots = jnp.arange(s, dtype=jnp.int32) + (jnp.int32(0) if cache is None else cache.length)
        positions = slots if positions is None else jnp.asarray(positions)
        if mask is None:
            keys = jnp.arange(s if cache is None else cache.max_length, dtype=jnp.int32)
            mask = (keys[None, :] <= slots[:, None])[None]
        y, new_cache = self.self_attn(self.input_layernorm(x), jnp.atleast_2d(positions), mask, cache)
        x = x + y
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x if cache is None else (x, new_cache)


class Llama(nnx.Module):
    """A causal language model.

    Example::

        model = Llama(LlamaConfig.tiny(), rngs=nnx.Rngs(0))
        logits = model(tokens)                                      # (B, S) -> (B, S, V) float32
        logits, cache = model(tokens, model.init_cache(B, 64))      # prefill
        logits, cache = model(next_tokens, cache)                   # (B, 1), one step
        x = model.embed(tokens)                                     # or block by block
        for layer in model.layers:
            x = layer(x)
        logits = model.head(x)
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, dtype: Any = jnp.float32):
        c = self.config = config
        self.embed_tokens = nnx.Embed(c.vocab_size, c.hidden_size, param_dtype=dtype, rngs=rngs)
        self.embed_tokens.dtype = None  # follow the parameter: Embed would pin the dtype it was built with
        self.layers = nnx.List([Block(c, dtype, rngs) for _ in range(c.num_hidden_layers)])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        if not c.tie_word_embeddings:
            self.lm_head = nnx.Linear(
                c.hidden_size,
                c.vocab_size,
                use_bias=False,
                param_dtype=dtype,
                preferred_element_type=jnp.float32,  # logits of 20 in bfloat16 would be off by 0.06
                rngs=rngs,
            )

    def embed(self, tokens: jax.Array) -> jax.Array:
        """(B, S) integers -> (B, S, E)."""
        return self.embed_tokens(tokens)

    def head(self, x: jax.Array) -> jax.Array:
        """The last block's output (B, S, E) -> float32 logits (B, S, V): final norm, then the head."""
        x = self.norm(x)
        if self.config.tie_word_embeddings:
            table = self.embed_tokens.embedding[...].astype(x.dtype)
            return jnp.einsum("bse,ve->bsv", x, table, preferred_element_type=jnp.float32)
        return self.lm_head(x).astype(jnp.float32)

    def hidden(self, tokens: jax.Array, cache: Cache | None = None, positions: jax.Array | None = None):
        """All blocks: (B, S) -> (B, S, E), and the new cache if one was given. See ``__call__``."""
        if cache is None:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x, positions)
            return x
        positions, mask = self._window(tokens, cache, positions)
        x, layers = self.embed(tokens), []
        for layer, old in zip(self.layers, cache.layers, strict=True):
            x, new = layer(x, positions, mask, old)
            layers.append(new)
        return x, Cache(tuple(layers), cache.start)

    def __call__(self, tokens: jax.Array, cache: Cache | None = None, positions: jax.Array | None = None):
        """Next-token logits.

        Args:
            tokens: (B, S) integers.
            cache: from ``init_cache`` or the previous call; the S tokens go into its next S slots.
            positions: (S,) or (B, S) for RoPE, where the default is not wanted: 0..S-1, or with a cache the slot minus
                the sequence's left padding. They never change which tokens see each other.

        Returns:
            logits, float32 (B, S, V); with a cache the pair (logits, new cache).

        Raises:
            ValueError: the tokens do not fit into the cache. Inside ``jit`` the filled length is unknown, so there
                only S > max_length can be seen; the caller allocates enough.
        """
        if cache is None:
            return self.head(self.hidden(tokens, positions=positions))
        x, cache = self.hidden(tokens, cache, positions)
        return self.head(x), cache

    def init_cache(self, batch: int, max_length: int, *, start: jax.Array | None = None) -> Cache:
        """An empty cache of ``max_length`` slots. ``start`` (B,): slots of left padding in each sequence, default 0."""
        c, dtype = self.config, self.norm.scale.dtype
        shape = (batch, c.num_key_value_heads, max_length, c.head_dim)
        layers = [
            # Separate zeros, not one array twice: a caller may donate the cache.
            LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((), jnp.int32))
            for _ in range(c.num_hidden_layers)
        ]
        return Cache(tuple(layers), jnp.zeros((batch,), jnp.int32) if start is None else jnp.asarray(start, jnp.int32))

    def _window(self, tokens: jax.Array, cache: Any, positions: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Positions (1 or B, S) of the next tokens in a cache that has room for them, and the mask (B, S, T)."""
        self._check_room(tokens, cache)
        slots = cache.length + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        if positions is None:
            positions = jnp.maximum(slots[None, :] - cache.start[:, None], 0)
        keys = jnp.arange(cache.max_length, dtype=jnp.int32)[None, None, :]
        return positions, (keys <= slots[None, :, None]) & (keys >= cache.start[:, None, None])

    @staticmethod
    def _check_room(tokens: jax.Array, cache: Cache) -> None:
        if tokens.shape[0] != cache.start.shape[0]:
            raise ValueError(f"batch of {tokens.shape[0]} with a cache for {cache.start.shape[0]} sequences")
        filled = 0 if isinstance(cache.length, jax.core.Tracer) else int(cache.length)
        if filled + tokens.shape[1] > cache.max_length:
            raise ValueError(
                f"{tokens.shape[1]} tokens after {filled} do not fit into a cache of {cache.max_length}; "
                "use a larger max_length in init_cache"
            )


def load(path: str | os.PathLike, dtype: Any = jnp.float32, *, lazy: bool = False) -> Llama:
    """Loads a Hugging Face folder (safetensors) or a GGUF file. See ``mxjax_models.params.load``."""
    from mxjax_models import params  # not at the top: params needs this file's classes

    return params.load(path, dtype, lazy=lazy)
