"""Hugging Face folders made up for the tests of ``quantize_folder``."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np

from mxjax.io import safetensors

BF16 = np.dtype(ml_dtypes.bfloat16)


def heavy(rng: np.random.Generator, shape: tuple[int, ...], dtype=BF16) -> np.ndarray:
    """Values over many powers of two, so that scales differ from block to block."""
    return (rng.standard_normal(shape) * np.exp(2 * rng.standard_normal(shape))).astype(dtype)


def tensors(seed: int = 0, layers: int = 2) -> dict[str, np.ndarray]:
    """A made-up decoder: Linears, experts stacked on a third axis, norms, integers, nothing that is an even chunk."""
    rng = np.random.default_rng(seed)
    out = {"model.embed_tokens.weight": heavy(rng, (50, 96))}
    for i in range(layers):
        head = f"model.layers.{i}"
        out[f"{head}.self_attn.q_proj.weight"] = heavy(rng, (96, 96))
        out[f"{head}.mlp.up_proj.weight"] = heavy(rng, (130, 96))
        out[f"{head}.mlp.down_proj.weight"] = heavy(rng, (96, 320), np.float32)
        out[f"{head}.mlp.down_proj.bias"] = heavy(rng, (96,))
        out[f"{head}.input_layernorm.weight"] = heavy(rng, (96,), np.float16)
        out[f"{head}.self_attn.positions"] = rng.integers(0, 9, 7)
    out["model.norm.weight"] = heavy(rng, (96,))
    return out


def write_source(folder: Path, values: dict[str, np.ndarray], *, shards: int = 1, config: dict | None = None) -> Path:
    """A folder with ``config.json``, a tokenizer, and the tensors in one file or in several with an index."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "made_up", "dtype": "bfloat16"} | (config or {})))
    (folder / "tokenizer.json").write_text('{"model": "none"}')
    (folder / "README.md").write_text("not part of the model")
    if shards == 1:
        safetensors.write(folder / "model.safetensors", values, {"format": "pt"})
        return folder
    names, places = list(values), {}
    for i in range(shards):
        part = {name: values[name] for name in names[i::shards]}
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        safetensors.write(folder / file, part, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
