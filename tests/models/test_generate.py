"""generate: equals a plain loop over full forwards, samples, stops, compiles once, works on changed models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mxjax_models.generate import generate
from mxjax_models.llama import Llama, LlamaConfig
from test_llama import run

TRACES = []


class Counted(nnx.Module):
    """A stand-in for a quantized linear; notes each time that it is traced."""

    def __init__(self, linear):
        self.half = nnx.Param(linear.kernel[...] / 2)

    def __call__(self, x):
        TRACES.append(x.shape)
        return x @ self.half[...] * 2


@pytest.fixture(scope="module")
def model():
    return Llama(LlamaConfig.tiny(num_hidden_layers=1), rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def prompts():
    return np.random.default_rng(0).integers(0, 128, (2, 7))


def greedy(model, prompt, n):
    """The definition: the whole text again for every token (at one padded shape; later tokens cannot matter)."""
    text = np.zeros((1, 24), np.int32)
    text[0, : len(prompt)] = prompt
    for i in range(len(prompt), len(prompt) + n):
        text[0, i] = int(run(model, jnp.asarray(text))[0, i - 1].argmax())
    return text[0, len(prompt) : len(prompt) + n]


def test_greedy(model, prompts):
    got = generate(model, prompts, 10)
    assert got.shape == (2, 10) and got.dtype == jnp.int32
    np.testing.assert_array_equal(got, [greedy(model, p, 10) for p in prompts])
    np.testing.assert_array_equal(generate(model, prompts[0].tolist(), 10), got[0])


def test_prompts_of_different_lengths(model, prompts):
    got = generate(model, [prompts[0], prompts[1][:3]], 10)
    np.testing.assert_array_equal(got, [greedy(model, prompts[0], 10), greedy(model, prompts[1][:3], 10)])


def test_prompt_longer_than_a_bucket(model):
    prompt = np.arange(17)  # the bucket is 32
    np.testing.assert_array_equal(generate(model, prompt, 3), greedy(model, prompt, 3))


def test_stops_at_eos(model, prompts):
    free = np.asarray(generate(model, prompts, 10))
    eos = int(free[0, 3])
    ends = [int(np.argmax(row == eos)) if eos in row else 9 for row in free]
    got = np.asarray(generate(model, prompts, 10, eos_id=eos))
    for row, want, end in zip(got, free, ends, strict=True):
        np.testing.assert_array_equal(row[: end + 1], want[: end + 1])
        assert (row[end:] == want[end]).all()
    several = np.asarray(generate(model, prompts[0], 10, eos_id=[int(free[0, 5]), eos]))
    np.testing.assert_array_equal(several, got[0])


def test_sampling(model, prompts):
    options = dict(temperature=0.7, key=jax.random.key(3))
    a, b = (generate(model, prompts, 10, **options) for _ in range(2))
    np.testing.assert_array_equal(a, b)  # the key decides
    assert (a != generate(model, prompts, 10, temperature=0.7, key=jax.random.key(4))).any()
    np.testing.assert_array_equal(generate(model, prompts, 10, top_k=1, **options), generate(model, prompts, 10))
    top = generate(model, np.repeat(prompts[:1], 64, axis=0), 1, temperature=5.0, top_k=3, key=jax.random.key(0))
    logits = run(model, jnp.asarray(prompts[:1]))[0, -1]
    assert set(np.asarray(top)[:, 0].tolist()) == set(np.asarray(jax.lax.top_k(logits, 3)[1]).tolist())


def test_changed_models_and_one_compilation(prompts):
    model = Llama(LlamaConfig.tiny(num_hidden_layers=1), rngs=nnx.Rngs(0))
    want = generate(model, prompts, 6)
    for layer in model.layers:
        layer.mlp.down_proj = Counted(layer.mlp.down_proj)
    TRACES.clear()
    np.testing.assert_array_equal(generate(model, prompts, 6), want)
    traced = len(TRACES)
    assert traced > 0
    generate(model, prompts[:, :4], 6)  # the same bucket
    model.layers[0].mlp.down_proj.half[...] = model.layers[0].mlp.down_proj.half[...] * 3  # new weights, same code
    assert (generate(model, prompts, 6) != want).any()
    assert len(TRACES) == traced


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([1, 128], {}, r"tokens must be in 0\.\.127"),
        ([[-1, 2]], {}, r"tokens must be in 0\.\.127"),
        ([], {}, "none of them empty"),
        ([[1], []], {}, "none of them empty"),
        ([[[1]]], {}, r"tokens must be \(S,\), \(B, S\)"),
        ([1.5], {}, "tokens must be integers"),
        ([1], dict(max_new_tokens=0), "max_new_tokens=0"),
        ([1], dict(temperature=-1.0), "temperature=-1.0"),
        ([1], dict(temperature=1.0), "needs a key"),
        ([1], dict(top_k=3), "set temperature > 0"),
        ([1], dict(key=jax.random.key(0)), "set temperature > 0"),
        ([1], dict(top_k=0, temperature=1.0, key=jax.random.key(0)), r"top_k=0 must be in 1\.\.128"),
        ([1], dict(top_k=129, temperature=1.0, key=jax.random.key(0)), "top_k=129"),
    ],
)
def test_errors(model, tokens, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model, tokens, **({"max_new_tokens": 2} | options))
