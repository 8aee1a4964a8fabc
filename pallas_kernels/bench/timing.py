"""Clocks. Three of them, for what each machine has.

*Device time* (NVIDIA) is the sum of a call's kernels as CUPTI reports them, without launch gaps: the median of ``reps``
calls over rotating copies of the operands, together several times larger than the L2 cache. *Host time* (elsewhere) is
the wall clock of ``reps`` calls in flight, gaps included. *Chain time* is the wall clock of dependent products inside
one jit. What is to be compared takes turns (:func:`round_times`).
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import backend
from pallas_kernels import _compat

ROTATE_BYTES = 420e6
MARKER = "mxjax_marker"
COMPILE_SECONDS = 3.0  # what a kernel variant may take to compile


@dataclass
class Job:
    """One thing to time: ``fn(*args)`` for every tuple of ``args`` in turn."""

    key: tuple
    fn: Callable[..., Any]
    args: list[tuple]
    info: dict[str, Any] = field(default_factory=dict)
    compiled: Any = None


def copies(nbytes: float, budget: float = ROTATE_BYTES) -> int:
    """How many operands of that size to rotate through."""
    return int(np.clip(np.ceil(budget / nbytes), 3, 64))


def compile_all(jobs: Sequence[Job], workers: int, say: Callable[[str], None] = print) -> list[Job]:
    """The jobs that compile, compiled; ``info["compile_s"]`` says how long it took."""

    def one(job: Job) -> Job:
        start = time.perf_counter()
        try:
            job.compiled = jax.jit(job.fn).lower(*job.args[0]).compile()
        except Exception as e:
            say(f"does not compile: {job.key} {repr(e)[:300]}")
        job.info["compile_s"] = round(time.perf_counter() - start, 2)
        return job

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return [job for job in pool.map(one, jobs) if job.compiled is not None]


def _marker_kernel(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] + 1.0


def make_marker() -> Callable[[], None]:
    """Launches a kernel whose name separates the jobs in the profile."""
    spec = _compat.pl.BlockSpec((128,), lambda i: (0,))
    run = _compat.triton_call(
        _marker_kernel, name=MARKER, grid=(1,), in_specs=[spec], out_specs=spec,
        out_shape=jax.ShapeDtypeStruct((128,), jnp.float32), num_warps=1, num_stages=1,
    )  # fmt: skip
    ones, launch = jnp.ones((128,), jnp.float32), jax.jit(run)
    return lambda: jax.block_until_ready(launch(ones))


def turns(jobs: Sequence[Job], rounds: int) -> Iterator[tuple[int, Job]]:
    """(round, job): forward, then back, and so on, so that a drift of the clock adds the same to every job."""
    for i in range(rounds):
        for job in jobs if i % 2 == 0 else reversed(jobs):
            yield i, job


def device_rounds(
    jobs: Sequence[Job], reps: int, rounds: int, say: Callable[[str], None] = print
) -> dict[tuple, tuple[list[str], np.ndarray]]:
    """By job: names of its kernels, and their device time in microseconds [rounds, reps, kernels]. NVIDIA only."""
    marker = make_marker()
    marker()
    for job in jobs:
        for args in job.args[:2]:
            jax.block_until_ready(job.compiled(*args))

    def run() -> None:
        for _, job in turns(jobs, rounds):
            marker()
            start = time.perf_counter()
            out = [job.compiled(*job.args[i % len(job.args)]) for i in range(reps)][-1]
            jax.block_until_ready(out)
            # A long product heats the chip and its clock drops, for what runs next too: 20 % were seen.
            time.sleep(min(0.02 + 15 * (time.perf_counter() - start), 0.5))
        marker()

    return by_job(jobs, reps, rounds, _compat.kernel_times(run), say)


def by_job(
    jobs: Sequence[Job], reps: int, rounds: int, kernels: Sequence[tuple[str, float]], say: Callable[[str], None]
) -> dict[tuple, tuple[list[str], np.ndarray]]:
    """The profile of :func:`device_rounds`, (name, microseconds) of every kernel, cut at its markers."""
    groups: list[list[tuple[str, float]]] = []
    for name, us in kernels:
        if MARKER in name:
            groups.append([])
        elif groups:
            groups[-1].append((name, us))
    found: dict[tuple, list[list[tuple[str, float]]]] = {job.key: [] for job in jobs}
    for (_, job), group in zip(turns(jobs, rounds), groups, strict=False):
        found[job.key].append(group)
    out = {}
    for key, visits in found.items():
        sizes = {len(group) for group in visits}
        if len(visits) != rounds or len(sizes) != 1 or max(sizes) == 0 or max(sizes) % reps:
            say(f"odd numbers of kernels: {key} {[len(group) for group in visits]}")
            continue
        times = np.asarray([[us for _, us in group] for group in visits]).reshape(rounds, reps, -1)
        out[key] = [name for name, _ in visits[0][: times.shape[2]]], times
    return out


def device_times(jobs: Sequence[Job], reps: int, say: Callable[[str], None] = print) -> dict[tuple, dict[str, Any]]:
    """Median device time of a call in microseconds, and of each of its kernels. NVIDIA only."""
    out = {}
    measured = device_rounds(jobs, reps, 1, say)
    for job in jobs:
        if job.key in measured:
            names, times = measured[job.key]
            kernels = {n[:60]: round(float(t), 2) for n, t in zip(names, np.median(times[0], axis=0), strict=True)}
            out[job.key] = {**_summary(times[0].sum(-1)), "kernels": kernels, **job.info}
    return out


def host_rounds(jobs: Sequence[Job], reps: int, rounds: int = 5) -> dict[tuple, np.ndarray]:
    """By job: wall clock of a call in microseconds, gaps included, with ``reps`` calls in flight [rounds]."""
    out = {job.key: np.zeros(rounds) for job in jobs}
    for job in jobs:
        for args in job.args[:2]:
            jax.block_until_ready(job.compiled(*args))
    for i, job in turns(jobs, rounds):
        start = time.perf_counter()
        last = [job.compiled(*job.args[j % len(job.args)]) for j in range(reps)][-1]
        jax.block_until_ready(last)
        out[job.key][i] = (time.perf_counter() - start) / reps * 1e6
    return out


def host_times(jobs: Sequence[Job], reps: int) -> dict[tuple, dict[str, Any]]:
    """Median over rounds of :func:`host_rounds`."""
    measured = host_rounds(jobs, reps)
    return {job.key: {**_summary(measured[job.key]), **job.info} for job in jobs}


def round_times(
    jobs: Sequence[Job], reps: int, rounds: int, say: Callable[[str], None] = print
) -> dict[tuple, np.ndarray]:
    """By job that ran: microseconds of a call in each round, on the clock that this machine has.

    The rounds take turns, so that the numbers of one round are comparable whatever the chip's clock does.
    """
    if backend.target().platform != "cuda":
        return host_rounds(jobs, reps, rounds)
    return {key: np.median(t.sum(-1), axis=1) for key, (_, t) in device_rounds(jobs, reps, rounds, say).items()}


def _summary(us: np.ndarray) -> dict[str, float]:
    spread = (np.quantile(us, 0.9) - np.quantile(us, 0.1)) / np.median(us)
    return {"us": round(float(np.median(us)), 2), "spread": round(float(spread), 3)}


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
