"""The examples of docs/sharding.md run, in order."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sharding.md"


def test_examples_run(capsys, unoptimized):
    names = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S):
        exec(compile(code, str(PAGE), "exec"), names)
    lines = capsys.readouterr().out.splitlines()
    assert "'model', 'data'" in lines[0]
    assert lines[1].startswith("w/kernel: axis -2 of shape (96, 64) is cut into 4 shards by ('data',)")
    assert lines[2:] == ["524288 False", "524288 True"]
    assert names["y"].shape == (8, 64, 256)
