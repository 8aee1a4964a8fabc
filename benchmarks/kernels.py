"""Times every kernel against bf16 XLA on this GPU: ``python benchmarks/kernels.py [--out FILE] [--only NAME ...]``.

The clocks, the operands and the floors are those of ``pallas_kernels.bench``, which ``mxjax bench`` and ``mxjax tune``
use too. Ratios are bf16 XLA over ours in the same run. The file is written again after every group of timings.

Parts: ``w4a16`` and ``w4a4`` (whole layers, by shape), ``quantize``, ``branch`` (what a low-rank branch adds),
``grouped`` (experts), ``unpack``, ``chain`` (products inside one jit, gaps included). ``mxjax tune`` finds
configurations; what it stored is what is timed here.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mxjax import backend
from mxjax.core.formats import MXFP4, MXFP8_E4M3
from mxjax.ops.activation import ActivationFormat
from mxjax.ops.kernels import KernelWeight, kernel_dot
from mxjax.ops.low_rank import LowRank
from mxjax.transforms import Hadamard
from pallas_kernels.bench import jobs as make
from pallas_kernels.bench import table
from pallas_kernels.bench.timing import Job, chain_time, compile_all, copies, device_times
from pallas_kernels.block_scaled_matmul import block_scaled_matmul
from pallas_kernels.block_scaled_matmul.arg_specs import BENCH_SHAPES, DECODE_M, MIXED_M, PREFILL_M
from pallas_kernels.transform_quantize import arg_specs

PARTS = ("w4a16", "w4a4", "quantize", "branch", "grouped", "unpack", "chain")


def chain(n: int, m: int) -> dict[str, float]:
    """Microseconds of one n x n product in a chain inside one jit, gaps included."""
    x = make.normal((m, n), 3)
    weights = [make.packed(n, n, i) for i in range(copies(make.weight_bytes(n, n)))]
    dense = [make.normal((n, n), i) * jnp.bfloat16(n**-0.5) for i in range(copies(2 * n * n))]
    ours, base = chain_time(block_scaled_matmul, x, weights), chain_time(make.bf16_matmul, x, dense)
    return {"us": ours, "bf16_us": base, "ratio": round(base / ours, 3)}


def branch_jobs(shape: tuple[int, int], ms: tuple[int, ...], rank: int = 64) -> list[Job]:
    """A W4A4 layer with Hadamard 32 without a branch, with one in bfloat16, and with one whose inputs are MXFP8."""
    n, k = shape
    fp8 = ActivationFormat(format=MXFP8_E4M3)
    factors = dict(a=make.normal((rank, k), 7), b=make.normal((n, rank), 8))
    branches = {"none": None, "bf16": LowRank(**factors), "mxfp8": LowRank(**factors, activation=fp8)}
    weights = [make.packed(n, k, i, activation=MXFP4) for i in range(copies(make.weight_bytes(n, k)))]
    out = []
    for m in ms:
        x = make.normal((m, k), 97)
        for name, branch in branches.items():
            held = partial(
                KernelWeight, transform=Hadamard(32), branch=branch, activation=ActivationFormat(format=MXFP4),
                out_shape=(n,), size=k, dtype_name="bfloat16",
            )  # fmt: skip
            args = [(x, held(packed=w)) for w in weights]
            out.append(Job((f"branch {name}", n, k, m), lambda x, w: kernel_dot(x, w), args))
    return out


def groups(only: set[str], shapes: tuple[tuple[int, int], ...]) -> Iterator[Callable[[], list[Job]]]:
    """What is timed together, in order of worth. Made late: the operands leave the memory with their group."""
    yield make.ceiling_jobs
    for shape in shapes:
        w4a16, w4a4 = DECODE_M * ("w4a16" in only), (MIXED_M + PREFILL_M) * ("w4a4" in only)
        if w4a16 or w4a4:
            yield partial(layers, shape, w4a16, w4a4)
    if "branch" in only:
        for shape, ms in (((12288, 3072), (512, 4096)), ((3072, 12288), (4096,)), ((8192, 8192), (4096,))):
            yield partial(branch_jobs, shape, ms)
    if "quantize" in only:
        yield partial(make.quantize_jobs, arg_specs.BENCH_M)
    if "grouped" in only:
        yield make.grouped_jobs
    if "unpack" in only:
        yield make.unpack_jobs


def layers(shape: tuple[int, int], w4a16: tuple[int, ...], w4a4: tuple[int, ...]) -> list[Job]:
    jobs = make.baseline_jobs((shape,), tuple(sorted({*w4a16, *w4a4})))
    jobs += make.layer_jobs("w4a16", (shape,), w4a16) + make.layer_jobs("w4a4", (shape,), w4a4)
    return sorted(jobs, key=lambda job: job.key[3])  # what is compared runs side by side


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kernels.json")
    parser.add_argument("--reps", type=int, default=24)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--shapes", type=int, default=len(BENCH_SHAPES), help="how many of the shapes, first ones first"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no group of timings after that")
    args = parser.parse_args()
    target = backend.target()
    if target.platform != "cuda":
        sys.exit(f"benchmarks/kernels.py times NVIDIA GPUs; this is {target.name} ({target.platform})")
    only, start = set(args.only), time.time()
    times: dict[tuple, dict[str, Any]] = {}
    chains: dict[str, Any] = {}

    def save() -> None:
        record = {
            **table.environment("python " + " ".join(sys.argv)),
            "reps": args.reps,
            "device_time_us": {" ".join(map(str, k)): v for k, v in times.items()},
            "chain_us": chains,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")

    for group in groups(only, BENCH_SHAPES[: args.shapes]):
        if time.time() - start > args.seconds:
            print(f"{args.seconds:g} s are over: the rest is not measured", flush=True)
            break
        times |= device_times(compile_all(group(), args.workers), args.reps)
        table.add_ratios(times)
        save()
        print(f"[{time.time() - start:5.0f} s] {len(times)} timings", flush=True)
    table.show(times)
    for n, m in ((8192, 1), (8192, 16), (4096, 1), (4096, 16)) if "chain" in only else ():
        if time.time() - start <= args.seconds:
            chains[f"{n}x{n} M={m}"] = chain(n, m)
            print("chain", n, m, chains[f"{n}x{n} M={m}"], flush=True)
            save()
            jax.clear_caches()


if __name__ == "__main__":
    main()
