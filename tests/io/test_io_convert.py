"""``convert``: one layout to another through memory maps, without a change of any value."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from io_cases import INTEROP, PEERS, SOURCE, assert_same, config_of, quantized_source, raw_tensors
from mxjax_models import params

import mxjax
from mxjax.errors import CheckpointError, ConfigError
from mxjax.io import HOST, hf_write, layout_of
from mxjax.io import safetensors as st

WEIGHTS = "model.safetensors"
MODELOPT, QUARK = INTEROP / "modelopt_nvfp4", INTEROP / "quark_mxfp4"
FOLDERS = {
    "compressed-tensors": PEERS["nvfp4"],
    "modelopt": MODELOPT,
    "quark": QUARK,
}


@pytest.mark.parametrize(
    "first, second",
    [
        ("modelopt", "compressed-tensors"),
        ("modelopt", "quark"),
        ("modelopt", "mxjax"),
        ("modelopt", "orbax"),
        ("modelopt", "modelopt"),
        ("compressed-tensors", "modelopt"),
        ("compressed-tensors", "mxjax"),
        ("quark", "compressed-tensors"),
        ("quark", "orbax"),
    ],
)
def test_there_and_back(tmp_path, first, second):
    source = FOLDERS[first]
    mxjax.convert(source, tmp_path / "there", second)
    assert layout_of(tmp_path / "there") == second
    assert_same(mxjax.load(tmp_path / "there"), mxjax.load(source))
    mxjax.io.convert(tmp_path / "there", tmp_path / "back", first)
    assert raw_tensors(tmp_path / "back" / WEIGHTS) == raw_tensors(source / WEIGHTS)
    for file in source.glob("*.json"):
        assert json.loads((tmp_path / "back" / file.name).read_text()) == json.loads(file.read_text())


def test_the_layout_of_a_folder(tmp_path):
    assert {name: layout_of(folder) for name, folder in FOLDERS.items()} == {name: name for name in FOLDERS}
    assert layout_of(SOURCE) is None
    with pytest.raises(CheckpointError, match=r"config\.json"):
        layout_of(tmp_path)


def test_names_of_a_model(tmp_path):
    """A tree with a model's own paths gets Hugging Face's names, and the other way round."""
    mxjax.convert(MODELOPT, tmp_path / "ours", "mxjax", paths=params.path_of)
    tree = mxjax.load(tmp_path / "ours")
    assert tree["layers"]["0"]["mlp"]["up_proj"]["kernel"].qtensor.axis == -2
    assert tree["lm_head"]["kernel"].shape == (64, 256)
    mxjax.convert(tmp_path / "ours", tmp_path / "back", "modelopt", names=params.hf_name)
    assert raw_tensors(tmp_path / "back" / WEIGHTS) == raw_tensors(MODELOPT / WEIGHTS)
    mxjax.convert(MODELOPT, tmp_path / "turned", "quark", paths=params.path_of)  # names come back by themselves
    mxjax.convert(MODELOPT, tmp_path / "plain", "quark")
    assert raw_tensors(tmp_path / "turned" / WEIGHTS) == raw_tensors(tmp_path / "plain" / WEIGHTS)


def test_divisors_come_back_bit_for_bit(tmp_path):
    """From compressed-tensors to itself: the stored divisors, also those that share a reciprocal with a neighbour."""
    tensors = {n: np.array(e.read()) for n, e in st.read(PEERS["nvfp4"] / WEIGHTS).items()}
    rng = np.random.default_rng(0)
    for name in tensors:
        if name.endswith("weight_global_scale"):
            tensors[name] = rng.uniform(1.0, 2.0, 1).astype(np.float32)
    (tmp_path / "peer").mkdir()
    st.write(tmp_path / "peer" / WEIGHTS, tensors, {"format": "pt"})
    (tmp_path / "peer" / "config.json").write_bytes((PEERS["nvfp4"] / "config.json").read_bytes())
    with pytest.warns(mxjax.errors.MxjaxWarning, match="different tensor scales"):
        mxjax.convert(tmp_path / "peer", tmp_path / "out", "compressed-tensors")
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (tmp_path / "peer" / WEIGHTS).read_bytes()


def test_nothing_is_read_into_memory(tmp_path, monkeypatch):
    """Every array of the tree that is written is a memory map of the source."""
    seen = []
    write = hf_write.write
    monkeypatch.setattr(
        hf_write, "write", lambda folder, tree, **options: seen.append(tree) or write(folder, tree, **options)
    )
    mxjax.convert(QUARK, tmp_path / "out", "compressed-tensors")
    leaves = jax.tree.leaves(seen[0])
    assert len(leaves) == 35

    def is_map(x):
        return isinstance(x, np.memmap) or (isinstance(x, np.ndarray) and x.base is not None and is_map(x.base))

    assert all(is_map(x) for x in leaves)
    assert all(not x.flags.writeable for x in leaves)


def test_loading_to_the_host():
    tree, loaded = mxjax.load(MODELOPT, shardings=HOST), mxjax.load(MODELOPT)
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(tree)) and repr(HOST) == "HOST"
    assert_same(jax.tree.map(jnp.asarray, tree), loaded)
    assert str(mxjax.summary(tree)) == str(mxjax.summary(loaded))
    only = mxjax.load(MODELOPT, shardings=lambda name: HOST if "embed_tokens" in name else None)
    assert isinstance(only["model"]["embed_tokens"]["weight"], np.ndarray)
    assert isinstance(only["lm_head"]["weight"], jax.Array)


def test_companions_come_along(tmp_path):
    (tmp_path / "in").mkdir()
    for file in QUARK.iterdir():
        (tmp_path / "in" / file.name).write_bytes(file.read_bytes())
    for name in ("tokenizer.json", "tokenizer.model", "chat_template.jinja", "generation_config.json"):
        (tmp_path / "in" / name).write_text(name)
    for name in ("README.md", "recipe.yaml", "optimizer.pt"):
        (tmp_path / "in" / name).write_text(name)
    mxjax.convert(tmp_path / "in", tmp_path / "out", "mxjax")
    found = sorted(p.name for p in (tmp_path / "out").iterdir())
    own = {"arrays.safetensors", "config.json", "mxjax.json"}
    assert set(found) == own | {"chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer.model"}
    assert "quantization_config" not in config_of(tmp_path / "out")
    mxjax.convert(tmp_path / "out", tmp_path / "back", "quark")
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "tokenizer.json"
    mxjax.convert(QUARK, tmp_path / "back", "compressed-tensors", overwrite=True)
    assert layout_of(tmp_path / "back") == "compressed-tensors"


REFUSED = {
    "wush": mxjax.transforms.BlockMatrix(jnp.eye(32)[None].repeat(2, 0)),
    "smooth": mxjax.transforms.ChannelScale(jnp.full(64, 2.0)),
    "chain": mxjax.transforms.Chain((mxjax.transforms.Hadamard(32), mxjax.transforms.ChannelScale(jnp.ones(64)))),
}


@pytest.mark.parametrize("to", ["compressed-tensors", "modelopt", "quark", "gpt-oss"])
@pytest.mark.parametrize("what", [*REFUSED, "low rank"])
def test_what_a_layout_cannot_carry_is_refused_before_anything_is_written(tmp_path, what, to):
    x = jax.random.normal(jax.random.key(0), (8, 64))
    name = "experts" if to == "gpt-oss" else "weight"
    fmt, axis = ("mxfp4", -2) if to == "gpt-oss" else ("nvfp4", -1)
    x = jnp.stack([x.T, x.T]) if to == "gpt-oss" else x
    w = mxjax.quantize(
        {"w": x}, mxjax.QuantConfig(rules=[mxjax.Rule(weight=fmt, axis=axis, transform=REFUSED.get(what))])
    )
    w = w["w"]
    if what == "low rank":
        a, b = ((2, 4, 64), (2, 8, 4)) if to == "gpt-oss" else ((4, 64), (8, 4))
        w = mxjax.QWeight(qtensor=w.qtensor, branch=mxjax.LowRank(a=jnp.ones(a), b=jnp.ones(b)))
    tree = (
        {"model": {"layers": {"0": {"mlp": {"experts": {"down_proj": w}}}}}}
        if name == "experts"
        else {"up": {"weight": w}}
    )
    mxjax.save(tmp_path / "ours", tree)
    reason = "low-rank branch" if what == "low rank" else rf"transform \({type(REFUSED[what]).__name__}\)"
    with pytest.raises(
        CheckpointError, match=rf"{re.escape(to)} cannot carry 1(.|\n)*{reason}(.|\n)*'mxjax' and 'orbax'"
    ):
        mxjax.convert(tmp_path / "ours", tmp_path / "out", to)
    assert [p.name for p in tmp_path.iterdir()] == ["ours"]
    mxjax.convert(tmp_path / "ours", tmp_path / "orbax", "orbax")  # as the message says
    assert_same(mxjax.load(tmp_path / "orbax"), tree)


def test_bad_calls(tmp_path):
    with pytest.raises(CheckpointError, match="is the source itself"):
        mxjax.convert(QUARK, QUARK, "compressed-tensors", overwrite=True)
    with pytest.raises(ConfigError, match="unknown checkpoint format 'gguf'"):
        mxjax.convert(QUARK, tmp_path / "out", "gguf")
    with pytest.raises(CheckpointError, match="nothing in the tree is quantized"):
        mxjax.convert(SOURCE, tmp_path / "out", "quark")
    with pytest.raises(CheckpointError, match="is no folder"):
        mxjax.convert(tmp_path / "none", tmp_path / "out", "quark")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"not empty|holds"):
        mxjax.convert(QUARK, tmp_path / "out", "mxjax")
    with pytest.raises(CheckpointError, match="thesis"):
        mxjax.convert(QUARK, tmp_path / "out", "mxjax", overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"] and (tmp_path / "out" / "thesis.txt").exists()


def test_a_failed_conversion_keeps_the_old_folder(tmp_path):
    mxjax.convert(QUARK, tmp_path / "out", "compressed-tensors")
    before = raw_tensors(tmp_path / "out" / WEIGHTS)
    with pytest.raises(CheckpointError, match="modelopt cannot carry 14 of"):
        mxjax.convert(QUARK, tmp_path / "out", "modelopt", overwrite=True)
    assert raw_tensors(tmp_path / "out" / WEIGHTS) == before and len(list(tmp_path.iterdir())) == 1


def test_eight_devices_another_mesh(tmp_path):
    """Saved from a (8,) mesh, restored onto (2, 4), rows and blocks turned: no device holds a whole weight."""
    P = jax.sharding.PartitionSpec
    old, new = jax.make_mesh((8,), ("x",)), jax.make_mesh((2, 4), ("a", "b"))
    tree = quantized_source("nvfp4", None)
    for format in ("orbax", "mxjax"):
        on_old = jax.tree.map(
            lambda x: jax.device_put(x, jax.sharding.NamedSharding(old, P("x") if x.ndim == 2 else P())), tree
        )
        mxjax.save(tmp_path / format, on_old, format)

        def onto(name):
            spec = P("b", "a") if name.endswith((".codes", ".scales", "/weight")) else P()
            return jax.sharding.NamedSharding(new, spec)

        loaded = mxjax.load(tmp_path / format, shardings=onto)
        assert_same(jax.device_get(loaded), jax.device_get(tree))
        codes = loaded["model"]["layers"]["0"]["mlp"]["up_proj"]["weight"].qtensor.codes
        assert codes.sharding == jax.sharding.NamedSharding(new, P("b", "a"))
        shards = codes.addressable_shards
        assert len({s.device for s in shards}) == 8 and {s.data.shape for s in shards} == {(32, 16)}
