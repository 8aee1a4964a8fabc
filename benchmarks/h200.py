"""All measurements of the kernels on one GPU, in order of worth and within a time. Two calls of nine minutes each:

    python benchmarks/h200.py --out DIR --only correct fold ops tune          # first: is it right, and which tiles
    python benchmarks/h200.py --out DIR --only decode layers rest             # second: how fast, with these tiles

Where DIR does not outlast a call, ``--resume FOLDER`` takes what an earlier one left there. The first call then leaves
out the tests that passed and the problems that were tuned; the second one needs its tunings.

Every part is a process of its own with a limit, so that one that hangs costs its share only, and writes as it goes.
What a part leaves of its time is for those after it. In DIR: ``log.txt`` (what they print), ``done.jsonl`` (tests and
tunings that are over), ``tunings.json`` (used by the parts after ``tune``), ``llama_decode.json``, ``kernels.json``,
``kernels_rest.json``. All parts share the compiled programs in ``--cache``. A part that failed is named at the end; the
exit status then is 1. Needs no installation of mxjax.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ["benchmarks/device_tests.py", "--out", "DIR/done.jsonl", "--seconds", "SECONDS"]
# The Hopper kernels against their references, new ones first
KERNEL_TESTS = [f"tests/kernels/test_kernels_{name}.py" for name in (
    "scales", "registers", "epilogue", "fragments", "matmul", "low_rank", "grouped", "quantize", "pair")]  # fmt: skip
# Of tests/ops what a device can get wrong: products of all formats, transforms, branches, extremes, gradients, experts.
# What is spread over eight devices is not for one.
OPS = (
    "(qdot_equals_float64 or row_by_row or transforms_cancel or test_low_rank_branch or extreme_x or nan_in_x or "
    "gradient or every_expert or one_product or packed_equals_unpacked) and not sharded"
)
# name: (seconds, how many of them what was begun may take to its end, arguments of python). DIR is the folder of the
# results, SECONDS what is left for beginning something. Where the numbers come from: in one process a kernel's test
# takes seven seconds, an operation's five (compilers), a problem of ``tune`` five.
PARTS: dict[str, tuple[int, int, list[str]]] = {
    "correct": (165, 4, [*TESTS, *KERNEL_TESTS, "-k", "(device or hopper) and not by_device"]),
    "fold": (45, 4, [*TESTS, "tests/gpu"]),
    "ops": (100, 4, [*TESTS, "tests/ops", "tests/kernels/test_kernels_qdot.py", "-k", OPS]),
    "tune": (220, 10, ["benchmarks/tune_h200.py", "--out", "DIR/tunings.json", "--done", "DIR/done.jsonl",
                       "--seconds", "SECONDS"]),
    "decode": (170, 10, ["benchmarks/llama_decode.py", "--out", "DIR/llama_decode.json"]),
    "layers": (220, 30, ["benchmarks/kernels.py", "--out", "DIR/kernels.json", "--only", "w4a16", "w4a4",
                         "--reps", "12", "--seconds", "SECONDS"]),
    "rest": (140, 20, ["benchmarks/kernels.py", "--out", "DIR/kernels_rest.json", "--only", "branch", "quantize",
                       "grouped", "unpack", "chain", "--reps", "12", "--seconds", "SECONDS"]),
}  # fmt: skip


def environment(out: Path, cache: Path) -> dict[str, str]:
    links = Path(tempfile.mkdtemp())
    (links / "mxjax_models").symlink_to(ROOT / "models")  # as the installed package calls it
    before = os.environ
    return {
        **before,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(links), before.get("PYTHONPATH", "")]),
        # level 2: XLA tries its products, but does not check them against one another; half the time
        "XLA_FLAGS": f"{before.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=2".strip(),
        "MXJAX_TUNINGS": str(out / "tunings.json"),
        "JAX_COMPILATION_CACHE_DIR": str(cache.resolve()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONUNBUFFERED": "1",
    }


def run(words: list[str], limit: float, env: dict[str, str], log: Path) -> int:
    """The exit status; 124 if the process, and all that it started, had to be ended."""
    with log.open("a") as file:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=env, stdout=file, stderr=file, start_new_session=True
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return 124


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=540, help="for everything")
    parser.add_argument("--resume", type=Path, help="folder of an earlier call's results")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "mxjax_h200_cache")
    args = parser.parse_args()
    start, failed, out = time.monotonic(), [], args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for file in args.resume.iterdir() if args.resume is not None else ():
        if file.is_file() and not (out / file.name).exists():
            shutil.copyfile(file, out / file.name)
    env, log = environment(out, args.cache), out / "log.txt"
    for i, name in enumerate(args.only):
        planned, ending, words = PARTS[name]
        later = sum(PARTS[n][0] for n in args.only[i + 1 :])
        left = args.seconds - (time.monotonic() - start)
        limit = min(left, max(left - later, planned))
        if limit < 2 * ending:
            print(f"== {name}: no time left", flush=True)
            continue
        begin = time.monotonic()
        with log.open("a") as file:
            print(f"== {name}", file=file)
        size = log.stat().st_size
        given = {"DIR": str(out), "SECONDS": f"{limit - ending:.0f}"}
        for word, value in given.items():
            words = [w.replace(word, value) for w in words]
        rc = run(words, limit, env, log)
        print(f"== {name}: {time.monotonic() - begin:.0f} s of {limit:.0f}, exit status {rc}", flush=True)
        print(*log.read_bytes()[size:].decode(errors="replace").splitlines()[-30:], sep="\n", flush=True)
        if rc:
            failed.append(name)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
