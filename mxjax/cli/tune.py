"""``mxjax tune``: the fastest configuration of each kernel for given shapes, stored for this device kind."""

from __future__ import annotations

from pathlib import Path

from mxjax.cli.bench import parse_rows, parse_shapes
from mxjax.cli.console import Console

ROWS = (16, 32, 64, 128)


def run(*, shapes: str | None, rows: str | None, out: str | None, reps: int, console: Console) -> None:
    from mxjax import backend
    from pallas_kernels import _tuning
    from pallas_kernels.bench import candidates, tune

    target = backend.target()
    path = Path(out) if out is not None else _tuning.user_file(target.name)
    _tuning.read(path, target.name)  # before the work: a file that is none should fail at once
    entries = []
    for problem in candidates.problems(parse_shapes(shapes, "llama-3.1-8b"), parse_rows(rows, ROWS), target):
        entry = tune.tune(problem, reps=reps, say=console.note)
        if entry is None:
            continue
        _tuning.store(path, target.name, [entry])  # what is found stays, whatever comes after
        name = f"{entry['operation']} {entry['n']}x{entry['k']} M<={entry['m']}: {entry['us']} us"
        if entry["config"] is None:
            console.note(f"{name}, the heuristic's own; none of {entry['tried']} is clearly faster")
            continue
        entries.append(entry)
        console.note(f"{name}, the heuristic's {entry['heuristic_us']} us")
    data = {"device": target.name, "file": str(path), "entries": entries}
    console.result(data, f"{len(entries)} configurations in {path}")
