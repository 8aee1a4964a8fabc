"""From timings to the table: ratios to bf16 XLA, shares of the floor, and the whole run for one machine.

The floor of a layer is the bytes that must move over the measured copy bandwidth, or the operations over the measured
FP8 rate of XLA's own product (W4A4), whichever is larger.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mxjax import backend
from pallas_kernels import _compat
from pallas_kernels.bench import jobs as make
from pallas_kernels.bench.timing import COMPILE_SECONDS, Job, compile_all, device_times, host_times

Times = dict[tuple, dict[str, Any]]


def add_ratios(times: Times) -> None:
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
        if key[0] in ("grouped w4a16", "grouped w4a4") and ("ragged bf16", *key[1:]) in times:
            t["bf16_us"] = times["ragged bf16", *key[1:]]["us"]
            t["ratio"] = round(t["bf16_us"] / t["us"], 3)
        if key[0].startswith("branch ") and ("branch none", *key[1:]) in times:
            t["added"] = round(t["us"] / times["branch none", *key[1:]]["us"] - 1, 3)
        if key[0] in ("w4a16", "w4a4"):
            base = [times[b]["us"] for b in (("bf16", *key[1:]), ("bf16 f32", *key[1:])) if b in times]
            if base:
                t["bf16_us"] = min(base)
                t["ratio"] = round(min(base) / t["us"], 3)


def layer_times(
    shapes: Sequence[tuple[int, int]],
    ms: Sequence[int],
    names: Sequence[str] = ("w4a16", "w4a4"),
    *,
    reps: int = 24,
    workers: int = 8,
    say: Callable[[str], None] = print,
) -> Times:
    """Timings of whole layers and of bf16 XLA, with ratios, on whatever this machine is.

    On NVIDIA by CUPTI; elsewhere by the host's clock, which sees the gaps between kernels too.
    """
    target = backend.target()
    gpu = target.platform in ("cuda", "rocm")
    cuda = target.platform == "cuda"
    ceilings = make.ceiling_jobs(triton_too=gpu and _compat.TRITON_MISSING is None, fp8=cuda and target.sm >= 89,
                                 values=2**28 if gpu else 2**22)  # fmt: skip
    times: Times = {}

    def measure(jobs: list[Job]) -> None:
        """A group at a time: its operands leave the memory with it."""
        compiled = compile_all(jobs, workers, say)
        times.update(device_times(compiled, reps, say) if cuda else host_times(compiled, reps))

    measure(ceilings)
    for shape in shapes:
        layers = [job for name in names for job in make.layer_jobs(name, (shape,), ms)]
        jobs = make.baseline_jobs((shape,), ms) + layers
        measure(sorted(jobs, key=lambda job: job.key[3]))  # what is compared runs side by side
    add_ratios(times)
    return times


def rows(times: Times) -> list[dict[str, Any]]:
    """One row for each layer: what people read and JSON holds."""
    out = []
    for key, t in times.items():
        if key[0] in ("w4a16", "w4a4"):
            name, n, k, m = key
            row = dict(layer=name, n=n, k=k, m=m, us=t["us"], bf16_us=t.get("bf16_us"), ratio=t.get("ratio"))
            row |= dict(share_of_floor=t.get("share_of_floor"), compile_s=t["compile_s"])
            row["slow_compile"] = t["compile_s"] > COMPILE_SECONDS
            row["kernels"] = list(t.get("kernels", ()))
            row["below_bf16"] = t.get("ratio", 1) < 1
            out.append(row)
    return out


def environment(command: str) -> dict[str, Any]:
    """What a record of timings says about the machine."""
    target = backend.target()
    return {
        "device": target.name,
        "arch": target.arch,
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"jax": jax.__version__, "jaxlib": jax.lib.__version__, "python": sys.version.split()[0]},
        "command": command,
    }


def show(times: Times) -> None:
    for key, t in times.items():
        extra = "  ".join(f"{name} {t[name]}" for name in ("ratio", "added", "share_of_floor", "gb_per_s") if name in t)
        print(f"{' '.join(map(str, key)):40s} {t['us']:9.2f} us  {extra}", flush=True)
