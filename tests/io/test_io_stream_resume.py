"""A run that is killed at any moment goes on from its finished files, and ends with the same bytes."""

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from stream_cases import contents, tensors, write_source

import mxjax
from mxjax.errors import CheckpointError
from mxjax.io.streaming import folder as folder_module
from mxjax.io.streaming.journal import JOURNAL, partial_folder
from mxjax.io.streaming.shards import UNFINISHED, ShardFile

LIMIT = 25_000
# Forks before JAX starts its threads. In each child one function of the operating system kills the process at its n-th
# call, half-way through where it writes; the next child goes on.
SCRIPT = """
import json, os, shutil, signal, sys
from pathlib import Path
import mxjax
from mxjax.io.streaming import arrays
arrays.CHUNK = 1 << 12
source, base, limit = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
FUNCTIONS = ["os.pwrite", "os.write", "os.fsync", "os.rename", "os.unlink", "os.posix_fallocate", "shutil.copyfile"]
TWICE = ["os.pwrite", "os.write", "os.rename"]  # killed in the middle and at the end; the others at the end

def run(target, recipe="mxfp4"):
    return mxjax.quantize_folder(source, target, recipe, shard_size=limit, workers=2)

def child(work):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def hook(name, counts, kill_at=None):
    module, function = {"os": os, "shutil": shutil}[name.split(".")[0]], name.split(".")[1]
    real = getattr(module, function)
    def wrapper(*args, **kwargs):
        counts[name] = counts.get(name, 0) + 1
        if counts[name] == kill_at:
            if function in ("write", "pwrite"):
                real(args[0], bytes(args[1])[: len(args[1]) // 2], *args[2:])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    setattr(module, function, wrapper)

def counted():
    counts = {}
    for name in FUNCTIONS:
        hook(name, counts)
    run(base / "whole")
    (base / "counts.json").write_text(json.dumps(counts))

assert child(counted) == 0
counts = json.loads((base / "counts.json").read_text())
assert set(counts) == set(FUNCTIONS), counts
cases, results = [], []
for name in FUNCTIONS:
    n = counts[name]
    cases += [(name, at) for at in sorted({(n + 1) // 2, n} if name in TWICE else {n})]
for i, (name, at) in enumerate(cases):
    target, report = base / f"case{i}", base / f"report{i}"
    def killed():
        hook(name, {}, at)
        run(target)
    def resumed():
        result = run(target)
        report.write_text(json.dumps([result.resumed, result.files, result.bytes_read, result.float_bytes]))
    code = child(killed)
    results.append({"name": name, "at": at, "killed": code, "there": target.exists()})
    if not target.exists():
        results[-1]["resumed"] = child(resumed)
        results[-1]["report"] = json.loads(report.read_text())
(base / "results.json").write_text(json.dumps(results))
"""


@pytest.fixture
def source(tmp_path):
    return write_source(tmp_path / "in", tensors(), shards=2)


def run(source: Path, target: Path, recipe: str = "mxfp4", **options):
    return mxjax.quantize_folder(source, target, recipe, **{"shard_size": LIMIT, "workers": 2} | options)


def test_killed_at_any_moment(tmp_path, source):
    base = tmp_path / "base"
    base.mkdir()
    command = [sys.executable, "-c", SCRIPT, str(source), str(base), str(LIMIT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    whole = contents(base / "whole")
    assert len([name for name in whole if name.endswith(".safetensors")]) > 3
    results = json.loads((base / "results.json").read_text())
    assert len(results) == 10 and all(r["killed"] == -9 for r in results)
    for i, r in enumerate(results):
        assert contents(base / f"case{i}") == whole, r
        assert r["there"] or r["resumed"] == 0, r
    # Only the last acts, after the rename of the folder, come too late to leave something undone.
    assert sum(r["there"] for r in results) <= 1
    reports = [r["report"] for r in results if "report" in r]
    assert any(0 < resumed < files and read < total for resumed, files, read, total in reports)
    assert not [p.name for p in base.iterdir() if p.name.startswith(".")]


def interrupt(source, target, monkeypatch, error, after=2, **options):
    """Let the ``after``-th finished shard be the last."""
    real, count = ShardFile.finish, [0]

    def finish(self, more=None):
        count[0] += 1
        if count[0] > after:
            raise error
        return real(self, more)

    monkeypatch.setattr(ShardFile, "finish", finish)
    with pytest.raises(type(error)):
        run(source, target, **options)
    monkeypatch.undo()


def test_load_refuses_what_is_unfinished(tmp_path, source, monkeypatch):
    interrupt(source, tmp_path / "out", monkeypatch, CheckpointError("now"))
    with pytest.raises(CheckpointError, match=r"\.out\.partial holds an interrupted run"):
        mxjax.load(tmp_path / "out")
    monkeypatch.setattr(folder_module, "sync_tree", lambda path: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    with pytest.raises(CheckpointError, match=r"broken; the finished files in .* are kept"):
        run(source, tmp_path / "out")
    assert (partial_folder(tmp_path / "out") / "config.json").exists()  # all there, but not known to be on the disk
    with pytest.raises(CheckpointError, match="is incomplete"):
        mxjax.load(partial_folder(tmp_path / "out"))


def test_only_finished_files_are_kept_and_only_if_they_are_whole(tmp_path, source, monkeypatch):
    run(source, tmp_path / "whole")
    interrupt(source, tmp_path / "out", monkeypatch, CheckpointError("now"), after=3, workers=1)
    partial = partial_folder(tmp_path / "out")
    finished = sorted(p for p in partial.iterdir() if p.suffix == ".safetensors")
    assert len(finished) == 3 and any(p.name.endswith(UNFINISHED) for p in partial.iterdir())
    data = bytearray(finished[0].read_bytes())
    data[-1] ^= 1
    finished[0].write_bytes(data)
    finished[1].write_bytes(finished[1].read_bytes()[:-1])
    report = run(source, tmp_path / "out")
    assert report.resumed == 1 and report.bytes_read < report.float_bytes
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("what", ["recipe", "format", "shard size", "source", "dtype"])
def test_another_run_is_refused_until_it_restarts(tmp_path, source, monkeypatch, what):
    interrupt(source, tmp_path / "out", monkeypatch, CheckpointError("now"))
    options = {"recipe": "mxfp4"}
    match what:
        case "recipe":
            options["recipe"] = "mxfp4_a16"
        case "format":
            options["format"] = "compressed-tensors"
        case "shard size":
            options["shard_size"] = LIMIT // 2
        case "dtype":
            options["dtype"] = "float32"
        case "source":
            file = next(source.glob("*.safetensors"))
            os.utime(file, ns=(1, 1))
    word = {"shard size": "format", "dtype": "format"}.get(what, what)
    with pytest.raises(CheckpointError, match=f"begun with another {word}"):
        run(source, tmp_path / "out", **options)
    assert run(source, tmp_path / "out", restart=True, **options).resumed == 0
    run(source, tmp_path / "whole", **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_something_else_under_that_name_is_left_alone(tmp_path, source):
    partial_folder(tmp_path / "out").mkdir()
    (partial_folder(tmp_path / "out") / "thesis.txt").write_text("mine")
    for restart in (False, True):
        with pytest.raises(CheckpointError, match="is in the way"):
            run(source, tmp_path / "out", restart=restart)
    assert (partial_folder(tmp_path / "out") / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "damage", [b"", b"{}\n", b"nonsense\n", b'{"mxjax": 1, "run": {}', b'{"mxjax": 2, "run": {}}\n']
)
def test_a_damaged_journal_is_a_fresh_start(tmp_path, source, monkeypatch, damage):
    interrupt(source, tmp_path / "out", monkeypatch, CheckpointError("now"))
    (partial_folder(tmp_path / "out") / JOURNAL).write_bytes(damage)
    assert run(source, tmp_path / "out").resumed == 0
    mxjax.load(tmp_path / "out", verify=True)


def test_two_processes_cannot_write_one_folder(tmp_path, source, monkeypatch):
    inside, go_on = threading.Event(), threading.Event()
    real = ShardFile.finish

    def finish(self, more=None):
        inside.set()
        assert go_on.wait(60)
        return real(self, more)

    monkeypatch.setattr(ShardFile, "finish", finish)
    thread = threading.Thread(target=run, args=(source, tmp_path / "out"))
    thread.start()
    assert inside.wait(60)
    with pytest.raises(CheckpointError, match="another process is writing"):
        run(source, tmp_path / "out")
    go_on.set()
    thread.join()
    mxjax.load(tmp_path / "out", verify=True)


def test_ctrl_c_leaves_no_thread_and_goes_on(tmp_path, source, monkeypatch):
    run(source, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "out", progress=lambda done, total: done and (_ for _ in ()).throw(KeyboardInterrupt))
    deadline = time.monotonic() + 30
    while any(t.name.startswith("mxjax-stream") for t in threading.enumerate()):
        assert time.monotonic() < deadline
    assert not (tmp_path / "out").exists()
    run(source, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("function", ["posix_fallocate", "pwrite", "fsync", "write"])
def test_a_full_disk(tmp_path, source, monkeypatch, function):
    """An error that says so; what is finished stays, and what was there before too."""
    run(source, tmp_path / "out", "mxfp4_a16")
    old = contents(tmp_path / "out")
    real = getattr(os, function)

    def full(*args):
        if len(list(partial_folder(tmp_path / "out").glob("*.safetensors"))) >= 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, function, full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        run(source, tmp_path / "out", overwrite=True, workers=1)
    monkeypatch.undo()
    assert contents(tmp_path / "out") == old
    assert run(source, tmp_path / "out", overwrite=True).resumed > 0
    run(source, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert sorted(os.listdir(tmp_path)) == ["in", "out", "whole"]
