"""mxjax.nnx.fuse_shared_inputs in the Llama of this repository: same bits, jit, scan over blocks, grad, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mxjax_models.llama import Llama, LlamaConfig
from mxjax_models.stacked import stack

import mxjax
from mxjax.errors import ConfigError
from mxjax.ops.fused import FusedPart, FusedWeight

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 5)))


@pytest.fixture(scope="module", params=["mxfp4", "nvfp4_a16"])
def models(request):
    """(quantized, the same fused), with biases."""
    model = Llama(LlamaConfig.tiny(attention_bias=True), rngs=nnx.Rngs(0))
    for path, node in nnx.iter_graph(model):
        if path and path[-1] == "bias":
            node.set_value(jax.random.normal(jax.random.key(len(str(path))), node.shape))
    qmodel = mxjax.nnx.quantize(model, request.param)
    return qmodel, mxjax.nnx.fuse_shared_inputs(qmodel)


def logits(model):
    graph, state = nnx.split(model)
    return np.asarray(jax.jit(lambda state: nnx.merge(graph, state)(TOKENS))(state))


def test_logits_do_not_change_by_a_bit(models):
    qmodel, fused = models
    attention = fused.layers[0].self_attn
    assert isinstance(attention.q_proj.kernel.get_value(), FusedWeight)
    assert attention.v_proj.kernel.get_value() == FusedPart("v_proj", "q_proj", 2)
    assert isinstance(fused.layers[1].mlp.gate_proj.kernel.get_value(), FusedWeight)
    assert not isinstance(qmodel.layers[0].self_attn.q_proj.kernel.get_value(), FusedWeight)
    np.testing.assert_array_equal(logits(fused), logits(qmodel))


def test_scan_over_stacked_blocks(models):
    qmodel, fused = models
    stacked = stack(fused)
    assert type(stacked).__name__ == "Stacked"
    np.testing.assert_array_equal(logits(stacked), logits(stack(qmodel)))


def test_unfused_is_the_model_before(models):
    qmodel, fused = models
    back = mxjax.nnx.unfuse_shared_inputs(fused)
    want, got = (jax.tree.leaves(nnx.to_pure_dict(nnx.state(m))) for m in (qmodel, back))
    assert len(want) == len(got)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)
    tree = mxjax.unfuse_shared_inputs(nnx.state(fused))  # what a checkpoint is written from
    np.testing.assert_array_equal(logits(mxjax.nnx.from_params(qmodel, tree)), logits(qmodel))


def test_dequantized_is_that_of_the_model_before(models):
    want, got = (jax.tree.leaves(nnx.to_pure_dict(nnx.state(mxjax.nnx.dequantize(m)))) for m in models)
    assert len(want) == len(got)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)


def test_gradients_reach_biases_and_norms(models):
    def loss(model):
        return jnp.mean(jnp.square(model(TOKENS)))

    want, got = (jax.tree.leaves(nnx.to_pure_dict(nnx.jit(nnx.grad(loss))(m))) for m in models)
    for g, w in zip(got, want, strict=True):
        # dx of the fused layers is added in another order: roundings of 2**-24 through two blocks of a tiny model
        np.testing.assert_allclose(g, w, rtol=0, atol=2.0**-16 * float(jnp.abs(w).max()))


def test_packed_for_kernels(models):
    """prepare_kernels takes whole models; fused layers are one product then."""
    want = logits(models[0])
    for model in models:
        packed = mxjax.prepare_kernels(model, "rows")
        # tokens quantize the next layers' inputs: a last bit may move a value to the next code
        assert np.linalg.norm(logits(packed) - want) <= 2.0**-6 * np.linalg.norm(want)
    gate = packed.layers[0].mlp.gate_proj.kernel.get_value()
    assert gate.weight.packed.n == 2 * models[0].config.intermediate_size


def test_packed_kernels_of_other_layers():
    x = jax.random.normal(jax.random.key(0), (2, 3, 64))
    for layer in (
        nnx.LinearGeneral(64, 32, rngs=nnx.Rngs(0)),
        nnx.Einsum("btk,nk->bnt", (32, 64), None, rngs=nnx.Rngs(0)),
    ):
        quantized = mxjax.nnx.quantize(layer, "mxfp4")
        packed = mxjax.prepare_kernels(quantized, "rows")
        np.testing.assert_allclose(packed(x), quantized(x), atol=1e-4)


def test_fused_layers_are_called_together():
    qmodel = mxjax.nnx.quantize(Llama(LlamaConfig.tiny(), rngs=nnx.Rngs(0)), "mxfp4")
    fused = mxjax.nnx.fuse_shared_inputs(qmodel, [("gate_proj", "up_proj")])
    x, mlp = jnp.ones((1, fused.config.hidden_size)), fused.layers[0].mlp
    for layer in (mlp.gate_proj, mlp.up_proj):
        with pytest.raises(ConfigError, match=r"mxjax\.nnx\.shared_input"):
            layer(x)
    with pytest.raises(ConfigError, match="all its parts"):
        mxjax.nnx.shared_input(x, mlp.gate_proj)
    qmodel.layers[0].mlp.up_proj.preferred_element_type = jnp.float16
    with pytest.raises(ConfigError, match="differ in their options"):
        mxjax.nnx.fuse_shared_inputs(qmodel)
    with pytest.raises(ConfigError, match="no quantized weights are called"):
        mxjax.nnx.fuse_shared_inputs(Llama(LlamaConfig.tiny(), rngs=nnx.Rngs(0)))
