"""A model with stacked blocks computes what the model computes, step by step, quantized or not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mxjax_models.generate import generate
from mxjax_models.llama import Llama, LlamaConfig
from mxjax_models.stacked import Stacked, stack

import mxjax

TOKENS = np.array([[5, 9, 1, 77, 30], [8, 8, 2, 0, 127]])
KINDS = {
    "llama": dict(),
    "tied": dict(tie_word_embeddings=True),
    "qwen3": dict(model_type="qwen3", num_hidden_layers=3),
}


def build(kind, recipe=None):
    model = Llama(LlamaConfig.tiny(**KINDS[kind]), rngs=nnx.Rngs(0))
    return model if recipe is None else mxjax.nnx.quantize(model, recipe)


def run(model, *arguments):
    return jax.jit(lambda model, *a: model(*a))(model, *arguments)


@pytest.mark.parametrize(("kind", "recipe"), [("llama", None), ("tied", "mxfp4_a16"), ("qwen3", "nvfp4_a16")])
def test_logits(kind, recipe):
    model = build(kind, recipe)
    # The same operations on the same numbers, fused differently: a few float32 roundings of logits of order 1.
    np.testing.assert_allclose(run(stack(model), TOKENS), run(model, TOKENS), atol=2e-5)


@pytest.mark.parametrize("kind", ["tied", "qwen3"])
def test_prefill_and_steps_equal_one_pass(kind):
    model = build(kind)
    stacked = stack(model)
    expected = run(model, TOKENS)
    logits, cache = run(stacked, TOKENS[:, :3], stacked.init_cache(2, 8))
    assert cache.max_length == 8 and int(cache.length) == 3
    np.testing.assert_allclose(logits, expected[:, :3], atol=2e-5)
    for i in (3, 4):
        logits, cache = run(stacked, TOKENS[:, i : i + 1], cache)
        np.testing.assert_allclose(logits[:, 0], expected[:, i], atol=2e-5)
    with pytest.raises(ValueError, match="do not fit into a cache of 8"):
        stacked(jnp.ones((2, 4), jnp.int32), cache)


def test_generate_with_left_padding():
    model = build("llama", "mxfp4_a16")
    prompts = [[5, 9, 1], [7, 7, 7, 7, 3, 2, 1]]
    assert generate(stack(model), prompts, 6).tolist() == generate(model, prompts, 6).tolist()


def test_one_block_is_traced_whatever_the_depth(monkeypatch):
    from mxjax_models import llama

    calls = []
    call = llama.Block.__call__
    monkeypatch.setattr(llama.Block, "__call__", lambda self, *a: calls.append(1) or call(self, *a))
    jax.eval_shape(stack(Llama(LlamaConfig.tiny(num_hidden_layers=5), rngs=nnx.Rngs(0))), TOKENS)
    assert len(calls) == 1


def test_blocks_that_differ_are_left_alone():
    cfg = mxjax.QuantConfig(rules=[mxjax.Rule(path="layers/0/")])
    model = mxjax.nnx.quantize(build("llama"), cfg)
    assert stack(model) is model
    assert isinstance(stack(build("llama")), Stacked)
