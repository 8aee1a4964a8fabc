"""Every layout against the files of its own authors, and against each other."""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from io_cases import INTEROP, PEERS, SOURCE, assert_same, config_of, quantized_source, raw_tensors
from mxjax_models import params
from mxjax_models.llama import LlamaConfig

import mxjax
from mxjax.errors import CheckpointError, ConfigError, MxjaxWarning
from mxjax.io import layouts
from mxjax.io import safetensors as st
from mxjax.io.layouts import Contents, Scheme

WEIGHTS = "model.safetensors"
FOLDERS = {
    "compressed-tensors mxfp4": PEERS["mxfp4"],
    "compressed-tensors nvfp4": PEERS["nvfp4"],
    "modelopt nvfp4": INTEROP / "modelopt_nvfp4",
    "quark mxfp4": INTEROP / "quark_mxfp4",
}
HOLDS = {"mxfp4": ("compressed-tensors", "quark"), "nvfp4": ("compressed-tensors", "modelopt", "quark")}
calibrated = pytest.mark.filterwarnings("ignore:.*no calibrated input_scale:mxjax.errors.MxjaxWarning")


def is_weight(x):
    return isinstance(x, mxjax.QWeight)


def weights(tree):
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_weight)[0]
    return {".".join(k.key for k in path[:-1]): w for path, w in flat if is_weight(w)}


def map_weights(f, tree):
    return jax.tree.map(lambda w: f(w) if is_weight(w) else w, tree, is_leaf=is_weight)


@functools.cache
def source(fmt, activation):
    tree = quantized_source(fmt, activation)
    if activation == "nvfp4":
        tree = map_weights(lambda w: dataclasses.replace(w, input_scale=jnp.float32(1 / 700)), tree)
    return tree


def json_of(folder):
    return {p.name: json.loads(p.read_text()) for p in folder.glob("*.json")}


# --- the peers' own files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peer", FOLDERS)
def test_peer_file_to_ours_to_the_same_layout(tmp_path, peer):
    """Every tensor byte for byte, and every JSON file key for key, by way of our own format."""
    folder, layout = FOLDERS[peer], peer.split()[0]
    tree = mxjax.load(folder)
    assert len(weights(tree)) == 14
    mxjax.save(tmp_path / "ours", tree)
    assert_same(mxjax.load(tmp_path / "ours"), tree)
    mxjax.save(tmp_path / "back", mxjax.load(tmp_path / "ours"), layout, config=config_of(folder))
    assert raw_tensors(tmp_path / "back" / WEIGHTS) == raw_tensors(folder / WEIGHTS)
    assert json_of(tmp_path / "back") == json_of(folder)


def test_values_of_the_peers():
    """Relative error of a weight against the source model, as decoded by an independent reader (published table)."""
    expected = {
        "compressed-tensors mxfp4": 0.1111,
        "quark mxfp4": 0.1111,
        "compressed-tensors nvfp4": 0.0964,
        "modelopt nvfp4": 0.0957,
    }
    name = "model.layers.0.mlp.down_proj"
    exact = np.asarray(mxjax.load(SOURCE)["model"]["layers"]["0"]["mlp"]["down_proj"]["weight"], np.float64)
    for peer, error in expected.items():
        got = np.asarray(weights(mxjax.load(FOLDERS[peer]))[name].dequantize("float32"), np.float64)
        assert round(np.linalg.norm(got - exact) / np.linalg.norm(exact), 4) == error, peer


def test_our_quark_file_is_the_peers(tmp_path):
    """But for the sign of zeros, which Quark drops where a negative number rounds to zero (code 8 is 0 there)."""
    mxjax.save(tmp_path / "out", source("mxfp4", "mxfp4"), "quark", config=config_of(SOURCE))
    ours, theirs = raw_tensors(tmp_path / "out" / WEIGHTS), raw_tensors(FOLDERS["quark mxfp4"] / WEIGHTS)
    assert ours.keys() == theirs.keys()
    for name, (dtype, shape, data) in ours.items():
        if dtype == "U8" and name.endswith(".weight"):
            codes = np.frombuffer(data, np.uint8)
            low, high = codes & 15, codes >> 4
            data = (np.where(low == 8, 0, low) | np.where(high == 8, 0, high) << 4).astype(np.uint8).tobytes()
        assert (dtype, shape, data) == theirs[name], name


def test_our_modelopt_file_against_the_peers(tmp_path):
    """Tensors, dtypes, shapes, config, tensor scales (the peer shares them too) and block scales; codes but for a few
    ties, since the peer divides by the product of both scales."""
    peer = weights(mxjax.load(FOLDERS["modelopt nvfp4"]))
    mxjax.save(tmp_path / "out", source("nvfp4", "nvfp4"), "modelopt", config=config_of(SOURCE))
    ours, theirs = raw_tensors(tmp_path / "out" / WEIGHTS), raw_tensors(FOLDERS["modelopt nvfp4"] / WEIGHTS)
    assert {k: v[:2] for k, v in ours.items()} == {k: v[:2] for k, v in theirs.items()}
    changed = {"architectures", "transformers_version", "dtype"}
    a, b = json_of(tmp_path / "out"), json_of(FOLDERS["modelopt nvfp4"])
    assert a["hf_quant_config.json"] == b["hf_quant_config.json"]
    assert {k: v for k, v in a["config.json"].items() if k not in changed} == {
        k: v for k, v in b["config.json"].items() if k not in changed
    }
    for name, w in weights(source("nvfp4", "nvfp4")).items():
        q, p = w.qtensor, peer[name].qtensor
        assert abs(q.global_scale - p.global_scale) <= np.spacing(np.float32(p.global_scale)), name
        assert np.array_equal(q.scales, p.scales), name
        assert np.mean(np.asarray(q.blocked_codes()) != np.asarray(p.blocked_codes())) < 1e-3, name


def test_a_modelopt_folder_with_the_second_file_alone(tmp_path):
    """Older exports say nothing in config.json."""
    folder = FOLDERS["modelopt nvfp4"]
    config = config_of(folder)
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in (WEIGHTS, "hf_quant_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert_same(mxjax.load(tmp_path), mxjax.load(folder))


# --- between layouts --------------------------------------------------------------------------------------------------


def trips():
    for peer in FOLDERS:
        layout, fmt = peer.split()
        others = [x for x in HOLDS[fmt] if x != layout]
        yield from ((peer, order) for n in range(1, len(others) + 1) for order in itertools.permutations(others, n))


@pytest.mark.parametrize("peer, order", list(trips()), ids=str)
def test_conversions_change_no_value(tmp_path, peer, order):
    """From each peer's file through every order of the other layouts and back: the same values, bit for bit, and the
    same codes, scales and input scales."""
    tree = mxjax.load(FOLDERS[peer])
    now = tree
    for i, layout in enumerate([*order, peer.split()[0]]):
        mxjax.save(tmp_path / str(i), now, layout, config=config_of(FOLDERS[peer]))
        now = mxjax.load(tmp_path / str(i))
        assert_same(now, tree)
        assert_same(mxjax.dequantize(now, "float32"), mxjax.dequantize(tree, "float32"))


def test_multipliers_that_are_nobodys_reciprocal(tmp_path):
    """Their divisor is the nearest one; the multiplier itself is in the metadata, for us alone."""
    rng = np.random.default_rng(0)
    w = weights(source("nvfp4", None))["model.layers.0.mlp.down_proj"]
    scales = rng.uniform(1e-5, 1e-3, 40).astype(np.float32)
    tree = {
        f"m{i}": {"weight": dataclasses.replace(w, qtensor=dataclasses.replace(w.qtensor, global_scale=jnp.asarray(s)))}
        for i, s in enumerate(scales)
    }
    mxjax.save(tmp_path / "out", tree, "compressed-tensors")
    assert_same(mxjax.load(tmp_path / "out"), tree)
    kept = json.loads(st.read_metadata(tmp_path / "out" / WEIGHTS)["mxjax.multipliers"])
    raw = raw_tensors(tmp_path / "out" / WEIGHTS)
    for i, s in enumerate(scales):
        stored = np.frombuffer(raw[f"m{i}.weight_global_scale"][2], np.float32)[0]
        assert (np.float32(1) / stored != s) == (f"m{i}.weight_global_scale" in kept)
        assert abs(float(stored) * float(s) - 1) <= 2.0**-23
    assert 0 < len(kept) < 40
    # A metadata entry that does not belong to the divisor in the file is not believed.
    tensors = {n: np.array(e.read()) for n, e in st.read(tmp_path / "out" / WEIGHTS).items()}
    wrong = {"mxjax.multipliers": json.dumps({"m0.weight_global_scale": 123.0})}
    st.write(tmp_path / "out" / WEIGHTS, tensors, wrong)
    stored = np.float32(1) / tensors["m0.weight_global_scale"][0]
    assert mxjax.load(tmp_path / "out")["m0"]["weight"].qtensor.global_scale == stored
    for bad in ('{"a": "b"}', "[]", '{"a": Infinity}', "{"):
        st.write(tmp_path / "out" / WEIGHTS, tensors, {"mxjax.multipliers": bad})
        with pytest.raises(CheckpointError, match=r"multiplier|JSON"):
            mxjax.load(tmp_path / "out")


@calibrated
@pytest.mark.parametrize("fmt", HOLDS)
def test_logits_from_every_layout_are_equal(tmp_path, fmt):
    model = params.abstract(LlamaConfig.from_hf(config_of(SOURCE)))
    tokens = jnp.arange(16).reshape(2, 8) * 7 % 256

    def logits(folder, **names):
        tree = mxjax.load(folder, **names)
        tree = jax.tree.map(lambda x: x if is_weight(x) else jnp.asarray(x, jnp.float32), tree, is_leaf=is_weight)
        return np.asarray(mxjax.nnx.from_params(model, tree)(tokens))

    tree = source(fmt, fmt)
    mxjax.save(tmp_path / "first", tree, HOLDS[fmt][0], config=config_of(SOURCE))
    flax = mxjax.load(tmp_path / "first", names=params.path_of)
    first = logits(tmp_path / "first", names=params.path_of)
    assert np.isfinite(first).all() and first.std() > 0
    for layout in ("mxjax", "orbax"):
        mxjax.save(tmp_path / layout, flax, layout)
        assert np.array_equal(logits(tmp_path / layout), first)
    for layout in HOLDS[fmt][1:]:
        mxjax.save(tmp_path / layout, flax, layout, names=params.hf_name, config=config_of(SOURCE))
        assert np.array_equal(logits(tmp_path / layout, names=params.path_of), first)
    assert not np.array_equal(np.asarray(params.load(SOURCE)(tokens)), first)


# --- what loaders register --------------------------------------------------------------------------------------------

# layout, weight format, activation format -> tensors of a Linear [48, 64], as vLLM's loaders register them.
REGISTERED = {
    ("compressed-tensors", "mxfp4", "mxfp4"): {"weight_packed": ("U8", [48, 32]), "weight_scale": ("U8", [48, 2])},
    ("compressed-tensors", "mxfp4", None): {"weight_packed": ("U8", [48, 32]), "weight_scale": ("U8", [48, 2])},
    ("compressed-tensors", "nvfp4", "nvfp4"): {
        "weight_packed": ("U8", [48, 32]),
        "weight_scale": ("F8_E4M3", [48, 4]),
        "weight_global_scale": ("F32", [1]),
        "input_global_scale": ("F32", [1]),
    },
    ("compressed-tensors", "nvfp4", None): {
        "weight_packed": ("U8", [48, 32]),
        "weight_scale": ("F8_E4M3", [48, 4]),
        "weight_global_scale": ("F32", [1]),
    },
    ("compressed-tensors", "mxfp8_e4m3", "mxfp8_e4m3"): {
        "weight": ("F8_E4M3", [48, 64]),
        "weight_scale": ("U8", [48, 2]),
    },
    ("compressed-tensors", "mxfp6_e2m3", None): {"weight_packed": ("U8", [48, 48]), "weight_scale": ("U8", [48, 2])},
    ("modelopt", "nvfp4", "nvfp4"): {
        "weight": ("U8", [48, 32]),
        "weight_scale": ("F8_E4M3", [48, 4]),
        "weight_scale_2": ("F32", []),
        "input_scale": ("F32", []),
    },
    ("modelopt", "nvfp4", None): {
        "weight": ("U8", [48, 32]),
        "weight_scale": ("F8_E4M3", [48, 4]),
        "weight_scale_2": ("F32", []),
    },
    ("modelopt", "mxfp8_e4m3", "mxfp8_e4m3"): {"weight": ("F8_E4M3", [48, 64]), "weight_scale": ("U8", [48, 2])},
    ("quark", "mxfp4", "mxfp4"): {"weight": ("U8", [48, 32]), "weight_scale": ("U8", [48, 2])},
    ("quark", "mxfp6_e3m2", "mxfp6_e3m2"): {"weight": ("U8", [48, 48]), "weight_scale": ("U8", [48, 2])},
    ("quark", "nvfp4", "nvfp4"): {
        "weight": ("U8", [48, 32]),
        "weight_scale": ("F8_E4M3", [48, 4]),
        "weight_scale_2": ("F32", []),
        "input_scale_2": ("F32", []),
    },
}


@calibrated
@pytest.mark.parametrize("case", REGISTERED, ids=str)
def test_tensors_are_what_loaders_register(tmp_path, case):
    """On disk, and as announced before anything is quantized; and the folder comes back as it was."""
    layout, fmt, activation = case
    rule = mxjax.Rule(weight=fmt, activation=activation, axis=-1)
    w = mxjax.quantize(
        {"a": {"weight": jax.random.normal(jax.random.key(0), (48, 64))}}, mxjax.QuantConfig(rules=[rule])
    )
    mxjax.save(tmp_path / "out", w, layout)
    found = {n: v[:2] for n, v in raw_tensors(tmp_path / "out" / WEIGHTS).items()}
    expected = {f"a.{part}": value for part, value in REGISTERED[case].items()}
    assert found == expected
    scheme = layouts.get(layout).scheme_of(w["a"]["weight"])
    announced = layouts.get(layout).shapes_of("a.weight", scheme, (48, 64))
    assert {n: (st.NAMES[dtype], list(shape)) for n, (dtype, shape) in announced.items()} == expected
    loaded = mxjax.load(tmp_path / "out")
    back, before = loaded["a"]["weight"], w["a"]["weight"]
    assert back.activation == before.activation and back.input_scale is None
    assert_same(back.qtensor, before.qtensor)


@calibrated
@pytest.mark.parametrize("layout", ["modelopt", "quark", "compressed-tensors"])
def test_mixed_schemes(tmp_path, layout):
    formats = {
        "modelopt": [("nvfp4", None), ("nvfp4", "nvfp4"), ("mxfp8_e4m3", "mxfp8_e4m3")],
        "quark": [("mxfp4", "mxfp4"), ("mxfp4", None), ("nvfp4", "nvfp4"), ("mxfp6_e2m3", "mxfp4")],
        "compressed-tensors": [("mxfp4", "mxfp4"), ("nvfp4", None), ("mxfp6_e2m3", "mxfp8_e4m3")],
    }[layout]
    rules = [
        mxjax.Rule(path=f"^m{i}/", weight=fmt, activation=activation, axis=-1)
        for i, (fmt, activation) in enumerate(formats)
    ]
    x = jax.random.normal(jax.random.key(0), (8, 64))
    tree = {f"m{i}": {"weight": x} for i in range(len(formats))} | {"rest": {"weight": x}}
    tree = mxjax.quantize(tree, mxjax.QuantConfig(rules=rules))
    mxjax.save(tmp_path / "out", tree, layout)
    assert_same(mxjax.load(tmp_path / "out"), tree)


def test_quark_prefers_the_commonest_scheme_and_names_the_rest_exactly(tmp_path):
    x = jnp.ones((8, 64))
    rules = [mxjax.Rule(path="^odd", weight="mxfp6_e3m2", axis=-1), mxjax.Rule(weight="mxfp4", axis=-1)]
    tree = mxjax.quantize({n: {"weight": x} for n in ("odd", "x", "y")}, mxjax.QuantConfig(rules=rules))
    mxjax.save(tmp_path / "out", {**tree, "kept": {"weight": x}}, "quark")
    config = config_of(tmp_path / "out")["quantization_config"]
    assert list(config["layer_quant_config"]) == ["odd"] and config["exclude"] == ["kept"]
    assert config["global_quant_config"]["weight"]["dtype"] == "fp4"
    assert config["global_quant_config"]["input_tensors"] is None


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt", "quark"])
def test_tied_embeddings(tmp_path, layout):
    """An untouched head stays tied, with one table on disk; a quantized one unties; exclusions are exact names."""
    x = jax.random.normal(jax.random.key(0), (8, 64))
    rule = mxjax.Rule(weight="nvfp4", axis=-1)
    q = mxjax.quantize({"w": x}, mxjax.QuantConfig(rules=[rule]))["w"]
    table = jnp.ones((10, 64))
    base = {"model": {"embed_tokens": {"weight": table}, "up": {"weight": q}}}

    def saved(name, tree, tie):
        mxjax.save(tmp_path / name, tree, layout, config={"tie_word_embeddings": tie})
        config = config_of(tmp_path / name)
        quantization = config["quantization_config"]
        left = quantization.get("exclude") if layout == "quark" else quantization["ignore"]
        heads = sorted(n for n in raw_tensors(tmp_path / name / WEIGHTS) if n.startswith("lm_head."))
        return config["tie_word_embeddings"], sorted(set(left) - {"model.embed_tokens"}), heads

    assert saved("untouched", base, True) == (True, ["lm_head"], [])
    assert saved("same", {**base, "lm_head": {"weight": table}}, False) == (True, ["lm_head"], [])
    assert saved("copy", {**base, "lm_head": {"weight": table + 1}}, True) == (False, ["lm_head"], ["lm_head.weight"])
    tie, left, heads = saved("quantized", {**base, "lm_head": {"weight": q}}, True)
    assert (tie, left) == (False, []) and len(heads) == 3
    assert "model.embed_tokens.weight" in raw_tensors(tmp_path / "quantized" / WEIGHTS)
    for name in ("untouched", "same", "copy", "quantized"):
        mxjax.load(tmp_path / name)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_refusals_name_the_layouts_that_can(tmp_path):
    x = jax.random.normal(jax.random.key(0), (8, 64))

    def one(**rule):
        return mxjax.quantize({"a": {"weight": x}}, mxjax.QuantConfig(rules=[mxjax.Rule(axis=-1, **rule)]))

    rotation = mxjax.transforms.Hadamard(32)
    cases = [
        (one(weight="mxfp4"), "modelopt", "format mxfp4", "compressed-tensors, quark can"),
        (one(weight="mxfp8_e4m3"), "quark", "format mxfp8_e4m3", "compressed-tensors can"),
        (one(weight="mxfp8_e4m3"), "modelopt", "float inputs", "compressed-tensors can"),
        (one(weight="mxfp4", transform=rotation), "quark", r"transform \(Hadamard\)", "compressed-tensors can"),
        (one(weight="mxfp4", activation="mxfp6_e3m2"), "compressed-tensors", "activations in mxfp6", "quark can"),
        (one(weight="mxint8"), "quark", "format mxint8", "carry everything$"),
        (one(weight="mxfp4"), "gpt-oss", "only mlp.experts.gate_up_proj", "compressed-tensors, quark can"),
    ]
    for tree, layout, reason, able in cases:
        with pytest.raises(CheckpointError, match=rf"{layout} cannot carry 1(.|\n)*a/weight: .*{reason}(.|\n)*{able}"):
            mxjax.save(tmp_path / "out", tree, layout)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="fp-quant"):
        mxjax.save(tmp_path / "out", cases[0][0], "fp-quant")
    with pytest.raises(ConfigError, match="known: compressed-tensors, modelopt, quark, gpt-oss, fp-quant"):
        layouts.get("gguf")


def test_uncalibrated_inputs_warn(tmp_path):
    tree = quantized_source("nvfp4", "nvfp4")
    for layout, part in (("modelopt", "input_scale"), ("quark", "input_scale_2")):
        with pytest.warns(MxjaxWarning, match="14 NVFP4 W4A4 layers have no calibrated input_scale"):
            mxjax.save(tmp_path / layout, tree, layout)
        raw = raw_tensors(tmp_path / layout / WEIGHTS)
        assert raw[f"model.layers.0.mlp.up_proj.{part}"] == ("F32", [], np.float32(1).tobytes())
        assert_same(mxjax.load(tmp_path / layout), tree)


def test_a_layout_on_its_own():
    """What a program needs that writes shards itself: contents filled weight by weight, then the JSON files."""
    layout = layouts.get("modelopt")
    contents = Contents(dtype_name="bfloat16")
    contents.schemes["model.up"] = Scheme(mxjax.get_format("nvfp4"))
    contents.add_dense("model.embed_tokens.weight", 2)
    contents.add_dense("lm_head.weight", 2)
    contents.add_dense("model.norm.weight", 1)
    files = layout.config_of({"model_type": "llama"}, contents)
    assert files["config.json"]["dtype"] == "bfloat16" and files["config.json"]["tie_word_embeddings"] is False
    inner = files["hf_quant_config.json"]["quantization"]
    assert inner["quant_algo"] == "W4A16_NVFP4" and inner["exclude_modules"] == ["lm_head", "model.embed_tokens"]
    assert layouts.detect(files["config.json"]) is layout
