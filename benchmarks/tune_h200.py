"""``mxjax tune`` for the problems whose predictions in NOTES.md wait for a measurement, most wanted first.

    python benchmarks/tune_h200.py --out FILE [--seconds 75]

The file is one that dispatch reads ($MXJAX_TUNINGS, or beside ``pallas_kernels`` as ``tunings/nvidia-h200.json``).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from mxjax import backend
from pallas_kernels import _tuning
from pallas_kernels.bench import tune

BIG = ((14336, 4096), (4096, 14336), (8192, 8192))
FUSED = ((6144, 4096), (28672, 4096))  # q, k, v and gate, up of Llama-3.1-8B as one
FLUX = ((12288, 3072), (3072, 12288), (9216, 3072), (3072, 3072))


def wanted() -> Iterator[tuple[str, tuple[tuple[int, int], ...], int]]:
    """(operation, shapes, rows)."""
    yield "w4_fused_bf16", BIG, 32
    yield "w4_rows_16", (*BIG, (12288, 3072)), 16
    yield "w4_fused_bf16", BIG, 64
    yield "w4_fused_fp8", BIG, 128
    yield "w4_rows_8", ((4096, 4096), *FUSED), 16
    yield "w4_fused_fp8", ((3072, 3072), (4096, 4096)), 512
    yield "w4_rows_16", FUSED, 16
    yield "w4_fused_bf16", BIG, 1024
    yield "w4_fused_fp8", FLUX, 512
    yield "w4_fused_fp8", BIG, 256
    yield "w4_fused_fp8", BIG, 64
    yield "w4_fused_bf16", ((4096, 4096), *FLUX), 32
    yield "w4_fused_fp8", FLUX, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no problem after that")
    args = parser.parse_args()
    target, start = backend.target(), time.monotonic()
    for operation, shapes, m in wanted():
        for shape in shapes:
            for problem in tune.problems([shape], [m], target):
                if problem.operation != operation or time.monotonic() - start > args.seconds:
                    continue
                entry = tune.tune(problem, reps=12)
                if entry is not None:
                    _tuning.store(args.out, target.name, [entry])
                    print(f"[{time.monotonic() - start:4.0f} s] {entry}", flush=True)


if __name__ == "__main__":
    main()
