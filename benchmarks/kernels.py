"""Times every kernel against bf16 XLA on this GPU: ``python benchmarks/kernels.py [--out FILE] [--only NAME ...]``.

The clocks, the operands and the floors are those of ``pallas_kernels.bench``, which ``mxjax bench`` and ``mxjax tune``
use too. Ratios are bf16 XLA over ours in the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from mxjax import backend
from pallas_kernels.bench import jobs as make
from pallas_kernels.bench import table, tune
from pallas_kernels.bench.timing import Job, chain_time, compile_all, copies, device_times
from pallas_kernels.block_scaled_matmul import block_scaled_matmul
from pallas_kernels.block_scaled_matmul.arg_specs import BENCH_SHAPES, DECODE_M, MIXED_M, PREFILL_M
from pallas_kernels.transform_quantize import arg_specs


def chain(n: int, m: int) -> dict[str, float]:
    """Microseconds of one n x n product in a chain inside one jit, gaps included."""
    x = make.normal((m, n), 3)
    weights = [make.packed(n, n, i) for i in range(copies(make.weight_bytes(n, n)))]
    dense = [make.normal((n, n), i) * jnp.bfloat16(n**-0.5) for i in range(copies(2 * n * n))]
    ours, base = chain_time(block_scaled_matmul, x, weights), chain_time(make.bf16_matmul, x, dense)
    return {"us": ours, "bf16_us": base, "ratio": round(base / ours, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kernels.json")
    parser.add_argument("--reps", type=int, default=24)
    parser.add_argument("--workers", type=int, default=8)
    names = ("w4a16", "w4a4", "quantize", "unpack", "chain", "tune")
    parser.add_argument("--only", nargs="*", choices=names, default=list(names[:-1]))
    parser.add_argument(
        "--shapes", type=int, default=len(BENCH_SHAPES), help="how many of the shapes, first ones first"
    )
    args = parser.parse_args()
    target = backend.target()
    if target.platform != "cuda":
        sys.exit(f"benchmarks/kernels.py times NVIDIA GPUs; this is {target.name} ({target.platform})")
    shapes = BENCH_SHAPES[: args.shapes]
    only, start = set(args.only), time.time()
    groups: list[list[Job]] = [make.ceiling_jobs()]
    if "quantize" in only:
        groups.append(make.quantize_jobs(arg_specs.BENCH_M))
    if "unpack" in only:
        groups.append(make.unpack_jobs())
    if "tune" in only:
        groups += [tune.jobs_of(problem) for problem in tune.problems(shapes, (16, 64, 128), target)]
    for shape in shapes:
        w4a16, w4a4 = DECODE_M * ("w4a16" in only), (MIXED_M + PREFILL_M) * ("w4a4" in only)
        jobs = make.baseline_jobs((shape,), tuple(sorted({*w4a16, *w4a4})))
        jobs += make.layer_jobs("w4a16", (shape,), w4a16) + make.layer_jobs("w4a4", (shape,), w4a4)
        groups.append(sorted(jobs, key=lambda job: job.key[3]))  # what is compared runs side by side
    times: dict[tuple, dict[str, Any]] = {}
    while groups:  # a group at a time: its operands leave the memory with it
        times |= device_times(compile_all(groups.pop(0), args.workers), args.reps)
        print(f"[{time.time() - start:5.0f} s] {len(times)} timings", flush=True)
    table.add_ratios(times)
    table.show(times)
    chains = {}
    if "chain" in only:
        for n in (8192, 4096):
            for m in (1, 16):
                chains[f"{n}x{n} M={m}"] = chain(n, m)
                print("chain", n, m, chains[f"{n}x{n} M={m}"], flush=True)
    record = {
        **table.environment("python " + " ".join(sys.argv)),
        "reps": args.reps,
        "device_time_us": {" ".join(map(str, k)): v for k, v in times.items()},
        "chain_us": chains,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
