"""gpt-oss: experts in blocks and scales."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from io_cases import E2M1, assert_same, config_of, raw_tensors

import mxjax
from mxjax.errors import BlockShapeError, CheckpointError
from mxjax.io import layouts
from mxjax.io import safetensors as st
from mxjax.io.layouts.gpt_oss import join_gate_up, split_gate_up

WEIGHTS = "model.safetensors"
EXPERTS = "model.layers.0.mlp.experts"


def folder_of(path, e=3, inner=64, hidden=96, seed=0, config=None, openai=False):
    """A folder with random bytes, as the authors lay them out."""
    path.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    name = (lambda i, part: f"block.0.mlp.mlp{i}_weight.{part}") if openai else None
    tensors = {} if openai else {"lm_head.weight": np.ones((8, hidden), np.float32)}
    for i, (which, n, k) in enumerate((("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)), 1):
        blocks = rng.integers(0, 256, (e, n, k // 32, 16), np.uint8)
        scales = rng.integers(110, 130, (e, n, k // 32), np.uint8)
        tensors[name(i, "blocks") if openai else f"{EXPERTS}.{which}_blocks"] = blocks
        tensors[name(i, "scales") if openai else f"{EXPERTS}.{which}_scales"] = scales
        tensors[f"block.0.mlp.mlp{i}_bias" if openai else f"{EXPERTS}.{which}_bias"] = rng.random((e, n), np.float32)
    st.write(path / WEIGHTS, tensors, None if openai else {"format": "pt"})
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config = {"model_type": "gpt_oss", "dtype": "bfloat16", "quantization_config": method} if config is None else config
    (path / "config.json").write_text(json.dumps(config))
    return tensors


def decode(blocks, scales):
    """[E, N, K] in float64, by the definition: low nibble first, 2^(byte - 127)."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    values = np.where(codes & 8, -1.0, 1.0) * E2M1[codes & 7] * np.exp2(scales.astype(np.float64) - 127)[..., None]
    return values.reshape(*blocks.shape[:2], -1)


@pytest.mark.parametrize("e, inner, hidden", [(3, 64, 96), (1, 32, 32), (5, 160, 64)])
def test_read_write_and_values(tmp_path, e, inner, hidden):
    tensors = folder_of(tmp_path / "peer", e, inner, hidden)
    tree = mxjax.load(tmp_path / "peer")
    experts = tree["model"]["layers"]["0"]["mlp"]["experts"]
    assert experts["gate_up_proj"].shape == (e, hidden, 2 * inner)  # as the parameter of the model: [E, in, out]
    assert experts["down_proj"].shape == (e, inner, hidden)
    for name in ("gate_up_proj", "down_proj"):
        exact = decode(tensors[f"{EXPERTS}.{name}_blocks"], tensors[f"{EXPERTS}.{name}_scales"])
        assert np.array_equal(np.asarray(experts[name].dequantize("float32"), np.float64), exact.swapaxes(1, 2))
        assert experts[name].activation is None and experts[name].dtype == jnp.bfloat16
    mxjax.save(tmp_path / "ours", tree)
    mxjax.save(tmp_path / "back", mxjax.load(tmp_path / "ours"), "gpt-oss", config=config_of(tmp_path / "peer"))
    assert raw_tensors(tmp_path / "back" / WEIGHTS) == raw_tensors(tmp_path / "peer" / WEIGHTS)
    assert {**config_of(tmp_path / "back"), "tie_word_embeddings": None} == {
        **config_of(tmp_path / "peer"),
        "tie_word_embeddings": None,  # written always: a head with a tensor of its own is not tied
    }


def test_transformers_decodes_the_same(tmp_path):
    torch = pytest.importorskip("torch", reason="compares with PyTorch: pip install 'mxjax[test]'")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4", reason="its decoder: pip install 'mxjax[test]'")
    tensors = folder_of(tmp_path)
    experts = mxjax.load(tmp_path)["model"]["layers"]["0"]["mlp"]["experts"]
    for name in ("gate_up_proj", "down_proj"):
        blocks, scales = (torch.tensor(tensors[f"{EXPERTS}.{name}_{part}"]) for part in ("blocks", "scales"))
        theirs = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).numpy()
        assert np.array_equal(theirs, experts[name].dequantize("float32"))


@pytest.mark.parametrize("e", [32, 128])
def test_shapes_of_the_published_models(e):
    """gpt-oss 20B and 120B, without their bytes."""
    layout = layouts.get("gpt-oss")
    scheme = layouts.Scheme(mxjax.get_format("mxfp4"))
    up = layout.shapes_of(f"{EXPERTS}.gate_up_proj", scheme, (e, 5760, 2880))
    down = layout.shapes_of(f"{EXPERTS}.down_proj", scheme, (e, 2880, 2880))
    assert {n.removeprefix(f"{EXPERTS}."): shape for n, (_, shape) in (up | down).items()} == {
        "gate_up_proj_blocks": (e, 5760, 90, 16),
        "gate_up_proj_scales": (e, 5760, 90),
        "down_proj_blocks": (e, 2880, 90, 16),
        "down_proj_scales": (e, 2880, 90),
    }


def test_quantize_and_write(tmp_path):
    """From float experts: even rows on disk are gate, odd ones up."""
    gate, up = (jax.random.normal(jax.random.key(i), (2, 64, 32)) for i in range(2))
    merged = jnp.stack([gate, up], axis=-1).reshape(2, 64, 64)
    tree = {"model": {"layers": {"0": {"mlp": {"experts": {"gate_up_proj": merged}}}}}}
    q = mxjax.quantize(tree, "mxfp4_a16")
    mxjax.save(tmp_path / "out", q, "gpt-oss")
    raw = raw_tensors(tmp_path / "out" / WEIGHTS)
    _, shape, data = raw[f"{EXPERTS}.gate_up_proj_blocks"]
    assert shape == [2, 64, 2, 16]
    blocks = np.frombuffer(data, np.uint8).reshape(shape)
    alone = mxjax.quantize_array(gate, "mxfp4", axis=-2)
    assert np.array_equal(blocks[:, ::2].reshape(2, 32, 32), alone.codes)
    assert_same(mxjax.load(tmp_path / "out"), q)


def test_split_and_join(tmp_path):
    gate, up = (jax.random.normal(jax.random.key(i), (2, 64, 32)) for i in range(2))
    merged = jnp.stack([gate, up], axis=-1).reshape(2, 64, 64)
    q = mxjax.quantize({"w": {"kernel": merged}}, "mxfp4_a16")["w"]["kernel"]
    g, u = split_gate_up(q)
    assert np.array_equal(g.dequantize(), q.dequantize()[..., ::2])
    assert np.array_equal(u.dequantize(), q.dequantize()[..., 1::2])
    assert_same(join_gate_up(g, u), q)
    with pytest.raises(BlockShapeError, match="no pair"):
        join_gate_up(g, q)


def test_openai_names(tmp_path):
    """Their own files have no quantization_config: the names say what it is."""
    tensors = folder_of(tmp_path / "peer", config={"num_experts": 3}, openai=True)
    tree = mxjax.load(tmp_path / "peer")
    w = tree["block"]["0"]["mlp"]["mlp1_weight"]
    assert w.shape == (3, 128, 96)  # [E, out, in]
    exact = decode(tensors["block.0.mlp.mlp1_weight.blocks"], tensors["block.0.mlp.mlp1_weight.scales"])
    assert np.array_equal(np.asarray(w.dequantize("float32"), np.float64), exact)
    mxjax.save(tmp_path / "back", tree, "gpt-oss", config=config_of(tmp_path / "peer"))
    assert raw_tensors(tmp_path / "back" / WEIGHTS) == raw_tensors(tmp_path / "peer" / WEIGHTS)


REFUSED = {
    "activations": (dict(weight="mxfp4", activation="mxfp4"), "activations in mxfp4; the layout is weight-only"),
    "format": (dict(weight="nvfp4"), "format nvfp4"),
    "third": (dict(weight="mxfp4", weight_scale="third"), "global factor"),
    "rotation": (dict(weight="mxfp4", transform=mxjax.transforms.Hadamard(32)), r"transform \(Hadamard\)"),
    "axis": (dict(weight="mxfp4", axis=-1), "quantized along axis -1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, case):
    options, reason = REFUSED[case]
    w = jax.random.normal(jax.random.key(0), (2, 64, 64))
    tree = {"model": {"layers": {"0": {"mlp": {"experts": {"down_proj": w}}}}}}
    q = mxjax.quantize(tree, mxjax.QuantConfig(rules=[mxjax.Rule(**options)]))
    with pytest.raises(CheckpointError, match=rf"gpt-oss cannot carry 1(.|\n)*down_proj: .*{reason}"):
        mxjax.save(tmp_path / "out", q, "gpt-oss")
    assert list(tmp_path.iterdir()) == []


UP = f"{EXPERTS}.gate_up_proj"
DAMAGE = {
    "no scales": ({f"{UP}_scales": None}, rf"{UP}_scales is missing"),
    "no blocks": ({f"{UP}_blocks": None}, rf"{UP}: blocks are missing .*{UP}_scales in"),
    "scales cut": ({f"{UP}_scales": lambda x: x[:, 1:]}, rf"{UP}_scales in .*\(3, 127, 3\), not uint8 \(3, 128, 3\)"),
    "blocks of 8": ({f"{UP}_blocks": lambda x: x[..., :8]}, rf"{UP}_blocks in .*\(3, 128, 3, 8\)"),
    "blocks flat": ({f"{UP}_blocks": lambda x: x.reshape(3, 128, 48)}, rf"{UP}_blocks in .*\(3, 128, 48\)"),
    "signed": ({f"{UP}_blocks": lambda x: x.view(np.int8)}, rf"{UP}_blocks in .*int8"),
    "no experts": ({f"{UP}_blocks": lambda x: x[:0], f"{UP}_scales": lambda x: x[:0]}, r"\(0, 128, 3, 16\)"),
    "unknown": ({f"{UP}_zeros": np.zeros(3, np.uint8)}, rf"{UP}_zeros in .*unknown tensor"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged(tmp_path, case):
    changes, message = DAMAGE[case]
    tensors = folder_of(tmp_path)
    for name, change in changes.items():
        new = change(tensors[name]) if callable(change) else change
        tensors.pop(name, None)
        if new is not None:
            tensors[name] = np.ascontiguousarray(new)
    st.write(tmp_path / WEIGHTS, tensors)
    with pytest.raises(CheckpointError, match=message):
        mxjax.load(tmp_path)


def test_packed_but_not_to_be_converted(tmp_path):
    """Patterns stand for a module and all within."""
    folder_of(tmp_path)
    config = config_of(tmp_path)
    config["quantization_config"]["modules_to_not_convert"] = ["model.layers.*.mlp"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="the config does not quantize"):
        mxjax.load(tmp_path)
