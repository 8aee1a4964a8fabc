"""Runs tests in several processes at once: on a GPU they wait for compilers most of the time.

    python benchmarks/device_tests.py --out FILE [--processes 8] [--seconds S] WORDS OF PYTEST ...

Every process collects the same tests and takes the next one that no other has taken; one whose kernel faults takes no
more. FILE gets one line of JSON when a
test starts and one when it is over, so that a run that is killed leaves what it found; a later run with the same FILE
leaves out what passed. Prints the failures and what was killed or crashed. The exit status is 1 if a test failed or a
process crashed, 124 if the time was over before the tests, else 0.

pytest-xdist does the same and more, where it is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest


class Share:
    """A plugin of pytest: of the tests collected, those that no other process has taken."""

    def __init__(self, out: Path, taken: Path):
        self.out, self.taken, self.poisoned = out, taken, False
        self.passed = {name for name, last in read(out).items() if last["outcome"] == "passed"}

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed:  # while collecting: pytest's own loop says what is wrong
            return None
        wanted = [item for item in session.items if item.nodeid not in self.passed]
        self.taken.with_name("wanted").write_text(str(len(wanted)))
        for i, item in enumerate(wanted):
            try:
                (self.taken / str(i)).touch(exist_ok=False)  # one process can
            except FileExistsError:
                continue
            self.write(item.nodeid, "started")
            # No next test: which one it will be is not known yet. Fixtures of a module are made for each test.
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if self.poisoned:
                break
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.write(report.nodeid, report.outcome, report.duration, report.longreprtext[-4000:])
            # After a fault of a kernel every other call of the process fails: the tests left are for the others.
            self.poisoned = report.outcome == "failed" and "CUDA_ERROR" in report.longreprtext

    def write(self, test: str, outcome: str, seconds: float = 0.0, text: str = "") -> None:
        record = {"test": test, "outcome": outcome, "seconds": round(seconds, 1), "text": text}
        with self.out.open("a") as file:  # one write of a line: lines of several processes do not mix
            file.write(json.dumps({k: v for k, v in record.items() if v}) + "\n")


def read(path: Path, start: int = 0) -> dict[str, dict[str, Any]]:
    """The last record of every test, from that byte of the file on; a line that was cut off is passed over."""
    out = {}
    for line in path.read_bytes()[start:].splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if "test" in record:
            out[record["test"]] = record
    return out


def run(out: Path, words: Sequence[str], processes: int, seconds: float) -> int:
    start = time.monotonic()
    before = out.stat().st_size if out.exists() else 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        taken = Path(folder) / "taken"
        taken.mkdir()
        command = [sys.executable, __file__, "--out", str(out.resolve()), "--taken", str(taken), *words]
        env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # they share the GPU's memory
        logs = [Path(folder) / f"{i}.txt" for i in range(processes)]
        workers = []
        for log in logs:
            with log.open("w") as file:
                workers.append(subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT))
        late = False
        try:
            for worker in workers:
                worker.wait(max(start + seconds - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            late = True
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        # 0, 1: tests passed or failed; 5: there are none
        broken = [
            f"exit status {worker.returncode}\n{log.read_text(errors='replace')[-3000:]}"
            for worker, log in zip(workers, logs, strict=True)
            if worker.returncode not in (0, 1, 5) and not late
        ]
        count = taken.with_name("wanted")
        untouched = int(count.read_text()) - len(list(taken.iterdir())) if count.exists() else 0
    if untouched:
        print(f"{untouched} tests were not begun")
    return report(read(out, before), broken, late, time.monotonic() - start)


def report(last: dict[str, dict[str, Any]], broken: list[str], late: bool, seconds: float) -> int:
    by_outcome: dict[str, list[str]] = {}
    for name, record in last.items():
        by_outcome.setdefault(record["outcome"], []).append(name)
    for name in by_outcome.get("failed", []):
        print(f"FAILED {name}\n{last[name].get('text', '')}\n")
    for name in by_outcome.get("started", []):
        print(f"{'killed' if late else 'CRASHED'} {name}")
    print(*broken, sep="\n", end="\n" if broken else "")
    slow = sorted(last.values(), key=lambda record: -record.get("seconds", 0))[:5]
    print("slowest: " + ", ".join(f"{r['test'].split('::')[-1]} {r.get('seconds', 0)} s" for r in slow))
    counts = ", ".join(
        f"{len(by_outcome[o])} {o}" for o in ("passed", "failed", "skipped", "started") if o in by_outcome
    )
    print(f"{counts or 'no test'} in {seconds:.0f} s{'; the time is over' if late else ''}", flush=True)
    if "failed" in by_outcome or broken or ("started" in by_outcome and not late):
        return 1
    return 124 if late else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=max((os.cpu_count() or 2) // 2, 1))
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--taken", type=Path, help=argparse.SUPPRESS)  # of a process that runs tests
    args, words = parser.parse_known_args()
    if args.taken is not None:
        sys.exit(pytest.main(["-p", "no:cacheprovider", *words], plugins=[Share(args.out, args.taken)]))
    sys.exit(run(args.out, words, args.processes, args.seconds))


if __name__ == "__main__":
    main()
