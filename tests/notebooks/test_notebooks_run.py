"""Notebooks: the two forms agree, nothing of a machine is stored in them, and they run top to bottom."""

import json
import os
import re
import subprocess
import sys

import pytest
from notebook_cells import FOLDER, ROOT, notebook_cells, run, text_cells

pytest.importorskip("matplotlib", reason="pip install 'mxjax[plot]'")

TEXTS = sorted(FOLDER.glob("*.py"))
# Pictures that each notebook shows, and a line that it must print.
EXPECTED = {
    "01_formats": (11, "1111  -6.0"),
    "02_quantize_a_tree": (3, "orbax  identical: True"),
    "03_flax": (2, "output sharding"),
    "04_outliers_and_transforms": (10, "choice            error of the output"),
    "05_mr_gptq": (8, "synthetic layer - 1024 tokens"),
    "06_loraq_and_kroquant": (14, "velocity error   bits a weight"),
    "07_kernels": (7, "equal to MXFP4: True"),
    "08_checkpoints": (3, "there and back, the file is identical: True"),
}
every_notebook = pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.stem)


def test_every_notebook_has_both_forms_and_is_expected_here():
    assert [p.stem for p in TEXTS] == sorted(p.stem for p in FOLDER.glob("*.ipynb")) == sorted(EXPECTED)


@every_notebook
def test_the_forms_agree(path):
    """After an edit of the text form: ``jupytext --to ipynb notebooks/*.py``."""
    assert text_cells(path) == notebook_cells(path.with_suffix(".ipynb"))


@every_notebook
def test_no_outputs_and_no_paths_are_stored(path):
    text = path.with_suffix(".ipynb").read_text(encoding="utf-8")
    for cell in json.loads(text)["cells"]:
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None
    for form in (text, path.read_text(encoding="utf-8")):
        assert not re.search(r"/home/|/root/|/work/|/tmp/|/Users/|[A-Z]:\\\\", form)


@every_notebook
def test_it_reads_like_an_article(path):
    cells = text_cells(path)
    assert cells[0][0] == "markdown" and cells[0][1].startswith("# "), "a title comes first"
    paragraphs = [p for kind, source in cells if kind == "markdown" for p in source.split("\n\n")]
    assert max(len(p) for p in paragraphs if not p.startswith("|")) < 500, "short paragraphs"
    code = [source for kind, source in cells if kind == "code"]
    assert max(source.count("\n") for source in code) < 30, "one idea a cell"


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - {"03_flax"}))
def test_it_runs(name, capsys, tmp_path, monkeypatch, request):
    monkeypatch.setenv("MXJAX_CACHE", str(tmp_path))  # no model, no tuned kernels: what a newcomer has
    monkeypatch.setenv("MXJAX_SMALL_NOTEBOOKS", "1")  # 06: one block of the model, two steps
    if name == "06_loraq_and_kroquant":
        request.getfixturevalue("unoptimized")  # it compiles much
    monkeypatch.chdir(FOLDER)
    shown = run(FOLDER / f"{name}.py")
    pictures, line = EXPECTED[name]
    assert sum(type(value).__name__ == "Figure" for value in shown) == pictures
    assert line in capsys.readouterr().out


def test_03_makes_its_own_eight_devices():
    """In a process without XLA_FLAGS: its first cell asks for the devices before JAX starts."""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, str(ROOT / "tests/notebooks/notebook_cells.py"), str(FOLDER / "03_flax.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    pictures, line = EXPECTED["03_flax"]
    assert line in done.stdout
    shown = re.search("SHOWN (.*)", done.stdout)[1]
    assert shown.count("'Figure'") == pictures
