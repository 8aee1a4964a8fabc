"""Our safetensors files are the package's, and a damaged one is an error of ours."""

import json
import random

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from mxjax.errors import CheckpointError
from mxjax.io import safetensors as st

ARRAYS = {
    "f32": np.arange(6, dtype=np.float32).reshape(2, 3),
    "bf16": np.arange(5).astype(ml_dtypes.bfloat16),
    "scalar": np.array(7, np.int64),
    "empty": np.zeros((0, 4), np.float16),
    "bool": np.array([True, False, True]),
    "e4m3": np.arange(4, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn),
    "ünï/code": np.array([1 + 2j], np.complex64),
}


def test_round_trip(tmp_path):
    st.write(tmp_path / "x", ARRAYS, {"format": "pt"})
    entries = st.read(tmp_path / "x")
    assert set(entries) == set(ARRAYS)
    for name, x in ARRAYS.items():
        y = entries[name].read()
        assert y.dtype == x.dtype and y.shape == x.shape and y.tobytes() == x.tobytes(), name


def test_the_package_reads_ours_and_writes_the_same_bytes(tmp_path):
    plain = {k: v for k, v in ARRAYS.items() if k not in ("e4m3", "bf16")}  # what its NumPy side knows everywhere
    st.write(tmp_path / "ours", plain, {"format": "pt"})
    theirs = safetensors.numpy.save(plain, {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == theirs
    with safetensors.safe_open(tmp_path / "ours", framework="np") as f:
        assert sorted(f.keys()) == sorted(plain)


def test_jax_arrays_and_transposed_views(tmp_path):
    st.write(tmp_path / "x", {"j": jnp.arange(4), "t": ARRAYS["f32"].T})
    entries = st.read(tmp_path / "x")
    assert entries["j"].read().tolist() == [0, 1, 2, 3]
    assert np.array_equal(entries["t"].read(), ARRAYS["f32"].T)


def test_a_dtype_without_a_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"x: .*int4"):
        st.write(tmp_path / "x", {"x": np.zeros(3, ml_dtypes.int4)})


def pack(header, body=b"", size=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text + body


def entry(dtype="U8", shape=(4,), offsets=(0, 4), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


BAD = {
    "empty file": b"",
    "seven bytes": b"1234567",
    "header longer than the file": pack(b"{}", size=1000),
    "header of 2**63": pack(b"{}", size=2**63),
    "header of 0": pack(b"", size=0),
    "no json": pack(b"not json"),
    "no utf-8": pack(b"\xff\xfe{}"),
    "a list": pack([1]),
    "nested": pack(b"[" * 200_000 + b"]" * 200_000),
    "huge integer": pack(b'{"a":' + b"9" * 10_000 + b"}"),
    "same key twice": pack(b'{"a":1,"a":2}'),
    "entry is a number": pack({"a": 1}),
    "fields missing": pack({"a": {"dtype": "U8"}}),
    "fields too many": pack({"a": entry(x=1)}, b"1234"),
    "unknown dtype": pack({"a": entry("Q9")}, b"1234"),
    "dtype is a list": pack({"a": entry(["U8"])}, b"1234"),
    "negative shape": pack({"a": entry(shape=(-4,))}, b"1234"),
    "float shape": pack({"a": entry(shape=(4.0,))}, b"1234"),
    "bool shape": pack({"a": entry(shape=(True, 4))}, b"1234"),
    "shape of 2**64": pack({"a": entry(shape=(2**64,))}, b"1234"),
    "forty axes": pack({"a": entry(shape=(1,) * 40)}, b"1"),
    "offsets backwards": pack({"a": entry(offsets=(4, 0))}, b"1234"),
    "offsets negative": pack({"a": entry(offsets=(-4, 0))}, b"1234"),
    "offsets do not fit the shape": pack({"a": entry(offsets=(0, 3))}, b"1234"),
    "beyond the end": pack({"a": entry()}, b"123"),
    "bytes left over": pack({"a": entry()}, b"12345"),
    "gap": pack({"a": entry(), "b": entry(offsets=(5, 9))}, b"123456789"),
    "overlap": pack({"a": entry(), "b": entry(offsets=(2, 6))}, b"123456"),
    "the same place twice": pack({"a": entry(), "b": entry()}, b"1234"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files(tmp_path, case):
    (tmp_path / "bad.safetensors").write_bytes(BAD[case])
    with pytest.raises(CheckpointError, match=r"bad\.safetensors"):
        st.read(tmp_path / "bad.safetensors")


def test_good_cousins_of_the_bad_files(tmp_path):
    (tmp_path / "x").write_bytes(pack({"a": entry(), "b": entry(offsets=(4, 8))}, b"12345678"))
    assert st.read(tmp_path / "x")["b"].read().tobytes() == b"5678"


def test_missing_file_and_file_that_shrinks(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        st.read(tmp_path / "none")
    st.write(tmp_path / "x", {"a": np.zeros(100)})
    entries = st.read(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"")
    with pytest.raises(CheckpointError, match="a in "):
        entries["a"].read()


def test_random_damage(tmp_path):
    """Flipped, cut and inserted bytes: the file reads (damage in the data) or it is a CheckpointError."""
    st.write(tmp_path / "x", ARRAYS)
    good = (tmp_path / "x").read_bytes()
    rng = random.Random(0)
    outcomes = {True: 0, False: 0}
    for _ in range(400):
        data = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(data))
            match rng.randrange(3):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    del data[at : at + rng.randint(1, 40)]
                case 2:
                    data[at:at] = rng.randbytes(rng.randint(1, 8))
        (tmp_path / "y").write_bytes(data)
        try:
            for e in st.read(tmp_path / "y").values():
                e.read()
            outcomes[True] += 1
        except CheckpointError:
            outcomes[False] += 1
    assert outcomes[False] > 200 and outcomes[True] > 0
