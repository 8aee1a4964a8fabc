"""PixArt equals diffusers' PixArtTransformer2DModel (tiny, random, torch on the CPU), by output, name and shape."""

import json

import jax
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
from mxjax_models import diffusers_folder, pixart

import mxjax
from mxjax.errors import BlockShapeError, CheckpointError, ConfigError

TINY = dict(num_attention_heads=4, attention_head_dim=24, num_layers=2, cross_attention_dim=96, caption_channels=32)
TINY |= dict(in_channels=8, out_channels=16, sample_size=8, norm_num_groups=1)
KINDS = {
    "sigma": dict(interpolation_scale=2),
    "alpha": dict(use_additional_conditions=True, attention_bias=False),
    "no-variance": dict(out_channels=None, patch_size=1),
}


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    reference = randomize(diffusers.PixArtTransformer2DModel(**{**TINY, **KINDS[request.param]}))
    folder = tmp_path_factory.mktemp("pixart")
    reference.save_pretrained(folder)
    return reference, pixart.load(folder)


def inputs(model, height=8, width=12):
    """Not square, not the training size: positions are interpolated; one caption is shorter than the other."""
    latents, caption = arrays((2, 8, height, width), (2, 7, 32))
    mask = np.arange(7)[None, :] < np.array([[7], [3]])
    sizes = np.array([[256.0, 384.0], [512.0, 300.0]], np.float32), np.array([[0.66], [1.7]], np.float32)
    return latents, np.array([7, 987]), caption, mask, *(sizes if model.config.use_additional_conditions else ())


def expected(reference, latents, timestep, caption, mask, *sizes):
    t = [torch.tensor(x) for x in (latents, timestep, caption, mask, *sizes)]
    extra = {"resolution": t[4], "aspect_ratio": t[5]} if sizes else {"resolution": None, "aspect_ratio": None}
    return in_torch(
        reference,
        hidden_states=t[0],
        timestep=t[1],
        encoder_hidden_states=t[2],
        encoder_attention_mask=t[3],
        added_cond_kwargs=extra,
    )


@pytest.mark.parametrize("size", [(8, 12), (8, 8)])
def test_outputs_equal_diffusers(pair, size):
    reference, model = pair
    x = inputs(model, *size)
    want = expected(reference, *x)
    c = model.config
    e, tokens = c.hidden_size, size[0] * size[1] // c.patch_size**2
    block = 4 * e + c.attention_head_dim * 2 + tokens + 7 + e + 4 * e + 2 * e  # q, o twice; scores, values; up, down
    atol = tolerance([256, e, e, c.in_channels * c.patch_size**2, *[block] * c.num_layers, e], np.abs(want).max())
    got = run(model, *x)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)
    # The test sees what it should: the mask, the time and the place of a patch all matter far more than the tolerance.
    assert np.abs(run(model, *x[:3], np.ones_like(x[3]), *x[4:]) - want).max() > 20 * atol
    assert np.abs(run(model, x[0], x[1] + 9, *x[2:]) - want).max() > 20 * atol
    assert np.abs(run(model, x[0][..., ::-1], *x[1:])[..., ::-1] - want).max() > 20 * atol


def test_export_round_trips(pair):
    check_round_trip(*pair)


def test_published_names_and_shapes():
    """PixArt-Sigma-XL-2-1024-MS; the other resolutions differ in positions only, which are no parameters."""
    arguments = dict(sample_size=128, caption_channels=4096, use_additional_conditions=False, interpolation_scale=2)
    config = pixart.PixArtConfig.sigma(1024)
    reference = check_names(diffusers.PixArtTransformer2DModel, arguments, pixart.PixArt, config)
    assert pixart.PixArtConfig.from_diffusers(dict(reference.config)) == config
    assert sum(p.numel() for p in reference.parameters()) == 610_856_096
    old = {**reference.config, "_class_name": "Transformer2DModel", "only_cross_attention": False}
    assert diffusers_folder.kind_of(old, "here").config.from_diffusers(old) == config
    for resolution, scale in ((256, 0.5), (512, 1), (2048, 4)):
        assert pixart.PixArtConfig.sigma(resolution).interpolation_scale == scale


def test_published_alpha_names_and_shapes():
    """Two blocks of PixArt-XL-2-1024-MS: what it has beyond Sigma is outside of them."""
    arguments = dict(sample_size=128, caption_channels=4096, num_layers=2)
    config = pixart.PixArtConfig.from_diffusers({"_class_name": "PixArtTransformer2DModel", **arguments})
    assert config.use_additional_conditions
    check_names(diffusers.PixArtTransformer2DModel, arguments, pixart.PixArt, config)


def tiny(**overrides):
    model = pixart.PixArt(pixart.PixArtConfig.tiny(**overrides), rngs=nnx.Rngs(0))
    latents, caption = arrays((2, 8, 8, 8), (2, 7, 32))
    return model, (latents, np.array([20, 700]), caption)


KEPT = {"pos_embed/proj", "adaln_single/emb/timestep_embedder/linear_1", "adaln_single/emb/timestep_embedder/linear_2"}
KEPT |= {"adaln_single/linear", "caption_projection/linear_1", "caption_projection/linear_2", "proj_out"}


def test_quantized_keeps_what_recipes_keep():
    model, x = tiny(num_layers=1)
    swapped = check_quantized(model, x, KEPT)
    stats = mxjax.calibrate(model, None, [x], "smoothquant_mxfp4")
    assert {p.removesuffix("/kernel") for p in stats} == swapped  # the same list where statistics are gathered


def test_an_exclude_of_ones_own_wins():
    """Another ``exclude`` is taken as it is, ``()`` too; one layer more and one layer less are both possible."""
    model, x = tiny()
    cfg = mxjax.recipes.get("mxfp4").replace(exclude=(*pixart.KEEP, r"attn2/to_[kv]/"))
    kept = {e.path for e in mxjax.nnx.plan(model, cfg).kept}
    assert "transformer_blocks/0/attn2/to_k/kernel" in kept and "transformer_blocks/0/attn2/to_q/kernel" not in kept
    cfg = mxjax.recipes.get("mxfp4").replace(exclude=[p for p in pixart.KEEP if "proj_out" not in p])
    assert "proj_out/kernel" in {e.path for e in mxjax.nnx.plan(model, cfg).quantized}
    assert np.isfinite(run(mxjax.nnx.quantize(model, cfg), *x)).all()
    with pytest.raises(BlockShapeError, match="scale_shift_table"):
        mxjax.nnx.plan(model, mxjax.recipes.get("mxfp4").replace(exclude=()))


def test_bfloat16_follows_the_parameters():
    """16 bits everywhere: off by some 2^-8 a layer, and by no more than a few of them."""
    model, x = tiny()
    half = nnx.merge(nnx.graphdef(model), jax.tree.map(lambda p: p.astype(jnp.bfloat16), nnx.state(model)))
    got = run(half, x[0].astype(jnp.bfloat16), x[1], x[2].astype(jnp.bfloat16))
    want = run(model, *x)
    assert got.dtype == jnp.bfloat16
    assert np.abs(got.astype(jnp.float32) - want).max() < 16 * 2.0**-8 * np.abs(want).max()


def test_sharded_pipeline_folder(tmp_path):
    """A pipeline's folder, three shards, as memory maps: the same parameters."""
    reference = randomize(diffusers.PixArtTransformer2DModel(**TINY))
    reference.save_pretrained(tmp_path / "transformer", max_shard_size="300KB")
    assert len(list((tmp_path / "transformer").glob("*.safetensors"))) > 2
    model = pixart.load(tmp_path, None, lazy=True)
    assert isinstance(model.transformer_blocks[0].attn1.to_q.kernel[...], np.ndarray)
    check_round_trip(reference, model)


def test_loading_says_everything_that_is_wrong(tmp_path):
    from safetensors.numpy import load_file, save_file

    model, _ = tiny()
    file, config = tmp_path / diffusers_folder.WEIGHTS, diffusers_folder.diffusers_config(model)
    tensors = diffusers_folder.to_diffusers(model)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileNotFoundError, match="diffusion_pytorch_model"):
        pixart.load(tmp_path)
    save_file(tensors, file)
    again = diffusers_folder.to_diffusers(diffusers_folder.load(tmp_path))
    assert all(np.array_equal(again[k], v) for k, v in tensors.items())
    tensors = load_file(file)
    tensors["extra"] = tensors.pop("proj_out.bias")
    tensors["pos_embed.proj.weight"] = tensors["pos_embed.proj.weight"].reshape(64, 32)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"3 problems") as e:
        pixart.load(tmp_path)
    assert all(part in str(e.value) for part in ("missing proj_out.bias", "unexpected extra", "(64, 8, 2, 2)"))
    for change, message in (
        ({"_class_name": "UNet2DConditionModel"}, "UNet2DConditionModel"),
        ({"activation_fn": "geglu", "new_switch": 3}, "geglu.*new_switch=3"),
        ({"caption_channels": None}, "no caption_channels"),
        ({"cross_attention_dim": 32}, "cross_attention_dim=32"),
        ({"num_layers": 0}, "num_layers=0"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises((CheckpointError, ConfigError), match=message):
            pixart.load(tmp_path)
