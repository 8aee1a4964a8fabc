"""``mxjax bench`` and ``mxjax tune`` on a machine without a GPU."""

import json

import jax
import pytest
from click.testing import CliRunner

from mxjax.cli.app import main
from mxjax.cli.bench import MODELS, parse_rows, parse_shapes
from mxjax.errors import ConfigError


def run(*arguments, code=0):
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="what they say where there is no GPU")


@on_cpu
def test_bench_on_a_cpu_says_what_it_is_worth(tmp_path):
    out = tmp_path / "table.json"
    done = run("bench", "--shapes", "64x64", "--rows", "1,3", "--reps", "1", "--out", out)
    assert "timings of interpret mode mean nothing" in done.stderr
    assert "share of floor" in done.stdout
    rows = json.loads(out.read_text())["rows"]
    assert [(r["layer"], r["n"], r["k"], r["m"]) for r in rows] == [
        (layer, 64, 64, m) for m in (1, 3) for layer in ("w4a16", "w4a4")
    ]
    assert all(r[name] >= 0 for r in rows for name in ("us", "bf16_us", "ratio", "share_of_floor", "compile_s"))


@on_cpu
def test_bench_json():
    data = json.loads(run("bench", "--shapes", "64x64", "--rows", "2", "--reps", "1", "--json").stdout)
    assert data["device"] == "cpu" and len(data["rows"]) == 2


@on_cpu
def test_tune_needs_a_gpu(tmp_path):
    done = run("tune", "--shapes", "64x64", "--out", tmp_path / "t.json", code=1)
    assert "nothing to tune" in done.stderr and not (tmp_path / "t.json").exists()


def test_shapes_and_rows():
    assert parse_shapes("8x32, flux.1,8x32", "") == ((8, 32), *MODELS["flux.1"])
    assert parse_shapes(None, "4x64") == ((4, 64),)
    assert parse_rows(None, (1, 2)) == (1, 2) and parse_rows("3, 5", ()) == (3, 5)
    for wrong in ("8x33", "8", "gpt", "0x32"):
        with pytest.raises(ConfigError, match="is no shape"):
            parse_shapes(wrong, "")
    with pytest.raises(ConfigError, match="row counts"):
        parse_rows("1,x", ())
