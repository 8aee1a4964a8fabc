"""``quantize_folder`` by several processes: each reads and writes its own files, the last makes the folder."""

import json
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
from stream_cases import contents, tensors, write_source

import mxjax
from mxjax.errors import CheckpointError, ConfigError
from mxjax.io import safetensors
from mxjax.io.streaming.journal import JOURNALS, Journal, partial_folder

SIZE = 30_000  # bytes of a file: eight or so


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_source(tmp_path_factory.mktemp("stream") / "source", tensors(layers=3), shards=2)


def part(source, folder, index, count=3, **options):
    given = {"recipe": "nvfp4_a16", "shard_size": SIZE, "workers": 1, **options}
    return mxjax.quantize_folder(source, folder, process_index=index, process_count=count, **given)


@pytest.fixture
def reads(monkeypatch):
    """Names of the tensors of which values are read, and how many bytes."""
    seen, one = {}, safetensors.Entry.part

    def recorded(entry, begin, end):
        seen[entry.name] = seen.get(entry.name, 0) + (end - begin) * entry.dtype.itemsize
        return one(entry, begin, end)

    monkeypatch.setattr(safetensors.Entry, "part", recorded)
    return seen


@pytest.mark.parametrize("format", ["mxjax", "compressed-tensors"])
def test_each_reads_its_own(source, tmp_path, reads, format):
    alone = mxjax.quantize_folder(source, tmp_path / "alone", "nvfp4_a16", shard_size=SIZE, format=format)
    assert alone.complete and alone.files > 3
    entire, parts, reports = dict(reads), [], []
    for index in (2, 0, 1):
        reads.clear()
        reports.append(part(source, tmp_path / "out", index, format=format))
        parts.append(dict(reads))
        assert reports[-1].complete == (index == 1) == (tmp_path / "out").is_dir()
    names = [set(p) for p in parts]
    assert all(a.isdisjoint(b) for a, b in zip(names, names[1:] + names[:1], strict=True))
    assert {name: n for p in parts for name, n in p.items()} == entire
    assert sum(r.files for r in reports) == alone.files and all(r.files for r in reports)
    assert sum(r.bytes_read for r in reports) == alone.bytes_read
    # Balanced within one tensor: the rest of a file cannot go elsewhere.
    loads = [r.bytes_read for r in reports]
    sizes = [entry.nbytes for file in source.glob("*.safetensors") for entry in safetensors.read(file).values()]
    assert max(loads) - min(loads) <= max(sizes)
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")
    mxjax.load(tmp_path / "out", verify=True)


def test_one_dies_and_is_started_again(source, tmp_path):
    def die(done, total):
        if done == total:  # in the last tensor of its last file
            raise KeyboardInterrupt

    part(source, tmp_path / "out", 0)
    with pytest.raises(KeyboardInterrupt):
        part(source, tmp_path / "out", 1, progress=die)
    assert not part(source, tmp_path / "out", 2).complete
    left = partial_folder(tmp_path / "out")
    with pytest.raises(CheckpointError, match="incomplete"):
        mxjax.load(left)
    with pytest.raises(CheckpointError, match="interrupted run"):
        mxjax.load(tmp_path / "out")
    before = {p.name: p.stat().st_mtime_ns for p in left.glob("*.safetensors")}
    again = part(source, tmp_path / "out", 1)
    assert again.complete and again.resumed >= 1
    after = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.safetensors")}
    assert before.items() < after.items()  # what was finished, by anyone, was left alone
    mxjax.load(tmp_path / "out", verify=True)
    assert not list((tmp_path / "out").glob(JOURNALS))


def test_all_at_once(source, tmp_path):
    """However they end, one of them makes the folder; nobody makes it twice."""
    reports = []
    threads = [threading.Thread(target=lambda i=i: reports.append(part(source, tmp_path / "out", i))) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=200)
    assert len(reports) == 3 and any(r.complete for r in reports)
    mxjax.load(tmp_path / "out", verify=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_fewer_files_than_processes(source, tmp_path):
    """Files become smaller, so that each process has one."""
    for index in range(3):
        report = part(source, tmp_path / "out", index, shard_size=10**9)
        assert report.files >= 1
    index_file = tmp_path / "out" / "arrays.safetensors.index.json"
    assert len(set(json.loads(index_file.read_text())["weight_map"].values())) >= 3


def test_refusals(source, tmp_path):
    out = tmp_path / "out"
    part(source, out, 0)
    with pytest.raises(CheckpointError, match="another number of processes"):
        part(source, out, 1, count=2)
    with pytest.raises(CheckpointError, match="another number of processes"):
        mxjax.quantize_folder(source, out, "nvfp4_a16", shard_size=SIZE)
    with pytest.raises(CheckpointError, match="another recipe"):
        part(source, out, 1, recipe="mxfp4_a16")
    journal = next(partial_folder(out).glob("*.jsonl")).read_text().splitlines()
    held = Journal(out, json.loads(journal[0])["run"], count=3)
    try:
        with pytest.raises(CheckpointError, match="another process is writing"):
            part(source, out, 0)
    finally:
        held.close()
    for index, count in ((3, 3), (-1, 2), (0, None)):
        with pytest.raises(ConfigError, match="process_index"):
            mxjax.quantize_folder(source, out, "mxfp4", process_index=index, process_count=count)
    assert mxjax.quantize_folder(source, out, "mxfp4_a16", restart=True).complete  # alone, from the start


LIMITED = """
import resource, sys
import mxjax
small, large, out = sys.argv[1:]
mxjax.quantize_folder(small, out + "-small", "nvfp4", workers=1)  # compiles everything
used = int(open("/proc/self/status").read().split("VmData:")[1].split()[0]) * 1024
limit = used + 90 * 10**6
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))  # for either process
for i in range(2):
    report = mxjax.quantize_folder(large, out, "nvfp4", workers=1, process_index=i, process_count=2)
    print(report.bytes_read, report.complete)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts memory maps on Linux only")
def test_a_checkpoint_larger_than_memory(tmp_path):
    """201 MB in six weights, and 90 MB of memory: neither process could hold its half."""
    noise = np.random.default_rng(0).standard_normal(1 << 20).astype(ml_dtypes.bfloat16)
    for name, shape in (("small", (1024, 1024)), ("large", (4096, 4096))):
        write_source(tmp_path / name, {f"layers.{i}.proj.weight": np.resize(noise, shape) for i in range(6)}, shards=3)
    command = [sys.executable, "-c", LIMITED, *(str(tmp_path / name) for name in ("small", "large", "out"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    half = 3 * 2 * 4096 * 4096
    assert half > 100 * 10**6 and done.stdout.split() == [str(half), "False", str(half), "True"]
