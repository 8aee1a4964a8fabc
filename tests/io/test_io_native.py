"""The formats "mxjax" and "orbax": everything that a tree can hold comes back, without a template."""

import copy
import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from io_cases import assert_same

import mxjax
from mxjax.errors import CheckpointError, MxjaxError
from mxjax.io import manifest
from mxjax.io import safetensors as st
from mxjax.transforms import Chain, Hadamard

FORMATS = ["mxjax", "orbax"]


def weight(fmt="mxfp4", **changes):
    w = jax.random.normal(jax.random.key(0), (64, 8))
    rule = mxjax.Rule(weight=fmt, activation=changes.pop("activation", None), transform=changes.pop("transform", None))
    return dataclasses.replace(mxjax.quantize({"kernel": w}, mxjax.QuantConfig(rules=[rule]))["kernel"], **changes)


def everything():
    low_rank = dict(a=jnp.ones((32, 64), jnp.bfloat16), b=mxjax.quantize_array(jnp.ones((8, 32)), "mxfp8_e4m3"))
    low_rank |= dict(activation=mxjax.ActivationFormat(format=mxjax.get_format("mxfp8_e4m3")))
    return {
        "params": {
            **{fmt: weight(fmt) for fmt in mxjax.FORMATS},
            "w4a8": weight("mxfp4", activation="mxfp8_e4m3"),
            "static": weight("nvfp4", activation="nvfp4", input_scale=jnp.float32(0.37)),
            "turned": weight("mxfp4", transform=Chain((Hadamard(32), Hadamard(16)))),
            "third": {"kernel": mxjax.quantize_array(jnp.ones((4, 32)), "mxfp4", scale="third")},
            "low_rank": weight("nvfp4", branch=mxjax.LowRank(**low_rank)),
            "padded": mxjax.quantize_array(jnp.ones((3, 40), jnp.bfloat16), "mxfp4", on_uneven="pad"),
            "experts": mxjax.quantize_array(jnp.ones((2, 32, 6)), "nvfp4", axis=-2, batch_axes=1),
        },
        "other": [
            jnp.arange(3, dtype=jnp.bfloat16),
            (np.arange(2), jnp.zeros((0, 3)), np.float16(2)),
            {
                "bool": jnp.array([True, False]),
                "int4": jnp.array([-8, 7], jnp.int4),
                "f8": jnp.ones(2, jnp.float8_e5m2),
            },
            [None, True, -3, 2.5, "text", jax.random.key(3)],
        ],
        "by number": {0: jnp.zeros(2), 10: jnp.ones(2)},
        "odd/keys": {"a/b": jnp.zeros(1), "a": {"b": jnp.ones(1)}, "": jnp.ones(2), "__metadata__": jnp.ones(3)},
    }


@pytest.mark.parametrize("format", FORMATS)
def test_everything_comes_back(tmp_path, format):
    tree = everything()
    mxjax.save(tmp_path / "out", tree, format, config={"model_type": "llama"})
    loaded = mxjax.load(tmp_path / "out")
    assert_same(loaded, tree)
    assert not any(x.committed for x in jax.tree.leaves(loaded) if isinstance(x, jax.Array))
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "llama"}
    # A second trip gives the same files.
    mxjax.save(tmp_path / "again", loaded, format)
    assert (tmp_path / "again" / "mxjax.json").read_bytes() == (tmp_path / "out" / "mxjax.json").read_bytes()
    if format == "mxjax":
        name = "arrays.safetensors"
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


@pytest.mark.parametrize("format", FORMATS)
def test_loaded_weights_compute_the_same(tmp_path, format):
    tree = {"w": weight("mxfp4", activation="mxfp4", transform=Hadamard(32))}
    mxjax.save(tmp_path / "out", tree, format)
    x = jax.random.normal(jax.random.key(1), (5, 64))
    assert np.array_equal(mxjax.qdot(x, mxjax.load(tmp_path / "out")["w"]), mxjax.qdot(x, tree["w"]))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tree", [{}, [], {"a": None, "b": ()}, {"a": np.zeros(0)}], ids=str)
def test_trees_without_values(tmp_path, format, tree):
    mxjax.save(tmp_path / "out", tree, format)
    assert_same(mxjax.load(tmp_path / "out"), tree)


@pytest.mark.parametrize("format", FORMATS)
def test_tied_arrays_are_stored_once(tmp_path, format):
    table = jnp.ones((256, 256))
    tree = {"embed": table, "head": table, "q": weight()}
    tree["q2"] = tree["q"]
    mxjax.save(tmp_path / "out", tree, format)
    loaded = mxjax.load(tmp_path / "out")
    assert loaded["head"] is loaded["embed"]
    assert loaded["q2"].qtensor.codes is loaded["q"].qtensor.codes
    if format == "mxjax":
        stored = st.read(tmp_path / "out" / "arrays.safetensors")
        assert set(stored) == {"embed", "q.qtensor.codes", "q.qtensor.scales"}


def test_nnx_state(tmp_path):
    """A State comes back as plain dicts; what was a list of layers has int keys."""
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(32, 4, rngs=rngs) for _ in range(2)])
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

    state = mxjax.quantize(nnx.state(Model(nnx.Rngs(0))), "mxfp4")
    mxjax.save(tmp_path / "out", state)
    loaded = mxjax.load(tmp_path / "out")
    assert sorted(loaded["layers"]) == [0, 1]
    assert isinstance(loaded["layers"][1]["kernel"], mxjax.QWeight)
    assert_same(jax.tree.leaves(loaded), jax.tree.leaves(nnx.to_pure_dict(state)))


def test_a_transform_of_the_caller(tmp_path):
    @manifest.register_transform
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class ScaleForTest:
        factor: jax.Array
        sizes: tuple[int, ...] = dataclasses.field(default=(1, 2), metadata=dict(static=True))

        def activation(self, x):
            return x * self.factor

        def weight(self, w):
            return w / self.factor

        undo_weight = activation

        def check(self, size, path=""):
            assert self.factor.shape == (size,)

    try:
        tree = {"w": weight(transform=ScaleForTest(jnp.arange(1.0, 65.0), (3, 4)))}
        mxjax.save(tmp_path / "out", tree)
        assert_same(mxjax.load(tmp_path / "out"), tree)
    finally:
        del manifest._extra["ScaleForTest"]
    with pytest.raises(CheckpointError, match="w/transform: unknown class 'ScaleForTest'"):
        mxjax.load(tmp_path / "out")
    with pytest.raises(CheckpointError, match="another class has its name"):
        manifest.register_transform(dataclasses.make_dataclass("Hadamard", []))


@pytest.mark.parametrize(
    "tree, message",
    [
        ({"a": {"b": object()}}, "a/b: cannot store a object"),
        ({"a": {(1, 2): 3}}, "a: dict keys are str or int"),
        ({"a": float("nan")}, "a: JSON has no nan"),
        ({"a": np.array([object()])}, "a: cannot store an array of Python objects"),
        ({"a": jax.ShapeDtypeStruct((2,), jnp.float32)}, "a: cannot store a ShapeDtypeStruct"),
    ],
)
def test_what_cannot_be_stored(tmp_path, tree, message):
    with pytest.raises(CheckpointError, match=message):
        mxjax.save(tmp_path / "out", tree)
    assert not (tmp_path / "out").exists()


# --- damage ---------------------------------------------------------------------------------------------------------


def edit(*keys, value):
    """A change of mxjax.json: walks to keys[:-1], sets keys[-1]; value None deletes it."""

    def apply(top):
        node = top
        for key in keys[:-1]:
            node = node[key]
        if value is None:
            del node[keys[-1]]
        else:
            node[keys[-1]] = value

    return apply


W = ("tree", "dict", 0, 1)  # the QWeight
Q = (*W, "data", "qtensor")
ARRAY = {"array": "x", "dtype": "float32", "shape": [2]}
DAMAGE = {
    "future version": (edit("version", value=2), "version 2; .* upgrade mxjax"),
    "version as text": (edit("version", value="1"), "no mxjax checkpoint"),
    "other format": (edit("format", value="zip"), "no mxjax checkpoint"),
    "other storage": (edit("arrays", value="pickle"), "not 'pickle'"),
    "no tree": (edit("tree", value=None), "does not know"),
    "unknown class": (edit(*W, "class", value="os.system"), "w: unknown class 'os.system'"),
    "unknown field": (edit(*W, "static", "extra", value=1), "w: QWeight has no such field 'extra'"),
    "static as data": (edit(*Q, "data", "size", value={"value": 64}), "no such field 'size'"),
    "missing field": (edit(*Q, "static", "size", value=None), "w/qtensor: no valid QTensor"),
    "size as text": (edit(*Q, "static", "size", value="64"), "w/qtensor/size: int, not '64'"),
    "size as float": (edit(*Q, "static", "size", value=64.0), "w/qtensor/size: int"),
    "wrong size": (edit(*Q, "static", "size", value=96), "w/qtensor: a contraction axis of 96"),
    "wrong axis": (edit(*Q, "static", "axis", value=0), "w/qtensor: axis 0"),
    "wrong format": (edit(*Q, "static", "format", "format", value="mxfp9"), "unknown format 'mxfp9'"),
    "needs a global scale": (edit(*Q, "static", "format", "format", value="nvfp4"), "w/qtensor: "),
    "format as text": (edit(*Q, "static", "format", value="mxfp4"), "w/qtensor/format: BlockFormat"),
    "dtype_name int": (edit(*Q, "static", "dtype_name", value="int8"), "no float"),
    "dtype_name nonsense": (edit(*Q, "static", "dtype_name", value="float99"), "no valid QTensor"),
    "unknown policy": (edit(*W, "static", "activation", "scale", value="best"), "w/activation: unknown scale policy"),
    "activation of nothing": (edit(*W, "static", "activation", value={"x": 1}), "describes no static field"),
    "huge Hadamard": (edit(*W, "data", "transform", "static", "size", value=2**50), "w: Hadamard blocks of"),
    "uneven Hadamard": (edit(*W, "data", "transform", "static", "size", value=24), "w: "),
    "Hadamard of 0": (edit(*W, "data", "transform", "static", "size", value=0), "w: "),
    "transform is a number": (edit(*W, "data", "transform", value={"value": 1}), "w: no valid QWeight"),
    "qtensor is a dict": (edit(*W, "data", "qtensor", value={"dict": [["codes", ARRAY]]}), "does not know"),
    "codes are missing": (edit(*Q, "data", "codes", value=None), "tensors that mxjax.json does not know"),
    "codes are no array": (edit(*Q, "data", "scales", value={"value": 3}), "does not know"),
    "branch is an array": (edit(*W, "data", "branch", value=ARRAY), "w: no valid QWeight"),
    "input_scale is text": (edit(*W, "data", "input_scale", value={"value": "x"}), "w/input_scale: an array"),
    "array with a wrong shape": (edit("tree", "dict", 1, 1, "shape", value=[3]), r"x in .*mxjax.json says"),
    "array with a wrong dtype": (edit("tree", "dict", 1, 1, "dtype", value="int32"), r"x in .*mxjax.json says"),
    "array of objects": (edit("tree", "dict", 1, 1, "dtype", value="object"), "x: 'object' is no dtype"),
    "array of records": (edit("tree", "dict", 1, 1, "dtype", value="i4,i4"), "x: 'i4,i4' is no dtype"),
    "shape is text": (edit("tree", "dict", 1, 1, "shape", value="2"), "x: 2 is no shape"),
    "unknown tensor": (edit("tree", "dict", 1, 1, "array", value="y"), "tensors are missing: y"),
    "random key of floats": (edit("tree", "dict", 1, 1, "key", value="threefry2x32"), "x: no random key"),
    "unknown generator": (edit("tree", "dict", 1, 1, "key", value="dice"), "x: no random key"),
    "two kinds in one node": (edit("tree", "list", value=[]), "describes no part"),
    "same key twice": (edit("tree", "dict", 1, 0, value="w"), "its key comes twice"),
    "key is a list": (edit("tree", "dict", 1, 0, value=[]), "no entry of a dict"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("io") / "good"
    mxjax.save(folder, {"w": weight(activation="mxfp4", transform=Hadamard(32)), "x": jnp.ones(2)})
    return folder


def damaged(good, folder):
    folder.mkdir()
    for file in good.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_manifest(good, tmp_path, case):
    change, message = DAMAGE[case]
    folder = damaged(good, tmp_path / "bad")
    top = json.loads((folder / "mxjax.json").read_text())
    change(top)
    (folder / "mxjax.json").write_text(json.dumps(top))
    with pytest.raises(CheckpointError, match=message) as error:
        mxjax.load(folder)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"format":"mxjax","version":1}'])
def test_manifest_that_is_no_manifest(good, tmp_path, text):
    folder = damaged(good, tmp_path / "bad")
    (folder / "mxjax.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"mxjax\.json"):
        mxjax.load(folder)


def test_deep_tree(good, tmp_path):
    folder = damaged(good, tmp_path / "bad")
    top = json.loads((folder / "mxjax.json").read_text())
    node = '{"list":[' * 5000 + json.dumps(top["tree"]) + "]}" * 5000
    (folder / "mxjax.json").write_text(json.dumps({**top, "tree": "HERE"}).replace('"HERE"', node))
    with pytest.raises(CheckpointError, match=r"nested too deeply|no valid JSON"):
        mxjax.load(folder)


@pytest.mark.parametrize("keep", [0, 8, 100, -1])
def test_truncated_arrays(good, tmp_path, keep):
    folder = damaged(good, tmp_path / "bad")
    file = folder / "arrays.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"arrays\.safetensors"):
        mxjax.load(folder)


def test_random_changes_of_the_manifest(good, tmp_path):
    """Any JSON value in any place of the manifest: it loads, or the error is ours."""
    folder = damaged(good, tmp_path / "bad")
    top = json.loads((folder / "mxjax.json").read_text())
    places = []

    def walk(node, keys):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            places.append((*keys, key))
            if isinstance(value, (dict, list)):
                walk(value, (*keys, key))

    walk(top, ())
    values = [-1, 0, 1.5, True, "", "mxfp8_e4m3", [], [[]], {}, {"value": 1}, {"dict": []}, 10**30, ARRAY]
    failures = 0
    for keys in places:
        for value in values:
            changed = copy.deepcopy(top)
            edit(*keys, value=value)(changed)
            (folder / "mxjax.json").write_text(json.dumps(changed))
            try:
                mxjax.load(folder)
            except MxjaxError:
                failures += 1
    assert failures > 0.8 * len(places) * len(values)


@pytest.mark.parametrize("victim", ["_METADATA", "manifest.ocdbt", "d"])
def test_damaged_orbax(tmp_path, victim):
    folder = tmp_path / "out"
    mxjax.save(folder, {"x": jnp.ones(2000)}, "orbax")
    for file in (folder / "arrays.orbax").rglob("*"):
        if (file.is_file() and victim in file.parts) or (file.name == victim and file.is_file()):
            file.write_bytes(b"damage")
    with pytest.raises(CheckpointError, match="Orbax cannot read it"):
        mxjax.load(folder)


@pytest.mark.parametrize("change", ["shape", "dtype", "array"])
def test_orbax_arrays_that_are_not_as_described(tmp_path, change):
    folder = tmp_path / "out"
    mxjax.save(folder, {"x": jnp.ones(2)}, "orbax")
    top = json.loads((folder / "mxjax.json").read_text())
    top["tree"]["dict"][0][1][change] = {"shape": [3], "dtype": "int32", "array": "y"}[change]
    (folder / "mxjax.json").write_text(json.dumps(top))
    with pytest.raises(CheckpointError, match="tensors are missing: y" if change == "array" else r"x in .*says"):
        mxjax.load(folder)


# --- shardings --------------------------------------------------------------------------------------------------------

SHARDED = """
import sys, jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import mxjax
from mxjax.errors import CheckpointError
folder, peer = sys.argv[1:]
assert len(jax.devices()) == 8
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
rows = NamedSharding(mesh, P("x"))
tree = mxjax.load(folder)
q = tree["layers"][0]["kernel"].qtensor

def check(loaded, shape):
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(tree), strict=True):
        assert np.array_equal(a, b)
    w = loaded["layers"][0]["kernel"].qtensor
    assert {s.data.shape for s in w.codes.addressable_shards} == {shape}, w.codes.sharding
    assert len(w.codes.sharding.device_set) == 8
    return loaded

# one sharding for everything: a scalar is replicated
w = check(mxjax.load(folder, shardings=rows), (16, 32))["layers"][0]["kernel"].qtensor
assert w.global_scale.sharding.is_fully_replicated and len(w.global_scale.sharding.device_set) == 8
# a callable from names
both = NamedSharding(mesh, P("x", "y"))
everywhere = NamedSharding(mesh, P())
check(mxjax.load(folder, shardings=lambda name: both if name.endswith(".codes") else everywhere), (16, 16))
# a tree with a sharding for a branch, and the tree of shardings of a loaded one
loaded = check(mxjax.load(folder, shardings={"layers": [rows], "bias": None}), (16, 32))
check(mxjax.load(folder, shardings=jax.tree.map(lambda x: x.sharding, loaded)), (16, 32))
# computes the same
x = jnp.ones((3, 64))
y, z = (np.asarray(mxjax.qdot(x, t["layers"][0]["kernel"])) for t in (loaded, tree))
# 64 terms of at most 4 in some order: each of the 64 additions rounds a partial sum below 256 to 2**-24 of itself
assert np.abs(y - z).max() < 64 * 256 * 2.0**-24, np.abs(y - z).max()
for bad in ({"layers": []}, {}, 3, lambda name: 3, {"layers": rows}):
    try:
        mxjax.load(folder, shardings=bad)
    except CheckpointError as e:
        print(e)
    else:
        raise AssertionError(bad)
try:
    mxjax.load(folder, shardings=lambda n: NamedSharding(Mesh(np.array(jax.devices()[:3]), ("z",)), P("z")))
except CheckpointError as e:
    assert "does not divide" in str(e), e
else:
    raise AssertionError
on_mesh, on_one = (mxjax.load(peer, shardings=s)["model"]["layers"]["0"]["mlp"]["down_proj"] for s in (rows, None))
codes = on_mesh["weight"].qtensor.codes
assert {s.data.shape for s in codes.addressable_shards} == {(16, 64)}
assert np.array_equal(codes, on_one["weight"].qtensor.codes)
print("OK")
"""


@pytest.mark.parametrize("format", FORMATS)
def test_onto_a_mesh_of_eight_devices(tmp_path, format):
    """In a fresh interpreter: the number of simulated devices is fixed when JAX starts."""
    from io_cases import PEERS

    kernel = jax.random.normal(jax.random.key(0), (64, 64))
    tree = {"layers": [{"kernel": mxjax.quantize({"kernel": kernel}, "nvfp4")["kernel"]}], "bias": jnp.zeros(4)}
    mxjax.save(tmp_path / "out", tree, format)
    process = subprocess.run(
        [sys.executable, "-c", SHARDED, str(tmp_path / "out"), str(PEERS["nvfp4"])],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert process.returncode == 0 and process.stdout.endswith("OK\n"), process.stdout + process.stderr
