"""``save`` and ``convert`` write shards of a chosen size with an index, as ``quantize_folder`` does."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from io_cases import PEERS, assert_same, quantized_source, raw_tensors
from stream_cases import contents

import mxjax
from mxjax.errors import CheckpointError, ConfigError
from mxjax.io import hf, sharded
from mxjax.io.hf_read import EXACT
from mxjax.io.safetensors import Spec, read_metadata

LIMIT = 20_000
LAYOUTS = [("mxjax", "mxfp4"), ("compressed-tensors", "mxfp4"), ("modelopt", "nvfp4"), ("quark", "mxfp4")]


def shards(folder):
    return sorted(folder.glob("*.safetensors"))


def weight_of(tensor):
    return tensor.partition(".qtensor.")[0] if "/" in tensor else tensor.rpartition(".")[0]


@pytest.fixture(scope="module")
def trees():
    return {fmt: quantized_source(fmt, None) for fmt in ("mxfp4", "nvfp4")}


@pytest.mark.parametrize(("layout", "fmt"), LAYOUTS)
def test_shards_hold_what_one_file_holds(tmp_path, trees, layout, fmt):
    mxjax.save(tmp_path / "one", trees[fmt], layout)
    mxjax.save(tmp_path / "many", trees[fmt], layout, shard_size=LIMIT)
    assert len(shards(tmp_path / "one")) == 1 and not list((tmp_path / "one").glob("*.index.json"))
    files = shards(tmp_path / "many")
    stem = files[0].name.partition("-")[0]
    assert [f.name for f in files] == [f"{stem}-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    found = {f.name: raw_tensors(f) for f in files}
    (only,) = shards(tmp_path / "one")
    assert {n: x for file in found.values() for n, x in file.items()} == raw_tensors(only)
    index = json.loads((tmp_path / "many" / f"{stem}.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file, tensors in found.items() for name in tensors}
    sizes = {file: sum(len(data) for _, _, data in tensors.values()) for file, tensors in found.items()}
    assert index["metadata"] == {"total_size": sum(sizes.values())}
    for file, tensors in found.items():  # one weight has one file, also where it is larger than the limit
        weights = {weight_of(name) for name in tensors}
        assert sizes[file] <= LIMIT or len(weights) == 1, file
    homes = {}
    for file, tensors in found.items():
        for name in tensors:
            homes.setdefault(weight_of(name), set()).add(file)
    assert len(files) > 3 and all(len(files) == 1 for files in homes.values())
    assert_same(mxjax.load(tmp_path / "many"), mxjax.load(tmp_path / "one"))


def test_convert_joins_and_splits(tmp_path):
    """A peer's file in shards and joined again has the same bytes; in our layout, the same values."""
    source = PEERS["nvfp4"]
    mxjax.convert(source, tmp_path / "ours", "mxjax", shard_size=LIMIT)
    mxjax.convert(source, tmp_path / "many", "compressed-tensors", shard_size=LIMIT)
    assert len(shards(tmp_path / "ours")) > 3 and len(shards(tmp_path / "many")) > 3
    mxjax.convert(tmp_path / "many", tmp_path / "one", "compressed-tensors")
    assert raw_tensors(tmp_path / "one" / hf.WEIGHTS) == raw_tensors(source / hf.WEIGHTS)
    assert_same(mxjax.load(tmp_path / "ours"), mxjax.load(source))


def test_the_multipliers_of_divisors_that_cannot_say_them_come_back_from_every_shard(tmp_path):
    """ModelOpt's multipliers in compressed-tensors: those in the metadata are in reach wherever the tensor lies."""
    values = {f"l{i}": {"weight": jnp.full((8, 64), 1 + i / 64, jnp.float32)} for i in range(64)}
    tree = mxjax.quantize(values, "nvfp4_a16")
    mxjax.save(tmp_path / "many", tree, "compressed-tensors", shard_size=1000)
    assert any(EXACT in read_metadata(file) for file in shards(tmp_path / "many"))
    loaded = mxjax.load(tmp_path / "many")
    for name in values:
        assert loaded[name]["weight"].qtensor.global_scale == tree[name]["weight"].qtensor.global_scale


def test_shards_replace_one_file_and_the_other_way_round(tmp_path, trees):
    folder = tmp_path / "out"
    mxjax.save(folder, trees["mxfp4"], "quark", shard_size=LIMIT)
    mxjax.save(folder, trees["mxfp4"], "quark", overwrite=True)
    assert [f.name for f in shards(folder)] == [hf.WEIGHTS] and not (folder / hf.INDEX).exists()
    one = contents(folder)
    mxjax.save(folder, trees["mxfp4"], "quark", shard_size=LIMIT, overwrite=True)
    assert not (folder / hf.WEIGHTS).exists() and (folder / hf.INDEX).exists()
    mxjax.save(folder, trees["mxfp4"], "quark", shard_size=10**12, overwrite=True)
    assert contents(folder) == one


@pytest.mark.parametrize("size", [0, -1, 1.5, "5GB", True])
def test_sizes_are_numbers_of_bytes(tmp_path, trees, size):
    with pytest.raises(ConfigError, match="shard_size is a number of bytes"):
        mxjax.save(tmp_path / "out", trees["mxfp4"], shard_size=size)
    assert not (tmp_path / "out").exists()


def test_orbax_has_files_of_its_own(tmp_path, trees):
    with pytest.raises(ConfigError, match="takes no shard_size"):
        mxjax.save(tmp_path / "out", trees["mxfp4"], "orbax", shard_size=LIMIT)


def test_arrays_that_are_shared_are_stored_once(tmp_path):
    """Two places, one array; and a scalar, an empty array, a key: all in some file or in the manifest."""
    table = jnp.arange(4096.0).reshape(64, 64)
    tree = {"a": table, "b": [table, jnp.zeros((0, 3))], "c": np.float32(2), "d": mxjax.quantize({"w": table}, "mxfp4")}
    mxjax.save(tmp_path / "out", tree, shard_size=1)
    names = [name for file in shards(tmp_path / "out") for name in raw_tensors(file)]
    assert sorted(names) == sorted(set(names)) and all(raw_tensors(file) for file in shards(tmp_path / "out"))
    loaded = mxjax.load(tmp_path / "out")
    assert loaded["a"] is loaded["b"][0] and loaded["b"][1].shape == (0, 3)
    assert_same(loaded["d"], tree["d"])


def test_who_goes_where():
    def group(n):
        return {f"{n}": Spec(np.dtype(np.uint8), (n,))} if n else {}

    def sizes(groups, limit):
        return [tuple(members) for _, members in sharded.split([group(n) for n in groups], "w.safetensors", limit)]

    assert sizes([], 10) == [()]
    assert sizes([4, 6], 10) == [(0, 1)]
    assert sizes([4, 7, 3, 1], 10) == [(0,), (1, 2), (3,)]
    assert sizes([11, 0, 0], 10) == [(0, 1, 2)]  # no file for nothing
    assert sizes([0, 11, 0, 3], 10) == [(0, 1, 2), (3,)]


def test_what_a_companion_refuses_is_known_before_the_work(tmp_path, monkeypatch):
    """A tokenizer that is a link to somewhere else: nothing is read, nothing is left."""
    source = tmp_path / "in"
    source.mkdir()
    for file in PEERS["mxfp4"].iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    (source / "tokenizer.json").unlink(missing_ok=True)
    (source / "tokenizer.json").symlink_to("/etc/hostname")
    monkeypatch.setattr(mxjax.io, "load", lambda *args, **kwargs: pytest.fail("the weights were opened"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: a link that leaves its folder"):
        mxjax.convert(source, tmp_path / "out", "quark")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]
