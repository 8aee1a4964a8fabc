"""Work for several devices: who does what, and doing it."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax


def assign(costs: Sequence[float], workers: int) -> list[int]:
    """The worker of each job, loads balanced: longest job first, each to the worker with the least to do.

    The largest load is at most 4/3 - 1/(3 workers) times the least possible (Graham, 1969). Equal jobs go round.

    Example:
      >>> assign([1, 5, 3, 3, 2], 2)
      [1, 0, 1, 1, 0]
    """
    loads = [(0.0, worker) for worker in range(workers)]
    out = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, worker = heapq.heappop(loads)
        out[i] = worker
        heapq.heappush(loads, (load + costs[i], worker))
    return out


def solver_cost(shape: Sequence[int], axis: int) -> int:
    """Operations of a GPTQ-like solver on a weight of N outputs and K inputs, up to a factor: ``N K^2``."""
    values = 1
    for n in shape:
        values *= n
    return values * shape[axis]


def spread(calls: Sequence[Callable[[jax.Device], Any]], costs: Sequence[float], devices: Sequence[Any]) -> list[Any]:
    """The result of every call, each made with a device: one thread a device, since solvers look at values.

    A thread of its own even where one device does all: the mesh of the caller's ``jax.set_mesh`` does not hold there,
    so arrays of one device may be used.

    Args:
      calls: what to do.
      costs: of each, in any unit.
      devices: of this process.

    Raises:
      whatever a call raises; calls that have not begun are then left.
    """
    at, out = assign(costs, len(devices)), [None] * len(calls)
    order = sorted(range(len(calls)), key=lambda i: (-costs[i], i))
    stopped = threading.Event()

    def run(worker: int) -> None:
        with jax.default_device(devices[worker]):
            for i in order:
                if at[i] == worker and not stopped.is_set():
                    out[i] = calls[i](devices[worker])

    busy = sorted(set(at))
    with ThreadPoolExecutor(max(1, len(busy)), "mxjax-solve") as pool:
        futures = [pool.submit(run, worker) for worker in busy]
        try:
            for future in futures:
                future.result()
        except BaseException:
            stopped.set()
            raise
    return out
