"""Throughput and memory of ``quantize_folder``, beside reading and writing the same bytes and nothing else.

    pip install . && python benchmarks/stream.py

A folder of random bfloat16 weights is generated, 2.2 GB in four shards, its largest tensor 268 MB; all of it is removed
at the end. Runs take turns: ``quantize_folder`` in a fresh process, whose compilations and hashes count, and whose peak
is the largest resident set that the kernel saw (VmHWM), memory-mapped pages included; then the bytes alone (read every
file in pieces of 8 MB, write as many bytes as the quantized folder has, wait for the disk). Both with the source on the
disk only ("cold") and in the page cache ("warm").

Goals: at most twice the time of the bytes alone; a peak below 3 times the largest tensor + 500 MB.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import ml_dtypes
import numpy as np

from mxjax.io import hf, safetensors

PIECE = 1 << 23
LAYERS, LARGE, SMALL = 7, (8192, 16384), (8192, 2048)
FORMAT = "compressed-tensors"
CASES = [(recipe, cache) for recipe in ("mxfp4_a16", "nvfp4_a16") for cache in ("cold", "warm")]
CHILD = """
import json, sys, time
start = time.perf_counter()
import mxjax
report = mxjax.quantize_folder(sys.argv[1], sys.argv[2], sys.argv[3], format=sys.argv[4], shard_size=500_000_000)
status = open("/proc/self/status").read()
peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
print(json.dumps({"seconds": report.seconds, "cpu": time.process_time(),
    "with_imports": time.perf_counter() - start, "peak": peak}))
"""


def generate(folder: pathlib.Path) -> None:
    """Weights of a made-up decoder, and an embedding that is copied."""
    rng = np.random.default_rng(0)
    noise = (rng.standard_normal(1 << 24) * 0.02).astype(ml_dtypes.bfloat16)  # repeated: values do not change the time
    shapes = {"model.embed_tokens.weight": (16384, 4096)}
    for i in range(LAYERS):
        shapes[f"model.layers.{i}.mlp.up_proj.weight"] = LARGE
        shapes[f"model.layers.{i}.self_attn.q_proj.weight"] = SMALL
        shapes[f"model.layers.{i}.input_layernorm.weight"] = (8192,)
    names, places, parts = list(shapes), {}, 4
    for part in range(parts):
        mine = names[part * len(names) // parts : (part + 1) * len(names) // parts]
        file = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        safetensors.write(folder / file, {name: np.resize(noise, shapes[name]) for name in mine})
        places |= dict.fromkeys(mine, file)
    (folder / hf.INDEX).write_text(json.dumps({"weight_map": places}))
    (folder / hf.CONFIG).write_text(json.dumps({"model_type": "made_up", "dtype": "bfloat16"}))


def prepare(folder: pathlib.Path, cache: str) -> None:
    """Take the files of a folder out of the page cache, or put them there."""
    for file in folder.iterdir():
        if cache == "warm":
            with open(file, "rb", buffering=0) as f:
                while f.read(PIECE):
                    pass
            continue
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def bytes_alone(source: pathlib.Path, target: pathlib.Path, written: int) -> tuple[float, float]:
    """Seconds, and seconds of CPU, to read all files of the source and write ``written`` bytes, the disk included."""
    files = sorted(source.glob("*.safetensors"))
    total, done, buffer = sum(f.stat().st_size for f in files), 0, bytearray(PIECE)
    target.mkdir()
    start, cpu = time.perf_counter(), time.process_time()
    with open(target / "bytes", "wb", buffering=0) as out:
        for file in files:
            with open(file, "rb", buffering=0) as f:
                while count := f.readinto(buffer):
                    out.write(memoryview(buffer)[: min(count, (done + count) * written // total - out.tell())])
                    done += count
        os.fsync(out.fileno())
    seconds = time.perf_counter() - start, time.process_time() - cpu
    shutil.rmtree(target)
    return seconds


def streamed(source: pathlib.Path, target: pathlib.Path, recipe: str) -> dict[str, float]:
    """What the child process reports, and the size of the folder that it wrote."""
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(source), str(target), recipe, FORMAT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    size = sum(file.stat().st_size for file in target.iterdir())
    shutil.rmtree(target)
    return json.loads(done.stdout) | {"size": size}


def cpu_model() -> str:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scratch", type=pathlib.Path, help="a folder on the disk to measure")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        base = pathlib.Path(scratch)
        source = base / "source"
        source.mkdir()
        generate(source)
        entries = hf.read_entries(source)
        largest, total = max(e.nbytes for e in entries.values()), sum(e.nbytes for e in entries.values())
        runs: dict[tuple[str, str], list[dict[str, float]]] = {case: [] for case in CASES}
        for _ in range(options.rounds):
            for case in CASES:
                prepare(source, case[1])
                ours = streamed(source, base / "out", case[0])
                prepare(source, case[1])
                alone, cpu = bytes_alone(source, base / "bytes", int(ours["size"]))
                runs[case].append(ours | {"alone": alone, "alone_cpu": cpu, "load": os.getloadavg()[0]})
                print(case, {k: round(v, 2) for k, v in runs[case][-1].items()}, flush=True)

    limit, rows = 3 * largest + 500_000_000, []
    for (recipe, cache), measured in runs.items():
        middle = {key: statistics.median(run[key] for run in measured) for key in measured[0]}
        moved = total + middle["size"]
        rows.append(
            dict(
                recipe=recipe,
                format=FORMAT,
                cache=cache,
                seconds=round(middle["seconds"], 2),
                bytes_alone_seconds=round(middle["alone"], 2),
                ratio=round(statistics.median(run["seconds"] / run["alone"] for run in measured), 2),
                cpu_seconds_with_imports=round(middle["cpu"], 2),
                bytes_alone_cpu_seconds=round(middle["alone_cpu"], 2),
                seconds_with_imports=round(middle["with_imports"], 2),
                gigabytes_per_second=round(moved / middle["seconds"] / 1e9, 2),
                bytes_alone_gigabytes_per_second=round(moved / middle["alone"] / 1e9, 2),
                peak_megabytes=round(max(run["peak"] for run in measured) / 1e6),
                rounds=[{key: round(value, 3) for key, value in run.items()} for run in measured],
            )
        )
    result = dict(
        benchmark="stream",
        date=datetime.date.today().isoformat(),
        command=f"python benchmarks/stream.py --rounds {options.rounds}",
        device=dict(cpu=cpu_model(), cores=os.cpu_count(), load_1min=round(os.getloadavg()[0], 1)),
        versions=dict(python=platform.python_version(), **{p: importlib.metadata.version(p) for p in ("jax", "numpy")}),
        source=dict(bytes=total, tensors=len(entries), largest_tensor_bytes=largest),
        goals=dict(ratio=2.0, peak_megabytes=round(limit / 1e6)),
        goals_met=dict(
            ratio_cold=all(row["ratio"] <= 2.0 for row in rows if row["cache"] == "cold"),
            ratio_warm=all(row["ratio"] <= 2.0 for row in rows if row["cache"] == "warm"),
            peak=all(row["peak_megabytes"] <= limit / 1e6 for row in rows),
        ),
        rows=rows,
    )
    for row in rows:
        print({key: value for key, value in row.items() if key != "rounds"})
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "stream_cpu.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
