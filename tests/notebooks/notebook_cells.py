"""Notebooks without Jupyter: cells of both forms, and a run of the text form that keeps what each cell shows.

``python notebook_cells.py FILE.py`` runs one in a process of its own and prints the types of what it showed.
"""

import ast
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"


def text_cells(path):
    """(kind, source) of each cell of a percent-format file, as Jupyter would show it."""
    cells, header, body = [], None, path.read_text(encoding="utf-8")
    assert body.startswith("# ---\n"), "a jupytext header comes first"
    for line in body.split("\n# ---\n", 1)[1].splitlines():
        if line in ("# %%", "# %% [markdown]"):
            header = "markdown" if line.endswith("[markdown]") else "code"
            cells.append((header, []))
        elif header is not None:
            if header == "markdown" or line.startswith(("# %matplotlib", "# %config")):
                line = line.removeprefix("#").removeprefix(" ")
            cells[-1][1].append(line)
        else:
            assert not line.strip(), f"text before the first cell: {line}"
    return [(kind, "\n".join(lines).strip("\n")) for kind, lines in cells]


def notebook_cells(path):
    """(kind, source) of each cell of an .ipynb file."""
    return [(c["cell_type"], "".join(c["source"])) for c in json.loads(path.read_text(encoding="utf-8"))["cells"]]


def run(path):
    """Execute the code cells in order, in one namespace; returns what the last expressions of the cells gave."""
    namespace, shown = {"__name__": "__main__"}, []
    for kind, source in text_cells(path):
        if kind != "code":
            continue
        lines = [line for line in source.splitlines() if not line.startswith("%")]
        body = ast.parse("\n".join(lines)).body
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), path.name, "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), path.name, "eval"), namespace)
            if value is not None:
                shown.append(value)
    return shown


if __name__ == "__main__":
    print("SHOWN", [type(value).__name__ for value in run(Path(sys.argv[1]))])
