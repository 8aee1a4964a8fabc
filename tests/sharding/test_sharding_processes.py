"""Two processes on this machine (``jax.distributed``, CPU) quantize, calibrate and save one sharded model."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import two_processes as script
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mxjax

OTHER = {"up": {"kernel": P(None, "x")}, "down": {"kernel": P("x")}, "norm": None}


def run_both(folder):
    """Their outputs. Both end, whatever happens: each kills nobody and waits for nobody for ever."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-W", "error:::mxjax", str(Path(script.__file__)), str(port)]
    env = {**os.environ, "XLA_FLAGS": ""}
    started = [
        subprocess.Popen([*command, str(i), str(folder)], stdout=-1, stderr=subprocess.STDOUT, text=True, env=env)
        for i in range(2)
    ]
    try:
        return [(p.communicate(timeout=400)[0], p.returncode) for p in started]
    finally:
        for p in started:
            p.kill()


def test_two_processes(tmp_path, unoptimized):
    outputs = run_both(tmp_path)
    for text, code in outputs:
        assert code == 0, text
        assert re.findall(r"^\w+Error$|^done$", text, re.M) == [
            "NonFiniteError",
            "NonFiniteError",
            "CheckpointError",
            "done",
        ]
    (first, _), (second, _) = outputs
    assert re.search(r"^y \w+$", first, re.M)[0] == re.search(r"^y \w+$", second, re.M)[0]

    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    params = script.params()
    for recipe in script.RECIPES:
        stats = mxjax.calibrate(script.model, params, script.batches(), recipe) if "_" in recipe else None
        want = mxjax.quantize(params, recipe, stats)
        for folder in (recipe, f"{recipe}-safetensors"):
            got = mxjax.load(tmp_path / folder, mesh=mesh, specs=OTHER)
            assert got["up"]["kernel"].qtensor.codes.sharding.spec[0] == "x"
            assert jax.tree.structure(got) == jax.tree.structure(want)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                assert a.dtype == b.dtype and np.array_equal(a, b), (folder, a.shape)
    for kernel in ("up", "down"):
        got = mxjax.load(tmp_path / "streamed")[kernel]["kernel"]
        want = mxjax.quantize(params, "nvfp4")[kernel]["kernel"]
        assert np.array_equal(got.qtensor.codes, want.qtensor.codes)
        assert np.array_equal(got.qtensor.global_scale, want.qtensor.global_scale)
    mxjax.save(tmp_path / "alone", mxjax.quantize(params, "mxfp4_a16"), format="compressed-tensors")
    for file in (tmp_path / "alone").iterdir():
        assert file.read_bytes() == (tmp_path / "ct" / file.name).read_bytes()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]  # no leftovers
