"""How long ``quantize_array`` takes for one weight matrix on a CPU, beside qwix, torchao and a memcpy.

    pip install . "qwix==0.1.8" "torchao==0.18.*" torch && python benchmarks/quantize_speed.py

Every candidate runs once to compile, then all take turns for ``--rounds`` rounds, so that whatever else the machine
does hits all of them alike; the table shows medians, their ratio to ``np.copyto`` of the same float32 array, and the
CPU seconds of all threads together (``cpu``), which other processes do not stretch. torchao runs eagerly and, where a
C++ compiler is found, through ``torch.compile``. A library that is not installed is left out, and the table says so.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import mxjax

SHAPE = (4096, 14336)
BLOCK = {"mxfp4": 32, "nvfp4": 16}
# The contraction axis: -1 as in (out, in) weights; 0 as in Flax kernels (in, out), what quantize(params) meets.
CASES = [(fmt, axis) for fmt in BLOCK for axis in (-1, 0)]


def mxjax_runs(x: np.ndarray) -> dict[tuple, Callable]:
    array = jax.device_put(x)

    def quantize(fmt, axis):
        return jax.block_until_ready(mxjax.quantize_array(array, fmt, axis))

    def dequantize(q, f):
        return jax.block_until_ready(f(q))

    runs = {("mxjax", *case): functools.partial(quantize, *case) for case in CASES}
    for case in CASES:
        f = jax.jit(lambda q: q.dequantize())
        runs["mxjax dequantize", *case] = functools.partial(dequantize, quantize(*case), f)
    return runs


def qwix_runs(x: np.ndarray) -> dict[tuple, Callable]:
    import qwix

    array = jax.device_put(x)

    def run(f):
        return jax.block_until_ready(f(array))

    def jitted(fmt, axis):
        tiles = {axis % x.ndim: BLOCK[fmt]}
        scale = jnp.float8_e8m0fnu if fmt == "mxfp4" else jnp.float8_e4m3fn
        return jax.jit(lambda a: qwix.quantize(a, fmt, tiled_axes=tiles, scale_dtype=scale))

    return {("qwix", *case): functools.partial(run, jitted(*case)) for case in CASES}


def torchao_runs(x: np.ndarray) -> dict[tuple, Callable]:
    import torch
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    def mxfp4(a):
        return to_mx(a, torch.float4_e2m1fn_x2, BLOCK["mxfp4"], ScaleCalculationMode.EVEN)

    def nvfp4(a):
        return nvfp4_quantize(a, BLOCK["nvfp4"], per_tensor_amax_to_scale(a.abs().amax()))

    array, functions = torch.from_numpy(x), {"mxfp4": mxfp4, "nvfp4": nvfp4}
    variants = {"torchao": functions}
    if shutil.which("g++") or shutil.which("clang++"):
        variants["torchao compiled"] = {fmt: torch.compile(f, dynamic=False) for fmt, f in functions.items()}

    def run(f, axis):
        return f(array if axis == -1 else array.t().contiguous())

    return {
        (name, *case): functools.partial(run, f[case[0]], case[1]) for name, f in variants.items() for case in CASES
    }


def measure(runs: dict[tuple, Callable], rounds: int) -> list[dict]:
    """Median wall and CPU milliseconds of every run; each has been called once before."""
    wall: dict[tuple, list[float]] = {name: [] for name in runs}
    cpu: dict[tuple, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, f in runs.items():
            cpu_start, start = time.process_time(), time.perf_counter()
            f()
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - cpu_start)
    copy = statistics.median(wall["memcpy", "float32", None])
    return [
        dict(
            library=name[0],
            format=name[1],
            axis=name[2],
            median_ms=round(1e3 * statistics.median(wall[name]), 2),
            best_ms=round(1e3 * min(wall[name]), 2),
            cpu_ms=round(1e3 * statistics.median(cpu[name]), 2),
            times_memcpy=round(statistics.median(wall[name]) / copy, 2),
        )
        for name in runs
    ]


def cpu_model() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def warm_up(runs: dict[tuple, Callable]) -> dict[tuple, Callable]:
    """Compile everything; drop, loudly, what a library cannot do here."""
    ready = {}
    for name, f in runs.items():
        try:
            f()
            ready[name] = f
        except Exception as e:  # any failure of a peer is a missing row, never the end of the benchmark
            if name[0].startswith(("mxjax", "memcpy")):
                raise
            print(f"left out {name}: {type(e).__name__}: {str(e).splitlines()[0]}", file=sys.stderr)
    return ready


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results")
    options = parser.parse_args()

    x = np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32)
    target = np.empty_like(x)
    runs: dict[tuple, Callable] = {("memcpy", "float32", None): functools.partial(np.copyto, target, x)}
    runs |= mxjax_runs(x)
    for package, make in (("qwix", qwix_runs), ("torchao", torchao_runs)):
        if version(package):
            runs |= make(x)
        else:
            print(f"left out {package}: not installed", file=sys.stderr)
    rows = measure(warm_up(runs), options.rounds)

    ours = {(r["format"], r["axis"]): r["median_ms"] for r in rows if r["library"] == "mxjax"}
    result = dict(
        date=datetime.date.today().isoformat(),
        device=dict(cpu=cpu_model(), cores=os.cpu_count(), load_1min=round(os.getloadavg()[0], 1)),
        versions=dict(python=platform.python_version(), **{p: version(p) for p in ("jax", "qwix", "torch", "torchao")}),
        command=f"python benchmarks/quantize_speed.py --rounds {options.rounds}",
        array=f"float32{list(SHAPE)}",
        rows=rows,
    )
    print(f"{result['device']}  {result['versions']}  {result['array']}")
    print(f"{'library':18}{'format':9}{'axis':>5}{'median ms':>11}{'cpu ms':>9}{'x memcpy':>10}{'x mxjax':>9}")
    for r in rows:
        slower = r["median_ms"] / ours[key] if (key := (r["format"], r["axis"])) in ours else float("nan")
        axis = "" if r["axis"] is None else r["axis"]
        print(
            f"{r['library']:18}{r['format']:9}{axis:>5}{r['median_ms']:>11.1f}{r['cpu_ms']:>9.1f}"
            f"{r['times_memcpy']:>10.1f}{slower:>9.1f}"
        )
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "quantize_speed_cpu.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
