"""GGUF files that the test writes: names, metadata, the query and key permutation, quantized types, errors."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest
from mxjax_models import llama
from mxjax_models._sources import unpermute
from mxjax_models.llama import Llama3Rope, LlamaConfig
from test_params import KINDS, assert_holds, weights

gguf = pytest.importorskip("gguf", reason="needs gguf: pip install 'mxjax[gguf]'")

TO_GGUF = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def permute(w, heads):
    """What llama.cpp's converter does to q and k: new row 2i + j of a head is old row i + j * D/2, said in a loop."""
    out, d = np.empty_like(w), w.shape[0] // heads
    for h in range(heads):
        for i in range(d // 2):
            for j in range(2):
                out[h * d + 2 * i + j] = w[h * d + i + j * d // 2]
    return out


def gguf_name(name):
    module, leaf = name.rsplit(".", 1)
    if module in TOP:
        return f"{TOP[module]}.{leaf}"
    _, _, block, rest = module.split(".", 3)
    return f"blk.{block}.{TO_GGUF[rest]}.{leaf}"


def write_gguf(file, config, tensors, *, arch=None, quantized=None, extra=(), metadata=(), drop=()):
    arch = arch or config.model_type
    writer = gguf.GGUFWriter(file, arch)
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "rope.freq_base": config.rope_theta,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    } | dict(metadata)
    for key, value in values.items():
        if key in drop:
            continue
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        add[type(value)](f"{arch}.{key}", value)
    writer.add_eos_token_id(2)
    for name, value in tensors.items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        value = permute(value, heads) if heads and arch == "llama" else value
        if quantized is not None and value.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quantize(value, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(gguf_name(name), value)
    for name, value in dict(extra).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("kind", KINDS)
def test_gguf(tmp_path, kind):
    config = LlamaConfig.tiny(**KINDS[kind], rms_norm_eps=1e-5, rope_theta=100000.0, eos_token_id=2)
    tensors = weights(config)
    model = llama.load(write_gguf(tmp_path / "m.gguf", config, tensors))
    assert model.config == config  # 1e-5 too, although GGUF holds it as float32
    assert_holds(model, tensors)


def test_gguf_dequantizes(tmp_path):
    kind = gguf.GGMLQuantizationType.Q8_0
    config = LlamaConfig.tiny(eos_token_id=2)
    tensors = weights(config)
    model = llama.load(write_gguf(tmp_path / "m.gguf", config, tensors, quantized=kind), jnp.bfloat16)
    # Blocks run along a row, so permuting rows and quantizing commute.
    want = {n: gguf.dequantize(gguf.quantize(t, kind), kind) if t.ndim == 2 else t for n, t in tensors.items()}
    assert_holds(model, {n: t.astype(jnp.bfloat16) for n, t in want.items()})


def test_unpermute_undoes_the_converter():
    w = np.random.default_rng(0).standard_normal((48, 5))
    assert not np.array_equal(permute(w, 3), w)
    np.testing.assert_array_equal(unpermute(permute(w, 3), 3), w)
    np.testing.assert_array_equal(unpermute(permute(w[:, 0], 3), 3), w[:, 0])


def test_gguf_rope_scaling(tmp_path):
    """llama.cpp stores Llama 3.1's scaling as divisors; the formula here is its converter's."""
    config = LlamaConfig.tiny(head_dim=64, rope_theta=500000.0, eos_token_id=2)
    divisors = []
    for f in 500000.0 ** (-np.arange(0, 64, 2) / 64):
        wavelength = 2 * np.pi / f
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        inside = 1 / ((1 - smooth) / 8.0 + smooth)
        divisors.append(1.0 if wavelength < 8192 / 4 else 8.0 if wavelength > 8192 else inside)
    divisors = np.array(divisors, np.float32)
    tensors = weights(config)
    model = llama.load(write_gguf(tmp_path / "a.gguf", config, tensors, extra={"rope_freqs.weight": divisors}))
    assert model.config.rope_scaling == Llama3Rope(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    ones = np.ones_like(divisors)
    assert (
        llama.load(write_gguf(tmp_path / "b.gguf", config, tensors, extra={"rope_freqs.weight": ones})).config == config
    )
    for i, wrong in enumerate((divisors[::-1].copy(), divisors[:-1])):
        with pytest.raises(ValueError, match=r"rope_freqs\.weight is not a Llama 3 scaling"):
            llama.load(write_gguf(tmp_path / f"c{i}.gguf", config, tensors, extra={"rope_freqs.weight": wrong}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(arch="gemma"), "architecture 'gemma' is not supported; supported: llama, qwen3"),
        (dict(drop=["block_count"]), "num_hidden_layers=None"),
        (dict(metadata={"attention.head_count": [4, 2]}), r"num_attention_heads=\[4, 2\]"),
        (dict(metadata={"attention.head_count_kv": [2, 1]}), r"attention.head_count_kv=\[2, 1\]"),
        (dict(metadata={"expert_count": 8}), r"expert_count=8 \(only 0\)"),
        (dict(metadata={"rope.dimension_count": 8}), r"rope.dimension_count=8 \(only 16\)"),
        (dict(metadata={"attention.value_length": 8}), "attention.value_length=8"),
        (dict(metadata={"rope.scaling.type": "yarn"}), "rope.scaling.type=yarn"),
        (dict(metadata={"attention.sliding_window": 8}), "attention.sliding_window=8"),
        (dict(metadata={"embedding_length": 32}), "problems"),  # shapes
        (
            dict(extra={"blk.0.ffn_gate_inp.weight": np.ones((4, 64), np.float32)}),
            "unexpected blk.0.ffn_gate_inp.weight",
        ),
        (dict(extra={"blk.0.attn_k.bias": np.ones(32, np.float32)}), r"unexpected blk.0.attn_k.bias in m.gguf"),
    ],
)
def test_gguf_errors(tmp_path, options, message):
    config = LlamaConfig.tiny(num_hidden_layers=1)
    file = write_gguf(tmp_path / "m.gguf", config, weights(config), **options)
    with pytest.raises(ValueError, match=message):
        llama.load(file)


def test_gguf_missing_tensors(tmp_path):
    config = LlamaConfig.tiny(num_hidden_layers=1)
    tensors = weights(config)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"missing model.layers.0.mlp.up_proj.weight in m.gguf, shape \(128, 64\)"):
        llama.load(write_gguf(tmp_path / "m.gguf", config, tensors))
    del tensors["model.embed_tokens.weight"]
    with pytest.raises(ValueError, match=r"no tensor token_embd\.weight"):
        llama.load(write_gguf(tmp_path / "n.gguf", config, tensors))


def test_gguf_type_without_dequantizer(tmp_path):
    config = LlamaConfig.tiny(num_hidden_layers=1)
    tensors = weights(config)
    tensors["model.norm.weight"] = np.zeros(64, np.int32)
    with pytest.raises(ValueError, match=r"output_norm.weight in m.gguf: gguf cannot dequantize its type I32"):
        llama.load(write_gguf(tmp_path / "m.gguf", config, tensors))


def test_gguf_package_missing(tmp_path, monkeypatch):
    (tmp_path / "m.gguf").touch()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'mxjax\[gguf\]'"):
        llama.load(tmp_path / "m.gguf")
