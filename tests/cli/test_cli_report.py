"""What ``mxjax eval --report`` measures for its page, and where it leaves something out."""

import pytest
from click.testing import CliRunner

from mxjax.cli import main
from mxjax.eval import layers

pytest.importorskip("matplotlib", reason="pip install 'mxjax[plot]'")


def page_of(workplace, tmp_path):
    arguments = ["eval", workplace / "model", "--recipe", "mxfp4", "--tokens", f"{workplace}/tokens.npz:text"]
    result = CliRunner().invoke(main, [str(a) for a in (*arguments, "--limit", 1, "--report", tmp_path / "p.html")])
    assert result.exit_code == 0, result.stderr
    return (tmp_path / "p.html").read_text(encoding="utf-8"), result.stderr


def test_the_page_says_what_layers_see_and_which_rule_decided(workplace, tmp_path):
    page, notes = page_of(workplace, tmp_path)
    assert "Inputs and their outliers" in page and "output SQNR mxfp4" in page and "inputs of every layer" in notes
    assert "rtn, the rule for all" in page and "excluded by" in page


def test_statistics_that_would_be_too_large_are_left_out(workplace, tmp_path, monkeypatch):
    monkeypatch.setattr(layers, "STATISTICS_BYTES", 1000)
    page, notes = page_of(workplace, tmp_path)
    assert "Inputs and their outliers" not in page and "too much memory" in notes
    assert "rtn, the rule for all" in page
