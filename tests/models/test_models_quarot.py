"""Offline rotations leave the model's function alone and spread its outliers."""

import dataclasses

import jax.numpy as jnp
import mxjax_models
import numpy as np
import pytest
from flax import nnx
from mxjax_models.llama import Llama, LlamaConfig
from mxjax_models.quarot import mixing_matrix, rotate

import mxjax
from mxjax.errors import ConfigError

TOKENS = np.random.default_rng(0).integers(0, 128, (2, 24))


def model_of(**overrides):
    """A tiny model with gains and biases that are not 1 and 0."""
    model, rng = Llama(LlamaConfig.tiny(**overrides), rngs=nnx.Rngs(0)), np.random.default_rng(1)
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if path[-1] in ("scale", "bias"):
            noise = rng.standard_normal(variable.shape)
            variable[...] = jnp.asarray(np.exp(0.5 * noise) if path[-1] == "scale" else 0.3 * noise, jnp.float32)
    return model


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("options", [{}, {"block": 32}, {"heads": False}], ids=str)
def test_logits_do_not_change(kind, tied, options):
    model = model_of(model_type=kind, tie_word_embeddings=tied)
    before = np.asarray(model(jnp.asarray(TOKENS)))
    turned = rotate(model, **options)
    after = np.asarray(turned(jnp.asarray(TOKENS)))
    # Both are float32 evaluations of one function: a dozen products of 64 to 128 terms in a row, each 2^-24 sqrt(128).
    assert np.abs(after - before).max() < 12 * 2.0**-24 * 128**0.5 * 4 * np.abs(before).max()
    assert np.array_equal(before, model(jnp.asarray(TOKENS))) and model.config.tie_word_embeddings == tied
    assert not turned.config.tie_word_embeddings
    for layer in turned.layers:
        assert np.all(layer.input_layernorm.scale[...] == 1) and np.all(layer.post_attention_layernorm.scale[...] == 1)
    assert np.abs(turned.embed_tokens.embedding[...] - model.embed_tokens.embedding[...]).max() > 0.1


def test_sizes_that_are_no_powers_of_two_and_biases():
    sizes = dict(hidden_size=96, head_dim=24, attention_bias=True, mlp_bias=True)
    model = model_of(**sizes)
    before, after = (np.asarray(m(jnp.asarray(TOKENS))) for m in (model, rotate(model)))
    assert np.abs(after - before).max() < 12 * 2.0**-24 * 128**0.5 * 4 * np.abs(before).max()


@pytest.mark.parametrize(("size", "block"), [(64, None), (576, None), (96, 32), (24, None), (7, None)])
def test_mixing_matrices_are_orthogonal(size, block):
    q = mixing_matrix(size, block)
    np.testing.assert_allclose(q @ q.T, np.eye(size), atol=1e-13)
    inside = np.kron(np.eye(size // (block or size)), np.ones((block or size,) * 2)) > 0
    assert np.all(q[~inside] == 0) and not np.array_equal(q, mixing_matrix(size, block, seed=5))
    if size == 576:  # every channel reaches every other, none with more than a few times its even share
        assert np.abs(q).max() < 1.5 / np.sqrt(576)


def test_outlier_channels_are_spread():
    model = model_of()
    table = np.asarray(model.embed_tokens.embedding[...]).copy()
    table[:, 5] *= 50
    model.embed_tokens.embedding[...] = jnp.asarray(table)
    spread = [np.abs(np.asarray(m.embed(jnp.asarray(TOKENS)))).max(-1).mean() for m in (model, rotate(model))]
    assert spread[1] < 0.5 * spread[0]


def test_a_rotated_model_is_quantized_like_any_other():
    model = mxjax_models.rotate(model_of(model_type="qwen3", tie_word_embeddings=True))
    weights = mxjax.quantize_sequential(model, [TOKENS], "quarot_nvfp4")
    assert len(weights) == 14
    for path, w in weights.items():
        assert (w.transform is not None) == ("down_proj" in path)


def test_reports():
    model = model_of()
    with pytest.raises(ConfigError, match="48"):
        rotate(model, block=48)
    with pytest.raises(ConfigError, match="Linear"):
        rotate(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(ConfigError, match="rotate first"):
        rotate(mxjax.nnx.quantize(model, "mxfp4"))
    with pytest.raises(AttributeError):
        _ = mxjax_models.nothing
    assert dataclasses.asdict(rotate(model).config) == dataclasses.asdict(model.config)
