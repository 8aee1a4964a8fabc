"""The command lines of the README, one after the other as they are printed, on a tiny folder."""

import shlex
from pathlib import Path

from click.testing import CliRunner

from mxjax.cli import main

README = Path(__file__).parents[2] / "README.md"


def commands():
    """Arguments of the lines of the block about the command line, comments off."""
    block = README.read_text(encoding="utf-8").split("**Command line.**")[1].split("```")[1]
    lines = [shlex.split(line, comments=True) for line in block.splitlines() if "bin/mxjax " in line]
    assert len(lines) >= 7
    return [line[1:] for line in lines]


def test_no_command_writes_where_another_did():
    written = [c[2] for c in commands() if c[0] in ("quantize", "convert")]
    assert len(written) >= 3 and len(set(written)) == len(written)


def test_they_run_in_this_order(workplace, tmp_path, monkeypatch):
    """Those without calibration; tests/cli has the others."""
    monkeypatch.chdir(tmp_path)
    names = {"SRC": str(workplace / "model"), "t.npz:KEY": f"{workplace}/tokens.npz:text"}
    ran = []
    for arguments in commands():
        if arguments[0] in ("bench", "lm-eval") or "--calib" in arguments:
            continue
        result = CliRunner().invoke(main, [names.get(a, a) for a in arguments])
        assert result.exit_code == 0, (arguments, result.stderr, result.exception)
        ran.append(arguments[0])
    assert ran == ["quantize", "eval", "convert", "inspect", "recipes"]
