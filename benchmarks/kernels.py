"""Times every kernel against bf16 XLA on this GPU: ``python benchmarks/kernels.py [--out FILE] [--only NAME ...]``.

Two clocks. *Device time* is the sum of a call's kernels as CUPTI reports them, without launch gaps: the median of
``--reps`` calls over rotating copies of the operands, together several times larger than the L2 cache. *Chain time* is
the wall clock of dependent products inside one jit, gaps included. Ratios are bf16 XLA over ours in the same run. The
floor is the bytes that must move over the measured copy bandwidth, or the operations over the measured FP8 rate of
XLA's own product (W4A4), whichever is larger.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import backend
from mxjax.core.formats import MXFP4, MXFP8_E4M3, NVFP4
from pallas_kernels import _compat, linear
from pallas_kernels.block_scaled_matmul import PackedWeight, block_scaled_matmul, triton
from pallas_kernels.block_scaled_matmul.arg_specs import BENCH_SHAPES, DECODE_M, PREFILL_M
from pallas_kernels.transform_quantize import Transform, arg_specs, transform_quantize, transform_quantize_fp8

BF16, F8, F32 = jnp.bfloat16, jnp.float8_e4m3fn, jnp.float32
ROTATE_BYTES = 420e6
MARKER = "mxjax_marker"


@dataclass
class Job:
    """One thing to time: ``fn(*args)`` for every tuple of ``args`` in turn."""

    key: tuple
    fn: Callable[..., Any]
    args: list[tuple]
    info: dict[str, Any] = field(default_factory=dict)
    compiled: Any = None


def random_bits(shape: tuple[int, ...], seed: int, low: int = 0, high: int = 256) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), shape, low, high, jnp.int32).astype(jnp.uint8)


def normal(shape: tuple[int, ...], seed: int, dtype: Any = BF16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def copies(nbytes: int) -> int:
    return int(np.clip(np.ceil(ROTATE_BYTES / nbytes), 3, 64))


def packed(n: int, k: int, seed: int) -> PackedWeight:
    """A weight in tiles of random codes; scales within 10 binades of each row's largest."""
    tiles, rows = -(-k // 128), -(-n // 128) * 128
    return PackedWeight(
        codes=random_bits((tiles, rows, 64), seed),
        scales=random_bits((tiles, rows, 4), seed + 1, 243, 254),
        row_scale=jnp.full((rows,), k**-0.5, F32),  # random codes have variance 1: products keep their size
        format=MXFP4, layout="tiles", n=n, k=k,
    )  # fmt: skip


def bf16_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """The faster of XLA's two ways to write it is not known ahead: this is the usual one."""
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=BF16)


def bf16_matmul_f32(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=F32).astype(BF16)


# --- measuring -------------------------------------------------------------------------------------------------------


def _marker_kernel(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] + 1.0


def make_marker() -> Callable[[], None]:
    """Launches a kernel whose name separates the jobs in the profile."""
    spec = _compat.pl.BlockSpec((128,), lambda i: (0,))
    run = _compat.triton_call(
        _marker_kernel, name=MARKER, grid=(1,), in_specs=[spec], out_specs=spec,
        out_shape=jax.ShapeDtypeStruct((128,), F32), num_warps=1, num_stages=1,
    )  # fmt: skip
    ones, launch = jnp.ones((128,), F32), jax.jit(run)
    return lambda: jax.block_until_ready(launch(ones))


def compile_all(jobs: list[Job], workers: int) -> list[Job]:
    def one(job: Job) -> Job:
        try:
            job.compiled = jax.jit(job.fn).lower(*job.args[0]).compile()
        except Exception as e:
            print("does not compile:", job.key, repr(e)[:300], flush=True)
        return job

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return [job for job in pool.map(one, jobs) if job.compiled is not None]


def device_times(jobs: list[Job], reps: int) -> dict[tuple, dict[str, Any]]:
    """Median device time of a call in microseconds, and of each of its kernels."""
    marker = make_marker()
    marker()
    for job in jobs:
        for args in job.args[:2]:
            jax.block_until_ready(job.compiled(*args))

    def run() -> None:
        for job in jobs:
            marker()
            start = time.perf_counter()
            out = [job.compiled(*job.args[i % len(job.args)]) for i in range(reps)][-1]
            jax.block_until_ready(out)
            # A long product heats the chip and its clock drops, for what runs next too: 20 % were seen.
            time.sleep(min(0.02 + 15 * (time.perf_counter() - start), 0.5))
        marker()

    groups: list[list[tuple[str, float]]] = []
    for name, us in _compat.kernel_times(run):
        if MARKER in name:
            groups.append([])
        elif groups:
            groups[-1].append((name, us))
    out = {}
    for job, group in zip(jobs, groups, strict=False):
        per_call, rest = divmod(len(group), reps)
        if rest or not per_call:
            print("odd number of kernels:", job.key, len(group), flush=True)
            continue
        calls = np.asarray([us for _, us in group]).reshape(reps, per_call)
        kernels = {group[i][0][:60]: round(float(np.median(calls[:, i])), 2) for i in range(per_call)}
        total = calls.sum(1)
        out[job.key] = {
            "us": round(float(np.median(total)), 2),
            "spread": round(float((np.quantile(total, 0.9) - np.quantile(total, 0.1)) / np.median(total)), 3),
            "kernels": kernels,
            **job.info,
        }
    return out


def chain_time(step: Callable[..., jax.Array], x: jax.Array, weights: list, unroll: int = 40, loops: int = 5) -> float:
    """Wall clock of one product in a chain of ``unroll * loops`` dependent ones inside one jit, microseconds.

    The weights keep the size of x about the same, so that no number vanishes or overflows on the way.
    """

    @jax.jit
    def run(x: jax.Array, weights: list) -> jax.Array:
        def body(_: Any, x: jax.Array) -> jax.Array:
            for i in range(unroll):
                x = step(x, weights[i % len(weights)])
            return x

        return jax.lax.fori_loop(0, loops, body, x)

    last = np.asarray(run(x, weights), np.float32)
    assert np.isfinite(last).all() and (last != 0).mean() > 0.9, "the chain died: it would be timed on zeros or NaN"
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(run(x, weights))
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e6 / (unroll * loops)


def _copy_kernel(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...]


def triton_copy(x: jax.Array) -> jax.Array:
    """A plain copy, 16 bytes a thread and load: the ceiling of what a kernel can move."""
    spec = _compat.pl.BlockSpec((8192,), lambda i: (i,))
    return _compat.triton_call(
        _copy_kernel, name="copy", grid=(x.size // 8192,), in_specs=[spec], out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), num_warps=4, num_stages=1,
    )(x)  # fmt: skip


# --- jobs ------------------------------------------------------------------------------------------------------------


def ceiling_jobs() -> list[Job]:
    big = [(normal((2**28,), i),) for i in range(3)]
    fp8 = [(normal((8192, 8192), 1).astype(F8), normal((8192, 8192), i).astype(F8)) for i in range(2, 5)]
    return [
        Job(("copy", "xla"), lambda x: x + jnp.bfloat16(1), big, {"bytes": 2**30}),
        Job(("copy", "triton"), triton_copy, big, {"bytes": 2**30}),
        Job(("fp8 xla", 8192), bf16_matmul, fp8, {"flops": 2 * 8192**3}),
    ]


def baseline_jobs(shapes: tuple, ms: tuple) -> list[Job]:
    jobs = []
    for n, k in shapes:
        weights = [normal((n, k), i) for i in range(copies(2 * n * k))]
        for m in ms:
            x = normal((m, k), 99)
            for name, fn in (("bf16", bf16_matmul), ("bf16 f32", bf16_matmul_f32)):
                if name == "bf16 f32" and m > 128:
                    continue
                jobs.append(Job((name, n, k, m), fn, [(x, w) for w in weights]))
    return jobs


def w4a16_jobs(shapes: tuple, ms: tuple) -> list[Job]:
    jobs = []
    for n, k in shapes:
        weights = [packed(n, k, i) for i in range(copies(n * k * 17 // 32))]
        for m in ms:
            x = normal((m, k), 98)
            info = {"bytes": n * k * 17 / 32 + 2 * m * (n + k)}
            jobs.append(Job(("w4a16", n, k, m), block_scaled_matmul, [(x, w) for w in weights], info))
    return jobs


def w4a4_jobs(shapes: tuple, ms: tuple) -> list[Job]:
    fn = partial(linear.quantized_linear, activation=MXFP4, transform=Transform(hadamard=32))
    jobs = []
    for n, k in shapes:
        weights = [packed(n, k, i) for i in range(copies(n * k * 17 // 32))]
        for m in ms:
            x = normal((m, k), 97)
            info = {"bytes": n * k * 17 / 32 + 2 * m * (n + k), "flops": 2 * m * n * k}
            jobs.append(Job(("w4a4", n, k, m), fn, [(x, w) for w in weights], info))
    return jobs


def quantize_jobs(ms: tuple) -> list[Job]:
    transforms = {
        "hadamard32": lambda k: Transform(hadamard=32),
        "kronecker": lambda k: Transform(matrix=normal((32, 32), 5, F32)),
        "scale": lambda k: Transform(channel_scale=normal((k,), 6)),
        "none": lambda k: Transform(),
    }
    jobs = []
    for k in arg_specs.BENCH_K:
        for m in ms:
            xs = [(normal((m, k), i),) for i in range(copies(3 * m * k))]
            for name, make in transforms.items():
                fn = partial(transform_quantize_fp8, transform=make(k))
                jobs.append(Job(("tq fp8", name, m, k), fn, xs, {"bytes": 3 * m * k}))
                if m == max(ms) and (k == 8192 or name == "hadamard32"):
                    fn = partial(transform_quantize, fmt=MXFP4, transform=make(k))
                    jobs.append(Job(("tq mxfp4", name, m, k), fn, xs, {"bytes": m * k * (2 + 17 / 32)}))
            if m == max(ms) and k == 8192:
                t = transforms["hadamard32"](k)
                fn = partial(transform_quantize, fmt=MXFP8_E4M3, transform=t)
                jobs.append(Job(("tq mxfp8", "hadamard32", m, k), fn, xs, {"bytes": m * k * (3 + 1 / 32)}))
                fn = partial(transform_quantize, fmt=NVFP4, transform=t, tensor_scale=jnp.full((m,), 0.01, F32))
                jobs.append(Job(("tq nvfp4", "hadamard32", m, k), fn, xs, {"bytes": m * k * (2 + 9 / 16)}))
    return jobs


def unpack_jobs() -> list[Job]:
    jobs = []
    for n, k in ((8192, 8192), (14336, 4096)):
        weights = [(packed(n, k, i),) for i in range(6)]
        for name, dtype, size in (("unpack e4m3", F8, 1), ("unpack bf16", BF16, 2)):
            jobs.append(
                Job((name, n, k), partial(triton.unpack, dtype=dtype), weights, {"bytes": n * k * (17 / 32 + size)})
            )
    return jobs


def tune_jobs(ms: tuple) -> list[Job]:
    """Decode configurations around the heuristic's."""
    jobs = []
    for n, k in ((8192, 8192), (4096, 4096), (14336, 4096), (4096, 14336), (3072, 12288)):
        weights = [packed(n, k, i) for i in range(copies(n * k * 17 // 32))]
        for m in ms:
            x = normal((m, k), 98)
            for block_m in {16, 32, 64, 128}:
                if block_m < m <= 64 or (block_m >= 4 * m and block_m > 16) or (block_m == 128 and m < 128):
                    continue
                for splits in (1, 2, 4, 8):
                    config = triton.DecodeConfig(block_m, splits)
                    fn = partial(_decode_with, config=config)
                    jobs.append(Job(("tune", n, k, m, block_m, splits), fn, [(x, w) for w in weights]))
    return jobs


def _decode_with(x: jax.Array, w: PackedWeight, config: triton.DecodeConfig) -> jax.Array:
    return triton.decode(x, None, w, None, BF16, config)


# --- report ----------------------------------------------------------------------------------------------------------


def add_ratios(times: dict[tuple, dict[str, Any]]) -> None:
    """Bandwidth, rate, ratio to the faster bf16 product, and share of the floor, where they mean something."""
    bandwidth = max((t["bytes"] / t["us"] / 1e3 for key, t in times.items() if key[0] == "copy"), default=None)
    fp8 = times.get(("fp8 xla", 8192))
    rate = fp8["flops"] / fp8["us"] / 1e6 if fp8 else None  # TFLOP/s
    for key, t in times.items():
        if "bytes" in t:
            t["gb_per_s"] = round(t["bytes"] / t["us"] / 1e3)
            if bandwidth:
                floor = t["bytes"] / bandwidth / 1e3
                if rate and "flops" in t:
                    floor = max(floor, t["flops"] / rate / 1e6)
                t["share_of_floor"] = round(floor / t["us"], 3)
        if key[0] in ("w4a16", "w4a4"):
            base = [times[b]["us"] for b in (("bf16", *key[1:]), ("bf16 f32", *key[1:])) if b in times]
            if base:
                t["bf16_us"] = min(base)
                t["ratio"] = round(min(base) / t["us"], 3)


def show(times: dict[tuple, dict[str, Any]]) -> None:
    for key, t in times.items():
        extra = "  ".join(f"{name} {t[name]}" for name in ("ratio", "share_of_floor", "gb_per_s") if name in t)
        print(f"{' '.join(map(str, key)):40s} {t['us']:9.2f} us  {extra}", flush=True)


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
    groups: list[list[Job]] = [ceiling_jobs()]
    if "quantize" in only:
        groups.append(quantize_jobs(arg_specs.BENCH_M))
    if "unpack" in only:
        groups.append(unpack_jobs())
    if "tune" in only:
        groups.append(tune_jobs((16, 64, 128)))
    for shape in shapes:
        ms = (DECODE_M if "w4a16" in only else (16, 64, 128) if "w4a4" in only else ()) + (
            PREFILL_M if "w4a4" in only else ()
        )
        jobs = baseline_jobs((shape,), ms)
        jobs += w4a16_jobs((shape,), DECODE_M) if "w4a16" in only else []
        jobs += w4a4_jobs((shape,), (16, 64, 128, *PREFILL_M)) if "w4a4" in only else []
        groups.append(sorted(jobs, key=lambda job: job.key[3]))  # what is compared runs side by side
    times: dict[tuple, dict[str, Any]] = {}
    while groups:  # a group at a time: its operands leave the memory with it
        jobs = compile_all(groups.pop(0), args.workers)
        times |= device_times(jobs, args.reps)
        print(f"[{time.time() - start:5.0f} s] {len(times)} timings", flush=True)
    add_ratios(times)
    show(times)
    chains = {}
    if "chain" in only:
        for n in (8192, 4096):
            for m in (1, 16):
                x = normal((m, n), 3)
                ours = chain_time(block_scaled_matmul, x, [packed(n, n, i) for i in range(copies(n * n * 17 // 32))])
                dense = [normal((n, n), i) * jnp.bfloat16(n**-0.5) for i in range(copies(2 * n * n))]
                base = chain_time(bf16_matmul, x, dense)
                chains[f"{n}x{n} M={m}"] = {"us": ours, "bf16_us": base, "ratio": round(base / ours, 3)}
                print("chain", n, m, chains[f"{n}x{n} M={m}"], flush=True)
    record = {
        "device": target.name,
        "arch": target.arch,
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"jax": jax.__version__, "jaxlib": jax.lib.__version__, "python": sys.version.split()[0]},
        "command": "python " + " ".join(sys.argv),
        "reps": args.reps,
        "device_time_us": {" ".join(map(str, k)): v for k, v in times.items()},
        "chain_us": chains,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
