"""Names and shapes of whole model families: both ways, against published sizes and against transformers."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from mxjax_models import names, params
from mxjax_models.llama import Llama, LlamaConfig

from mxjax.errors import CheckpointError, ConfigError

LLAMA = dict(model_type="llama", num_attention_heads=32, num_key_value_heads=8, vocab_size=128256)
MOE = dict(model_type="qwen3_moe", vocab_size=151936, num_experts=128, head_dim=128, tie_word_embeddings=False)
OSS = dict(model_type="gpt_oss", vocab_size=201088, hidden_size=2880, intermediate_size=2880, head_dim=64,
           num_attention_heads=64, num_key_value_heads=8)  # fmt: skip

# The sizes in the published config.json files, and the number of parameters on the model cards.
PUBLISHED = {
    "Llama-3.2-1B": (
        LLAMA | dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, tie_word_embeddings=True),
        1_235_814_400,
    ),
    "Llama-3.1-8B": (LLAMA | dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32), 8_030_261_248),
    "Llama-3.1-70B": (
        LLAMA | dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64),
        70_553_706_496,
    ),
    "Qwen3-0.6B": (
        dict(model_type="qwen3", vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
             num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True),
        596_049_920,
    ),
    "Qwen3-8B": (
        dict(model_type="qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
             num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False),
        8_190_735_360,
    ),
    "Mixtral-8x7B": (
        dict(model_type="mixtral", vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
             num_attention_heads=32, num_key_value_heads=8, num_local_experts=8),
        46_702_792_704,
    ),
    "Qwen3-30B-A3B": (
        MOE | dict(hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
                   num_attention_heads=32, num_key_value_heads=4),
        30_532_122_624,
    ),
    "Qwen3-235B-A22B": (
        MOE | dict(hidden_size=4096, intermediate_size=12288, moe_intermediate_size=1536, num_hidden_layers=94,
                   num_attention_heads=64, num_key_value_heads=4),
        235_093_634_560,
    ),
    "gpt-oss-20b": (OSS | dict(num_hidden_layers=24, num_local_experts=32), 20_914_757_184),
    "gpt-oss-120b": (OSS | dict(num_hidden_layers=36, num_local_experts=128), 116_829_156_672),
}  # fmt: skip


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_models(model):
    """The number of parameters is the published one, and every name comes back from Hugging Face's."""
    config, count = PUBLISHED[model]
    shapes, family = names.shapes(config), names.family(config)
    assert sum(math.prod(shape) for shape in shapes.values()) == count
    hf = {family.hf_name(path): path for path in shapes}
    assert len(hf) == len(shapes)
    assert all(family.path_of(name) == path for name, path in hf.items())
    assert all(name.startswith("model.") or name == "lm_head.weight" for name in hf)


def test_names_of_each_family():
    table = {
        ("llama", "layers/3/mlp/up_proj/kernel"): "model.layers.3.mlp.up_proj.weight",
        (
            "mixtral",
            "layers/0/block_sparse_moe/experts/7/w2/kernel",
        ): "model.layers.0.block_sparse_moe.experts.7.w2.weight",
        ("mixtral", "layers/0/block_sparse_moe/gate/kernel"): "model.layers.0.block_sparse_moe.gate.weight",
        ("qwen3_moe", "layers/0/mlp/experts/127/down_proj/kernel"): "model.layers.0.mlp.experts.127.down_proj.weight",
        ("qwen3_moe", "layers/0/self_attn/q_norm/scale"): "model.layers.0.self_attn.q_norm.weight",
        ("gpt_oss", "layers/0/mlp/experts/gate_up_proj"): "model.layers.0.mlp.experts.gate_up_proj",
        ("gpt_oss", "layers/0/mlp/experts/down_proj_bias"): "model.layers.0.mlp.experts.down_proj_bias",
        ("gpt_oss", "layers/0/mlp/router/bias"): "model.layers.0.mlp.router.bias",
        ("gpt_oss", "layers/0/self_attn/sinks"): "model.layers.0.self_attn.sinks",
        ("gpt_oss", "layers/0/self_attn/q_proj/bias"): "model.layers.0.self_attn.q_proj.bias",
    }
    for (kind, path), name in table.items():
        family = names.family({"model_type": kind})
        assert family.hf_name(path) == name and family.path_of(name) == path
    assert names.hf_shape("a/kernel", (2, 3)) == (3, 2) and names.hf_shape("experts/gate_up_proj", (4, 2, 3)) == (
        4,
        2,
        3,
    )


def test_unknown_names():
    for kind, path in (
        ("llama", "layers/0/mlp/experts/0/up_proj/kernel"),
        ("mixtral", "layers/0/block_sparse_moe/experts/0/w4/kernel"),
        ("gpt_oss", "layers/0/mlp/experts/gate_up_proj/kernel"),
        ("gpt_oss", "layers/0/mlp/up_proj/kernel"),
        ("qwen3_moe", "layers/0/mlp/gate/scale"),
    ):
        with pytest.raises(CheckpointError, match="is no parameter"):
            names.family({"model_type": kind}).hf_name(path)
    for kind, name in (
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj.weight"),
        ("gpt_oss", "layers.0.self_attn.sinks"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.w1.weight"),
        ("llama", "lm_head.bias.weight"),
    ):
        with pytest.raises(CheckpointError, match="is no tensor"):
            names.family({"model_type": kind}).path_of(name)
    with pytest.raises(ConfigError, match="'gemma' has no names here; known: llama"):
        names.family({"model_type": "gemma"})
    with pytest.raises(ConfigError, match="no hidden_size"):
        names.shapes({"model_type": "llama", "vocab_size": 3})


@pytest.mark.parametrize(
    "kind", [dict(), dict(model_type="qwen3", tie_word_embeddings=True), dict(attention_bias=True)]
)
def test_our_models_have_these_parameters(kind):
    config = LlamaConfig.tiny(**kind)
    state = nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: Llama(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))))
    expected = {"/".join(map(str, path)): tuple(v.shape) for path, v in state}
    assert names.shapes(params.hf_config(config)) == expected
    assert all(isinstance(x, jax.ShapeDtypeStruct) for _, v in state for x in [v.get_value()])


def test_dense_layers_of_a_mixture():
    base = dict(PUBLISHED["Qwen3-30B-A3B"][0], num_hidden_layers=4, num_experts=2)
    shapes = names.shapes(base | dict(decoder_sparse_step=2, mlp_only_layers=[3]))
    dense = {i for i in range(4) if f"layers/{i}/mlp/up_proj/kernel" in shapes}
    assert dense == {0, 2, 3} and shapes["layers/0/mlp/up_proj/kernel"] == (2048, 6144)
    assert shapes["layers/1/mlp/experts/1/up_proj/kernel"] == (2048, 768)


@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Qwen3-8B", "gpt-oss-120b", "Mixtral-8x7B", "Qwen3-30B-A3B"])
def test_transformers_has_these_parameters(model):
    """Full-size models without memory: the same names and shapes; mixtures are fused in memory, so only their sum."""
    torch = pytest.importorskip("torch", reason="compares with PyTorch: pip install 'mxjax[test]'")
    transformers = pytest.importorskip("transformers", reason="compares with it: pip install 'mxjax[test]'")
    config, count = PUBLISHED[model]
    options = {k: v for k, v in config.items() if k != "model_type"}
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(config["model_type"], **options)
        )
    found = {name: tuple(p.shape) for name, p in theirs.named_parameters()}
    assert sum(math.prod(shape) for shape in found.values()) == count
    family = names.family(config)
    ours = {family.hf_name(path): names.hf_shape(path, shape) for path, shape in names.shapes(config).items()}
    if config["model_type"] in ("mixtral", "qwen3_moe"):
        # In memory the router and the experts have other names than on disk.
        shared = found.keys() & ours.keys()
        assert {n for n in ours if n not in shared} == {
            n for n in ours if re.search(r"block_sparse_moe|mlp\.experts", n)
        }
        found, ours = ({n: shapes[n] for n in shared} for shapes in (found, ours))
    assert found == ours
