"""Benchmarks in several processes: merged rows, what is not done again, limits, failures."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from side_by_side import side_by_side

# Does the rows it is told to, unless its file has them; "slow" takes for ever, "bad" fails.
SCRIPT = """
import argparse, json, os, pathlib, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--names", nargs="+")
parser.add_argument("--out", type=pathlib.Path)
parser.add_argument("--workers")
args = parser.parse_args()
report = json.loads(args.out.read_text()) | {"device": "here"}
for name in args.names:
    if name == "bad":
        sys.exit("a bad row")
    if name not in [row["name"] for row in report["rows"]]:
        report["rows"].append({"name": name, "by": args.names})
        new = args.out.with_name(args.out.name + ".own")
        new.write_text(json.dumps(report))
        os.replace(new, args.out)
    if name == "slow":
        time.sleep(600)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    script, out = tmp_path / "script.py", tmp_path / "report.json"
    script.write_text(SCRIPT)
    monkeypatch.setattr(sys, "argv", [str(script), "--workers", "2", "--out", str(out)])

    def call(*parts, **options):
        names = [["--names", *part] for part in parts]
        return side_by_side(names, out, key=("name",), workers=2, summary=len, every=0.05, **options)

    return call


def test_rows_are_merged_and_not_done_again(run, tmp_path):
    first = run("ab", "c", "d")
    assert sorted(row["name"] for row in first["rows"]) == list("abcd") and first["claims"] == 4
    assert first["device"] == "here" and json.loads((tmp_path / "report.json").read_text()) == first
    second = run("a", "be")
    assert {row["name"]: row["by"] for row in second["rows"]} == {
        "a": ["a", "b"], "b": ["a", "b"], "c": ["c"], "d": ["d"], "e": ["b", "e"]
    }  # fmt: skip
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.json", "script.py"]


def test_a_part_that_fails_is_named_and_the_others_count(run, tmp_path):
    with pytest.raises(SystemExit, match=r"--names a bad: exit status 1\na bad row"):
        run(["a", "bad"], "b")
    assert sorted(row["name"] for row in json.loads((tmp_path / "report.json").read_text())["rows"]) == ["a", "b"]


def test_what_takes_too_long_is_stopped(run, tmp_path):
    """It would take ten minutes; how far it came depends on how long Python takes to start."""
    report = run(["a", "slow"], seconds=3)
    assert [row["name"] for row in report["rows"]] in ([], ["a"], ["a", "slow"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.json", "script.py"]
