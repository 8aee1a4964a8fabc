"""Every Mosaic GPU kernel lowered on any machine, and compiled to an H200's or B200's machine code where JAX's CUDA
plugin is."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import mosaic_kernels
import pytest


@pytest.mark.parametrize("name", mosaic_kernels.KERNELS)
def test_lowers_without_a_gpu(name):
    text = mosaic_kernels.lower(name).as_text()
    assert "mosaic_gpu" in text
    if name in mosaic_kernels.BLACKWELL:  # Mosaic writes this instruction as PTX into the program
        assert re.search(mosaic_kernels.KERNELS[name][1].removeprefix(r"tcgen05\.mma\S*"), text)


@pytest.fixture(scope="module")
def compiled():
    pytest.importorskip(
        "jax_plugins.xla_cuda13", reason="install jax[cuda13]: its plugin compiles for a GPU that is not here"
    )
    if jax.default_backend() == "gpu":
        pytest.skip("compiles for a GPU that is not here; the device tests run the kernels themselves")
    script, out = Path(mosaic_kernels.__file__), {}
    blackwell = list(mosaic_kernels.BLACKWELL)
    for names in ([n for n in mosaic_kernels.KERNELS if n not in blackwell], blackwell):  # one kind of GPU a process
        args = [sys.executable, script, *names]
        run = subprocess.run(args, capture_output=True, text=True, env=dict(os.environ), timeout=600)
        assert run.returncode == 0, run.stderr[-3000:]
        out |= json.loads(run.stdout[run.stdout.index('{"') :])
    return out


@pytest.mark.parametrize("name", mosaic_kernels.KERNELS)
def test_machine_code(name, compiled):
    got, most = compiled[name], mosaic_kernels.KERNELS[name][2]
    assert got["found"], f"{name} lacks its instruction; it has {got['matrix']}"
    assert got["registers"], "ptxas did not report"
    assert got["spilled"] <= most
    assert not got["serialized"], "ptxas put the wgmma in sequence: too many in flight for the registers"
