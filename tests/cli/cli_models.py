"""Tiny models for the command-line tests: a Hugging Face folder and a GGUF file with a byte-level tokenizer."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from mxjax_models import params
from mxjax_models.llama import Llama, LlamaConfig

MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_tokens():
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    return [chr(b) for b in printable] + [chr(256 + n) for n in range(len(rest))]


VOCABULARY = [*MARKS, *byte_tokens(), "ab"]


def tiny(seed=0, **changes):
    config = LlamaConfig.tiny(vocab_size=len(VOCABULARY), rms_norm_eps=1e-5, eos_token_id=2, **changes)
    return Llama(config, rngs=nnx.Rngs(seed))


def write_folder(folder, model):
    """A Hugging Face folder; config.json keeps a key that mxjax does not know."""
    folder.mkdir(parents=True)
    config = params.hf_config(model.config) | {"torch_dtype": "float32", "unknown_key": [1]}
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(params.to_hf(model), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizers = pytest.importorskip("tokenizers", reason="pip install 'mxjax[tokenizer]'")
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={t: i for i, t in enumerate(VOCABULARY)}, merges=[("a", "b")]),
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": MARKS[2]}))
    return folder


def write_gguf(path, model):
    """The same as a GGUF file, architecture qwen3 (llama's would need its rows of q and k reordered)."""
    gguf = pytest.importorskip("gguf", reason="pip install 'mxjax[gguf]'")
    c = model.config
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(c.head_dim)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3] * len(MARKS) + [1] * (len(VOCABULARY) - len(MARKS)))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    names = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    parts = {
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
    for name, value in params.to_hf(model).items():
        stem = name.removesuffix(".weight").removeprefix("model.")
        if stem.startswith("layers."):
            _, layer, part = stem.split(".", 2)
            stem = f"blk.{layer}.{parts[part]}"
        else:
            stem = names[stem]
        writer.add_tensor(f"{stem}.weight", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tokens(path, shape=(3, 16), seed=5):
    ids = np.asarray(jax.random.randint(jax.random.key(seed), shape, 0, len(VOCABULARY)), np.int32)
    np.savez(path, text=ids, wrong=np.zeros(4))
    return ids
