"""All measurements of the kernels on one GPU, in one command, in order of worth and within a time.

    python benchmarks/h200.py --out DIR [--only PART ...] [--seconds 540]

Every part is a process of its own with a limit, so that one that hangs costs its share only, and writes its file as it
goes; what they print is in DIR/log.txt. What ``tune`` finds is stored in DIR/tunings.json and used by the parts after
it. A part that failed is named at the end; the exit status then is 1. Seconds planned for each part are in PARTS. Needs
no installation of mxjax.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
# name: (seconds, arguments of python; DIR is the folder of the results)
PARTS: dict[str, tuple[int, list[str]]] = {
    # the Hopper kernels against their references, new ones first
    "correct": (100, [*PYTEST, "tests/kernels/test_kernels_registers.py", "tests/kernels/test_kernels_epilogue.py",
                      "tests/kernels/test_kernels_fragments.py", "-k", "device or hopper"]),
    "tune": (90, ["benchmarks/tune_h200.py", "--out", "DIR/tunings.json", "--seconds", "75"]),
    "decode": (110, ["benchmarks/llama_decode.py", "--out", "DIR/llama_decode.json"]),
    "layers": (130, ["benchmarks/kernels.py", "--out", "DIR/kernels.json", "--only", "w4a16", "w4a4", "--reps", "12",
                     "--seconds", "110"]),
    "rest": (70, ["benchmarks/kernels.py", "--out", "DIR/kernels_rest.json", "--only", "branch", "quantize", "grouped",
                  "unpack", "chain", "--reps", "12", "--seconds", "60"]),
    "fold": (20, [*PYTEST, "tests/gpu"]),
    "ops": (20, [*PYTEST, "tests/ops"]),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=540, help="for everything")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    start, failed = time.monotonic(), []
    links = Path(tempfile.mkdtemp())
    (links / "mxjax_models").symlink_to(ROOT / "models")  # as the installed package calls it
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(links), os.environ.get("PYTHONPATH", "")])}
    # level 2: XLA tries its products, but does not check them against one another; half the time
    env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=2".strip()
    env |= {"MXJAX_TUNINGS": str(args.out.resolve() / "tunings.json"), "PYTHONUNBUFFERED": "1"}
    for name in args.only:
        planned, words = PARTS[name]
        left = args.seconds - (time.monotonic() - start)
        if left < 20:
            print(f"== {name}: no time left", flush=True)
            continue
        begin = time.monotonic()
        command = [sys.executable, *(w.replace("DIR", str(args.out.resolve())) for w in words)]
        log = args.out / "log.txt"
        with log.open("a") as file:
            print(f"== {name}", file=file, flush=True)
            try:
                limit = min(planned, left)
                rc = subprocess.run(command, cwd=ROOT, env=env, stdout=file, stderr=file, timeout=limit).returncode
            except subprocess.TimeoutExpired:
                rc = 124
        print(f"== {name}: {time.monotonic() - begin:.0f} s of {planned}, exit status {rc}", flush=True)
        print("\n".join(log.read_text(errors="replace").splitlines()[-20:]), flush=True)
        if rc:
            failed.append(name)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
