"""Many thousand damaged checkpoints: every reader answers with a valid tree or with an error of ours.

    pip install '.[test]' && python benchmarks/fuzz.py

Hypothesis draws the damage (tests/io/fuzz_cases.py): bytes changed, cut and inserted; headers that lie about lengths,
offsets, dtypes and shapes; JSON of configs, indexes and manifests changed anywhere, nested a hundred thousand deep or
with numbers of thousands of digits; tensors missing, renamed, of another dtype, shape or value; files that are gone, or
are folders, pipes, or links that lead out. Each case is loaded, loaded with hashes, and, where it is a Hugging Face
folder, quantized again. Address space is limited to what the process has after one good case of each reader and 1 GB
more, so that an allocation that no header justifies is a failure too.

Goal: at least 10,000 cases and no failure.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import resource
import shutil
import sys
import tempfile
import time
import traceback

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "io"))
import fuzz_cases

SPARE = 1 << 30


def limit_memory() -> None:
    status = pathlib.Path("/proc/self/status").read_text()
    now = int(status.split("VmSize:")[1].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (now + SPARE, now + SPARE))


def fuzz(good: pathlib.Path, base: pathlib.Path, cases: int, first: int) -> tuple[dict[str, int], list[dict]]:
    """How many cases were read and refused, and what went wrong, each kind once."""
    outcomes: dict[str, int] = collections.Counter()
    failures: dict[str, dict] = {}

    @seed(first)
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        shutil.rmtree(base, ignore_errors=True)
        shutil.copytree(good, base / "folder")
        fuzz_cases.damage(data.draw, base / "folder")
        start = time.perf_counter()
        try:
            outcomes[fuzz_cases.read(base / "folder")] += 1
        except Exception as e:  # recorded, so that one run shows every kind of failure
            where = traceback.extract_tb(e.__traceback__)[-1]
            key = f"{type(e).__name__} {pathlib.Path(where.filename).name}:{where.lineno}"
            failures.setdefault(key, {"kind": key, "message": str(e)[:300], "count": 0})["count"] += 1
        if time.perf_counter() - start > 10:
            failures.setdefault("slow", {"kind": "more than 10 s", "message": "", "count": 0})["count"] += 1

    run()
    return dict(outcomes), list(failures.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1200, help="for each reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results")
    options = parser.parse_args()

    rows, start = [], time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        base = pathlib.Path(scratch)
        for name, make in fuzz_cases.FOLDERS.items():
            make(base / name)
            assert fuzz_cases.read(base / name) == "read"
        limit_memory()
        for i, name in enumerate(fuzz_cases.FOLDERS):
            outcomes, failures = fuzz(base / name, base / "case", options.cases, options.seed + i)
            cases = sum(outcomes.values()) + sum(f["count"] for f in failures if f["kind"] != "more than 10 s")
            rows.append(dict(reader=name, cases=cases, **outcomes, failures=failures))
            print(rows[-1], flush=True)
    result = dict(
        benchmark="fuzz",
        date=datetime.date.today().isoformat(),
        command=f"python benchmarks/fuzz.py --cases {options.cases} --seed {options.seed}",
        device=dict(cpu=platform.machine(), cores=os.cpu_count()),
        versions=dict(
            python=platform.python_version(),
            **{p: importlib.metadata.version(p) for p in ("jax", "numpy", "hypothesis")},
        ),
        seconds=round(time.perf_counter() - start),
        goals=dict(cases=10_000, failures=0),
        goals_met=dict(
            cases=sum(row["cases"] for row in rows) >= 10_000, failures=not any(row["failures"] for row in rows)
        ),
        rows=rows,
    )
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "fuzz_cpu.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
