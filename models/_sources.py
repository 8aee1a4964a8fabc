"""Where weights come from: a Hugging Face safetensors folder or a GGUF file, opened but not yet read.

Both readers return the model's config and, for every tensor in the file, a ``Source`` under its Hugging Face name, so
that names and shapes are checked before the first byte of weights is read.
"""

import dataclasses
import re
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from mxjax_models._llama_config import Llama3Rope, LlamaConfig
from mxjax_models._weights import Source, Weights
from mxjax_models.llama import rope_frequencies

from mxjax.errors import CheckpointError, MissingExtraError
from mxjax.io import hf, safetensors

FLOATS = ("F32", "F16", "BF16")


class Checkpoint(NamedTuple):
    config: LlamaConfig
    weights: Weights


def open_folder(folder: Path) -> Checkpoint:
    """Opens ``config.json`` and ``model.safetensors`` or the shards of ``model.safetensors.index.json``.

    Raises:
        FileNotFoundError: no config or no weights.
        CheckpointError: a config this model cannot honour, a quantized checkpoint, a damaged file, or an index that
            leaves the folder.
    """
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} has no config.json")
    raw = hf.read_config(folder)
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise CheckpointError(
            f"{folder} is a quantized checkpoint (quant_method {method!r}); this loads float weights only"
        )
    return Checkpoint(LlamaConfig.from_hf(raw), open_weights(folder, hf.WEIGHTS))


def open_weights(folder: Path, weights: str) -> Weights:
    """Opens the file ``weights`` of the folder, or the shards of its index, ``weights + ".index.json"``.

    Raises:
        FileNotFoundError: neither is there.
        CheckpointError: a damaged file, or an index that leaves the folder.
    """
    places = hf.read_index(folder, weights) or {}
    if not places and not (folder / weights).is_file():
        raise FileNotFoundError(f"{folder} has neither {weights} nor {weights}.index.json")

    sources, problems = {}, []
    for file in dict.fromkeys(places.values()) or [weights]:
        if not (folder / file).is_file():
            problems.append(f"missing shard {file}")
            continue
        for name, entry in safetensors.read(hf.inside(folder, file)).items():
            if (dtype := safetensors.NAMES[entry.dtype]) not in FLOATS:
                problems.append(f"{name} in {file}: dtype {dtype}, not one of {', '.join(FLOATS)}")
            sources[name] = Source(name, file, entry.shape, entry.read)
    return Weights(sources, problems, places)


def import_gguf() -> ModuleType:
    """The optional package ``gguf``, or an error that says how to get it."""
    try:
        import gguf
    except ImportError as e:
        raise MissingExtraError("reading GGUF files needs the package gguf: pip install 'mxjax[gguf]'") from e
    return gguf


# llama.cpp's names (gguf-py/gguf/constants.py) -> Hugging Face modules.
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _from_gguf_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``; unknown names are returned as they are."""
    if (m := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)) and m[2] in _BLOCK:
        return f"model.layers.{m[1]}.{_BLOCK[m[2]]}.{m[3]}"
    if (m := re.fullmatch(r"(\w+)\.(weight|bias)", name)) and m[1] in _TOP:
        return f"{_TOP[m[1]]}.{m[2]}"
    return name


def open_gguf(path: Path) -> Checkpoint:
    """Opens a GGUF file of architecture llama or qwen3, of any type that ``gguf`` can dequantize.

    Raises:
        MissingExtraError: the package ``gguf`` is missing.
        CheckpointError: another architecture or metadata that this model cannot honour.
    """
    gguf = import_gguf()
    reader = gguf.GGUFReader(path)
    tensors = {t.name: t for t in reader.tensors}
    config = _gguf_config(reader.fields, tensors, path.name)
    if "rope_freqs.weight" in tensors:
        divisors = np.asarray(tensors.pop("rope_freqs.weight").data, np.float32)
        config = _with_rope_divisors(config, divisors, path.name)

    def read(tensor: Any) -> np.ndarray:
        try:
            value = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as e:
            kind = tensor.tensor_type.name
            raise CheckpointError(f"{tensor.name} in {path.name}: gguf cannot dequantize its type {kind}") from e
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        part = tensor.name.split(".")[-2]
        if config.model_type == "llama" and part in heads:
            value = unpermute(value, heads[part])
        return value

    sources = {}
    for t in tensors.values():
        shape = tuple(int(n) for n in reversed(t.shape))  # ggml counts from the fastest axis
        sources[_from_gguf_name(t.name)] = Source(t.name, path.name, shape, partial(read, t))
    return Checkpoint(config, Weights(sources, [], {}))


def unpermute(w: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's reordering of query and key rows.

    llama.cpp rotates neighbours (2i, 2i+1), Hugging Face the halves (i, i + D/2), so its converter interleaves the rows
    of every head. w (heads * D, ...) -> same shape. Architecture qwen3 is stored as it was.
    """
    rows = w.shape[0]
    return w.reshape(heads, rows // heads // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def _gguf_config(fields: dict[str, Any], tensors: dict[str, Any], file: str) -> LlamaConfig:
    def get(key, default=None):
        return fields[key].contents() if key in fields else default

    arch = get("general.architecture")
    if arch not in ("llama", "qwen3"):
        raise CheckpointError(f"{file}: architecture {arch!r} is not supported; supported: llama, qwen3")
    sizes = {
        "hidden_size": get(f"{arch}.embedding_length"),
        "intermediate_size": get(f"{arch}.feed_forward_length"),
        "num_hidden_layers": get(f"{arch}.block_count"),
        "num_attention_heads": get(f"{arch}.attention.head_count"),
    }
    if bad := [f"{k}={v}" for k, v in sizes.items() if not isinstance(v, int)]:
        raise CheckpointError(f"{file}: metadata missing or different per layer: {', '.join(bad)}")
    heads = sizes["num_attention_heads"]
    head_dim = get(f"{arch}.attention.key_length", sizes["hidden_size"] // heads)
    kv = get(f"{arch}.attention.head_count_kv", heads)
    problems = [] if isinstance(kv, int) else [f"attention.head_count_kv={kv}"]
    accepted = {
        "expert_count": 0,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.scaling.type": "none",
        "rope.scale_linear": 1.0,
        "attention.sliding_window": 0,
    }
    for key, only in accepted.items():
        if (value := get(f"{arch}.{key}", only)) != only:
            problems.append(f"{key}={value} (only {only})")
    if "token_embd.weight" not in tensors:
        problems.append("no tensor token_embd.weight")
    if problems:
        raise CheckpointError(f"{file}: not supported by mxjax_models.llama: {', '.join(problems)}")

    def short(x):  # GGUF stores float32: 9.999999747378752e-06 is 1e-05
        return float(str(np.float32(x)))

    return LlamaConfig(
        **sizes,
        model_type=arch,
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        num_key_value_heads=kv,
        head_dim=head_dim,
        rms_norm_eps=short(get(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)),
        rope_theta=short(get(f"{arch}.rope.freq_base", 10000.0)),
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        max_position_embeddings=get(f"{arch}.context_length", 2048),
        bos_token_id=get("tokenizer.ggml.bos_token_id"),
        eos_token_id=get("tokenizer.ggml.eos_token_id"),
    )


def _with_rope_divisors(config: LlamaConfig, divisors: np.ndarray, file: str) -> LlamaConfig:
    """GGUF keeps Llama 3.1's RoPE scaling as divisors of the frequencies; find what they came from."""
    if np.all(divisors == 1):
        return config
    # Every Llama 3.x so far: low 1, high 4, original length 8192; the longest wavelength carries the factor itself.
    scaling = Llama3Rope(
        factor=float(divisors.max()),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    scaled = dataclasses.replace(config, rope_scaling=scaling)
    expected = rope_frequencies(config) / rope_frequencies(scaled)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-5):
        raise CheckpointError(f"{file}: rope_freqs.weight is not a Llama 3 scaling with low 1, high 4 and length 8192")
    return scaled
