"""``quantize_folder`` never has a whole tensor in memory."""

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from mxjax.io import safetensors

SHAPE = (8192, 6144)  # 100 MB of bfloat16
CHILD = """
import sys
import mxjax
def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
small, large, out, recipe = sys.argv[1:]
mxjax.quantize_folder(small, out + "-small", recipe, workers=2)  # compiles everything
open("/proc/self/clear_refs", "w").write("5")  # the peak starts again at what is resident now
before = peak()
mxjax.quantize_folder(large, out, recipe, workers=2)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc, which Linux has")
def test_peak(tmp_path):
    noise = np.random.default_rng(0).standard_normal(1 << 20).astype(ml_dtypes.bfloat16)
    for name, shape in (("small", (2048, 1024)), ("large", SHAPE)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({}))
        tensors = {f"layers.{i}.proj.weight": np.resize(noise, shape) for i in range(2)}
        tensors["embed.weight"] = np.resize(noise, shape)
        safetensors.write(tmp_path / name / "model.safetensors", tensors)
    largest = 2 * SHAPE[0] * SHAPE[1]
    command = [sys.executable, "-c", CHILD, *(str(tmp_path / name) for name in ("small", "large", "out")), "nvfp4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    # Two weights at a time, as codes and scales: 4.5 of 16 bits each, 0.56 of the largest tensor in all, and about as
    # much again in chunks and in what malloc keeps. Reading them whole would add twice the largest tensor.
    assert int(done.stdout) < 1.5 * largest
