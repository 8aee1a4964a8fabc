"""The command line as a process: exit codes, streams, Ctrl-C, and what is imported when."""

import json
import os
import signal
import subprocess
import sys
import time

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


@pytest.mark.parametrize(("given", "command", "seen"), [
    (None, "recipes", "--xla_gpu_autotune_level=0"), ("--xla_a=1", "recipes", "--xla_a=1"), (None, "bench", None),
])  # fmt: skip
def test_xla_does_not_search_for_products_that_run_a_few_times(given, command, seen, monkeypatch):
    """Unless the user says something about XLA, or the command measures it."""
    from mxjax.cli import app, entry

    monkeypatch.setattr(os, "environ", {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"})
    if given:
        os.environ["XLA_FLAGS"] = given
    monkeypatch.setattr(sys, "argv", ["mxjax", command])
    monkeypatch.setattr(app.main, "main", lambda: None)
    entry._command()
    assert os.environ.get("XLA_FLAGS") == seen


def test_the_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "mxjax", "--version"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("mxjax, version "), done.stderr


def test_usage():
    assert mxjax("quantize", "a", code=2).stderr.startswith("Usage: mxjax quantize")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["eval", "--help"]])
def test_help_imports_nothing_heavy(arguments):
    heavy = "{'jax', 'flax', 'numpy', 'rich', 'matplotlib', 'gguf', 'torch', 'mxjax.api'}"
    check = f"import atexit, sys; atexit.register(lambda: print(sorted(set(sys.modules) & {heavy}), file=sys.stderr))"
    done = mxjax(*arguments, start=f"{check}; {START}")
    assert done.stderr.strip() == "[]" and done.stdout


def test_ctrl_c():
    wait = (  # in short sleeps: a signal just before one long sleep begins is seen by Python only when it ends
        "import time; import mxjax.cli.recipes as r; "
        "r.run = lambda **_: (print('working', flush=True), [time.sleep(0.05) for _ in range(1200)])"
    )
    command = [sys.executable, "-c", f"{wait}; {START}", "recipes"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "working\n"
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=30)
    assert child.returncode == 130 and stderr == "interrupted\n"


LOST = """
import gc, signal, sys, time, weakref
import mxjax.cli.recipes as r
class Thing:
    def __del__(self): signal.raise_signal(signal.SIGINT)
def weak():
    thing = type("Other", (), {})()
    ref = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
    del thing
def collected():
    gc.callbacks.append(lambda *_: (gc.callbacks.clear(), signal.raise_signal(signal.SIGINT)))
    gc.collect()
def converted():
    try: signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt: raise RuntimeError("callback failed") from None
def dropped():
    try: signal.raise_signal(signal.SIGINT)
    except BaseException: pass
"""


@pytest.mark.parametrize("way", ["Thing()", "weak()", "collected()", "converted()", "dropped()"])
def test_ctrl_c_is_not_lost(way):
    """KeyboardInterrupt in a destructor or callback is dropped by Python; the command must end all the same."""
    work = f"def work(**_):\n    {way}\n" + ("" if way == "dropped()" else "    time.sleep(60)\n")
    done = mxjax("recipes", start=f"{LOST}\n{work}\nr.run = work\n{START}", code=130)
    assert done.stderr == "interrupted\n"


def test_ctrl_c_waits_for_an_extension_module():
    """NumPy and jaxlib cannot be interrupted while they initialize themselves: they print a traceback, or abort."""
    work = """
import signal, time
import mxjax.cli.recipes as r
class ExtensionFileLoader:
    def exec_module(self):
        signal.raise_signal(signal.SIGINT)
        print("initialized")
def work(**_):
    ExtensionFileLoader().exec_module()
    time.sleep(60)
r.run = work
"""
    assert mxjax("recipes", start=work + START, code=130).stdout == "initialized\n"


def test_ctrl_c_skips_the_shutdown_of_python():
    """XLA's threads may still compute: what was printed gets out, and no exit handler runs under them."""
    work = (
        "import atexit, signal; import mxjax.cli.recipes as r; atexit.register(print, 'shutdown')\n"
        "r.run = lambda **_: (print('half'), signal.raise_signal(signal.SIGINT))\n"
    )
    assert mxjax("recipes", start=work + START, code=130).stdout == "half\n"


@pytest.mark.parametrize("delay", [0, 0.02, 0.1, 0.4, 1.0, 2.0])
def test_ctrl_c_at_any_time(workplace, tmp_path, delay):
    """From the first import on: 130 and no traceback, or done; the result is whole, or absent and can be finished."""
    start = "from mxjax.cli import entry; entry.install(); print('up', flush=True); entry.main()"
    arguments = ["quantize", str(workplace / "model"), str(tmp_path / "q"), "--recipe=mxfp4", "--quiet"]
    child = subprocess.Popen(
        [sys.executable, "-c", start, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "up\n"
    time.sleep(delay)
    running = child.poll() is None
    child.send_signal(signal.SIGINT)
    stdout, stderr = child.communicate(timeout=60)
    assert child.returncode == 130 or (child.returncode == 0 and (not running or stdout)), stderr
    assert "Traceback" not in stderr and "ignored" not in stderr
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"q", ".q.partial"}
    if ".q.partial" in left:
        assert child.returncode == 130 and "q" not in left
        mxjax(*arguments)
        assert {path.name for path in tmp_path.iterdir()} == {"q"}
    if left:
        mxjax("inspect", tmp_path / "q")


def test_warnings_are_one_line_on_stderr():
    warn = "import warnings; import mxjax.cli.recipes as r; r.run = lambda **_: warnings.warn('look here')"
    done = mxjax("recipes", start=f"{warn}; {START}")
    assert done.stdout == "" and done.stderr == "warning: look here\n"
