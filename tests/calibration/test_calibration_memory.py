"""The device holds one block and one batch, whatever the depth; parameters may wait on the host."""

import gc

import jax
import numpy as np
import pytest
from calibration_models import Blocks, config, on_host, same, tokens
from flax import nnx

import mxjax
from mxjax.algorithms.gptq_solver import SolverOptions, solve
from mxjax.calibration import CalibrationOptions
from mxjax.core.formats import MXFP4
from mxjax.nn import sequential
from mxjax.nn.devices import Devices, live_bytes

CFG = config(CalibrationOptions(batch_size=4, mismatch=True), correction=0.5)


class Looks(list):
    """Live bytes at every point where the run looks, above those of :meth:`begin`."""

    def begin(self):
        self.clear()
        gc.collect()  # nnx modules are cycles
        self.before = live_bytes(jax.local_devices()[0])


@pytest.fixture
def looks(monkeypatch):
    seen, look = Looks(), Devices.look

    def spy(self):
        look(self)
        seen.append(live_bytes(self.device) - seen.before)

    monkeypatch.setattr(Devices, "look", spy)
    return seen


def peak(looks, depth, sequences=10, host=True, **options):
    model = on_host(Blocks(depth))
    looks.begin()
    got = mxjax.quantize_sequential(model, [tokens(sequences)], CFG, host=host, **options)
    assert len(looks) > 4 * depth
    return max(looks), got


def test_neither_depth_nor_sequences_cost_device_memory(looks):
    two, _ = peak(looks, 2)
    six, got = peak(looks, 6)
    more, _ = peak(looks, 2, sequences=26)
    assert two == six == more > 0
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(got))
    # The check can fail: weights that stay on the device add up.
    kept = [peak(looks, depth, host=False)[0] for depth in (2, 6)]
    stored = sum(w.nbytes for path, w in got.items() if not path.startswith(("layers/0/", "layers/1/")))
    assert kept[1] - kept[0] >= stored


def test_the_model_may_be_larger_than_what_the_device_ever_holds(looks):
    model = Blocks(6, hidden=256)
    floats = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
    model = on_host(model)
    looks.begin()
    cfg = config(CalibrationOptions(batch_size=1), algorithm="rtn", weight="mxfp4", activation=None)
    mxjax.quantize_sequential(model, [tokens(2)], cfg, host=True)
    assert max(looks) < 0.3 * floats


def test_memory_maps_give_the_same_weights(tmp_path):
    """Parameters as read-only maps of a file: what ``numpy.load(mmap_mode="r")`` and safetensors give."""
    model = Blocks(2)
    want = mxjax.quantize_sequential(model, [tokens()], CFG)
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    for i, x in enumerate(leaves):
        np.save(tmp_path / f"{i}.npy", x)
    maps = [np.load(tmp_path / f"{i}.npy", mmap_mode="r") for i in range(len(leaves))]
    mapped = nnx.merge(graphdef, jax.tree.unflatten(treedef, maps))
    got = mxjax.quantize_sequential(mapped, [tokens()], CFG)
    assert same(got, want)
    assert isinstance(mapped.layers[0].up.kernel.get_value(), np.memmap)  # the model is as it was


def test_expected_and_measured_bytes_are_said(looks, monkeypatch):
    lines, seen = [], []
    expect = sequential.expected_bytes
    monkeypatch.setattr(sequential, "expected_bytes", lambda *args: seen.append(expect(*args)) or seen[-1])
    most, _ = peak(looks, 2, progress=lines.append)
    texts = [at.text for at in lines]
    assert texts[0] == f"expecting {seen[0]}" and "on the device for one block at a time (weights " in texts[0]
    assert texts[1].startswith("block 1/2: ") and "arrays took at most " in texts[-1] and len(texts) == 4
    assert most <= seen[0].total
    # up and side [32, 64], down [64, 32], one bias; float32, and 4 bits with a byte for 32 of them
    values = 3 * 32 * 64
    assert seen[0].weights == 4 * (values + 64) + values // 2 + values // 32
    # high, low and mean, for x^T x and x_float^T x, of an input of 32 and one of 64
    assert seen[0].statistics == 4 * 3 * 2 * (32**2 + 64**2)
    assert seen[0].batch >= 2 * 4 * 4 * 16 * 32  # two batches [4, 16, 32] in float32
    # up and side together are wider than down: K = 32, N = 128
    assert seen[0].solver == 4 * (7 * 32**2 + 12 * 32 * 128)


@pytest.mark.parametrize(("k", "n"), [(512, 256), (256, 512)])
def test_the_solver_takes_what_is_said(k, n):
    arguments = [jax.ShapeDtypeStruct(s, d) for s, d in (((1, n, k), "f4"), ((1, k, k), "f4"), ((1, n, k // 32), "u1"))]
    analysis = solve.lower(*arguments, fmt=MXFP4, options=SolverOptions(act_order="column")).compile().memory_analysis()
    solver = analysis.temp_size_in_bytes + analysis.argument_size_in_bytes + analysis.output_size_in_bytes
    # Four of the twelve K x N are outside the solver: the weight, its copies in float32, transformed and scaled.
    assert solver < 4 * (7 * k * k + 8 * k * n) < 2 * solver


def test_the_expectation_costs_no_compilation():
    """It compiles the program that the first block runs anyway."""
    seen = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **more: seen.append(more.get("fun_name")) if "backend_compile" in event else None
    )
    counts = []
    for width, progress in ((96, None), (160, lambda at: None)):
        seen.clear()
        cfg = config(CalibrationOptions(batch_size=5, static_input_scale=True), "nvfp4", "nvfp4", algorithm="rtn")
        mxjax.quantize_sequential(Blocks(2, hidden=width), [tokens()], cfg, progress=progress)
        counts.append(sum("accumulate" in name for name in seen))
    assert counts == [1, 1]
