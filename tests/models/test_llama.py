"""The Llama model against itself: cache, blocks, dtypes, surgery, config errors."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mxjax_models.llama import Llama, Llama3Rope, LlamaConfig, rope_frequencies

KINDS = {
    "llama": {},
    "llama-tied-biases-mqa": dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True, num_key_value_heads=1),
    "qwen3": dict(model_type="qwen3", head_dim=32),  # head_dim is not hidden_size / heads
}
SCALING = Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
HF = dict(
    model_type="llama",
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
)


def tolerance(config: LlamaConfig, length: int, scale: float, dtype=jnp.float32) -> float:
    """Two orders of the same sums: every dot product of length K adds about eps * sqrt(K), relative to its scale.

    Along the longest path that is, for each layer, hidden (q), head_dim (scores), length (values), heads * head_dim
    (o), hidden (gate) and intermediate (down), then hidden (head); independent errors add as squares. 4 covers the
    maximum over all logits (about 4 sigma for tens of thousands).
    """
    c = config
    layer = 2 * c.hidden_size + c.head_dim + length + c.num_attention_heads * c.head_dim + c.intermediate_size
    return 4 * float(jnp.finfo(dtype).eps) * math.sqrt(c.num_hidden_layers * layer + c.hidden_size) * scale


@nnx.jit
def run(model, *args, **kwargs):
    """One compilation instead of one for every small operation: most of this file's time would go there."""
    return model(*args, **kwargs)


def make(dtype=jnp.float32, **overrides) -> Llama:
    return Llama(LlamaConfig.tiny(**overrides), rngs=nnx.Rngs(0), dtype=dtype)


def tokens(batch=2, length=9, seed=0):
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, 128)


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_then_steps_equal_one_forward(kind):
    model, t = make(**KINDS[kind]), tokens()
    full = run(model, t)
    assert full.shape == (2, 9, 128) and full.dtype == jnp.float32

    logits, cache = run(model, t[:, :5], model.init_cache(2, 12))
    parts = [logits]
    for i in range(5, 9):
        logits, cache = run(model, t[:, i : i + 1], cache)
        parts.append(logits)
    assert int(cache.length) == 9
    atol = tolerance(model.config, 12, float(jnp.abs(full).max()))
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), full, rtol=0, atol=atol)


def test_left_padding_changes_nothing():
    model, t = make(), tokens(batch=1)
    padded = jnp.concatenate([jnp.full((1, 3), 7), t], axis=1)
    logits, cache = run(model, padded, model.init_cache(1, 16, start=jnp.array([3])))
    atol = tolerance(model.config, 16, 4.0)
    np.testing.assert_allclose(logits[:, 3:], run(model, t), rtol=0, atol=atol)
    assert jnp.isfinite(logits).all()  # the padding sees no key, and still makes no NaN
    step, _ = run(model, t[:, :1], cache)
    np.testing.assert_allclose(step[:, 0], run(model, jnp.concatenate([t, t[:, :1]], axis=1))[:, -1], rtol=0, atol=atol)


def test_causal():
    model, t = make(), tokens()
    np.testing.assert_array_equal(run(model, t)[:, :4], run(model, t.at[:, 4:].set(5))[:, :4])


def test_block_by_block_is_the_forward():
    model, t = make(), tokens()
    x = model.embed(t)
    for layer in model.layers:
        x = layer(x)
    np.testing.assert_array_equal(model.head(x), model(t))
    np.testing.assert_array_equal(model.hidden(t), x)


def test_layer_takes_positions_mask_and_cache():
    model, t = make(), tokens()
    layer, x, positions = partial(run, model.layers[0]), model.embed(t), jnp.arange(9)
    mask = jnp.tril(jnp.ones((9, 9), bool))[None]
    np.testing.assert_array_equal(layer(x, positions, mask), layer(x))
    cache = model.init_cache(2, 9).layers[0]
    y, cache = layer(x[:, :6], cache=cache)
    z, cache = layer(x[:, 6:], cache=cache)
    assert int(cache.length) == 9
    np.testing.assert_allclose(jnp.concatenate([y, z], 1), layer(x), rtol=0, atol=tolerance(model.config, 9, 4.0))


def test_positions_are_relative():
    """RoPE sees only differences: shifting all positions moves logits by the rounding of the angles, eps * position."""
    model, t = make(), tokens()
    shifted = run(model, t, positions=jnp.arange(9) + 1000)
    atol = tolerance(model.config, 9, 4.0) + 4 * float(jnp.finfo(jnp.float32).eps) * 1000 * 4.0
    np.testing.assert_allclose(shifted, run(model, t), rtol=0, atol=atol)
    assert jnp.abs(run(model, t, positions=jnp.arange(9) * 2) - run(model, t)).max() > 100 * atol


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_bfloat16(kind):
    """The compute dtype is the parameters' dtype; the logits stay near the float32 model's with the same parameters."""
    low, t = make(jnp.bfloat16, **KINDS[kind]), tokens()
    assert {x.dtype for x in jax.tree.leaves(nnx.state(low))} == {jnp.dtype(jnp.bfloat16)}
    assert low.embed(t).dtype == low.hidden(t).dtype == jnp.bfloat16
    assert low.init_cache(1, 4).layers[0].k.dtype == jnp.bfloat16
    graph, state = nnx.split(low)
    high = nnx.merge(graph, jax.tree.map(lambda x: x.astype(jnp.float32), state))  # cast after building works too
    assert high.embed(t).dtype == jnp.float32
    logits = run(low, t)
    assert logits.dtype == jnp.float32
    reference = run(high, t)
    atol = tolerance(low.config, 9, float(jnp.abs(reference).max()), jnp.bfloat16)
    np.testing.assert_allclose(logits, reference, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_no_implicit_promotion(dtype):
    model, t = make(dtype, **KINDS["qwen3"], attention_bias=True, mlp_bias=True), tokens()
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        run(model, t)
        _, cache = run(model, t, model.init_cache(2, 10))
        run(model, t[:, :1], cache)


def test_paths_are_hugging_face_names():
    paths = {"/".join(map(str, p)): v.shape for p, v in nnx.to_flat_state(nnx.state(make(model_type="qwen3")))}
    assert paths["layers/0/self_attn/q_proj/kernel"] == (64, 64)
    assert paths["layers/1/self_attn/k_proj/kernel"] == (64, 32)
    assert paths["layers/0/mlp/down_proj/kernel"] == (128, 64)
    assert paths["layers/0/self_attn/q_norm/scale"] == (16,)
    assert paths["embed_tokens/embedding"] == (128, 64) and paths["lm_head/kernel"] == (64, 128)
    assert paths["norm/scale"] == (64,)
    assert len(paths) == 3 + 2 * (7 + 4)


class Doubled(nnx.Module):
    """Stands for a quantized linear: another state, no kernel, the same call."""

    def __init__(self, linear: nnx.Linear):
        self.half = nnx.Param(linear.kernel[...] / 2)

    def __call__(self, x):
        return x @ self.half[...] * 2


def test_linears_can_be_replaced_by_path():
    """A surgery that knows only nnx: every nnx.Linear, found by type, set on its parent."""
    model, t = make(), tokens()
    before = run(model, t)
    found = ["/".join(map(str, p)) for p, m in nnx.iter_modules(model) if isinstance(m, nnx.Linear)]
    assert len(found) == 2 * 7 + 1
    for path in found:
        *parents, name = path.split("/")
        owner = model
        for part in parents:
            owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
        setattr(owner, name, Doubled(getattr(owner, name)))
    assert not [p for p, m in nnx.iter_modules(model) if isinstance(m, nnx.Linear)]
    np.testing.assert_allclose(run(model, t), before, rtol=0, atol=tolerance(model.config, 9, 4.0))


def test_rope_scaling():
    plain = LlamaConfig.tiny(head_dim=64, rope_theta=500000.0)
    f = rope_frequencies(plain)
    g = rope_frequencies(LlamaConfig.tiny(head_dim=64, rope_theta=500000.0, rope_scaling=SCALING))
    wavelength = 2 * np.pi / f
    np.testing.assert_array_equal(g[wavelength < 64 / 4], f[wavelength < 64 / 4])
    np.testing.assert_array_equal(g[wavelength > 64], f[wavelength > 64] / 8)
    middle = (wavelength >= 16) & (wavelength <= 64)
    assert middle.any() and ((g < f) & (g > f / 8))[middle].all()


def test_cache_overflow_raises():
    model, t = make(), tokens(length=9)
    with pytest.raises(ValueError, match="9 tokens after 0 do not fit into a cache of 8"):
        model(t, model.init_cache(2, 8))
    _, cache = run(model, t, model.init_cache(2, 9))
    with pytest.raises(ValueError, match="1 tokens after 9 do not fit into a cache of 9"):
        model(t[:, :1], cache)
    with pytest.raises(ValueError, match="9 tokens"):
        run(model, t, model.init_cache(2, 8))
    with pytest.raises(ValueError, match="batch of 2 with a cache for 3"):
        model(t, model.init_cache(3, 9))


def test_from_hf_defaults_and_both_rope_spellings():
    config = LlamaConfig.from_hf(HF)
    assert (config.num_key_value_heads, config.head_dim, config.rope_theta, config.rms_norm_eps) == (4, 16, 10000, 1e-6)
    assert not config.tie_word_embeddings and config.rope_scaling is None and config.eos_token_id is None
    scaling = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    old = HF | dict(rope_theta=5e5, rope_scaling=dict(rope_type="llama3", **scaling), eos_token_id=[1, 2])
    new = HF | dict(rope_parameters=dict(rope_theta=5e5, rope_type="llama3", **scaling), eos_token_id=[1, 2])
    assert LlamaConfig.from_hf(old) == LlamaConfig.from_hf(new)
    assert LlamaConfig.from_hf(old).rope_scaling == SCALING
    assert LlamaConfig.from_hf(old).eos_token_id == (1, 2)
    # A window that is switched off, as Qwen's files have it.
    qwen = HF | dict(model_type="qwen3", num_key_value_heads=2, head_dim=32, sliding_window=4096)
    assert LlamaConfig.from_hf(qwen | dict(use_sliding_window=False)).qk_norm


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(model_type="gemma"), "model_type 'gemma' is not supported; supported: llama, qwen3"),
        (dict(hidden_size=None), "config has no hidden_size"),
        (dict(model_type="qwen3"), "config has no num_key_value_heads, head_dim"),
        (dict(hidden_act="gelu"), "hidden_act='gelu'"),
        (dict(sliding_window=128), "sliding window"),
        (dict(use_sliding_window=True, sliding_window=128), "sliding window"),
        (dict(layer_types=["full_attention", "sliding_attention"]), "layer_types"),
        (dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), "rope_type='yarn'"),
        (dict(rope_scaling=dict(type="linear", factor=4.0)), "rope_type='linear'"),
        (dict(rope_parameters=dict(rope_type="longrope", rope_theta=1e4)), "rope_type='longrope'"),
        (dict(rope_scaling=dict(rope_type="llama3", factor=8.0)), "without low_freq_factor, high_freq_factor, orig"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
        (dict(hidden_act="gelu", sliding_window=128), "hidden_act='gelu'.*sliding window"),  # all in one message
        (dict(num_key_value_heads=3), "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
        (dict(head_dim=15), "head_dim=15 must be even"),
        (dict(num_hidden_layers=0), "num_hidden_layers=0"),
    ],
)
def test_from_hf_errors(change, message):
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_hf(HF | change)


def test_config_checks_itself():
    with pytest.raises(ValueError, match="model_type 'gpt'"):
        LlamaConfig.tiny(model_type="gpt")
    with pytest.raises(AttributeError):
        LlamaConfig.tiny().hidden_size = 3
    with pytest.raises(TypeError):
        LlamaConfig("llama")
