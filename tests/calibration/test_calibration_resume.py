"""A run by block can stop at any moment and go on: same bits, and nothing but its own folder is accepted."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from calibration_models import Blocks, config, same, tokens

import mxjax
from mxjax.calibration import CalibrationOptions
from mxjax.errors import CheckpointError, MxjaxWarning
from mxjax.io import safetensors
from mxjax.transforms import Wush

CFG = config(CalibrationOptions(batch_size=4, mismatch=True), transform=Wush(), correction=0.5)


class Stop(BaseException):
    """As KeyboardInterrupt: no ``except Exception`` catches it."""


def stop_after(blocks, lines=None):
    def progress(at):
        if lines is not None:
            lines.append(at)
        if at.text.startswith(f"block {blocks}/"):
            raise Stop

    return progress


def run(folder=None, *, model=None, data=None, cfg=CFG, **options):
    return mxjax.quantize_sequential(model or Blocks(), [tokens() if data is None else data], cfg, resume=folder,
                                     **options)  # fmt: skip


@pytest.fixture(scope="module")
def whole():
    return run()


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder with two of three blocks."""
    folder = tmp_path_factory.mktemp("run") / "folder"
    lines = []
    with pytest.raises(Stop):
        run(folder, progress=stop_after(2, lines))
    assert lines[-1].text == f"stopped: 2 of 3 blocks are kept in {folder}; run the same again to go on after them"
    return folder


@pytest.fixture
def folder(begun, tmp_path):
    return shutil.copytree(begun, tmp_path / "folder")


def names(folder):
    return sorted(p.name for p in Path(folder).iterdir())


def test_a_rerun_goes_on_and_gives_the_same_bits(folder, whole):
    assert names(folder) == ["block-0000", "block-0001", "run.json", "streams-0002"]
    lines = []
    got = run(folder, progress=lines.append)
    assert same(got, whole)
    assert lines[0].text == "2 of 3 blocks were done before"
    assert [at.done for at in lines if at.text.startswith("block")] == [3]
    assert names(folder) == ["block-0000", "block-0001", "block-0002", "run.json"]
    lines.clear()
    assert same(run(folder, progress=lines.append), whole)  # nothing left to do
    assert len(lines) == 1
    assert mxjax.load(folder / "block-0002").keys() == {p for p in whole if p.startswith("layers/2/")}


def test_the_second_block_is_not_computed_again(folder, whole):
    """The rerun takes what is stored: a code changed in block 1 is in the result."""
    path = folder / "block-0001"
    weights, name = mxjax.load(path), "layers/1/down/kernel"
    q = weights[name].qtensor
    weights[name] = replace(weights[name], qtensor=replace(q, codes=q.codes.at[0, 0].add(1)))
    mxjax.save(path, weights, overwrite=True)
    assert not same(run(folder), whole)


@pytest.mark.parametrize("after", range(8))
def test_killed_between_any_two_steps(tmp_path, monkeypatch, whole, after):
    """Death before the n-th change of the folder's names: a rename, or the removal of old inputs."""
    from mxjax.io import atomic
    from mxjax.nn import resume

    left = [after]

    def mortal(step):
        def wrapped(*args, **kwargs):
            if left[0] == 0:
                raise Stop
            left[0] -= 1
            return step(*args, **kwargs)

        return wrapped

    with monkeypatch.context() as patch:
        patch.setattr(atomic.os, "rename", mortal(os.rename))
        patch.setattr(resume.shutil, "rmtree", mortal(shutil.rmtree))
        with pytest.raises(Stop):
            run(tmp_path / "run")
    assert same(run(tmp_path / "run"), whole)


CHILD = """
import sys, os, signal
sys.path[:0] = {path!r}
import test_calibration_resume as t
def progress(at):
    print(at, flush=True)
    if at.done == 1: sys.stdin.readline()
t.run({folder!r}, progress=progress)
"""


def test_sigkill(tmp_path, whole):
    folder = str(tmp_path / "run")
    start = CHILD.format(path=[str(Path(__file__).parent)], folder=folder)
    child = subprocess.Popen([sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline().startswith("expecting ")
    assert child.stdout.readline().startswith("block 1/3: ")
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    lines = []
    assert same(run(folder, progress=lines.append), whole)
    assert lines[0].done == 1


def test_unfinished_folders_are_ignored_and_removed(folder, whole):
    left = folder / ".block-0002.123-abc.tmp"
    left.mkdir()
    (left / "mxjax.json").write_text("{")
    assert same(run(folder), whole)
    assert not left.exists()


@pytest.mark.parametrize(
    ("file", "done"),
    [
        ("block-0001/arrays.safetensors", 0),
        ("block-0000/mxjax.json", 0),
        ("streams-0002/streams.safetensors", 0),
    ],
)
def test_damaged_files_are_done_again(folder, whole, file, done):
    path = folder / file
    path.write_bytes(path.read_bytes()[:-9])
    lines = []
    with pytest.warns(MxjaxWarning, match=Path(file).parts[0]):
        got = run(folder, progress=lines.append)
    assert same(got, whole)
    assert [at.done for at in lines if at.text.startswith("block")] == list(range(done + 1, 4))


def other_epsilon():
    model = Blocks()
    model.layers[1].up.precision = "highest"  # a static attribute, no array
    return model


OTHERS = {
    "model": dict(model=Blocks(seed=1)),
    "tokens": dict(data=tokens(seed=1)),
    "config": dict(cfg=config(CalibrationOptions(batch_size=4, mismatch=True), transform=Wush(), correction=0.4)),
}


@pytest.mark.parametrize("what", [*OTHERS, "static", "options", "version"])
def test_a_folder_of_another_run_is_refused(begun, monkeypatch, what):
    changes = OTHERS.get(what, {})
    if what == "static":
        changes, what = dict(model=other_epsilon()), "model"
    elif what == "options":
        changes, what = dict(options=CalibrationOptions(batch_size=5, mismatch=True)), "config"
    elif what == "version":
        monkeypatch.setattr("mxjax.nn.resume.__version__", "0.0.9")
        what = "mxjax"
    before = names(begun)
    with pytest.raises(CheckpointError, match=rf"begun with another {what} \(.*another folder"):
        run(begun, **changes)
    assert names(begun) == before


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(CheckpointError, match=r"holds 'thesis.tex' and no run.json"):
        run(tmp_path)
    assert names(tmp_path) == ["thesis.tex"]


def test_the_same_run_has_the_same_fingerprint_in_another_process(begun):
    """Nothing in it depends on addresses or hash seeds."""
    start = CHILD.format(path=[str(Path(__file__).parent)], folder=str(begun)).replace("t.run(", "t.accepts(")
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, timeout=120,
                          env=os.environ | {"PYTHONHASHSEED": "7"})  # fmt: skip
    assert done.returncode == 0, done.stderr


def accepts(folder, progress):
    from mxjax.nn.resume import RunFolder, fingerprint

    RunFolder(folder, fingerprint(Blocks(), [tokens()], CFG, CFG.calibration))


def test_streams_of_narrow_floats_are_kept_exactly(tmp_path):
    from mxjax.nn.resume import RunFolder

    x = np.arange(7, dtype="float32").astype(jax.numpy.bfloat16)
    store = RunFolder(tmp_path / "run", {})
    store.save(0, {}, {"quantized": [x] * 11, "float": [x + 1]})
    done, weights, streams = store.load(2, {"quantized": [x.shape] * 11, "float": [x.shape]})
    assert (done, weights) == (1, {}) and len(streams["quantized"]) == 11
    assert all(y.dtype == x.dtype for y in streams["quantized"]) and np.array_equal(streams["float"][0], x + 1)


@pytest.mark.parametrize("kept", [["quantized/0", "float/0"], ["quantized/0", "quantized/1", "quantized/2"], []])
def test_inputs_of_another_run_are_not_used(folder, whole, kept):
    """Not all batches, or not all streams: the run begins before them and says so."""
    file = folder / "streams-0002" / "streams.safetensors"
    held = {name: np.array(entry.read()) for name, entry in safetensors.read(file).items()}
    assert set(kept) < set(held)
    safetensors.write(file, {name: held[name] for name in kept})
    with pytest.warns(MxjaxWarning, match="not the batches of this run"):
        assert same(run(folder), whole)


def test_a_block_in_the_place_of_another_is_done_again(folder, whole):
    shutil.rmtree(folder / "block-0001")
    shutil.copytree(folder / "block-0000", folder / "block-0001")
    with pytest.warns(MxjaxWarning, match="which is no weight of block 1"):
        assert same(run(folder), whole)
