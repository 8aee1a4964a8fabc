"""A benchmark's rows in several processes side by side on one device: compiling is most of their time, and one core's.

Each process writes a file of its own, which the parent merges as they grow; what the result holds at the start, no
process does again.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def side_by_side(
    parts: Sequence[Sequence[str]],
    out: Path,
    *,
    key: Sequence[str],
    workers: int,
    summary: Callable[[list[dict[str, Any]]], Any],
    seconds: float | None = None,
    every: float = 2.0,
) -> dict[str, Any]:
    """The merged report.

    Args:
      parts: words of the command line that tell the processes apart; they come after the words of this process.
      out: the report. Parts are ``OUT.part0`` and so on beside it, with a log each; they go when all went well.
      key: what tells rows apart.
      workers: processes at a time.
      summary: of all rows, the report's "claims".
      seconds: after which what still runs is stopped; the same command goes on from there.
      every: seconds between two looks.

    Raises:
      SystemExit: parts that failed, by the last lines of their logs; the report has what was done.
    """
    if out is None:
        sys.exit("--workers needs --out: the processes meet there")
    before = json.loads(out.read_text()) if out.exists() else {"rows": []}
    files = [out.with_name(f"{out.name}.part{i}") for i in range(len(parts))]
    logs = [file.with_name(f"{file.name}.log") for file in files]
    # Each process takes memory as it needs it.
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1", **os.environ}

    def start(i: int) -> subprocess.Popen:
        write(files[i], before)
        words = [sys.executable, *sys.argv, *parts[i], "--out", str(files[i]), "--workers", "1"]
        with logs[i].open("w") as log:
            return subprocess.Popen(words, env=env, stdout=log, stderr=log)

    def merged() -> dict[str, Any]:
        report, rows = before, {}
        for part in [before, *(json.loads(f.read_text()) for f in files if f.exists())]:
            report = report | {k: v for k, v in part.items() if k != "rows"}
            rows |= {tuple(row[k] for k in key): row for row in part.get("rows", [])}
        own = {"command": shlex.join(["python", *sys.argv]), "rows": list(rows.values())}
        own["claims"] = summary(own["rows"])
        return report | own

    begin = time.monotonic()
    waiting, running = list(range(len(parts))), dict[int, subprocess.Popen]()
    codes: dict[int, int] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                i = waiting.pop(0)
                running[i] = start(i)
            time.sleep(every)
            for i in [i for i, process in running.items() if process.poll() is not None]:
                codes[i] = running.pop(i).returncode
                print(f"part {i} of {len(parts)}: exit status {codes[i]}", *parts[i], flush=True)
            write(out, merged())
            if seconds is not None and time.monotonic() - begin > seconds:
                print(f"stopped after {seconds:g} s: {len(running)} parts at work, {len(waiting)} waiting", flush=True)
                break
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
    report = merged()
    if any(codes.values()):
        tails = [f"{' '.join(parts[i])}: exit status {c}\n" + "\n".join(logs[i].read_text().splitlines()[-15:])
                 for i, c in codes.items() if c]  # fmt: skip
        sys.exit("\n".join(tails))
    write(out, report)
    for file in [*files, *logs]:
        for left in (file, _new(file)):  # the second of one that was stopped as it wrote
            left.unlink(missing_ok=True)
    return report


def write(path: Path, report: dict[str, Any]) -> None:
    """The report as JSON; who reads the file meanwhile sees the old one or the new one."""
    _new(path).write_text(json.dumps(report, indent=1) + "\n")
    os.replace(_new(path), path)


def _new(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")
