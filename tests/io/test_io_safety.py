"""Named attacks on a reader: paths that lead out, JSON bombs, headers that promise more than there is, pipes."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from io_cases import SOURCE
from stream_cases import tensors, write_source

import mxjax
from mxjax.errors import CheckpointError
from mxjax.io import hashes, hf, safetensors


def float_folder(tmp_path):
    return write_source(tmp_path / "in", tensors(layers=1), shards=2)


def every_reader(folder, target):
    yield lambda: mxjax.load(folder)
    yield lambda: mxjax.quantize_folder(folder, target, "mxfp4")


def refused(tmp_path, folder, match):
    for act in every_reader(folder, tmp_path / "out"):
        with pytest.raises(CheckpointError, match=match):
            act()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "file", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "..\\b", "C:b", "a\0b", 7, None]
)
def test_an_index_cannot_leave_the_folder(tmp_path, file):
    folder = float_folder(tmp_path)
    index = json.loads((folder / hf.INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = file
    (folder / hf.INDEX).write_text(json.dumps(index))
    refused(tmp_path, folder, r"model\.norm\.weight in .*index\.json.*is no file of this folder")


@pytest.mark.parametrize("shards", [1, 2])
def test_a_link_cannot_leave_the_folder(tmp_path, shards):
    folder = write_source(tmp_path / "in", tensors(layers=1), shards=shards)
    file = next(folder.glob("*.safetensors"))
    file.rename(tmp_path / "elsewhere.safetensors")
    file.symlink_to(tmp_path / "elsewhere.safetensors")
    refused(tmp_path, folder, "a link that leaves its folder, to .*elsewhere")
    (tmp_path / "elsewhere.safetensors").rename(folder / "here")
    file.unlink()
    file.symlink_to(folder / "here")
    mxjax.load(folder)  # inside, it may point where it likes


def test_links_of_companions_cannot_leave_the_folder(tmp_path):
    folder = float_folder(tmp_path)
    (tmp_path / "secret").write_text("key")
    (folder / "tokenizer_config.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="a link that leaves its folder"):
        mxjax.quantize_folder(folder, tmp_path / "out", "mxfp4")


def test_the_cache_of_the_hub_is_read(tmp_path):
    """There files are links: ``snapshots/REVISION/file -> ../../blobs/HASH``."""
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
    blobs.mkdir(parents=True)
    write_source(snapshot, tensors(layers=1), shards=2)
    for i, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(i))
        file.symlink_to(f"../../blobs/{i}")
    mxjax.quantize_folder(snapshot, tmp_path / "out", "mxfp4")
    assert (tmp_path / "out" / "tokenizer.json").is_file() and not (tmp_path / "out" / "tokenizer.json").is_symlink()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_file_is_refused_at_once(tmp_path, name, kind):
    folder = float_folder(tmp_path)
    (folder / name).unlink()
    os.mkfifo(folder / name) if kind == "pipe" else (folder / name).mkdir()
    refused(tmp_path, folder, name.replace(".", r"\."))


BOMBS = {
    "depth": b"[" * 5_000_000,
    "objects": b'{"a":' * 1_000_000,
    "digits": b'{"a":' + b"9" * 1_000_000 + b"}",
    "exponent": b'{"dtype":1e999999999}',
    "twice": b'{"dtype":"bfloat16","dtype":"float32"}',
    "surrogates": b'{"dtype":"\\ud800"}',
    "zeros": b"\0" * 1000,
    "no end": b'{"dtype":"' + b"x" * 1_000_000,
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_json_bombs(tmp_path, bomb):
    folder = float_folder(tmp_path)
    good = (folder / "config.json").read_bytes()
    if bomb not in ("exponent", "surrogates"):  # these are JSON: what matters is that nothing else comes of them
        (folder / "config.json").write_bytes(BOMBS[bomb])
        with pytest.raises(CheckpointError, match=r"config\.json"):
            mxjax.quantize_folder(folder, tmp_path / "out", "mxfp4")
        (folder / "config.json").write_bytes(good)
    (folder / hf.INDEX).write_bytes(BOMBS[bomb])
    refused(tmp_path, folder, r"index\.json")
    (folder / hf.INDEX).unlink()
    (folder / hf.WEIGHTS).write_bytes(len(BOMBS[bomb]).to_bytes(8, "little") + BOMBS[bomb])
    refused(tmp_path, folder, r"model\.safetensors")


# A process that may not have much more memory than it has.
LIMITED = """
import resource, sys
import mxjax
from mxjax.errors import CheckpointError
good, *folders = sys.argv[1:]
mxjax.load(good)
now = int(open("/proc/self/status").read().split("VmSize:")[1].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (now + 2**28,) * 2)
for folder in folders:
    try:
        mxjax.load(folder)
    except CheckpointError as e:
        print(e)
"""


def test_no_memory_for_what_is_only_promised(tmp_path):
    folders = []
    for claim in ("length", "shape", "offsets", "empty"):
        folders.append(write_source(tmp_path / claim, {"w.weight": np.zeros((4, 32), np.float32)}))
        data = (folders[-1] / hf.WEIGHTS).read_bytes()
        size = int.from_bytes(data[:8], "little")
        header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
        match claim:
            case "shape":
                header["w.weight"]["shape"] = [2**20, 2**20]
            case "offsets":
                header["w.weight"] |= {"shape": [2**40], "data_offsets": [0, 2**42]}
            case "empty":
                header["v.weight"] = {"dtype": "F32", "shape": [0, 2**61], "data_offsets": [512, 512]}
        text = json.dumps(header).encode()
        claimed = 90_000_000 if claim == "length" else len(text)
        (folders[-1] / hf.WEIGHTS).write_bytes(claimed.to_bytes(8, "little") + text + body)
    command = [sys.executable, "-c", LIMITED, str(SOURCE), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4 and all(f"{f}/model.safetensors" in line for f, line in zip(folders, lines, strict=True))


def test_nothing_is_unpickled(tmp_path):
    """Weights in formats that can run code are not looked at."""
    folder = float_folder(tmp_path)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    refused(tmp_path, folder, r"model\.safetensors: No such file")


def test_sums(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.bin").write_bytes(b"abc")
    (tmp_path / "sub" / "b.bin").write_bytes(b"")
    hashes.write_sums(tmp_path)
    text = (tmp_path / "SHA256SUMS").read_text()
    assert (
        text.splitlines()[0] == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad  a.bin"
    )  # FIPS 180-2
    done = subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "sub/b.bin: OK" in done.stdout
    assert list(hashes.verify(tmp_path)) == [("a.bin", 3), ("sub/b.bin", 0)]
    (tmp_path / "c.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"c\.bin: SHA256SUMS does not know it"):
        list(hashes.verify(tmp_path))
    (tmp_path / "c.bin").unlink()
    (tmp_path / "a.bin").write_bytes(b"abd")
    with pytest.raises(CheckpointError, match=r"a\.bin: changed since it was written"):
        list(hashes.verify(tmp_path))
    (tmp_path / "a.bin").unlink()
    with pytest.raises(CheckpointError, match=r"a\.bin: SHA256SUMS lists it"):
        list(hashes.verify(tmp_path))
    for wrong in ("x  a.bin\n", text + text, f"{'0' * 64}  ../../etc/passwd\n", "\0"):
        (tmp_path / "SHA256SUMS").write_text(wrong)
        with pytest.raises(CheckpointError):
            list(hashes.verify(tmp_path))


def test_load_verifies(tmp_path):
    folder = float_folder(tmp_path)
    mxjax.quantize_folder(folder, tmp_path / "out", "mxfp4")
    mxjax.load(tmp_path / "out", verify=True)
    file = tmp_path / "out" / "arrays.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    mxjax.load(tmp_path / "out")  # a flipped bit of a code is a valid code
    with pytest.raises(CheckpointError, match=r"arrays\.safetensors: changed since it was written"):
        mxjax.load(tmp_path / "out", verify=True)
    assert safetensors.read(file)
