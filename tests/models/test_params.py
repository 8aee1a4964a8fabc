"""Safetensors folders that the test writes, every way in which they can be wrong, and the names both ways."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from mxjax_models import llama, params
from mxjax_models.llama import Llama3Rope, LlamaConfig
from safetensors.numpy import save_file

KINDS = {
    "llama": {},
    "llama-tied-biases": dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "qwen3": dict(model_type="qwen3", head_dim=32),
}


def weights(config: LlamaConfig, dtype=np.float32) -> dict[str, np.ndarray]:
    """Random tensors under Hugging Face names and PyTorch shapes, from the abstract model."""
    rng = np.random.default_rng(0)
    out = {}
    for path, v in nnx.to_flat_state(nnx.state(params.abstract(config))):
        shape = v.shape[::-1] if path[-1] == "kernel" else v.shape
        out[params.hf_name("/".join(map(str, path)))] = rng.standard_normal(shape, np.float32).astype(dtype)
    return out


def write_folder(folder, config, tensors, shards=0, **config_changes):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(params.hf_config(config) | config_changes))
    if not shards:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names, weight_map = sorted(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        save_file({n: tensors[n] for n in names[i::shards]}, folder / file)
        weight_map |= dict.fromkeys(names[i::shards], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def assert_holds(model, tensors):
    got = params.to_hf(model)
    assert got.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)
        assert got[name].flags.c_contiguous


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shards", [0, 3])
def test_safetensors(tmp_path, kind, shards):
    config = LlamaConfig.tiny(**KINDS[kind])
    tensors = weights(config)
    model = llama.load(write_folder(tmp_path, config, tensors, shards))
    assert model.config == config
    assert_holds(model, tensors)
    kernel = model.layers[0].mlp.down_proj.kernel[...]
    np.testing.assert_array_equal(kernel, tensors["model.layers.0.mlp.down_proj.weight"].T)  # (in, out)


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_safetensors_dtypes(tmp_path, stored, dtype):
    config = LlamaConfig.tiny(num_hidden_layers=1)
    tensors = weights(config, stored)
    model = params.load(write_folder(tmp_path, config, tensors), dtype)
    assert {x.dtype for x in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(dtype)}
    assert_holds(model, {n: t.astype(dtype) for n, t in tensors.items()})


def test_ignored_tensors(tmp_path):
    """RoPE buffers of old exports, and a tied head that is stored all the same."""
    config = LlamaConfig.tiny(tie_word_embeddings=True)
    tensors = weights(config)
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    more["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    assert_holds(llama.load(write_folder(tmp_path, config, tensors | more)), tensors)
    more["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    with pytest.raises(ValueError, match=r"lm_head.weight in model.safetensors differs from the embedding"):
        llama.load(write_folder(tmp_path, config, tensors | more))


def test_mapping_errors_come_together(tmp_path):
    config = LlamaConfig.tiny()
    tensors = weights(config)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.experts.weight"] = np.zeros((2, 3), np.float32)
    tensors["model.layers.1.self_attn.k_proj.weight"] = np.zeros((64, 64), np.float32)
    tensors["model.layers.1.self_attn.v_proj.weight"] = np.zeros((32, 64), np.int8)
    with pytest.raises(ValueError) as error:
        llama.load(write_folder(tmp_path, config, tensors, shards=2))
    text = str(error.value)
    assert "4 problems" in text
    assert "missing model.norm.weight in" in text and "shape (64,)" in text
    assert "unexpected model.layers.0.mlp.experts.weight in model-0000" in text and "(2, 3)" in text
    assert "model.layers.1.self_attn.k_proj.weight in model-0000" in text
    assert "shape (64, 64), but the config asks for (32, 64)" in text
    assert "dtype I8, not one of F32, F16, BF16" in text


def test_missing_shard_and_lying_index(tmp_path):
    config = LlamaConfig.tiny(num_hidden_layers=1)
    folder = write_folder(tmp_path, config, weights(config), shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    lost = [n for n, f in index["weight_map"].items() if f.startswith("model-00002")]
    with pytest.raises(ValueError, match=r"missing shard model-00002-of-00003.safetensors") as error:
        llama.load(folder)
    for name in lost:
        assert f"missing {name} in model-00002-of-00003.safetensors" in str(error.value)
    index["weight_map"] |= dict.fromkeys(lost, "model-00001-of-00003.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"missing {lost[0]} in model-00001-of-00003.safetensors"):
        llama.load(folder)


@pytest.mark.parametrize("file", ["../evil.safetensors", "/etc/passwd", "a/../../b.safetensors", "..\\b", "C:b", ""])
def test_index_must_stay_inside(tmp_path, file):
    config = LlamaConfig.tiny(num_hidden_layers=1)
    folder = write_folder(tmp_path, config, weights(config), shards=1)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    with pytest.raises(ValueError, match="no file of this folder"):
        llama.load(folder)


def test_folder_errors(tmp_path):
    config = LlamaConfig.tiny(num_hidden_layers=1)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        llama.load(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        llama.load(tmp_path)
    (tmp_path / "model.bin").touch()
    with pytest.raises(ValueError, match="neither a folder nor"):
        llama.load(tmp_path / "model.bin")
    with pytest.raises(ValueError, match="int8 is not a float type"):
        llama.load(tmp_path, jnp.int8)
    folder = write_folder(tmp_path, config, weights(config), quantization_config={"quant_method": "fp_quant"})
    with pytest.raises(ValueError, match=r"quantized checkpoint.*'fp_quant'"):
        llama.load(folder)
    write_folder(tmp_path, config, weights(config), model_type="mamba")
    with pytest.raises(ValueError, match="model_type 'mamba'"):
        llama.load(folder)
    write_folder(tmp_path, config, {})
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        llama.load(folder)


def test_nothing_is_allocated_before_loading():
    leaves = jax.tree.leaves(nnx.state(params.abstract(LlamaConfig.tiny(), jnp.bfloat16)))
    assert leaves and all(isinstance(x, jax.ShapeDtypeStruct) and x.dtype == jnp.bfloat16 for x in leaves)


@pytest.mark.parametrize("kind", KINDS)
def test_names_both_ways(kind):
    for path, _ in nnx.to_flat_state(nnx.state(params.abstract(LlamaConfig.tiny(**KINDS[kind])))):
        path = "/".join(map(str, path))
        assert params.path_of(params.hf_name(path)) == path
    assert params.hf_name("layers/11/self_attn/q_proj/kernel") == "model.layers.11.self_attn.q_proj.weight"
    assert params.hf_name("layers/11/self_attn/q_proj") == "model.layers.11.self_attn.q_proj"
    assert params.path_of("model.layers.11.self_attn.q_proj") == "layers/11/self_attn/q_proj"
    assert params.path_of("model.embed_tokens.weight") == "embed_tokens/embedding"
    assert params.path_of("lm_head.weight") == "lm_head/kernel"


def test_unknown_names():
    for path in (
        "",
        "kernel",
        "layers/0/mlp/experts/kernel",
        "layers/x/mlp/up_proj/kernel",
        "norm/kernel",
        "norm/bias",
    ):
        with pytest.raises(ValueError, match="is no parameter"):
            params.hf_name(path)
    for name in ("", "norm.weight", "model.lm_head.weight", "model.norm.bias", "model.layers.0.mlp.up_proj.qweight"):
        with pytest.raises(ValueError, match="is no tensor"):
            params.path_of(name)


def test_to_hf_refuses_foreign_parameters():
    model = llama.Llama(LlamaConfig.tiny(num_hidden_layers=1), rngs=nnx.Rngs(0))
    model.layers[0].mlp.up_proj.codes = nnx.Param(jnp.zeros((2,), jnp.uint8))
    with pytest.raises(ValueError, match="layers/0/mlp/up_proj/codes"):
        params.to_hf(model)


def test_config_round_trip():
    rope = Llama3Rope(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    for options in (
        *KINDS.values(),
        dict(rope_scaling=rope, rope_theta=5e5, eos_token_id=(1, 2), bos_token_id=0),
        dict(eos_token_id=3, rms_norm_eps=1e-5, max_position_embeddings=77),
    ):
        config = LlamaConfig.tiny(**options)
        assert LlamaConfig.from_hf(json.loads(json.dumps(params.hf_config(config)))) == config
