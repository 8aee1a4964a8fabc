"""Which of a problem's configurations is the fastest: what ``mxjax tune`` runs.

Three things make two timings differ that are of the same code: noise, a clock that drifts while the chip warms up, and
the choice of the smallest of many. So all candidates are timed in turns, in rounds that go back and forth; the fastest
of them then meets the heuristic's configuration in rounds of their own, whose numbers had no part in choosing it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pallas_kernels.bench.candidates import Problem
from pallas_kernels.bench.jobs import packed, weight_bytes
from pallas_kernels.bench.timing import COMPILE_SECONDS, Job, compile_all, copies, round_times

ROUNDS, DUEL_ROUNDS = 3, 7  # of all candidates, and of the two
# The same kernel differs by 3 % and more from one machine to the next of its kind: what wins by less than that here may
# lose there, and a heuristic needs no file.
MARGIN = 0.03
COMPILE_SHARE = 0.5  # of a problem's time, after which no more candidates are compiled

Clock = Callable[[Sequence[Job], int, int, Callable[[str], None]], dict[tuple, np.ndarray]]


def tune(
    problem: Problem,
    *,
    reps: int = 24,
    seconds: float = float("inf"),
    workers: int = 8,
    say: Callable[[str], None] = print,
    clock: Clock = round_times,
) -> dict[str, Any] | None:
    """An entry for a tuning file. Its ``config`` is None where nothing was clearly faster than the heuristic's.

    Args:
      problem: what to try.
      reps: calls of a candidate in a round.
      seconds: for this problem. The first ``workers`` candidates are timed in any case; more only if time is left.
      workers: threads that compile.
      say: takes a line of text about a candidate that failed.
      clock: microseconds of each job in each round; :func:`~pallas_kernels.bench.timing.round_times`.

    Returns:
      operation, m, n, k, config, ``us`` and ``heuristic_us`` of the same rounds, ``tried``. None if the heuristic's own
      configuration could not be timed: nothing can be said then.
    """
    start = time.monotonic()
    wanted = jobs_of(problem)
    jobs: list[Job] = []
    while wanted and (not jobs or time.monotonic() - start < COMPILE_SHARE * seconds):
        wave, wanted = wanted[:workers], wanted[workers:]
        jobs += compile_all(wave, workers, say)
    return choose(problem, jobs, reps, say, clock)


def jobs_of(problem: Problem) -> list[Job]:
    n, k = problem.n, problem.k
    weights = [packed(n, k, i, problem.layout) for i in range(copies(weight_bytes(n, k)))]
    args = [(problem.x, w) for w in weights]
    return [Job(key(problem, config), problem.run(config), args) for config in problem.configs]


def key(problem: Problem, config: Any) -> tuple:
    return problem.operation, problem.n, problem.k, problem.m, config


def choose(
    problem: Problem, jobs: Sequence[Job], reps: int, say: Callable[[str], None], clock: Clock
) -> dict[str, Any] | None:
    """As :func:`tune`, from compiled jobs whose key is :func:`key`'s."""
    first = clock(jobs, reps, ROUNDS, say)
    timed = {job.key: job for job in jobs if job.key in first}
    heuristic = timed.get(key(problem, problem.configs[0]))
    if heuristic is None:
        say(f"{problem.operation} {problem.n}x{problem.k} M<={problem.m}: the heuristic's configuration does not run")
        return None
    # Threads that trace and compile share Python's lock: their seconds mean something beside those of the crowd only.
    most = max(COMPILE_SECONDS, 2 * heuristic.info["compile_s"])
    quick = [job for job in timed.values() if job is heuristic or job.info["compile_s"] <= most]
    best = min(quick, key=lambda job: np.median(first[job.key]))
    us = heuristic_us = first[heuristic.key]
    config = None
    if best is not heuristic:
        duel = clock([heuristic, best], reps, DUEL_ROUNDS, say)
        heuristic_us = duel.get(heuristic.key, heuristic_us)
        better = best.key in duel and heuristic.key in duel and clearly_better(duel[best.key], heuristic_us)
        us, config = (duel[best.key], dataclasses.asdict(best.key[-1])) if better else (heuristic_us, None)
    return {
        "operation": problem.operation, "m": problem.m, "n": problem.n, "k": problem.k, "config": config,
        "us": round(float(np.median(us)), 2), "heuristic_us": round(float(np.median(heuristic_us)), 2),
        "tried": len(timed),
    }  # fmt: skip


def clearly_better(us: np.ndarray, than: np.ndarray) -> bool:
    """Whether a configuration is faster by MARGIN in the median round, and faster at all in every round but one.

    Each round's two numbers lie next to each other in time, so a clock that drifts moves both.
    """
    ratios = us / than
    return bool(np.median(ratios) <= 1 - MARGIN and np.sum(ratios >= 1) <= 1)
