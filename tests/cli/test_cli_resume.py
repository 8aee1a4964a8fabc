"""``mxjax quantize --resume``: Ctrl-C says how to go on, and the same command does."""

import signal
import subprocess
import sys
import time

import numpy as np

import mxjax

START = """
import time
import mxjax.nn.sequential as sequential
one_block, calls = sequential._one_block, []
def second_block_takes_long(*args):
    calls.append(1)
    if {slow} and len(calls) == 2: time.sleep(60)
    return one_block(*args)
sequential._one_block = second_block_takes_long
from mxjax.cli import entry
entry.main()
"""


def test_ctrl_c_and_the_same_command_again(workplace, tmp_path):
    kept = tmp_path / "kept"
    arguments = ["quantize", str(workplace / "model"), str(tmp_path / "q"), "--recipe=gptq_mxfp4_a16",
                 f"--calib={workplace}/tokens.npz:text", f"--resume={kept}"]  # fmt: skip
    command = [sys.executable, "-c", START.format(slow=True), *arguments]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = []
    while not lines or not lines[-1].startswith("block 1/2: "):
        lines.append(child.stderr.readline())
        assert lines[-1], lines
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == 130 and "Traceback" not in stderr, stderr
    assert f"stopped: 1 of 2 blocks are kept in {kept}; run the same again to go on after them\n" in stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kept"]

    command = [sys.executable, "-c", START.format(slow=False), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 of 2 blocks were done before" in done.stderr
    stored, block = mxjax.load(tmp_path / "q"), mxjax.load(kept / "block-0000")
    assert np.array_equal(
        stored["layers"][0]["mlp"]["up_proj"]["kernel"].qtensor.codes,
        block["layers/0/mlp/up_proj/kernel"].qtensor.codes,
    )
