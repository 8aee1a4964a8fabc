"""``quantize_folder``: the numbers and files of ``quantize`` and ``save``, without the whole model in memory."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from io_cases import PEERS, SOURCE, assert_same, config_of, raw_tensors
from stream_cases import heavy, tensors, write_source

import mxjax
from mxjax.api import plan
from mxjax.config import FUSED
from mxjax.errors import CheckpointError, ConfigError, MxjaxWarning, NonFiniteError
from mxjax.io import hf, safetensors
from mxjax.io.streaming import arrays

# One data-free recipe for each kind of weight: activations do not change how it is stored.
DATA_FREE = [*mxjax.FORMATS, "hadamard_mxfp4", "hadamard_nvfp4"]


@pytest.fixture
def small_chunks(monkeypatch):
    """A chunk is 4096 values, so that small weights have several."""
    monkeypatch.setattr(arrays, "CHUNK", 1 << 12)


def one_entry(folder, x):
    safetensors.write(folder / "x", {"x": x})
    return safetensors.read(folder / "x")["x"]


@pytest.mark.parametrize("recipe", DATA_FREE)
def test_chunks_give_the_bits_of_the_whole(tmp_path, small_chunks, recipe):
    rng = np.random.default_rng(0)
    cases = [
        ((3, 40, 32), np.float16, "weight"),
        ((130, 640), jnp.bfloat16, "weight"),
        ((7, 96), np.float32, "kernel"),
    ]
    for shape, dtype, leaf in cases:
        x = heavy(rng, shape, dtype)
        x[1] = 0  # a whole expert too: its tensor scale is 1
        tree = {leaf: jnp.asarray(x.T if leaf == "kernel" else x)}
        spec = plan(tree, recipe).quantized[0].spec
        got = arrays.quantize_entry(one_entry(tmp_path, x), spec, "rtn", turned=leaf == "kernel")
        assert_same(got, jax.tree.map(np.asarray, mxjax.quantize(tree, recipe)[leaf]))


@pytest.mark.parametrize("policy", ["floor", "ceil", "rceil", "mse", "third", "four_over_six"])
def test_scale_policies(tmp_path, small_chunks, policy):
    x = heavy(np.random.default_rng(1), (67, 96))
    rule = mxjax.Rule(weight="nvfp4" if policy == "four_over_six" else "mxfp4", weight_scale=policy)
    cfg = mxjax.QuantConfig(rules=[rule])
    got = arrays.quantize_entry(one_entry(tmp_path, x), plan({"weight": x}, cfg).quantized[0].spec, "rtn")
    assert_same(got, jax.tree.map(np.asarray, mxjax.quantize({"weight": jnp.asarray(x)}, cfg)["weight"]))


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("policy", ["nan", "saturate", "raise"])
def test_nan_and_inf(tmp_path, small_chunks, fmt, dtype, policy):
    x = heavy(np.random.default_rng(2), (130, 96), dtype)
    x[3, 5], x[70, 1], x[71, 40] = np.nan, np.inf, -np.inf
    cfg = mxjax.QuantConfig(rules=[mxjax.Rule(weight=fmt)], on_nonfinite=policy)
    spec = plan({"weight": x}, cfg).quantized[0].spec
    entry = one_entry(tmp_path, x)
    if policy == "raise":
        with pytest.raises(NonFiniteError, match=r"weight.*NaN or Inf in x of"):
            arrays.quantize_entry(entry, spec, "rtn")
        return
    want = mxjax.quantize({"weight": jnp.asarray(x)}, cfg)["weight"]
    assert_same(arrays.quantize_entry(entry, spec, "rtn"), jax.tree.map(np.asarray, want))


@pytest.mark.parametrize(
    ("shape", "axis", "on_uneven"), [((96, 70), -2, "error"), ((3, 64, 50), -2, "error"), ((7, 70), -1, "pad")]
)
def test_other_axes_and_padding(tmp_path, shape, axis, on_uneven):
    x = heavy(np.random.default_rng(3), shape)
    cfg = mxjax.QuantConfig(rules=[mxjax.Rule(weight="nvfp4", axis=axis)], on_uneven=on_uneven)
    got = arrays.quantize_entry(one_entry(tmp_path, x), plan({"w": x}, cfg).quantized[0].spec, "rtn")
    assert_same(got, jax.tree.map(np.asarray, mxjax.quantize({"w": jnp.asarray(x)}, cfg)["w"]))


@pytest.mark.filterwarnings("ignore::mxjax.errors.MxjaxWarning")
@pytest.mark.parametrize(
    ("format", "recipe"),
    [
        ("mxjax", "nvfp4_a16"),
        ("mxjax", "hadamard_mxfp4"),
        ("compressed-tensors", "nvfp4_a16"),
        ("compressed-tensors", "hadamard_mxfp4"),
        ("quark", "mxfp4"),
        ("modelopt", "nvfp4"),
    ],
)
def test_one_file_is_what_save_writes(tmp_path, format, recipe):
    """Every byte of the tensors and of config.json; the header may have more room at its end."""
    report = mxjax.quantize_folder(SOURCE, tmp_path / "out", recipe, format=format)
    qparams = mxjax.quantize(mxjax.load(SOURCE), recipe)
    mxjax.save(tmp_path / "ref", qparams, format=format, config=config_of(SOURCE))
    ours = {p.name for p in (tmp_path / "out").iterdir()}
    companions = {p.name for p in SOURCE.iterdir() if p.name.startswith(("tokenizer", "generation_config"))}
    assert ours == {p.name for p in (tmp_path / "ref").iterdir()} | companions | {"SHA256SUMS"}
    assert report.files == 1 and report.summary.nbytes == mxjax.summary(qparams).nbytes
    for file in (tmp_path / "ref").iterdir():
        if file.suffix == ".safetensors":
            assert raw_tensors(tmp_path / "out" / file.name) == raw_tensors(file)
        else:
            assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    assert_same(mxjax.load(tmp_path / "out"), mxjax.load(tmp_path / "ref"))


@pytest.mark.parametrize("format", ["mxjax", "compressed-tensors"])
def test_shards(tmp_path, small_chunks, format):
    """Many shards in, many shards out, each below the limit unless one weight is larger."""
    source, limit = write_source(tmp_path / "in", tensors(), shards=3), 20_000
    mxjax.quantize_folder(source, tmp_path / "out", "mxfp4", format=format, shard_size=limit)
    mxjax.save(tmp_path / "ref", mxjax.quantize(mxjax.load(source), "mxfp4"), format, config=config_of(source))
    assert_same(mxjax.load(tmp_path / "out"), mxjax.load(tmp_path / "ref"))
    weights = "arrays" if format == "mxjax" else "model"
    index = json.loads((tmp_path / "out" / f"{weights}.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"{weights}-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 3 and set(index["weight_map"].values()) == set(files)
    found = {name: file for file in files for name in safetensors.read(tmp_path / "out" / file)}
    assert found == index["weight_map"]
    sizes = [sum(e.nbytes for e in safetensors.read(tmp_path / "out" / file).values()) for file in files]
    assert index["metadata"]["total_size"] == sum(sizes)
    for file, size in zip(files, sizes, strict=True):
        modules = {name.rpartition(".")[0] for name in safetensors.read(tmp_path / "out" / file)}
        assert size <= limit or len(modules) == 1


def test_what_is_not_quantized_is_copied(tmp_path):
    source = write_source(tmp_path / "in", tensors(), shards=2)
    mxjax.quantize_folder(source, tmp_path / "out", "mxfp4", format="compressed-tensors", shard_size=50_000)
    before = {k: v for file in source.glob("*.safetensors") for k, v in raw_tensors(file).items()}
    after = {k: v for file in (tmp_path / "out").glob("*.safetensors") for k, v in raw_tensors(file).items()}
    kept = before.keys() & after.keys()
    assert kept == {k for k in before if not k.endswith("_proj.weight")}
    for name in kept:
        assert before[name] == after[name], name
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert not (tmp_path / "out" / "README.md").exists()
    assert config_of(tmp_path / "out")["model_type"] == "made_up"


def test_dtype_casts_what_is_not_quantized(tmp_path):
    source = write_source(tmp_path / "in", tensors())
    mxjax.quantize_folder(source, tmp_path / "out", "mxfp4", format="compressed-tensors", dtype="bfloat16")
    norm = mxjax.load(tmp_path / "out")["model"]["layers"]["0"]["input_layernorm"]["weight"]
    want = jnp.asarray(tensors()["model.layers.0.input_layernorm.weight"]).astype(jnp.bfloat16)
    assert norm.dtype == jnp.bfloat16 and (norm == want).all()


def names(name):
    head, _, last = name.rpartition(".")
    return f"{head}.kernel".replace(".", "/") if last == "weight" and "_proj" in head else name.replace(".", "/")


@pytest.mark.parametrize("format", ["mxjax", "compressed-tensors"])
def test_names_are_what_rules_see(tmp_path, format):
    """Flax kernels: the decisions, and in our own format the paths and orientations, of the tree with these names."""
    cfg = mxjax.QuantConfig(rules=[mxjax.Rule(path="up_proj/kernel$", weight="nvfp4")])
    source = write_source(tmp_path / "in", tensors())
    mxjax.quantize_folder(source, tmp_path / "out", cfg, format=format, names=names)
    want = mxjax.quantize(mxjax.load(source, names=names), cfg)
    options = {} if format == "mxjax" else {"names": names}
    assert_same(mxjax.load(tmp_path / "out", **options), want)


@pytest.mark.parametrize("case", ["same", "other", "absent", "quantized"])
def test_tied_heads(tmp_path, case):
    values = tensors(layers=1)
    head = values["model.embed_tokens.weight"].copy()
    if case == "other":
        head[0, 0] += 1
    if case != "absent":
        values["lm_head.weight"] = head
    cfg = mxjax.recipes.get("mxfp4")
    if case == "quantized":
        cfg = cfg.replace(exclude=("embed", "norm", "bias"))
    source = write_source(tmp_path / "in", values, config={"tie_word_embeddings": True})
    mxjax.quantize_folder(source, tmp_path / "out", cfg, format="compressed-tensors")
    stored = set(raw_tensors(tmp_path / "out" / "model.safetensors"))
    assert ("lm_head.weight" in stored) == (case == "other")
    assert ("lm_head.weight_packed" in stored) == (case == "quantized")
    config = config_of(tmp_path / "out")
    assert config["tie_word_embeddings"] == (case in ("same", "absent"))
    assert ("lm_head" in config["quantization_config"]["ignore"]) == (case != "quantized")


def test_refusals(tmp_path):
    source = write_source(tmp_path / "in", tensors(layers=1))
    with pytest.raises(ConfigError, match="needs calibration data"):
        mxjax.quantize_folder(source, tmp_path / "out", "mr_gptq_mxfp4")
    with pytest.raises(ConfigError, match="not 'orbax'"):
        mxjax.quantize_folder(source, tmp_path / "out", "mxfp4", format="orbax")
    with pytest.raises(ConfigError, match="nothing would be quantized"):
        mxjax.quantize_folder(source, tmp_path / "out", mxjax.QuantConfig(rules=[mxjax.Rule(path="nowhere")]))
    with pytest.raises(CheckpointError, match=r"cannot carry 3 of the tensors(.|\n)*mxfp6_e3m2"):
        mxjax.quantize_folder(source, tmp_path / "out", "mxfp6_e3m2", format="compressed-tensors")
    with pytest.raises(CheckpointError, match="quantized already"):
        mxjax.quantize_folder(PEERS["mxfp4"], tmp_path / "out", "mxfp4")
    with pytest.raises(CheckpointError, match="no folder"):
        mxjax.quantize_folder(tmp_path / "none", tmp_path / "out", "mxfp4")
    with pytest.raises(CheckpointError, match=r"no quantized checkpoint|no checkpoint alone"):
        mxjax.quantize_folder(source, source, "mxfp4", overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["in"]  # refused before anything was written


def test_a_rule_that_matches_nothing_is_a_warning(tmp_path):
    source = write_source(tmp_path / "in", tensors(layers=1))
    cfg = mxjax.QuantConfig(rules=[mxjax.Rule(path="nowhere"), mxjax.Rule()])
    with pytest.warns(MxjaxWarning, match="'nowhere' matches no parameter"):
        mxjax.quantize_folder(source, tmp_path / "out", cfg)


def test_progress_counts_the_bytes_of_the_source(tmp_path):
    source, seen = write_source(tmp_path / "in", tensors(layers=1)), []
    report = mxjax.quantize_folder(source, tmp_path / "out", "mxfp4", progress=lambda *x: seen.append(x))
    total = sum(e.nbytes for e in hf.read_entries(source).values())
    assert seen[0] == (0, total) and seen[-1] == (total, total) and report.bytes_read == report.float_bytes == total
    assert report.bytes_written == report.summary.nbytes and report.gigabytes_per_second > 0


@pytest.mark.parametrize("format", ["mxjax", "compressed-tensors"])
@pytest.mark.parametrize("use_names", [False, True])
def test_shared_tensor_scales(tmp_path, small_chunks, format, use_names):
    """The members of a group lie in different shards, on both sides."""
    values = tensors(layers=1)
    values["model.layers.0.mlp.gate_proj.weight"] = heavy(np.random.default_rng(9), (130, 96))
    values |= {
        f"model.layers.0.self_attn.{x}_proj.weight": heavy(np.random.default_rng(i), (64, 96))
        for i, x in enumerate("kv")
    }
    source = write_source(tmp_path / "in", values, shards=4)
    cfg = mxjax.recipes.get("nvfp4_a16").replace(share_scales=FUSED)
    options = {"names": names} if use_names else {}
    mxjax.quantize_folder(source, tmp_path / "out", cfg, format=format, shard_size=9000, **options)
    tree = mxjax.quantize(mxjax.load(source, **options), cfg)
    attention = tree["model"]["layers"]["0"]["self_attn"]
    leaf = "kernel" if use_names else "weight"
    assert len({float(attention[f"{x}_proj"][leaf].qtensor.global_scale) for x in "qkv"}) == 1
    got = mxjax.load(tmp_path / "out", **(options if format != "mxjax" else {}))
    want = jax.tree.leaves(tree)
    assert len(want) == len(jax.tree.leaves(got))
    for x, y in zip(want, jax.tree.leaves(got), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
