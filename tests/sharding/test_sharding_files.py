"""Sharded trees on disk: no file knows of a mesh, any mesh can take a file up, and each shard is read on its own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mxjax
from mxjax import sharding
from mxjax.errors import BlockShapeError, ConfigError
from mxjax.io import safetensors
from mxjax.transforms import BlockMatrix

RULES = {"up": {"kernel": P("a", "b"), "bias": P("b")}}
FORMATS = ["mxjax", "orbax", "compressed-tensors"]


def mesh_of(**axes):
    assert len(jax.devices()) >= 8, "tests/conftest.py asks XLA for eight"
    shape = tuple(axes.values())
    kinds = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, tuple(axes), axis_types=kinds, devices=jax.devices()[: int(np.prod(shape))])


def tree():
    rng = np.random.default_rng(0)
    w = {"kernel": rng.standard_normal((128, 16)).astype(np.float32), "bias": np.arange(16, dtype=np.float32)}
    return mxjax.quantize({"up": w}, "nvfp4_a16")


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b)


@pytest.mark.parametrize("format", FORMATS)
def test_saved_from_one_mesh_and_loaded_on_another(format, tmp_path):
    want = tree()
    mxjax.save(tmp_path / "out", sharding.shard(want, mesh_of(a=4, b=2), RULES), format=format)
    mxjax.save(tmp_path / "plain", want, format=format)
    if format != "orbax":  # a mesh leaves no trace
        for file in (tmp_path / "plain").iterdir():
            assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()
    mesh = mesh_of(x=2)
    rules = {"up/kernel": P(None, "x"), "up/bias": P("x")}
    names = {"names": lambda name: name.replace(".", "/").replace("weight", "kernel")}
    got = mxjax.load(tmp_path / "out", mesh=mesh, specs=rules.get, **(names if format == FORMATS[2] else {}))
    q = got["up"]["kernel"].qtensor
    assert q.codes.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 2)
    assert q.scales.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 2)
    assert q.global_scale.sharding.is_equivalent_to(NamedSharding(mesh, P()), q.global_scale.ndim)
    assert got["up"]["bias"].sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 1)
    assert np.array_equal(mxjax.dequantize(got)["up"]["kernel"], mxjax.dequantize(want)["up"]["kernel"])
    if format != FORMATS[2]:
        assert_same(got, want)


def test_what_calibration_added_is_cut_too(tmp_path):
    """A transform and a branch that no recipe could tell beforehand: the file does."""
    w = tree()["up"]["kernel"]
    branch = mxjax.LowRank(a=jnp.ones((4, 128)), b=jnp.ones((16, 4)))
    w = dataclasses.replace(w, transform=BlockMatrix(jnp.stack([jnp.eye(16)] * 8)), branch=branch)
    for format in ("mxjax", "orbax"):
        mxjax.save(tmp_path / format, [w, "text", jax.random.key(1)], format=format)
        got, text, _ = mxjax.load(tmp_path / format, mesh=mesh_of(a=4, b=2), specs=[P("a", "b"), None, None])
        assert text == "text"
        assert got.transform.matrices.sharding.spec == P("a") and got.branch.a.sharding.spec == P(None, "a")
        assert_same(got, w)


def test_only_slices_are_read(tmp_path, monkeypatch):
    """What is taken of the memory maps: each device's shard of each array, never a whole one."""
    mxjax.save(tmp_path / "out", {"up": {"kernel": tree()["up"]["kernel"]}})
    seen, read = {}, safetensors.Entry.read

    class Map(np.ndarray):
        name = ""

        def __array_finalize__(self, other):
            self.name = getattr(other, "name", "")

        def __getitem__(self, index):
            out = super().__getitem__(index)
            seen.setdefault(self.name, []).append(out.nbytes)
            return out

    def recorded(entry):
        out = read(entry).view(Map)
        out.name = entry.name
        return out

    monkeypatch.setattr(safetensors.Entry, "read", recorded)
    mxjax.load(tmp_path / "out", mesh=mesh_of(a=4, b=2), specs={"up": {"kernel": P("a", "b")}})
    assert seen["up/kernel.qtensor.codes"] == [128 * 16 // 2 // 8] * 8
    assert seen["up/kernel.qtensor.scales"] == [128 * 16 // 16 // 8] * 8


def test_what_cannot_be_placed(tmp_path):
    mxjax.save(tmp_path / "out", tree())
    mesh = mesh_of(a=4, b=2)
    with pytest.raises(ConfigError, match="a mesh and specs"):
        mxjax.load(tmp_path / "out", specs=RULES)
    with pytest.raises(ConfigError, match="none named 'z'"):
        mxjax.load(tmp_path / "out", mesh=mesh, specs={"up": {"kernel": P("z"), "bias": None}})
    with pytest.raises(BlockShapeError, match=r"up/bias: axis 0 of shape \(16,\) is not cut evenly into 3 .*'c': 3"):
        mxjax.load(tmp_path / "out", mesh=mesh_of(c=3), specs={"up": {"kernel": None, "bias": P("c")}})
    with pytest.raises(BlockShapeError, match="no multiple of 16"):
        sharding.shard(tree(), mesh_of(c=3), {"up": {"kernel": P("c"), "bias": None}}, on_uneven="error")
