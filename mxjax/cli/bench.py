"""``mxjax bench``: our layers against bf16 XLA on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mxjax.cli.console import Console
from mxjax.errors import ConfigError

# N x K of real layers: q and o, gate and up, down; attention and MLP of diffusion transformers.
MODELS = {
    "llama-3.1-8b": ((4096, 4096), (14336, 4096), (4096, 14336)),
    "qwen3-32b": ((8192, 5120), (25600, 5120), (5120, 25600)),
    "flux.1": ((3072, 3072), (12288, 3072), (3072, 12288)),
    "pixart-sigma": ((1152, 1152), (4608, 1152), (1152, 4608)),
}
ROWS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096, 8192)
CPU_SHAPE, CPU_ROWS = (512, 512), (1, 16)


def parse_shapes(text: str | None, default: str) -> tuple[tuple[int, int], ...]:
    """``"8192x8192,llama-3.1-8b"`` to shapes [N, K].

    Raises:
      ConfigError: neither a shape nor a model, or a K that MXFP4's blocks do not divide.
    """
    shapes: dict[tuple[int, int], None] = {}
    for word in (text or default).split(","):
        parts = word.strip().lower().split("x")
        if word.strip().lower() in MODELS:
            shapes |= dict.fromkeys(MODELS[word.strip().lower()])
        elif len(parts) == 2 and all(p.isdigit() and int(p) for p in parts) and int(parts[1]) % 32 == 0:
            shapes[int(parts[0]), int(parts[1])] = None
        else:
            raise ConfigError(
                f"{word.strip()!r} is no shape: NxK with K a multiple of 32, such as 8192x8192, or one of "
                f"{', '.join(MODELS)}"
            )
    return tuple(shapes)


def parse_rows(text: str | None, default: tuple[int, ...]) -> tuple[int, ...]:
    """``"1,16,4096"`` to numbers of rows."""
    words = [w.strip() for w in (text or ",".join(map(str, default))).split(",")]
    if not all(w.isdigit() and int(w) for w in words):
        raise ConfigError(f"{text!r} is no list of row counts such as 1,16,4096")
    return tuple(map(int, words))


def run(*, shapes: str | None, rows: str | None, out: str | None, reps: int, console: Console) -> None:
    from mxjax import backend
    from pallas_kernels.bench import table

    target = backend.target()
    gpu = target.platform in ("cuda", "rocm")
    if not gpu:
        console.note(
            f"this is {target.name} ({target.platform}): no kernel runs here, and timings of interpret mode mean "
            f"nothing; what follows is XLA's own route for 4-bit weights beside its bf16 product"
        )
    elif target.platform != "cuda":
        console.note("timed by the host's clock, gaps between kernels included: CUPTI is for NVIDIA GPUs")
    small = f"{CPU_SHAPE[0]}x{CPU_SHAPE[1]}"
    which = parse_shapes(shapes, "llama-3.1-8b" if gpu else small)
    ms = parse_rows(rows, ROWS if gpu else CPU_ROWS)
    times = table.layer_times(which, ms, reps=reps if gpu else min(reps, 3), workers=8 if gpu else 1, say=console.note)
    found = table.rows(times)
    data = {**table.environment("mxjax bench"), "rows": found}
    if out is not None:
        import json

        Path(out).write_text(json.dumps(data, indent=1) + "\n")
    if gpu and (slow := [r for r in found if r["slow_compile"]]):
        console.note(f"{len(slow)} layers took more than 3 s to compile")
    if lost := [r for r in found if (r["ratio"] or 1) < 1]:
        console.note(f"{len(lost)} of {len(found)} are slower than bf16; 4 bits then save memory only")
    console.result(data, _table(found, f"{target.name}, jax {data['versions']['jax']}"))


def _table(found: list[dict[str, Any]], title: str) -> Any:
    from rich.table import Table

    table = Table(title=title)
    columns = ("layer", "N", "K", "M", "us", "bf16 us", "x bf16", "share of floor", "compile s")
    for name in columns:
        table.add_column(name, justify="left" if name == "layer" else "right")
    for r in found:
        values = (r["layer"], r["n"], r["k"], r["m"], r["us"], r["bf16_us"], r["ratio"], r["share_of_floor"])
        table.add_row(*("-" if v is None else str(v) for v in (*values, r["compile_s"])))
    return table
