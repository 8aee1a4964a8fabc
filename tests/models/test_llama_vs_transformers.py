"""Logits and greedy text equal transformers' LlamaForCausalLM and Qwen3ForCausalLM (tiny, random, torch on the CPU)."""

import jax.numpy as jnp
import numpy as np
import pytest
from mxjax_models import llama, params
from mxjax_models.generate import generate
from test_llama import run, tolerance

torch = pytest.importorskip("torch", reason="needs torch: pip install 'mxjax[test]'")
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'mxjax[test]'")

ROPE3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
ROPE3 |= dict(original_max_position_embeddings=64, rope_theta=500000.0)
KINDS = {
    "gqa": dict(),
    "tied-one-kv-head": dict(tie_word_embeddings=True, num_key_value_heads=1),
    "biases-head-dim": dict(attention_bias=True, mlp_bias=True, head_dim=32),
    "llama3-rope": dict(rope_parameters=ROPE3, head_dim=64),
    "qwen3": dict(model_type="qwen3", head_dim=32),
    "qwen3-tied-bias": dict(model_type="qwen3", head_dim=16, tie_word_embeddings=True, attention_bias=True),
}


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """A transformers model with every parameter random (biases and norms too), and ours, loaded from its files."""
    options = dict(KINDS[request.param])
    qwen = options.pop("model_type", "llama") == "qwen3"
    sizes = dict(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(num_key_value_heads=2, max_position_embeddings=65536, rms_norm_eps=1e-5)
    classes = (transformers.Qwen3Config, transformers.Qwen3ForCausalLM)
    if not qwen:
        classes = (transformers.LlamaConfig, transformers.LlamaForCausalLM)
    config = classes[0](**{**sizes, **options}, attn_implementation="eager", eos_token_id=None, bos_token_id=None)
    torch.manual_seed(0)
    reference = classes[1](config).eval()
    with torch.no_grad():
        for p in reference.parameters():
            if p.ndim == 2:
                p.normal_(0.0, p.shape[1] ** -0.5)
            else:
                p.add_(torch.randn_like(p) * 0.2)
    folder = tmp_path_factory.mktemp("hf")
    reference.save_pretrained(folder)
    return reference, llama.load(folder)


def reference_logits(model, ids, positions=None):
    with torch.no_grad():
        ids = torch.tensor(np.asarray(ids)).long()
        # An explicit mask: without one, transformers reads positions with gaps as several packed sequences.
        extra = {} if positions is None else {"position_ids": torch.tensor(positions)[None].expand(ids.shape)}
        return model(ids, attention_mask=torch.ones_like(ids), **extra).logits.numpy()


IDS = np.random.default_rng(0).integers(0, 128, (2, 24)).astype(np.int32)


def test_logits(pair):
    reference, model = pair
    want = reference_logits(reference, IDS)
    atol = tolerance(model.config, IDS.shape[1], float(np.abs(want).max()))
    got = run(model, jnp.asarray(IDS), positions=jnp.arange(IDS.shape[1]))
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


def test_logits_at_long_positions(pair):
    """Distances up to 23 * 331: frequencies that differ by an ulp (2^-23) turn by 2^-23 * position, on both sides."""
    reference, model = pair
    positions = np.arange(IDS.shape[1]) * 331
    want = reference_logits(reference, IDS, positions)
    scale = float(np.abs(want).max())
    angle = 2 * 2.0**-23 * positions[-1]
    atol = tolerance(model.config, IDS.shape[1], scale) + angle * scale
    got = run(model, jnp.asarray(IDS), positions=jnp.asarray(positions))
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)
    assert np.abs(want - reference_logits(reference, IDS)).max() > 20 * atol  # positions this far do matter


def test_rope_frequencies(pair):
    """Float64 rounded once, against torch's float32 power and division (a few ulp)."""
    reference, model = pair
    np.testing.assert_allclose(
        llama.rope_frequencies(model.config), reference.model.rotary_emb.inv_freq.numpy(), rtol=8 * 2.0**-23
    )


def test_greedy_generation(pair):
    reference, model = pair
    prompt = IDS[:, :7]
    with torch.no_grad():
        ids = torch.tensor(prompt).long()
        want = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
    np.testing.assert_array_equal(generate(model, prompt, 12), want[:, 7:].numpy())


def test_export_round_trips(pair):
    """Our names, shapes and config go back into transformers and give the very same parameters."""
    reference, model = pair
    config = type(reference.config)(**params.hf_config(model.config), attn_implementation="eager")
    again = type(reference)(config)
    tensors = {k: torch.tensor(v) for k, v in params.to_hf(model).items()}
    missing, unexpected = again.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if model.config.tie_word_embeddings else [])
    again.tie_weights()
    want = dict(reference.named_parameters())
    for name, p in again.named_parameters():
        assert torch.equal(p, want[name]), name
    np.testing.assert_array_equal(reference_logits(again.eval(), IDS), reference_logits(reference, IDS))
