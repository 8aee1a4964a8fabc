"""The command line as a process: exit codes, streams, Ctrl-C, and what is imported when."""

import json
import signal
import subprocess
import sys

import pytest

START = "from mxjax.cli import main; main(prog_name='mxjax')"


def mxjax(*arguments, code=0, start=START):
    command = [sys.executable, "-c", start, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stderr
    return done


def test_eval_prints_one_object(workplace):
    done = mxjax("eval", workplace / "model", "--tokens", f"{workplace}/tokens.npz:text", "--json")
    data = json.loads(done.stdout)
    assert set(data) >= {"perplexity", "tokens", "seconds"} and data["tokens"] == 45
    assert "Traceback" not in done.stderr


def test_error(workplace):
    done = mxjax("inspect", workplace / "nothing", "--json", code=1)
    assert done.stdout == "" and done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")
    assert "Traceback" in mxjax("inspect", workplace / "nothing", "--debug", code=1).stderr


def test_usage():
    assert mxjax("quantize", "a", code=2).stderr.startswith("Usage: mxjax quantize")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["eval", "--help"]])
def test_help_imports_nothing_heavy(arguments):
    heavy = "{'jax', 'flax', 'numpy', 'rich', 'matplotlib', 'gguf', 'torch', 'mxjax.api'}"
    check = f"import atexit, sys; atexit.register(lambda: print(sorted(set(sys.modules) & {heavy}), file=sys.stderr))"
    done = mxjax(*arguments, start=f"{check}; {START}")
    assert done.stderr.strip() == "[]" and done.stdout


def test_ctrl_c():
    wait = (
        "import time; import mxjax.cli.recipes as r; r.run = lambda **_: (print('working', flush=True), time.sleep(60))"
    )
    command = [sys.executable, "-c", f"{wait}; {START}", "recipes"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "working\n"
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=30)
    assert child.returncode == 130 and stderr == "interrupted\n"


def test_warnings_are_one_line_on_stderr():
    warn = "import warnings; import mxjax.cli.recipes as r; r.run = lambda **_: warnings.warn('look here')"
    done = mxjax("recipes", start=f"{warn}; {START}")
    assert done.stdout == "" and done.stderr == "warning: look here\n"
