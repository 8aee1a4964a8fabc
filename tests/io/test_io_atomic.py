"""A folder is written whole or not at all, whatever happens and whenever."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mxjax.errors import CheckpointError, ConfigError
from mxjax.io.atomic import atomic_folder

NEW = {"a.bin": b"new" * 1000, "sub/b.bin": b"more"}

# Runs in a fresh interpreter and kills itself at the n-th call of one function of the operating system.
SCRIPT = """
import os, signal, shutil, sys
from pathlib import Path
from mxjax.io.atomic import atomic_folder
function, n, target = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
calls = 0
def killer(real):
    def wrapper(*args, **kwargs):
        global calls
        calls += 1
        if calls == n:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    return wrapper
module = shutil if function == "rmtree" else os
setattr(module, function, killer(getattr(module, function)))
with atomic_folder(target, overwrite=True) as t:
    (t / "sub").mkdir()
    (t / "a.bin").write_bytes(b"new" * 1000)
    (t / "sub" / "b.bin").write_bytes(b"more")
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def write(target: Path, **options) -> None:
    with atomic_folder(target, **options) as t:
        (t / "sub").mkdir()
        (t / "a.bin").write_bytes(NEW["a.bin"])
        (t / "sub" / "b.bin").write_bytes(NEW["sub/b.bin"])


def make_old(target: Path) -> dict[str, bytes]:
    target.mkdir()
    (target / "old.bin").write_bytes(b"old")
    return {"old.bin": b"old"}


def test_writes_and_leaves_nothing_else(tmp_path):
    write(tmp_path / "deep" / "out")
    assert contents(tmp_path / "deep" / "out") == NEW
    assert os.listdir(tmp_path / "deep") == ["out"]


def test_an_empty_folder_may_be_there(tmp_path):
    write(tmp_path)
    assert contents(tmp_path) == NEW


def test_does_not_replace_unless_told(tmp_path):
    old = make_old(tmp_path / "out")
    with pytest.raises(CheckpointError, match="overwrite=True"):
        write(tmp_path / "out")
    assert contents(tmp_path / "out") == old
    write(tmp_path / "out", overwrite=True)
    assert contents(tmp_path / "out") == NEW
    assert os.listdir(tmp_path) == ["out"]


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "out").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        write(tmp_path / "out", overwrite=True)


def test_a_link_keeps_pointing(tmp_path):
    make_old(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink() and contents(tmp_path / "real") == NEW


def test_permissions_are_the_usual_ones(tmp_path):
    (tmp_path / "plain").mkdir()
    write(tmp_path / "out")
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("old", [False, True])
def test_an_exception_in_the_middle(tmp_path, error, old):
    before = make_old(tmp_path / "out") if old else None
    with pytest.raises(error), atomic_folder(tmp_path / "out", overwrite=True) as t:
        (t / "a.bin").write_bytes(b"half")
        raise error
    assert os.listdir(tmp_path) == (["out"] if old else [])
    assert before is None or contents(tmp_path / "out") == before


@pytest.mark.parametrize("function, nth", [("fsync", 1), ("fsync", 3), ("rename", 1), ("rename", 2)])
def test_an_interrupt_at_every_step(tmp_path, monkeypatch, function, nth):
    """KeyboardInterrupt inside fsync or between the two renames: the old folder is back, nothing is left over."""
    old = make_old(tmp_path / "out")
    real, calls = getattr(os, function), []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == nth:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(os, function, interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", overwrite=True)
    monkeypatch.undo()
    assert contents(tmp_path / "out") == old
    assert os.listdir(tmp_path) == ["out"]


# What may be there after SIGKILL before the n-th call. fsync: 2 files and 2 folders, then the parent of the new folder.
KILLS = [
    *[("fsync", n, "old") for n in (1, 2, 4)],
    ("rename", 1, "old"),
    ("rename", 2, "none"),
    ("fsync", 5, "new"),
    ("rmtree", 1, "new"),
]


@pytest.mark.parametrize("function, nth, expected", KILLS)
def test_killed(tmp_path, function, nth, expected):
    target = tmp_path / "out"
    old = make_old(target)
    process = subprocess.run([sys.executable, "-c", SCRIPT, function, str(nth), str(target)], timeout=120)
    assert process.returncode == -signal.SIGKILL
    if expected == "none":
        assert not target.exists()
        (aside,) = tmp_path.glob(".out.*.old")
        assert contents(aside) == old  # the previous version is whole, and load() names it
    else:
        assert contents(target) == (old if expected == "old" else NEW)
    write(target, overwrite=True)  # leftovers do not stand in the way of the next save
    assert contents(target) == NEW


def test_save_replaces_checkpoints_only(tmp_path):
    import mxjax

    make_old(tmp_path / "out")
    with pytest.raises(CheckpointError, match="replaces checkpoints only"):
        mxjax.save(tmp_path / "out", {"a": 1}, overwrite=True)
    mxjax.save(tmp_path / "new", {"a": 1})
    mxjax.save(tmp_path / "new", {"a": 2}, overwrite=True)
    assert mxjax.load(tmp_path / "new") == {"a": 2}


def test_save_that_fails_leaves_the_old_checkpoint(tmp_path):
    import mxjax

    mxjax.save(tmp_path / "out", {"a": 1})
    with pytest.raises(CheckpointError, match="b: cannot store a object"):
        mxjax.save(tmp_path / "out", {"a": 2, "b": object()}, overwrite=True)
    assert mxjax.load(tmp_path / "out") == {"a": 1}
    assert os.listdir(tmp_path) == ["out"]


def test_load_points_to_the_version_that_an_interrupted_save_left(tmp_path):
    import mxjax

    (tmp_path / ".out.1-2.old").mkdir()
    with pytest.raises(CheckpointError, match=r"previous version in .*\.out\.1-2\.old"):
        mxjax.load(tmp_path / "out")


def test_unknown_format_and_options(tmp_path):
    import mxjax

    with pytest.raises(ConfigError, match="known: mxjax, orbax, compressed-tensors"):
        mxjax.save(tmp_path / "out", {}, format="pickle")
    with pytest.raises(ConfigError, match="takes no names"):
        mxjax.save(tmp_path / "out", {}, names=str)


SAVE = """
import os, signal, sys
import jax.numpy as jnp, mxjax
real = os.rename
os.rename = lambda *names: os.kill(os.getpid(), signal.SIGKILL) if str(names[0]).endswith(".tmp") else real(*names)
mxjax.save(sys.argv[1], {"a": jnp.ones(3)}, sys.argv[2])
"""


@pytest.mark.parametrize("format", ["mxjax", "orbax"])
def test_killed_save_leaves_no_checkpoint(tmp_path, format):
    """Everything is written, the last rename is not done: the name is not there."""
    import mxjax

    process = subprocess.run([sys.executable, "-c", SAVE, str(tmp_path / "out"), format], timeout=300)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    mxjax.save(tmp_path / "out", {"a": 1}, format)
    assert mxjax.load(tmp_path / "out") == {"a": 1}
