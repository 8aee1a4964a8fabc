"""The compressed-tensors layouts: peers' files byte for byte, ours like theirs, and a clear error for all the rest."""

import dataclasses
import json
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from io_cases import PEERS, SOURCE, assert_same, config_of, decode_numpy, quantized_source, raw_tensors

import mxjax
from mxjax.errors import CheckpointError, MxjaxError, MxjaxWarning
from mxjax.io import safetensors as st
from mxjax.io.layouts.scales import divisor, multiplier
from mxjax.transforms import BlockMatrix, Chain, ChannelScale, Hadamard

CT = "compressed-tensors"
WEIGHTS = "model.safetensors"
SCALE = ChannelScale(jnp.full(64, 2.0))


def is_weight(x):
    return isinstance(x, mxjax.QWeight)


def weights(tree):
    """module name -> QWeight."""
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_weight)[0]
    return {".".join(k.key for k in path[:-1]): w for path, w in flat if is_weight(w)}


def replaced(tree, **changes):
    return jax.tree.map(lambda w: dataclasses.replace(w, **changes) if is_weight(w) else w, tree, is_leaf=is_weight)


def linear(fmt="mxfp4", shape=(8, 64), activation=None, **options):
    w = jax.random.normal(jax.random.key(0), shape)
    rule = mxjax.Rule(weight=fmt, activation=activation, axis=-1, **options)
    return mxjax.quantize({"w": w}, mxjax.QuantConfig(rules=[rule], on_uneven="pad"))["w"]


# --- peers' files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", PEERS)
def test_peer_file_to_tree_to_the_same_file(tmp_path, fmt):
    """Not only the tensors: header, order, padding and config.json too."""
    mxjax.save(tmp_path / "out", mxjax.load(PEERS[fmt]), CT, config=config_of(PEERS[fmt]))
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (PEERS[fmt] / WEIGHTS).read_bytes()
    assert (tmp_path / "out" / "config.json").read_text().strip() == (PEERS[fmt] / "config.json").read_text().strip()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", WEIGHTS]


@pytest.mark.parametrize("fmt, error", [("mxfp4", 0.1111), ("nvfp4", 0.0964)])
def test_peer_values(fmt, error):
    tensors, loaded = raw_tensors(PEERS[fmt] / WEIGHTS), weights(mxjax.load(PEERS[fmt]))
    assert len(loaded) == 14
    dequantize = jax.jit(lambda w: w.dequantize("float32"))
    for module, w in loaded.items():
        ours, independent = np.asarray(dequantize(w), np.float64), decode_numpy(module, tensors)
        if fmt == "mxfp4":
            assert np.array_equal(ours, independent)  # a code times a power of two: exact
        else:
            # Two roundings to float32: of the reciprocal, and of the product.
            assert np.all(np.abs(ours - independent) <= 2 * 2.0**-24 * np.abs(independent))
        assert w.dtype == jnp.bfloat16 and w.qtensor.axis == -1
        assert w.activation == mxjax.ActivationFormat(format=mxjax.get_format(fmt))
    source = np.asarray(mxjax.load(SOURCE)["model"]["layers"]["0"]["mlp"]["down_proj"]["weight"]).astype(np.float64)
    got = decode_numpy("model.layers.0.mlp.down_proj", tensors)
    assert round(np.linalg.norm(got - source) / np.linalg.norm(source), 4) == error
    ours = np.asarray(dequantize(loaded["model.layers.0.mlp.down_proj"]))
    assert round(np.linalg.norm(ours - source) / np.linalg.norm(source), 4) == error


def test_our_mxfp4_is_the_peers_file(tmp_path):
    """Round to nearest with the scale rule "even" on the same bfloat16 weights: every byte is the peer's."""
    mxjax.save(tmp_path / "out", quantized_source("mxfp4", "mxfp4"), CT, config=config_of(SOURCE))
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (PEERS["mxfp4"] / WEIGHTS).read_bytes()
    assert config_of(tmp_path / "out") == config_of(PEERS["mxfp4"])


def test_our_nvfp4_against_the_peers(tmp_path):
    """Same tensors, dtypes, shapes and config. The bytes differ: the peer computes scales in bfloat16."""
    peer = mxjax.load(PEERS["nvfp4"])
    tree = quantized_source("nvfp4", "nvfp4")
    scales = {name: w.input_scale for name, w in weights(peer).items()}
    for name, w in weights(tree).items():
        *parents, last = f"{name}.weight".split(".")
        node = tree
        for key in parents:
            node = node[key]
        node[last] = dataclasses.replace(w, input_scale=scales[name])
    mxjax.save(tmp_path / "out", tree, CT, config=config_of(SOURCE))
    ours, theirs = raw_tensors(tmp_path / "out" / WEIGHTS), raw_tensors(PEERS["nvfp4"] / WEIGHTS)
    assert {k: v[:2] for k, v in ours.items()} == {k: v[:2] for k, v in theirs.items()}
    assert config_of(tmp_path / "out") == config_of(PEERS["nvfp4"])
    before = weights(tree)
    for name, w in weights(mxjax.load(tmp_path / "out")).items():
        a, b = w.qtensor, before[name].qtensor
        assert np.array_equal(a.codes, b.codes) and np.array_equal(a.scales, b.scales)
        # A multiplier that is nobody's reciprocal moves by one step of float32.
        assert abs(a.global_scale - b.global_scale) <= np.spacing(np.float32(b.global_scale))


# --- round trips ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", PEERS)
@pytest.mark.parametrize("a4", [False, True])
def test_our_file_to_tree_to_the_same_file(tmp_path, fmt, a4):
    tree = replaced(quantized_source(fmt, fmt if a4 else None), input_scale=jnp.float32(0.003) if a4 else None)
    config = config_of(SOURCE)
    mxjax.save(tmp_path / "a", tree, CT, config=config)
    loaded = mxjax.load(tmp_path / "a")
    mxjax.save(tmp_path / "b", loaded, CT, config=config)
    assert (tmp_path / "a" / WEIGHTS).read_bytes() == (tmp_path / "b" / WEIGHTS).read_bytes()
    assert_same(mxjax.load(tmp_path / "b"), loaded)
    group = config_of(tmp_path / "a")["quantization_config"]["config_groups"]["group_0"]
    assert (group["input_activations"] is not None) == a4
    names = {n.rpartition(".")[2] for n in raw_tensors(tmp_path / "a" / WEIGHTS)}
    assert ("input_global_scale" in names) == (a4 and fmt == "nvfp4")
    if fmt == "mxfp4":
        assert_same(
            replaced(loaded, input_scale=tree["model"]["layers"]["0"]["mlp"]["up_proj"]["weight"].input_scale), tree
        )


def test_flax_orientation_and_names(tmp_path):
    """A Flax model's tree [in, out] goes to PyTorch's [out, in] and back; only the static axis of a QTensor changes."""
    key = jax.random.key(0)
    tree = {
        "layers": {"0": {"up": {"kernel": jax.random.normal(key, (64, 32)), "bias": jnp.arange(32.0)}}},
        "norm": {"scale": jnp.ones(64)},
        "embed": {"embedding": jax.random.normal(key, (10, 64))},
        "head": {"kernel": jax.random.normal(key, (64, 10))},
    }
    q = mxjax.quantize(tree, "mxfp4_a16")
    names = {
        "layers/0/up/kernel": "model.layers.0.up.weight",
        "layers/0/up/bias": "model.layers.0.up.bias",
        "norm/scale": "model.norm.weight",
        "embed/embedding": "model.embed.weight",
        "head/kernel": "lm_head.weight",
    }
    mxjax.save(tmp_path / "out", q, CT, names=names.__getitem__)
    raw = raw_tensors(tmp_path / "out" / WEIGHTS)
    assert raw["model.layers.0.up.weight_packed"][1] == [32, 32]
    assert raw["lm_head.weight"][:2] == ("F32", [10, 64])
    assert np.array_equal(np.frombuffer(raw["lm_head.weight"][2], np.float32).reshape(10, 64), tree["head"]["kernel"].T)
    assert np.array_equal(decode_numpy("model.layers.0.up", raw), mxjax.dequantize(q)["layers"]["0"]["up"]["kernel"].T)
    assert config_of(tmp_path / "out")["quantization_config"]["ignore"] == ["lm_head"]  # no embedding: no Linear
    back = {hf: path for path, hf in names.items()}
    assert_same(mxjax.load(tmp_path / "out", names=back.__getitem__), q)
    plain = mxjax.load(tmp_path / "out")["model"]["layers"]["0"]["up"]["weight"]
    assert plain.shape == (32, 64) and plain.qtensor.axis == -1
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: names\(\) does not know it"):
        mxjax.load(tmp_path / "out", names={k: v for k, v in back.items() if "norm" not in k}.__getitem__)


def test_default_names(tmp_path):
    tree = {"mlp": {"kernel": linear().qtensor, "bias": jnp.ones(8)}, "ln": {"scale": jnp.ones(4)}}
    mxjax.save(tmp_path / "out", tree, CT)
    assert sorted(raw_tensors(tmp_path / "out" / WEIGHTS)) == [
        *("ln.weight", "mlp.bias", "mlp.weight_packed", "mlp.weight_scale")
    ]


def test_kept_leaves_keep_their_dtype_or_take_the_given_one(tmp_path):
    tree = {"a": {"weight": linear()}, "f": jnp.ones(3), "h": jnp.ones(3, jnp.float16), "i": jnp.arange(3)}
    mxjax.save(tmp_path / "keep", tree, CT)
    mxjax.save(tmp_path / "cast", tree, CT, dtype="bfloat16")
    kept, cast = (raw_tensors(tmp_path / d / WEIGHTS) for d in ("keep", "cast"))
    assert [kept[k][0] for k in "fhi"] == ["F32", "F16", "I32"]
    assert [cast[k][0] for k in "fhi"] == ["BF16", "BF16", "I32"]
    assert config_of(tmp_path / "keep")["dtype"] == "float32"  # that of the quantized weights


def test_mixed_schemes(tmp_path):
    tree = {
        "a": {"weight": linear("mxfp4")},
        "b": {"weight": linear("mxfp4", activation="mxfp4")},
        "c": {"weight": dataclasses.replace(linear("nvfp4", activation="nvfp4"), input_scale=jnp.float32(0.5))},
        "d": {"weight": linear("nvfp4")},
        "e": {"weight": jnp.ones((4, 4))},
    }
    mxjax.save(tmp_path / "out", tree, CT)
    config = config_of(tmp_path / "out")["quantization_config"]
    assert config["format"] == "mixed-precision" and config["ignore"] == ["e"]
    assert sorted(g["targets"] for g in config["config_groups"].values()) == [["a"], ["b"], ["c"], ["d"]]
    loaded = mxjax.load(tmp_path / "out")
    assert_same({k: v for k, v in loaded.items() if k != "d"}, {k: v for k, v in tree.items() if k != "d"})
    assert loaded["d"]["weight"].activation is None


def test_tied_embeddings(tmp_path):
    table = jnp.ones((10, 64))
    base = {"model": {"embed_tokens": {"weight": table}, "up": {"weight": linear()}}}
    config = {"tie_word_embeddings": True}

    def saved(name, tree, config):
        mxjax.save(tmp_path / name, tree, CT, config=config)
        out = config_of(tmp_path / name)
        return (
            sorted(raw_tensors(tmp_path / name / WEIGHTS)),
            out["tie_word_embeddings"],
            out["quantization_config"]["ignore"],
        )

    packed = ["model.up.weight_packed", "model.up.weight_scale"]
    tied = (["model.embed_tokens.weight", *packed], True, ["lm_head"])
    assert saved("untouched", base, config) == tied  # no head in the tree: stays tied
    assert saved("same array", {**base, "lm_head": {"weight": table}}, config) == tied
    assert saved("same array first", {"lm_head": {"weight": table}, **base}, {}) == tied
    copy = saved("copy", {**base, "lm_head": {"weight": table + 1}}, config)
    assert copy == (["lm_head.weight", "model.embed_tokens.weight", *packed], False, ["lm_head"])
    quantized = saved("quantized head", {**base, "lm_head": {"weight": linear()}}, config)
    assert quantized[1:] == (False, []) and "model.embed_tokens.weight" in quantized[0]


def test_sharded_files_with_an_index(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    names = sorted(raw_tensors(PEERS["mxfp4"] / WEIGHTS))
    tensors = st.read(PEERS["mxfp4"] / WEIGHTS)
    places = {}
    for i in range(3):
        for name in names[i::3]:
            places[name] = f"model-{i + 1:05}-of-00003.safetensors"
        st.write(folder / f"model-{i + 1:05}-of-00003.safetensors", {n: tensors[n].read() for n in names[i::3]})
    (folder / "config.json").write_bytes((PEERS["mxfp4"] / "config.json").read_bytes())
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert_same(mxjax.load(folder), mxjax.load(PEERS["mxfp4"]))

    for bad in ("../x", "/etc/passwd", "..", "a/b", "C:x", "a\\b", "", 3, None, "x\0y", "none.safetensors"):
        index.write_text(json.dumps({"weight_map": {**places, names[0]: bad}}))
        with pytest.raises(CheckpointError, match=r"index\.json|none\.safetensors"):
            mxjax.load(folder)
    index.write_text(json.dumps({"weight_map": {**places, names[0]: places[names[1]]}}))
    with pytest.raises(CheckpointError, match=f"{re.escape(names[0])} in .*the index places it"):
        mxjax.load(folder)
    index.write_text(json.dumps({"weight_map": {**places, "ghost": places[names[1]]}}))
    with pytest.raises(CheckpointError, match=r"ghost in .*promises"):
        mxjax.load(folder)


# --- scales -----------------------------------------------------------------------------------------------------------


def test_divisors_come_back():
    rng = np.random.default_rng(0)
    bits = rng.integers(0x00800000, 0x7E800000, 20_000).astype(np.uint32)
    for m in bits.view(np.float32):
        d = divisor(m)
        assert abs(np.float64(d) * np.float64(m) - 1) <= 2.0**-23  # within one step of the exact reciprocal
        assert divisor(multiplier(d)) == d
    for d in np.arange(128, 256, dtype=np.float32) * np.float32(128):  # every bfloat16 significand
        assert divisor(multiplier(d)) == d


def test_like_brings_back_every_divisor(tmp_path):
    """Two neighbours with one reciprocal: without the folder they came from, one of them is lost."""
    d = np.float32(1.9)
    while multiplier(d) != multiplier(np.nextafter(d, np.float32(2))):
        d = np.nextafter(d, np.float32(2))
    pair = [d, np.nextafter(d, np.float32(2))]
    w = linear("nvfp4")
    for i, value in enumerate(pair):
        folder = tmp_path / f"peer{i}"
        mxjax.save(folder, {"a": {"weight": w}}, CT)
        tensors = {n: np.array(e.read()) for n, e in st.read(folder / WEIGHTS).items()}
        st.write(folder / WEIGHTS, {**tensors, "a.weight_global_scale": np.array([value])}, {"format": "pt"})
        mxjax.save(tmp_path / f"back{i}", mxjax.load(folder), CT, like=folder)
        assert (tmp_path / f"back{i}" / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
        assert config_of(tmp_path / f"back{i}") == config_of(folder)
    # A tree that has another scale by now does not take the stored one.
    changed = {"a": {"weight": linear("nvfp4")}}
    mxjax.save(tmp_path / "new", changed, CT, like=tmp_path / "peer0")
    stored = np.frombuffer(raw_tensors(tmp_path / "new" / WEIGHTS)["a.weight_global_scale"][2], np.float32)
    assert stored[0] == divisor(np.asarray(changed["a"]["weight"].qtensor.global_scale))


def test_zero_blocks(tmp_path):
    """Inside: byte 0. On disk: MXFP4 byte 0; NVFP4 byte 56 (1.0), since loaders divide by the scale. And back.

    A block that only rounds to zero (row 3, byte 1) keeps its byte.
    """
    x = np.array(jax.random.normal(jax.random.key(0), (4, 64)))
    x[3, :32] = 1e-30
    x[1, :32] = 0
    x[2] = 0
    for fmt in PEERS:
        tree = {"a": {"weight": mxjax.QWeight(qtensor=mxjax.quantize_array(jnp.asarray(x), fmt))}}
        mxjax.save(tmp_path / fmt, tree, CT)
        _, shape, data = raw_tensors(tmp_path / fmt / WEIGHTS)["a.weight_scale"]
        byte = np.frombuffer(data, np.uint8).reshape(shape)
        zero = (x.reshape(*shape, -1) == 0).all(-1)
        assert (byte[zero] == (0 if fmt == "mxfp4" else 56)).all() and (byte[~zero] > 0).all()
        loaded = mxjax.load(tmp_path / fmt)
        assert np.array_equal(loaded["a"]["weight"].qtensor.scales, tree["a"]["weight"].qtensor.scales)
        assert np.array_equal(
            np.asarray(loaded["a"]["weight"].dequantize())[zero.repeat(x.shape[1] // shape[1], 1)],
            np.zeros(zero.sum() * x.shape[1] // shape[1]),
        )


def test_other_bytes_of_zero_blocks_and_byte_0_of_others_stay(tmp_path):
    q = mxjax.quantize_array(jnp.ones((2, 32)), "nvfp4")
    q = dataclasses.replace(q, scales=jnp.array([[1, 0], [56, 32]], jnp.uint8), codes=q.codes.at[0, :8].set(0))
    mxjax.save(tmp_path / "out", {"a": {"weight": q}}, CT)
    data = raw_tensors(tmp_path / "out" / WEIGHTS)["a.weight_scale"][2]
    assert list(data) == [1, 0, 56, 32]  # byte 0 with codes is a choice of whoever made it
    assert mxjax.load(tmp_path / "out")["a"]["weight"].qtensor.scales.tolist() == [[1, 0], [56, 32]]


@pytest.mark.parametrize("fmt", PEERS)
def test_blocks_of_nan_stay_nan(tmp_path, fmt):
    x = jnp.ones((2, 64)).at[0, 3].set(jnp.nan)
    q = mxjax.quantize_array(x, fmt, on_nonfinite="nan")
    mxjax.save(tmp_path / "out", {"a": {"weight": q}}, CT)
    loaded = mxjax.load(tmp_path / "out")["a"]["weight"]
    assert np.array_equal(loaded.dequantize(), q.dequantize(), equal_nan=True)
    assert int(jnp.isnan(loaded.dequantize()).sum()) == mxjax.get_format(fmt).block_size


def test_uncalibrated_inputs_are_written_as_1_with_a_warning(tmp_path):
    with pytest.warns(MxjaxWarning, match=r"1 NVFP4 W4A4 layers have no calibrated input_scale.*first: a\)"):
        mxjax.save(tmp_path / "out", {"a": {"weight": linear("nvfp4", activation="nvfp4")}}, CT)
    assert raw_tensors(tmp_path / "out" / WEIGHTS)["a.input_global_scale"][2] == np.float32(1).tobytes()
    assert mxjax.load(tmp_path / "out")["a"]["weight"].input_scale is None  # as saved: a scale for each token


def test_another_activation_policy_warns(tmp_path):
    with pytest.warns(MxjaxWarning, match="other than 'even'"):
        w = linear("mxfp4", activation="mxfp4", activation_scale="rceil")
        mxjax.save(tmp_path / "out", {"a": {"weight": w}}, CT)


BRANCH = mxjax.LowRank(a=jnp.ones((4, 64)), b=jnp.ones((8, 4)))


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSED = {
    "transform": (lambda: linear(transform=SCALE), r"transform \(ChannelScale\)"),
    "chain": (lambda: linear(transform=Chain((Hadamard(32), SCALE))), r"transform \(Chain\)"),
    "block matrix": (
        lambda: linear(transform=BlockMatrix(jnp.eye(32)[None].repeat(2, 0))),
        r"transform \(BlockMatrix\)",
    ),
    "low rank": (lambda: dataclasses.replace(linear(), branch=BRANCH), "low-rank branch"),
    "mxfp6": (lambda: linear("mxfp6_e3m2"), "format mxfp6_e3m2"),
    "mxfp8": (lambda: linear("mxfp8_e5m2"), "format mxfp8_e5m2"),
    "mxint8": (lambda: linear("mxint8"), "format mxint8"),
    "third": (lambda: linear(weight_scale="third"), "global factor on MXFP4"),
    "padding": (lambda: linear(shape=(8, 40)), "axis of 40 padded to 64"),
    "a8": (lambda: linear(activation="mxfp8_e4m3"), "activations in mxfp8_e4m3"),
    "experts": (lambda: linear(shape=(2, 8, 64)), r"3 axes \(2, 8, 64\)"),
    "bad scale": (lambda: dataclasses.replace(linear("nvfp4"), input_scale=jnp.float32(0)), "input_scale is 0.0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, case):
    make, reason = REFUSED[case]
    tree = {"ok": {"weight": linear()}, "layer": {"0": {"weight": make()}}}
    with pytest.raises(
        CheckpointError, match=rf"cannot carry 1 of(.|\n)*layer/0/weight: .*{reason}(.|\n)*'mxjax' and 'orbax'"
    ):
        mxjax.save(tmp_path / "out", tree, CT)
    assert list(tmp_path.iterdir()) == []
    mxjax.save(tmp_path / "out", tree)  # as the message says
    assert_same(mxjax.load(tmp_path / "out"), tree)


def test_all_reasons_in_one_error(tmp_path):
    tree = {"a": {"weight": linear("mxint8")}, "b": {"weight": linear(transform=SCALE)}, "c": {"w": linear()}}
    with pytest.raises(CheckpointError, match=r"carry 3 of(.|\n)*a/weight(.|\n)*b/weight(.|\n)*c/w: its name is 'c.w'"):
        mxjax.save(tmp_path / "out", tree, CT)


def test_names_that_clash_and_nothing_quantized(tmp_path):
    tree = {"a": {"kernel": linear(), "weight": jnp.ones(2)}, "b": {"weight": jnp.ones(2), "scale": jnp.ones(2)}}
    with pytest.raises(CheckpointError, match=r"b\.weight: two leaves have this name"):
        mxjax.save(tmp_path / "out", tree, CT)
    with pytest.raises(CheckpointError, match="nothing in the tree is quantized"):
        mxjax.save(tmp_path / "out", {"a": jnp.ones(2)}, CT)
    with pytest.raises(CheckpointError, match="kernel of 3 axes"):
        mxjax.save(tmp_path / "out", {"q": {"kernel": linear()}, "conv": {"kernel": jnp.ones((3, 3, 3))}}, CT)


# --- damage -----------------------------------------------------------------------------------------------------------

DOWN = "model.layers.0.mlp.down_proj"


def retensor(name, change):
    """A change of one tensor: a new array, None to delete; ``name`` may be new."""

    def apply(tensors, config):
        new = change(tensors.get(name)) if callable(change) else change
        tensors.pop(name, None)
        if new is not None:
            tensors[name] = new

    return apply


def reconfig(*keys, value):
    def apply(tensors, config):
        node = config
        for key in keys[:-1]:
            node = node[key]
        node[keys[-1]] = value

    return apply


G = ("quantization_config", "config_groups", "group_0")
DAMAGE = {
    "no packed weight": (retensor(f"{DOWN}.weight_packed", None), f"{DOWN}: weight_packed is missing"),
    "no block scale": (retensor(f"{DOWN}.weight_scale", None), rf"{DOWN}\.weight_scale is missing"),
    "no global scale": (retensor(f"{DOWN}.weight_global_scale", None), rf"{DOWN}\.weight_global_scale is missing"),
    "no input scale": (retensor(f"{DOWN}.input_global_scale", None), rf"{DOWN}\.input_global_scale is missing"),
    "codes of another dtype": (retensor(f"{DOWN}.weight_packed", lambda x: x.view(np.int8)), "int8"),
    "codes of another rank": (retensor(f"{DOWN}.weight_packed", lambda x: x.reshape(-1)), r"uint8 \(4096,\)"),
    "codes cut": (retensor(f"{DOWN}.weight_packed", lambda x: x[:, :-4]), "multiple of 16"),
    "no rows": (retensor(f"{DOWN}.weight_packed", lambda x: x[:0]), r"\(0, 64\)"),
    "rows missing": (
        retensor(f"{DOWN}.weight_scale", lambda x: x[:-1]),
        r"weight_scale in .*\(63, 8\), not .*\(64, 8\)",
    ),
    "scales transposed": (retensor(f"{DOWN}.weight_scale", lambda x: x.T), r"weight_scale in .*\(8, 64\)"),
    "scales as uint8": (retensor(f"{DOWN}.weight_scale", lambda x: x.view(np.uint8)), "weight_scale in .*uint8"),
    "negative scales": (retensor(f"{DOWN}.weight_scale", lambda x: -x), "weight_scale in .*negative block scales"),
    "global scale of two": (retensor(f"{DOWN}.weight_global_scale", np.ones(2, np.float32)), "weight_global_scale in"),
    "global scale in f64": (retensor(f"{DOWN}.weight_global_scale", np.ones(1)), "weight_global_scale in .*float64"),
    **{
        f"global scale {x}": (retensor(f"{DOWN}.weight_global_scale", np.array([x], np.float32)), "no global scale")
        for x in (0, -1, np.nan, np.inf, 1e-40)
    },
    "unknown tensor": (retensor(f"{DOWN}.weight_zero_point", np.zeros(1)), rf"{DOWN}\.weight_zero_point in"),
    "unknown 8-bit tensor": (retensor("model.x.k", np.zeros(3, np.uint8)), r"model\.x\.k in .*unknown tensor"),
    "dense and packed": (retensor(f"{DOWN}.weight", np.zeros(3)), rf"{DOWN}\.weight in .*no tensor that"),
    "leaf and branch": (retensor("model.layers", np.zeros(3)), "model/layers"),
    "packed but ignored": (reconfig("quantization_config", "ignore", value=[DOWN]), "config does not quantize"),
    "named but dense": (reconfig(*G, "targets", value=["re:.*"]), "lm_head in .*weight_packed is missing|embed"),
    "no target": (reconfig(*G, "targets", value=["Conv2d", "Linear_"][:0]), "config does not quantize"),
    "mxfp4 in the config": (reconfig(*G, "format", value="mxfp4-pack-quantized"), "strategy is 'tensor_group'"),
    "int4": (reconfig(*G, "weights", "type", value="int"), "type is 'int'"),
    "asymmetric": (reconfig(*G, "weights", "symmetric", value=False), "symmetric is 'False'"),
    "group of 32": (reconfig(*G, "weights", "group_size", value=32), "group_size is '32'"),
    "pack-quantized": (reconfig(*G, "format", value="pack-quantized"), "'pack-quantized'; mxjax reads"),
    "static activations": (reconfig(*G, "input_activations", "dynamic", value=False), "dynamic is 'False'"),
    "output activations": (reconfig(*G, "output_activations", value={"num_bits": 8}), "output_activations"),
    "weights null": (reconfig(*G, "weights", value=None), "weights is no object"),
    "group null": (reconfig(*G, value=None), "group_0 is no object"),
    "no groups": (reconfig("quantization_config", "config_groups", value={}), "no config_groups"),
    "bad pattern": (reconfig(*G, "targets", value=["re:("]), "no regular expression"),
    "targets text": (reconfig(*G, "targets", value="Linear"), "targets is a list"),
    "ignore numbers": (reconfig("quantization_config", "ignore", value=[1]), "ignore is a list"),
    "transform": (reconfig("quantization_config", "transform_config", value={"R1": {}}), "transform_config holds"),
    "sparsity": (reconfig("quantization_config", "sparsity_config", value={"format": "x"}), "sparsity_config is set"),
    "kv cache": (reconfig("quantization_config", "kv_cache_scheme", value={"num_bits": 8}), "kv_cache_scheme is set"),
    "frozen": (reconfig("quantization_config", "quantization_status", value="frozen"), "'frozen'"),
    "awq": (reconfig("quantization_config", "quant_method", value="awq"), "quant_method 'awq'"),
    "method list": (reconfig("quantization_config", "quant_method", value=[]), "quant_method"),
    "config list": (reconfig("quantization_config", value=[]), "quant_method"),
    "dtype int": (reconfig("dtype", value="int8"), "dtype 'int8' is no float"),
    "dtype nonsense": (reconfig("dtype", value={"a": 1}), "is no float"),
    "a16 with input scales": (reconfig(*G, "input_activations", value=None), "float inputs has no such tensor"),
}


@pytest.fixture(scope="module")
def peer_tensors():
    return {n: np.array(e.read()) for n, e in st.read(PEERS["nvfp4"] / WEIGHTS).items()}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_folder(tmp_path, peer_tensors, case):
    change, message = DAMAGE[case]
    tensors, config = dict(peer_tensors), config_of(PEERS["nvfp4"])
    change(tensors, config)
    st.write(tmp_path / WEIGHTS, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        mxjax.load(tmp_path)


@pytest.mark.parametrize("file", [WEIGHTS, "config.json"])
@pytest.mark.parametrize("keep", [0, 5, 500, -1, None])
def test_truncated_or_missing_file(tmp_path, file, keep):
    for name in (WEIGHTS, "config.json"):
        (tmp_path / name).write_bytes((PEERS["mxfp4"] / name).read_bytes().strip())
    if keep is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=re.escape(file)):
        mxjax.load(tmp_path)


def test_random_damage(tmp_path):
    """Bytes of the header or of the config changed at random: it loads, or the error is ours."""
    rng = random.Random(0)
    files = {name: (PEERS["nvfp4"] / name).read_bytes() for name in (WEIGHTS, "config.json")}
    header = int.from_bytes(files[WEIGHTS][:8], "little") + 8
    errors = 0
    for i in range(150):
        for name, data in files.items():
            data = bytearray(data)
            if (name == WEIGHTS) == (i % 2 == 0):
                for _ in range(3):
                    data[rng.randrange(header if name == WEIGHTS else len(data))] = rng.choice(
                        b'0123456789{}[],:"aZ\xff\0'
                    )
            (tmp_path / name).write_bytes(data)
        try:
            mxjax.load(tmp_path)
        except MxjaxError:
            errors += 1
    assert errors > 75


def test_a_folder_without_quantization_gives_its_floats():
    tree = mxjax.load(SOURCE)
    raw = raw_tensors(SOURCE / WEIGHTS)
    assert len(jax.tree.leaves(tree)) == len(raw)
    got = tree["model"]["layers"]["1"]["self_attn"]["k_proj"]["weight"]
    assert got.dtype == jnp.bfloat16 and np.asarray(got).tobytes() == raw["model.layers.1.self_attn.k_proj.weight"][2]
    turned = mxjax.load(SOURCE, names=lambda n: n.replace(".", "/").replace("proj/weight", "proj/kernel"))
    assert np.array_equal(turned["model"]["layers"]["1"]["self_attn"]["k_proj"]["kernel"], got.T)


def test_folders_that_are_none(tmp_path):
    with pytest.raises(CheckpointError, match="is no folder"):
        mxjax.load(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"neither mxjax\.json nor config\.json"):
        mxjax.load(tmp_path)
