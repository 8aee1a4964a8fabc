"""QuaRot's offline rotations (arXiv 2404.00456): the same function, with outliers spread over all channels.

Letters: E hidden size, D head size, R [E, E] and P [D, D] orthogonal. The residual stream becomes ``x R``, each value
head ``v P``, and the matrices around them take the inverse, so nothing is computed online::

    embedding  ->  embedding R             o, down  ->  kernel R  (and bias R)
    q, k, v, gate, up, head  ->  R^T diag(g) kernel      with the gains g of the norm before them, which become 1
    v  ->  kernel P for each head          o  ->  P^T kernel for each head

``RMSNorm(x R) = RMSNorm(x) R`` holds for a norm without gains, hence the folding. A head that is the embedding
transposed (tied) cannot take the gains of the final norm; the rotated model has a head of its own.

What does not fold is left to the recipe: ``quarot_*`` puts an online block Hadamard before each down projection.
Rotating over the whole hidden size is known to *hurt* MXFP4 (it raises the scale of most blocks, arXiv 2511.04214);
block recipes such as ``mr_gptq_mxfp4`` or ``auto_mxfp4`` need no rotated model.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from mxjax_models.llama import Llama

from mxjax.errors import ConfigError
from mxjax.transforms import hadamard_matrix


def mixing_matrix(size: int, block: int | None = None, seed: int = 0) -> np.ndarray:
    """A randomized orthogonal matrix, float64 [size, size]: signs on the rows, then Hadamard.

    With ``size = m 2^p``, m odd: ``diag(signs) (DCT_m ⊗ Hadamard_2^p)``, where ``DCT_m`` is the orthonormal cosine
    transform, so that sizes such as 576 = 9 * 64 mix every channel with every other; for m = 1 it is a Hadamard matrix.
    With ``block`` the diagonal blocks are such matrices.

    Raises:
        ConfigError: a block that does not divide ``size``.
    """
    if block is not None and (block < 1 or size % block):
        raise ConfigError(f"rotation blocks of {block} do not divide {size}")
    width = block or size
    power = width & -width  # the largest power of two in it
    i, m = np.arange(width // power), width // power
    dct = np.sqrt(2 / m) * np.cos(np.pi * (2 * i[None, :] + 1) * i[:, None] / (2 * m))
    dct[0] = np.sqrt(1 / m)
    mix = np.kron(np.eye(size // width), np.kron(dct, hadamard_matrix(power).astype(np.float64)))
    # hadamard_matrix is float32: its entries are all alike, so one factor restores full precision.
    mix /= np.sqrt(np.sum(mix[0] ** 2))
    return np.random.default_rng(seed).choice([-1.0, 1.0], size)[:, None] * mix


def rotate(model: Llama, *, block: int | None = None, heads: bool = True, seed: int = 0) -> Llama:
    """A copy of the model with rotated weights that computes the same logits, up to rounding.

    Args:
        model: a float Llama or Qwen3; it is not changed.
        block: rotate blocks of this many channels of the residual stream; default: all of them together.
        heads: rotate the values of each head as well.
        seed: of the random signs.

    Returns:
        A Llama whose config has ``tie_word_embeddings=False``: one head matrix more where the model was tied.

    Raises:
        ConfigError: no Llama, a quantized one, or a block that does not divide the hidden size.

    Example::

        model = mxjax_models.rotate(mxjax_models.llama.load(folder))
        weights = mxjax.quantize_sequential(model, [tokens], "quarot_nvfp4")
    """
    if type(model) is not Llama:
        raise ConfigError(f"rotate takes a Llama of mxjax_models, not {type(model).__name__}")
    kinds = [type(node) for _, node in nnx.iter_graph(model) if hasattr(node, "kernel")]
    if any(kind is not nnx.Linear for kind in kinds):
        raise ConfigError("rotate takes a float model; rotate first, then quantize")
    c = model.config
    r, p = mixing_matrix(c.hidden_size, block, seed), np.eye(c.head_dim)
    if heads:
        p = mixing_matrix(c.head_dim, None, seed + 1)
    out = nnx.clone(model)
    table = _value(out.embed_tokens.embedding)
    if c.tie_word_embeddings:
        out.config = dataclasses.replace(c, tie_word_embeddings=False)
        dtype = model.embed_tokens.embedding[...].dtype
        options: Any = dict(use_bias=False, param_dtype=dtype, preferred_element_type=jnp.float32, rngs=nnx.Rngs(0))
        out.lm_head = nnx.Linear(c.hidden_size, c.vocab_size, **options)
        out.lm_head.kernel[...] = jnp.asarray(table.T, dtype)
    _set(out.embed_tokens.embedding, table @ r)
    for layer in out.layers:
        attention, mlp = layer.self_attn, layer.mlp
        _rotate_in(layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj], r)
        _rotate_in(layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj], r)
        _rotate_out(attention.v_proj, np.kron(np.eye(c.num_key_value_heads), p))
        o = attention.o_proj.kernel
        _set(o, np.einsum("de,hdn->hen", p, _value(o).reshape(-1, c.head_dim, c.hidden_size)).reshape(o.shape))
        _rotate_out(attention.o_proj, r)
        _rotate_out(mlp.down_proj, r)
    _rotate_in(out.norm, [out.lm_head], r)
    return out


def _value(variable: Any) -> np.ndarray:
    return np.asarray(variable[...], np.float64)


def _set(variable: Any, value: np.ndarray) -> None:
    variable[...] = jnp.asarray(value, variable[...].dtype)


def _rotate_in(norm: Any, linears: list[nnx.Linear], r: np.ndarray) -> None:
    """``R^T diag(g) kernel``; the norm's gains become 1."""
    gain = _value(norm.scale)
    for linear in linears:
        _set(linear.kernel, r.T @ (gain[:, None] * _value(linear.kernel)))
    _set(norm.scale, np.ones_like(gain))


def _rotate_out(linear: nnx.Linear, r: np.ndarray) -> None:
    """``kernel R`` and ``bias R``."""
    _set(linear.kernel, _value(linear.kernel) @ r)
    if linear.bias is not None:
        _set(linear.bias, _value(linear.bias) @ r)
