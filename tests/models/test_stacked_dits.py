"""FLUX.1 and PixArt with stacked blocks, and with layers that share an input fused: the same model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mxjax_models import flux, pixart
from mxjax_models.stacked import StackedFlux, StackedPixArt, stack

import mxjax
from mxjax.nn.nnx_graph import variables_of
from mxjax.ops.fused import FusedPart, FusedWeight


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def flux_case(layers=2):
    config = flux.FluxConfig.tiny(num_layers=layers, num_single_layers=layers)
    args = (normal(0, 1, 6, 32), normal(1, 1, 3, 32), normal(2, 1, 32), np.float32([0.5]), flux.image_ids(2, 3))
    return flux.Flux(config, rngs=nnx.Rngs(0)), (*args, jnp.zeros((3, 3)), np.float32([3.5]))


def pixart_case():
    model = pixart.PixArt(pixart.PixArtConfig.tiny(), rngs=nnx.Rngs(0))
    return model, (normal(0, 1, 8, 4, 4), np.float32([500]), normal(1, 1, 3, 32))


@jax.jit
def run(model, *args):
    return model(*args)


def close(got, want):
    """The same sums, compiled in another program: float32 roundings of a dozen products in sequence."""
    np.testing.assert_allclose(got, want, rtol=0, atol=12 * 8 * 2.0**-24 * np.sqrt(256) * np.abs(want).max())


@pytest.mark.parametrize("case, kind", [(flux_case, StackedFlux), (pixart_case, StackedPixArt)])
def test_stacked_blocks_are_the_same_model(case, kind):
    model, args = case()
    stacked = stack(model)
    assert type(stacked) is kind
    close(run(stacked, *args), run(model, *args))
    with pytest.raises(AssertionError):  # blocks differ: one left out would show
        close(run(stacked, *args), run(jax.tree.map(lambda x: x * 1.001, model), *args))


def test_fused_inputs_of_flux():
    """Every group of ``shared_inputs`` is there, and what the model computes stays."""
    model, args = flux_case(1)
    model = mxjax.nnx.quantize(model, "mxfp4_a16")
    fused = mxjax.nnx.fuse_shared_inputs(model, flux.shared_inputs(model.config))
    kinds = {path: type(v.get_value()) for path, v in variables_of(fused).items()}
    heads = sorted(path for path, kind in kinds.items() if kind is FusedWeight)
    assert heads == [
        "single_transformer_blocks/0/attn/to_q/kernel",
        "transformer_blocks/0/attn/add_q_proj/kernel",
        "transformer_blocks/0/attn/to_q/kernel",
    ]
    assert sum(kind is FusedPart for kind in kinds.values()) == 2 + 2 + 3
    close(run(fused, *args), run(model, *args))


def test_fused_inputs_of_pixart():
    model = mxjax.nnx.quantize(pixart_case()[0], "mxfp4_a16")
    fused = mxjax.nnx.fuse_shared_inputs(model, pixart.SHARED_INPUTS)
    kinds = [type(v.get_value()) for v in variables_of(fused).values()]
    assert kinds.count(FusedWeight) == 4 and kinds.count(FusedPart) == 2 * (2 + 1)
