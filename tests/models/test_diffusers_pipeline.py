"""Tiny random pipelines of diffusers give the same images with our transformer in them as with their own."""

import jax.numpy as jnp
import numpy as np
import pytest
from dit_cases import diffusers, randomize, torch
from flax import nnx
from mxjax_models import diffusers_folder, diffusers_pipeline, flux
from mxjax_models.llama import Llama, LlamaConfig

import mxjax
from mxjax.errors import ConfigError


def vae(channels):
    sizes = dict(block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2)
    sizes |= dict(up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1, latent_channels=channels)
    return diffusers.AutoencoderKL(**sizes, shift_factor=0.1, scaling_factor=0.5, norm_num_groups=8).eval()


def text(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def flux_pipeline():
    transformer = diffusers.FluxTransformer2DModel(
        num_layers=1, num_single_layers=1, num_attention_heads=2, attention_head_dim=32, in_channels=32,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(8, 12, 12), guidance_embeds=True,
    )  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    nothing = dict(text_encoder=None, tokenizer=None, text_encoder_2=None, tokenizer_2=None)
    pipe = diffusers.FluxPipeline(scheduler=scheduler, vae=vae(8), transformer=randomize(transformer), **nothing)
    return pipe, dict(prompt_embeds=text(1, 5, 32), pooled_prompt_embeds=text(1, 32), height=16, width=24)


def pixart_pipeline():
    transformer = diffusers.PixArtTransformer2DModel(
        num_layers=1, num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=8,
        cross_attention_dim=64, caption_channels=32, sample_size=8, norm_num_groups=1,
    )  # fmt: skip
    scheduler = diffusers.DPMSolverMultistepScheduler()
    pipe = diffusers.PixArtSigmaPipeline(None, None, vae(4), randomize(transformer), scheduler)
    return pipe, conditions() | dict(height=16, width=24, use_resolution_binning=False)


def sana_pipeline():
    transformer = diffusers.SanaTransformer2DModel(
        num_layers=1, num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=4, sample_size=4,
        num_cross_attention_heads=2, cross_attention_head_dim=32, cross_attention_dim=64, caption_channels=32,
    )  # fmt: skip
    autoencoder = diffusers.AutoencoderDC(
        latent_channels=4, attention_head_dim=8, encoder_block_types=("ResBlock",) * 2,
        decoder_block_types=("ResBlock",) * 2, encoder_block_out_channels=(8, 16), decoder_block_out_channels=(8, 16),
        encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1), encoder_qkv_multiscales=((), ()),
        decoder_qkv_multiscales=((), ()), downsample_block_type="conv", upsample_block_type="interpolate",
        decoder_norm_types="rms_norm", decoder_act_fns="silu",
    ).eval()  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipe = diffusers.SanaPipeline(None, None, autoencoder, randomize(transformer), scheduler)
    return pipe, conditions() | dict(height=64, width=64, use_resolution_binning=False)


def conditions():
    """Embeddings of a prompt and of nothing, the latter shorter, for guidance."""
    mask, short = torch.ones(1, 7), torch.tensor([[1.0] * 3 + [0.0] * 4])
    return dict(
        prompt_embeds=text(1, 7, 32), prompt_attention_mask=mask, negative_prompt=None,
        negative_prompt_embeds=text(1, 7, 32, seed=1), negative_prompt_attention_mask=short,
    )  # fmt: skip


PIPELINES = {"flux": flux_pipeline, "pixart": pixart_pipeline, "sana": sana_pipeline}


def images(pipe, options, steps=3):
    generator = torch.Generator().manual_seed(0)
    pipe.set_progress_bar_config(disable=True)
    with torch.no_grad():
        return pipe(**options, num_inference_steps=steps, generator=generator, output_type="np").images


@pytest.fixture(params=PIPELINES)
def case(request, tmp_path):
    pipe, options = PIPELINES[request.param]()
    pipe.transformer.save_pretrained(tmp_path / "transformer")
    return pipe, options, diffusers_folder.load(tmp_path)


def test_images_equal_diffusers(case):
    """On pixels between 0 and 1. Each of three steps is off by some eps * sqrt(1000) (see the models' tests); guidance
    of 4.5 and the steps after it (of a random model, whose slope is a few) enlarge that a hundredfold at most."""
    pipe, options, model = case
    want = images(pipe, options)
    pipe.transformer = diffusers_pipeline.for_pipeline(model)
    got = images(pipe, options)
    assert want.std() > 0.01  # not one colour
    np.testing.assert_allclose(got, want, rtol=0, atol=100 * 2.0**-23 * 1000**0.5)
    pipe.transformer = diffusers_pipeline.for_pipeline(mxjax.nnx.quantize(model, "mxfp4"))
    quantized = images(pipe, options)
    assert np.isfinite(quantized).all() and 0 < np.abs(quantized - want).mean() < want.std()


def test_what_it_cannot_do_is_an_error():
    config = flux.FluxConfig.tiny(num_layers=1, num_single_layers=1)
    model = flux.Flux(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    stand_in = diffusers_pipeline.for_pipeline(model)
    assert stand_in.dtype == torch.bfloat16 and stand_in.config.guidance_embeds
    x = torch.zeros(1, 4, 32, dtype=torch.bfloat16)
    inputs = dict(
        encoder_hidden_states=x, pooled_projections=x[:, 0], timestep=torch.ones(1), guidance=torch.ones(1),
        img_ids=torch.zeros(4, 3), txt_ids=torch.zeros(4, 3),
    )  # fmt: skip
    assert stand_in(x, **inputs, joint_attention_kwargs=None).sample.dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="controlnet_block_samples"):
        stand_in(x, **inputs, controlnet_block_samples=[x])
    with pytest.raises(ConfigError, match="Llama has no pipeline"):
        diffusers_pipeline.for_pipeline(Llama(LlamaConfig.tiny(), rngs=nnx.Rngs(0)))
