"""``mxjax tune`` for the problems whose predictions in NOTES.md wait for a measurement, most wanted first.

    python benchmarks/tune_h200.py --out FILE [--seconds 230] [--done LINES]

Each problem gets its share of the time that is left, so that the last one is tried as well as the first; what it leaves
over is for those after it. LINES gets what was found for each problem, the heuristic's choice too, and a later run
leaves those out. FILE is one that dispatch reads ($MXJAX_TUNINGS, or ``pallas_kernels/tunings/nvidia-h200.json``).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

from mxjax import backend
from pallas_kernels import _tuning
from pallas_kernels.bench import tune
from pallas_kernels.bench.candidates import Problem, problems

BIG = ((14336, 4096), (4096, 14336), (8192, 8192))
FUSED = ((6144, 4096), (28672, 4096))  # q, k, v and gate, up of Llama-3.1-8B as one
FLUX = ((12288, 3072), (3072, 12288), (9216, 3072), (3072, 3072))


# operation, shapes, rows; most wanted first
WANTED: tuple[tuple[str, tuple[tuple[int, int], ...], int], ...] = (
    ("w4_fused_bf16", BIG, 32),
    ("w4_rows_16", (*BIG, (12288, 3072)), 16),
    ("w4_fused_bf16", BIG, 64),
    ("w4_fused_fp8", BIG, 128),
    ("w4_rows_8", ((4096, 4096), *FUSED), 16),
    ("w4_fused_fp8", ((3072, 3072), (4096, 4096)), 512),
    ("w4_rows_16", FUSED, 16),
    ("w4_fused_bf16", BIG, 1024),
    ("w4_fused_fp8", FLUX, 512),
    ("w4_fused_fp8", BIG, 256),
    ("w4_fused_fp8", BIG, 64),
    ("w4_fused_bf16", ((4096, 4096), *FLUX), 32),
    ("w4_fused_fp8", FLUX, 128),
)


def wanted(target: backend.Target) -> Iterator[Problem]:
    for operation, shapes, m in WANTED:
        for shape in shapes:
            yield from (p for p in problems([shape], [m], target) if p.operation == operation)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all problems together")
    parser.add_argument("--done", type=Path, help="JSON lines, written and read")
    args = parser.parse_args()
    target, start = backend.target(), time.monotonic()
    over = done(args.done)
    count = sum(len(shapes) for _, shapes, _ in WANTED) - len(over)
    for problem in wanted(target):
        if (problem.operation, problem.m, problem.n, problem.k) in over:
            continue
        left = args.seconds - (time.monotonic() - start)
        if left <= 0:
            print(f"{args.seconds:g} s are over: {count} problems are not tried", flush=True)
            break
        entry = tune.tune(problem, reps=12, seconds=left / count)
        count -= 1
        if entry is None:
            continue
        _tuning.store(args.out, target.name, [entry])
        print(f"[{time.monotonic() - start:4.0f} s] {entry}", flush=True)
        if args.done is not None:
            with args.done.open("a") as file:
                file.write(json.dumps({"tuned": entry}) + "\n")


def done(path: Path | None) -> set[tuple]:
    """Operation and sizes of what an earlier run tuned; lines of others, and one that was cut off, are passed over."""
    out = set()
    for line in path.read_text().splitlines() if path is not None and path.exists() else ():
        try:
            entry = json.loads(line).get("tuned")
        except ValueError:
            continue
        if entry is not None:
            out.add(tuple(entry[name] for name in ("operation", "m", "n", "k")))
    return out


if __name__ == "__main__":
    main()
