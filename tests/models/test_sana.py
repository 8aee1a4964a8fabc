"""SANA equals diffusers' SanaTransformer2DModel (tiny, random, torch on the CPU), by output, name and shape."""

import jax.numpy as jnp
import numpy as np
import pytest
from dit_cases import (
    arrays,
    check_names,
    check_quantized,
    check_round_trip,
    diffusers,
    in_torch,
    randomize,
    run,
    tolerance,
    torch,
)
from flax import nnx
from mxjax_models import sana

from mxjax.errors import ConfigError

TINY = dict(num_attention_heads=4, attention_head_dim=16, num_layers=2, caption_channels=48, in_channels=8)
TINY |= dict(num_cross_attention_heads=2, cross_attention_head_dim=32, cross_attention_dim=64, sample_size=8)
KINDS = {
    "sana": dict(out_channels=None),
    "positions": dict(interpolation_scale=2.0, patch_size=2, attention_bias=True, out_channels=4),
    "sana-1.5": dict(qk_norm="rms_norm_across_heads", out_channels=8, timestep_scale=2.0),
}


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    reference = randomize(diffusers.SanaTransformer2DModel(**{**TINY, **KINDS[request.param]}))
    folder = tmp_path_factory.mktemp("sana")
    reference.save_pretrained(folder)
    return reference, sana.load(folder)


def inputs(channels=8, features=48, height=8, width=12):
    latents, caption = arrays((2, channels, height, width), (2, 7, features))
    return latents, np.array([7.5, 987.0], np.float32), caption, np.arange(7)[None, :] < np.array([[7], [3]])


def expected(reference, latents, timestep, caption, mask):
    names = ("hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask")
    values = dict(zip(names, map(torch.tensor, (latents, timestep, caption, mask)), strict=True))
    return in_torch(reference, **values)


def test_outputs_equal_diffusers(pair):
    reference, model = pair
    x = inputs()
    want = expected(reference, *x)
    c, e = model.config, model.config.hidden_size
    tokens, inner = 96 // c.patch_size**2, int(c.mlp_ratio * e)
    # Linear attention: sums over tokens and head, both above and below the line; then q and o twice, and the MLP.
    block = 2 * (tokens + c.attention_head_dim) + 4 * e + c.cross_attention_head_dim + 7 + e + 9 + inner
    sums = [256, e, e, c.in_channels * c.patch_size**2, *[block] * c.num_layers, e]
    atol = tolerance(sums, np.abs(want).max())
    got = run(model, *x)
    assert got.dtype == jnp.float32 and got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)
    # The test sees what it should: the mask, the time and the place of a pixel all matter far more than the tolerance.
    assert np.abs(run(model, *x[:3], np.ones_like(x[3])) - want).max() > 20 * atol
    assert np.abs(run(model, x[0], x[1] + 9, *x[2:]) - want).max() > 20 * atol
    assert np.abs(run(model, x[0][..., ::-1], *x[1:])[..., ::-1] - want).max() > 20 * atol


def test_export_round_trips(pair):
    check_round_trip(*pair)


def test_linear_attention_is_attention_with_a_relu_for_a_kernel():
    q, k, v = arrays((1, 6, 2, 8), (1, 6, 2, 8), (1, 6, 2, 8))
    weights = np.einsum("bshd,bthd->bhst", np.maximum(q, 0), np.maximum(k, 0)).astype(np.float64)
    want = np.einsum("bhst,bthd->bshd", weights / weights.sum(-1, keepdims=True), v).reshape(1, 6, 16)
    # Sums of 6 and 8, and a quotient, each relative to terms of size 1 over a denominator that is not small here.
    np.testing.assert_allclose(sana.linear_attention(q, k, v), want, rtol=0, atol=32 * 2.0**-23 * np.abs(v).max())


SIZES_600M = dict(num_attention_heads=36, num_layers=28, num_cross_attention_heads=16, cross_attention_head_dim=72)


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("sana_1600m", {}),
        ("sana_600m", dict(**SIZES_600M, cross_attention_dim=1152)),
        ("sana_1_5_4800m", dict(num_layers=60, qk_norm="rms_norm_across_heads")),
    ],
)
def test_published_names_and_shapes(name, arguments):
    config = getattr(sana.SanaConfig, name)()
    reference = check_names(diffusers.SanaTransformer2DModel, arguments, sana.Sana, config)
    assert sana.SanaConfig.from_diffusers(dict(reference.config)) == config


def tiny():
    x = inputs(32, 32, 8, 8)
    return sana.Sana(sana.SanaConfig.tiny(num_layers=1), rngs=nnx.Rngs(0)), x


def test_quantized_keeps_what_recipes_keep():
    kept = {"patch_embed/proj", "time_embed/linear", "proj_out"}
    kept |= {f"time_embed/emb/timestep_embedder/linear_{i}" for i in (1, 2)}
    kept |= {f"caption_projection/linear_{i}" for i in (1, 2)}
    swapped = check_quantized(*tiny(), kept)
    assert {"transformer_blocks/0/ff/conv_inverted", "transformer_blocks/0/ff/conv_point"} <= swapped


def test_linear_attention_without_any_key_is_zero():
    """As in diffusers, which adds 1e-15 below the line: no NaN where no key is above zero."""
    q, v = arrays((1, 6, 2, 8), (1, 6, 2, 8))
    assert (np.asarray(sana.linear_attention(q, -np.abs(q), v)) == 0).all()


def test_sizes_must_fit():
    with pytest.raises(ConfigError, match="cross_attention_dim=32"):
        sana.SanaConfig.tiny(cross_attention_dim=32)
    with pytest.raises(ConfigError, match="guidance_embeds=True"):
        sana.SanaConfig.from_diffusers({"guidance_embeds": True})
    with pytest.raises(ConfigError, match="qk_norm"):
        sana.SanaConfig.tiny(qk_norm="l2")
