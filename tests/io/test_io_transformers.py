"""transformers, with the compressed-tensors package, loads what mxjax wrote and computes with our weights.

How transformers 5 runs such a folder on a CPU. By default the weights are decompressed at the first forward pass and
the input of each quantized Linear goes through the scheme's input_activations: W4A4 is emulated. With
``CompressedTensorsConfig(dequantize=True)`` they are decompressed while loading, and activations stay as they are.

Every comparison is exact: the reference runs the same torch operations on the weights that mxjax dequantizes.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from io_cases import INTEROP, SOURCE, config_of, quantized_source, raw_tensors

import mxjax
from mxjax.config import FUSED

torch = pytest.importorskip("torch", reason="compares with PyTorch: pip install 'mxjax[test]'")
transformers = pytest.importorskip("transformers", reason="loads the folder: pip install 'mxjax[test]'")
pytest.importorskip("compressed_tensors", reason="decompresses the folder: pip install 'mxjax[test]'")

IDS = np.arange(32).reshape(2, 16) * 7 % 256


def logits(model):
    with torch.no_grad():
        return model(torch.tensor(IDS)).logits.float().numpy()


def reference(tree, dtype, activation=None):
    """The source model with the weights of ``tree`` and, if asked, our activation quantization in front of Linears."""
    model = transformers.AutoModelForCausalLM.from_pretrained(SOURCE, dtype=dtype)
    flat = jax.tree_util.tree_flatten_with_path(mxjax.dequantize(tree, "bfloat16"))[0]
    state = {".".join(k.key for k in path): torch.tensor(np.asarray(w, np.float32)).to(dtype) for path, w in flat}
    model.load_state_dict(state, strict=True)

    def quantize_input(module, args):
        x = mxjax.fake_quantize(jnp.asarray(args[0].float().numpy()), activation)
        return (torch.tensor(np.asarray(x)).to(dtype),)

    for name, module in model.named_modules():
        if activation and isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(quantize_input)
    return logits(model)


@pytest.fixture(
    scope="module", params=[("mxfp4", None), ("mxfp4", "mxfp4"), ("nvfp4", None), ("nvfp4", "nvfp4")], ids=str
)
def case(request, tmp_path_factory):
    fmt, activation = request.param
    tree = quantized_source(fmt, activation)
    if (fmt, activation) == ("nvfp4", "nvfp4"):
        leaf = lambda x: isinstance(x, mxjax.QWeight)  # noqa: E731
        calibrated = lambda x: dataclasses.replace(x, input_scale=jnp.float32(1 / 720)) if leaf(x) else x  # noqa: E731
        tree = jax.tree.map(calibrated, tree, is_leaf=leaf)
    folder = tmp_path_factory.mktemp("io") / f"{fmt}_{activation}"
    mxjax.save(folder, tree, "compressed-tensors", config=config_of(SOURCE))
    return fmt, activation, tree, folder


# It tells that its own loading options win over the folder's, which is what is asked for.
SAYS_SO = pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")


@SAYS_SO
def test_dequantized_while_loading(case):
    _, _, tree, folder = case
    config = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
    assert np.array_equal(logits(model), reference(tree, torch.float32))


def test_decompressed_at_the_first_forward_pass(case):
    _, activation, tree, folder = case
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    got = logits(model)
    weights = dict(model.named_parameters())
    down = weights["model.layers.0.mlp.down_proj.weight"].detach().float().numpy()
    q = tree["model"]["layers"]["0"]["mlp"]["down_proj"]["weight"]
    assert np.array_equal(down, np.asarray(q.dequantize("bfloat16"), np.float32))
    if activation != "nvfp4":
        # MXFP4: its dynamic quantization of activations and ours agree in every bit of the logits.
        assert np.array_equal(got, reference(tree, torch.bfloat16, activation))
    else:
        # NVFP4: it computes the block scales of activations in bfloat16 and we in float32, so some differ by one step.
        stored = raw_tensors(folder / "model.safetensors")["model.layers.0.mlp.down_proj.input_global_scale"][2]
        assert weights["model.layers.0.mlp.down_proj.input_global_scale"].detach().numpy().tobytes() == stored
    float_inputs = reference(tree, torch.bfloat16)
    assert np.array_equal(got, float_inputs) == (activation is None)


@SAYS_SO
@pytest.mark.parametrize("peer", ["modelopt_nvfp4", "quark_mxfp4"])
def test_peers_files_after_a_conversion(tmp_path, peer):
    """What ModelOpt and Quark wrote, as compressed-tensors."""
    mxjax.convert(INTEROP / peer, tmp_path / "out", "compressed-tensors")
    config = transformers.CompressedTensorsConfig(dequantize=True)
    options = dict(dtype=torch.float32, quantization_config=config)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", **options)
    assert np.array_equal(logits(model), reference(mxjax.load(INTEROP / peer), torch.float32))


def test_mixed_groups(tmp_path):
    """MXFP4, NVFP4 and MXFP8 in one folder, each group with a format of its own.

    Decompressed at the first forward pass: while loading, transformers 5.24 takes one group for all layers.
    """
    rules = [
        mxjax.Rule(path="self_attn", weight="nvfp4", axis=-1),
        mxjax.Rule(path="down_proj", weight="mxfp8_e4m3", axis=-1),
        mxjax.Rule(weight="mxfp4", axis=-1),
    ]
    tree = mxjax.quantize(mxjax.load(SOURCE), mxjax.QuantConfig(rules=rules, share_scales=FUSED))
    mxjax.save(tmp_path / "out", tree, "compressed-tensors", config=config_of(SOURCE))
    groups = config_of(tmp_path / "out")["quantization_config"]["config_groups"].values()
    assert {group["format"] for group in groups} == {"mxfp4-pack-quantized", "nvfp4-pack-quantized", "mxfp8-quantized"}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert np.array_equal(logits(model), reference(tree, torch.bfloat16))


@SAYS_SO
def test_tied_head(tmp_path):
    tree = quantized_source("mxfp4", None)
    del tree["lm_head"]
    mxjax.save(tmp_path / "out", tree, "compressed-tensors", config={**config_of(SOURCE), "tie_word_embeddings": True})
    config = transformers.CompressedTensorsConfig(dequantize=True)
    options = dict(dtype=torch.float32, quantization_config=config, output_loading_info=True)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", **options)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    tied = {**tree, "lm_head": {"weight": tree["model"]["embed_tokens"]["weight"]}}
    assert np.array_equal(logits(model), reference(tied, torch.float32))
