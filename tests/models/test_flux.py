"""FLUX.1 equals diffusers' FluxTransformer2DModel (tiny, random, torch on the CPU), by output, name and shape."""

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
from mxjax_models import flux, pixart

from mxjax.errors import CheckpointError, ConfigError

TINY = dict(num_layers=2, num_single_layers=2, num_attention_heads=4, attention_head_dim=16, in_channels=32)
TINY |= dict(joint_attention_dim=48, pooled_projection_dim=24, axes_dims_rope=(4, 6, 6))
KINDS = {"dev": dict(guidance_embeds=True), "schnell": dict(out_channels=16)}


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    reference = randomize(diffusers.FluxTransformer2DModel(**{**TINY, **KINDS[request.param]}))
    folder = tmp_path_factory.mktemp("flux")
    reference.save_pretrained(folder / "transformer")
    return reference, flux.load(folder)


def inputs(model, height=4, width=6, text=5):
    c = model.config
    x, tokens, pooled = arrays(
        (2, height * width, c.in_channels), (2, text, c.joint_attention_dim), (2, c.pooled_projection_dim)
    )
    time, guidance = np.array([0.987, 0.02], np.float32), np.array([3.5, 1.0], np.float32)
    ids = np.asarray(flux.image_ids(height, width)), np.zeros((text, 3), np.float32)
    return x, tokens, pooled, time, *ids, *([guidance] if c.guidance_embeds else [])


def expected(reference, x, tokens, pooled, time, image_ids, text_ids, guidance=None):
    names = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "img_ids", "txt_ids")
    values = dict(zip(names, map(torch.tensor, (x, tokens, pooled, time, image_ids, text_ids)), strict=True))
    return in_torch(reference, **values, guidance=None if guidance is None else torch.tensor(guidance))


def test_outputs_equal_diffusers(pair):
    reference, model = pair
    x = inputs(model)
    want = expected(reference, *x)
    c, e, tokens = model.config, model.config.hidden_size, x[0].shape[1] + x[1].shape[1]
    double = 2 * e + c.attention_head_dim + tokens + e + 4 * e  # q, o; scores, values; up, down
    single = e + c.attention_head_dim + tokens + 5 * e
    sums = [256, e, e, c.in_channels, *[double] * c.num_layers, *[single] * c.num_single_layers, e]
    atol = tolerance(sums, np.abs(want).max())
    # An ulp of one of the 256 frequencies turns its angle by up to 3500 * 2^-24: time and guidance go up to 3500.
    atol += 4000 * 2.0**-24 * 2**0.5 * np.abs(want).max() / 256**0.5
    got = run(model, *x)
    assert got.dtype == jnp.float32 and got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)
    # The test sees what it should: rows, columns, time and guidance all matter far more than the tolerance.
    turned = x[4][:, [0, 2, 1]]
    changes = [(4, turned), (3, x[3] * 0.9), (2, -x[2]), (5, x[5] + np.float32(1))]
    for i, value in changes + ([(6, x[6] + 1)] if c.guidance_embeds else []):
        assert np.abs(run(model, *x[:i], value, *x[i + 1 :]) - want).max() > 10 * atol, i


def test_export_round_trips(pair):
    check_round_trip(*pair)


@pytest.mark.parametrize("guidance", [True, False], ids=["dev", "schnell"])
def test_published_names_and_shapes(guidance):
    """FLUX.1-dev in full, and two blocks of each sort of schnell, which lacks the guidance embedder only."""
    arguments = dict(guidance_embeds=guidance) | ({} if guidance else dict(num_layers=2, num_single_layers=2))
    config = flux.FluxConfig.from_diffusers({"_class_name": "FluxTransformer2DModel", **arguments})
    if guidance:
        assert config == flux.FluxConfig.dev()
    reference = check_names(diffusers.FluxTransformer2DModel, arguments, flux.Flux, config)
    assert flux.FluxConfig.from_diffusers(dict(reference.config)) == config
    if guidance:
        assert sum(p.numel() for p in reference.parameters()) == 11_901_408_320


def tiny():
    model = flux.Flux(flux.FluxConfig.tiny(num_layers=1, num_single_layers=1), rngs=nnx.Rngs(0))
    return model, tuple(map(jnp.asarray, inputs(model)))


def test_quantized_keeps_what_recipes_keep():
    embedders = {f"time_text_embed/{e}_embedder/linear_{i}" for e in ("timestep", "guidance", "text") for i in (1, 2)}
    adaln = {f"transformer_blocks/0/{n}/linear" for n in ("norm1", "norm1_context")}
    adaln |= {"single_transformer_blocks/0/norm/linear", "norm_out/linear"}
    swapped = check_quantized(*tiny(), embedders | adaln | {"x_embedder", "context_embedder", "proj_out"})
    assert "single_transformer_blocks/0/proj_out" in swapped


def test_guidance_is_asked_for():
    model, x = tiny()
    with pytest.raises(ValueError, match="missing"):
        model(*x[:6])
    model = flux.Flux(flux.FluxConfig.tiny(guidance_embeds=False), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="no input"):
        model(*x)


def test_another_model_is_refused(pair, tmp_path):
    pair[0].save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="is a Flux, not a PixArt"):
        pixart.load(tmp_path)
    with pytest.raises(ConfigError, match="axes_dims_rope"):
        flux.FluxConfig.tiny(axes_dims_rope=(4, 6, 8))
