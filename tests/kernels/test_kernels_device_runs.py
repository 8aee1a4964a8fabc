"""benchmarks/device_tests.py: each test runs once in one of the processes, and a crash costs one test."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "device_tests.py"
TESTS = """
import os, time, pytest

@pytest.mark.parametrize("i", range(12))
def test_passes(i):
    time.sleep(0.05)

def test_fails():
    assert os.environ.get("MEND"), "this is why"

def test_skipped():
    pytest.skip("not here")

def test_crashes():
    if not os.environ.get("MEND"):
        os._exit(7)

def test_the_kernel_faults():
    assert os.environ.get("MEND"), "CUDA_ERROR_ILLEGAL_ADDRESS"
"""


def run(folder, *words, **env):
    command = [sys.executable, SCRIPT, "--out", folder / "done.jsonl", *words, "--rootdir", folder, folder]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=120, cwd=folder)
    return done.returncode, done.stdout


def records(folder):
    return [json.loads(line) for line in (folder / "done.jsonl").read_text().splitlines()]


def test_tests_are_shared_and_a_second_run_takes_up_the_rest(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    code, text = run(tmp_path, "--processes", "3")
    assert code == 1, text
    for said in ("FAILED test_it.py::test_fails", "this is why", "CRASHED test_it.py::test_crashes", "exit status 7"):
        assert said in text
    assert "12 passed, 2 failed, 1 skipped, 1 started" in text
    started = [r["test"] for r in records(tmp_path) if r["outcome"] == "started"]
    assert len(started) == len(set(started)) == 16
    code, text = run(tmp_path, "--processes", "2", MEND="1")
    assert code == 0 and "3 passed, 1 skipped" in text, "what had passed is not run again"


def test_time_is_over(tmp_path):
    (tmp_path / "test_it.py").write_text("import time\ndef test_a():\n    time.sleep(60)\ndef test_b():\n    pass\n")
    code, text = run(tmp_path, "--processes", "1", "--seconds", "3")
    assert code == 124 and "the time is over" in text and "passed" not in text, text


def test_a_file_that_does_not_import_is_said(tmp_path):
    (tmp_path / "test_it.py").write_text("import nothing_of_that_name\n")
    code, text = run(tmp_path, "--processes", "1")
    assert code == 1 and "nothing_of_that_name" in text
