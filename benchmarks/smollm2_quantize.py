"""Quantize the whole parameter tree of SmolLM2-135M: time after compilation, compilations, peak memory, import time.

    python benchmarks/smollm2_quantize.py            # prints a table, writes results/smollm2_quantize_<platform>.json

Goals: under 5 s once compiled; at most 12 compilations; peak memory under 1.6 times the float32 tree, the tree itself
included; ``import mxjax`` under 0.3 s beyond ``import jax``. Every figure comes from a fresh process. The model is the
one of ``mxjax demo`` (fetched once).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

GOALS = {"seconds_compiled": 5.0, "compilations": 12, "peak_over_tree": 1.6, "import_seconds": 0.3}
RECIPES = ("mxfp4", "nvfp4", "hadamard_mxfp4")
IMPORT = """
import time
start = time.perf_counter(); import jax
middle = time.perf_counter(); import mxjax
end = time.perf_counter(); mxjax.quantize
print(end - middle, time.perf_counter() - middle, middle - start)
"""


class Peak:
    """The largest resident size of this process while the block runs, sampled every 2 ms."""

    def __enter__(self) -> Peak:
        import psutil

        self._process, self._stop, self.bytes = psutil.Process(), threading.Event(), 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.bytes = max(self.bytes, self._process.memory_info().rss)
            self._stop.wait(0.002)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def measure(recipe: str, path: str) -> dict:
    """One recipe, in this process."""
    import gc

    import jax
    import jax.numpy as jnp
    import psutil
    from flax import nnx
    from mxjax_models import llama

    import mxjax

    jax.block_until_ready(jnp.zeros(8) + 1)  # the runtime's own memory is no part of the comparison
    before = psutil.Process().memory_info().rss
    params = nnx.state(llama.load(path), nnx.Param)
    gc.collect()
    tree_bytes = mxjax.summary(params).nbytes
    loaded = psutil.Process().memory_info().rss

    compilations: list[float] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if "backend_compile_duration" in event:
            compilations.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    start = time.perf_counter()
    with Peak() as peak:
        qparams = jax.block_until_ready(mxjax.quantize(params, recipe))
    cold = time.perf_counter() - start
    first = len(compilations)
    warm = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(mxjax.quantize(params, recipe))
        warm.append(time.perf_counter() - start)
    summary = mxjax.summary(qparams)
    return {
        "recipe": recipe,
        "seconds_with_compilation": cold,
        "seconds_compiled": statistics.median(warm),
        "compilations": first,
        "compilations_of_a_second_run": len(compilations) - first,
        "compile_seconds": sum(compilations),
        "tree_bytes": tree_bytes,
        "rss_of_tree_bytes": loaded - before,
        "peak_over_tree": (tree_bytes + peak.bytes - loaded) / tree_bytes,
        "quantized": sum(row.quantized for row in summary.rows),
        "result_bytes": summary.nbytes,
        "device": jax.devices()[0].device_kind,
        "platform": jax.devices()[0].platform,
    }


def import_seconds(repeats: int = 7) -> dict:
    runs = [
        [float(x) for x in subprocess.check_output([sys.executable, "-c", IMPORT], text=True).split()]
        for _ in range(repeats)
    ]
    mxjax, with_quantize, jax = (statistics.median(column) for column in zip(*runs, strict=True))
    return {"import_seconds": mxjax, "import_and_resolve_quantize_seconds": with_quantize, "import_jax_seconds": jax}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", help="measure this one in this process and print JSON")
    parser.add_argument("--model", help="a GGUF file or folder in place of SmolLM2")
    arguments = parser.parse_args()

    from mxjax.cli.fetch import fetch

    model = arguments.model or str(fetch(note=print))
    if arguments.recipe:
        print(json.dumps(measure(arguments.recipe, model)))
        return
    rows = []
    for recipe in RECIPES:
        command = [sys.executable, __file__, "--recipe", recipe, "--model", model]
        rows.append(json.loads(subprocess.check_output(command, text=True).splitlines()[-1]))
        shown = ("seconds_with_compilation", "seconds_compiled", "compilations", "peak_over_tree")
        print(f"{recipe:16}", *(f"{name} {rows[-1][name]:.2f}" for name in shown), sep="  ", flush=True)
    imports = import_seconds()
    print(f"import mxjax {imports['import_seconds']:.3f} s beyond jax ({imports['import_jax_seconds']:.2f} s)")
    found = imports | {name: max(row[name] for row in rows) for name in GOALS if name in rows[0]}
    met = {name: found[name] <= goal for name, goal in GOALS.items()}
    print("goals met:", met)
    result = {
        "benchmark": "smollm2_quantize",
        "command": "python benchmarks/smollm2_quantize.py",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": rows[0]["device"],
        "cpu": {"machine": platform.machine(), "count": os.cpu_count(), "load": os.getloadavg()},
        "versions": {"python": platform.python_version()} | {n: version(n) for n in ("jax", "jaxlib", "flax", "numpy")},
        "goals": GOALS,
        "goals_met": met,
        "imports": imports,
        "rows": rows,
    }
    out = Path(__file__).parent / "results" / f"smollm2_quantize_{rows[0]['platform']}.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(out)


if __name__ == "__main__":
    main()
