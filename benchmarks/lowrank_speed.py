"""Seconds and memory of SVDQuant, LoRaQ and KroQuant on one layer of FLUX.1's size.

    python benchmarks/lowrank_speed.py --out benchmarks/results/lowrank_speed.json

The layer is random: a weight of ``--shape`` (outputs x inputs; 3072 x 12288 is FLUX.1's second matrix of an MLP) and
statistics of inputs with a decaying spectrum. ``first`` includes compilation, which layers of equal shape share;
``seconds`` is the call after it. ``peak_bytes`` is the device's peak in this process (GPU only), and holds for the
rows so far: run one row alone (``--recipes``) for its own.
"""

import argparse
import datetime
import json
import platform
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import mxjax
from mxjax.algorithms import ALGORITHMS
from mxjax.calibration import GramSum, update
from mxjax.calibration.accumulate import SAMPLE_ROWS, stats_of

RECIPES = ("kroquant_loraq_mxfp4", "kroquant_gptq_loraq_mxfp4", "loraq_mxfp4", "svdquant_mxfp4")


def layer(outputs: int, inputs: int):
    """A weight [K, N] and statistics of 8192 inputs, a few of whose channels are ten times as large."""
    keys = jax.random.split(jax.random.key(0), 4)
    w = jax.random.normal(keys[0], (inputs, outputs)) / inputs**0.5
    size = jnp.exp(0.5 * jax.random.normal(keys[1], (inputs,))) * jnp.where(jnp.arange(inputs) % 100, 1.0, 10.0)
    total = GramSum.zeros(inputs, sample=SAMPLE_ROWS)
    for key in jax.random.split(keys[2], 4):
        low = jax.random.normal(key, (2048, 256)) @ jax.random.normal(keys[3], (256, inputs)) / 16
        total = update(total, size * (low + 0.3 * jax.random.normal(key, (2048, inputs))))
    return w, stats_of(total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="3072x12288")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    outputs, inputs = map(int, args.shape.split("x"))
    w, stats = jax.block_until_ready(layer(outputs, inputs))
    device = jax.devices()[0]
    report = {
        "command": " ".join(["python", "benchmarks/lowrank_speed.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": device.device_kind if device.platform != "cpu" else platform.processor() or "cpu",
        "versions": {"jax": jax.__version__, "mxjax": mxjax.__version__, "python": platform.python_version()},
        "shape": [outputs, inputs],
        "rows": [],
    }
    for name in args.recipes:
        (rule,) = mxjax.recipes.get(name).rules
        spec = rule.spec("layer", 2, on_nonfinite="raise", on_uneven="error")
        times = []
        for _ in range(2):
            start = time.perf_counter()
            jax.block_until_ready(ALGORITHMS[rule.algorithm](w, spec, stats))
            times.append(round(time.perf_counter() - start, 2))
        peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
        report["rows"].append({"recipe": name, "first": times[0], "seconds": times[1], "peak_bytes": peak})
        print(report["rows"][-1], flush=True)
        if args.out:
            args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
