"""Tables of the pages that are made, not written: from recipes, formats and the stored results of benchmarks.

No figure in the documentation is typed by hand. ``TABLES`` maps the name in ``<!-- table: NAME -->`` to its function.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import mxjax
from mxjax.report.numbers import policies_of
from mxjax.transforms import describe

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"

# The pages about recipes, and how the names of the recipes on each begin; the longest beginning decides.
FAMILIES = {
    "rtn": tuple(mxjax.FORMATS),
    "hadamard": ("hadamard",),
    "gptq": ("gptq", "mr_gptq"),
    "best": ("best",),
    "wush": ("wush", "kbbq", "auto"),
    "smooth": ("smoothquant", "awq"),
    "quarot": ("quarot",),
    "branch": ("svdquant", "loraq"),
    "kroquant": ("kroquant",),
}
QUALITY = "gptq_quality_h200.json"
ROW_NAMES = {"rtn": "round to nearest", "rtn_third": "round to nearest, policy `third`", "rtn_hadamard": "`hadamard`"}


def results(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def code(text: str) -> str:
    """Text as code in a cell of a table, where a bar would end the cell."""
    return f"<code>{escape(' '.join(text.split())).replace('|', '&#124;')}</code>"


def source(*files: str) -> str:
    """Where the figures are from: device, versions, date, command's file."""
    first = results(files[0])
    device = first["device"] if isinstance(first["device"], str) else f"{first['device']['cores']} CPU cores"
    device = "CPU" if device == "cpu" else device
    names = ", ".join(f"`benchmarks/results/{name}`" for name in files)
    return f"\n\n{device}, jax {first['versions']['jax']}, {first['date'][:10]}; {names}."


def formats() -> str:
    rows = []
    for f in mxjax.FORMATS.values():
        e = f.element
        policies = ", ".join(f"`{p}`" for p in policies_of(f))
        rows.append([f"`{f.name}`", e.name.upper(), f.block_size, f.scale.upper(), f.bits_per_value,
                     f"{e.max_value:g}", policies])  # fmt: skip
    return table(["name", "element", "block", "scale", "bits a value", "largest element", "scale policies"], rows)


def family_of(recipe: str) -> str:
    """The page that a recipe is on."""
    fitting = [
        (len(n), family) for family, names in FAMILIES.items() for n in names if f"{recipe}_".startswith(f"{n}_")
    ]
    if not fitting:
        raise SystemExit(f"docs/tools/tables.py: no page in FAMILIES is about the recipe {recipe!r}")
    return max(fitting)[1]


def recipe_list() -> str:
    rows = []
    for name, recipe in mxjax.recipes.RECIPES.items():
        page = f"[`{name}`]({family_of(name)}.md)"
        rows.append([page, "yes" if recipe().needs_data else "no", recipe.when])
    return table(["recipe", "calibration", "when to use it"], rows)


def family(name: str) -> str:
    """What the recipes of one page are made of."""
    rows = []
    for recipe in (r for r in mxjax.recipes.RECIPES if family_of(r) == name):
        cfg = mxjax.recipes.get(recipe)
        for rule in cfg.rules:
            options = ", ".join(f"{k}={v}" for k, v in sorted(rule.options.items()))
            where = "" if rule.path == "" else f" ({code(rule.path)})"
            scales = rule.weight_scale
            if rule.activation and rule.activation_scale != scales:
                scales += f", inputs {rule.activation_scale}"
            rows.append([f"`{recipe}`{where}", rule.activation or "float", scales, describe(rule.transform),
                         rule.algorithm + (f" ({options})" if options else ""),
                         "yes" if rule.needs_data else "no"])  # fmt: skip
    return table(["recipe", "inputs", "scale policy", "transform", "algorithm", "calibration"], rows)


def quality(only: Sequence[str] | None = None) -> str:
    """Perplexity of every stored row; a column for weight format and activations."""
    cells: dict[str, dict[str, str]] = {}
    columns: list[str] = []
    report = results(QUALITY)
    for row in report["rows"]:
        column = f"{row['format'].upper()} W4A{row['activations'].removeprefix('a')}"
        columns.append(column)
        name = ROW_NAMES.get(row["recipe"], f"`{row['recipe']}`")
        if only is None or row["recipe"] in only:
            cells.setdefault(name, {})[column] = f"{row['perplexity']:.2f}"
    shown = [c for c in dict.fromkeys(columns) if any(c in row for row in cells.values())]
    body = table(["", *shown], [[name, *(row.get(c, "not measured") for c in shown)] for name, row in cells.items()])
    text = "Perplexity of SmolLM2-135M on 64 sequences of 512 tokens of Python documentation, one calibration draw of "
    text += f"64 sequences of Linux documentation; float: {report['float']:.2f}."
    return f"{text}\n\n{body}{source(QUALITY)}"


DIFFUSION = "pixart_quality_h200.json"


def diffusion(fmt: str) -> str:
    """Every stored row of the whole model: mean over the seeds, and their standard deviation if there are several."""
    by: dict[str, list[dict[str, Any]]] = {}
    for row in results(DIFFUSION)["rows"]:
        if row["format"] == fmt:
            by.setdefault(row["row"], []).append(row)

    def cell(rows: list[dict[str, Any]], measure: str, digits: int, unit: float = 1) -> str:
        values = [unit * row[measure] for row in rows]
        spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
        return f"{statistics.fmean(values):.{digits}f}{spread}"

    plain = by["RTN"][0]["velocity_error"]
    head = [
        f"{fmt.upper()} W4A4",
        "seeds",
        "velocity error, %",
        "of RTN's",
        "PSNR",
        "SSIM",
        "bits a weight",
        "transform",
    ]
    lines = []
    for name, rows in sorted(by.items(), key=lambda item: -statistics.fmean(r["velocity_error"] for r in item[1])):
        ratio = statistics.fmean(r["velocity_error"] for r in rows) / plain
        numbers = rows[0]["transform_parameters"]
        lines.append([name, len(rows), cell(rows, "velocity_error", 3, 100), f"{ratio:.2f}", cell(rows, "psnr", 2),
                      cell(rows, "ssim", 3), f"{rows[0]['bits_per_weight']:.2f}", f"{numbers:,}"])  # fmt: skip
    text = "PixArt-Mini, all linear layers of its blocks, against the float model on 64 held-out prompts. Mean and "
    text += (
        "standard deviation over seeds of calibration and algorithm; a row with one seed has no spread, and RTN and "
    )
    text += "Hadamard have no seed. Transform: how many numbers it holds."
    return f"{text}\n\n{table(head, lines)}{source(DIFFUSION)}"


def low_rank_speed() -> str:
    report = results("lowrank_speed_h200.json")
    rows = [
        [f"`{r['recipe']}`", f"{r['seconds']:.1f}", f"{r['first']:.1f}", f"{r['peak_bytes'] / 1e9:.1f} GB"]
        for r in report["rows"]
    ]
    n, k = report["shape"]
    head = [f"one layer, {n} x {k}", "seconds", "with compilation", "peak memory"]
    return table(head, rows) + source("lowrank_speed_h200.json")


def low_rank() -> str:
    """Every stored method on every stored layer, MXFP4."""
    stored = [row for row in results("lowrank_quality_cpu.json")["rows"] if row["format"] == "mxfp4"]
    by = {(row["layer"], row["row"]): row for row in stored}
    layers, methods = (list(dict.fromkeys(key[i] for key in by)) for i in (0, 1))
    plain = methods[0]
    head = [
        "MXFP4 W4A4",
        *(f"`{layer.removesuffix('/kernel')}`" for layer in layers),
        f"bytes against {plain}",
        "seconds",
    ]
    rows = []
    for method in methods:
        found = [by.get((layer, method)) for layer in layers]
        measured = [row for row in found if row is not None]
        sizes = sorted(row["bytes"] / by[row["layer"], plain]["bytes"] for row in measured)
        bytes_ = f"{sizes[0]:.2f}" + (f" to {sizes[-1]:.2f}" if f"{sizes[-1]:.2f}" != f"{sizes[0]:.2f}" else "")
        seconds = f"{sum(row['seconds'] for row in measured):.1f}"
        rows.append([method, *("" if r is None else f"{100 * r['error']:.2f} %" for r in found), bytes_, seconds])
    text = "Squared error of a layer's output relative to the output, inputs quantized as well; names as in "
    text += "`benchmarks/lowrank_quality.py`. Seconds for all layers of the row, compilation included."
    return f"{text}\n\n{table(head, rows)}{source('lowrank_quality_cpu.json')}"


def kernels(kind: str) -> str:
    """Device time and ratio to a bfloat16 product, a row a shape, a column a number of rows of x."""
    times = results("kernels_h200.json")["device_time_us"]
    times = {key: row for key, row in times.items() if key.startswith(f"{kind} ") and "measured" not in row}  # today's
    found = {tuple(map(int, key.split()[1:])): row for key, row in times.items()}
    shapes = list(dict.fromkeys(key[:2] for key in found))
    counts = sorted({key[2] for key in found})
    rows = []
    for n, k in shapes:
        line = [f"{n} x {k}"]
        for m in counts:
            row = found.get((n, k, m))
            ratio = f", {row['ratio']:.2f}x" if row and "ratio" in row else ""
            line.append(f"{row['us']:.1f}{ratio}" if row else "")
        rows.append(line)
    head = ["N x K", *(f"M = {m}" for m in counts)]
    return f"{table(head, rows)}{source('kernels_h200.json')}"


def gptq_speed() -> str:
    rows = [
        [row["shape"], row["observer"], f"{row['torch_seconds']:.3f}", f"{row['mxjax_seconds']:.3f}",
         f"{row['ratio']:.0f}x", f"{row['torch_error']:.4f}", f"{row['mxjax_error']:.4f}"]
        for row in results("gptq_speed_h200.json")["rows"]
    ]  # fmt: skip
    head = ["layer", "scale observer", "PyTorch loop (s)", "mxjax (s)", "ratio", "error, PyTorch", "error, mxjax"]
    return table(head, rows) + source("gptq_speed_h200.json")


def quantize_speed() -> str:
    rows = []
    for row in results("quantize_speed_cpu.json")["rows"]:
        axis = "" if row["axis"] is None else row["axis"]
        rows.append([row["library"], row["format"], axis, f"{row['median_ms']:.1f}", f"{row['times_memcpy']:.1f}"])
    array = results("quantize_speed_cpu.json")["array"]
    head = ["library", "format", "axis", "milliseconds", "times memcpy"]
    return f"One `{array}`.\n\n{table(head, rows)}{source('quantize_speed_cpu.json')}"


def memory() -> str:
    """What the arrays of a Llama-3 8B decoder weigh, embeddings and head left in bfloat16."""
    blocks, hidden, mlp, kv, vocabulary = 32, 4096, 14336, 1024, 128256
    linear = blocks * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * mlp)
    rest = 2 * vocabulary * hidden + (2 * blocks + 1) * hidden
    rows = []
    for name in ("bfloat16", *mxjax.FORMATS):
        bits = 16.0 if name == "bfloat16" else mxjax.get_format(name).bits_per_value
        total = linear * bits / 8 + 2 * rest
        rows.append([f"`{name}`", f"{linear * bits / 8e9:.2f}", f"{total / 1e9:.2f}"])
    assert math.isclose(linear + rest, 8.03e9, rel_tol=1e-3)
    return table(["weights", "linear layers (GB)", "whole model (GB)"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "formats": formats,
    "memory": memory,
    "recipes": recipe_list,
    **{f"recipes {name}": (lambda name=name: family(name)) for name in FAMILIES},
    "quality": quality,
    "quality rtn": lambda: quality(("rtn", "rtn_third")),
    "quality hadamard": lambda: quality(("rtn", "rtn_hadamard")),
    "quality gptq": lambda: quality(("rtn", "gptq", "mr_gptq")),
    "quality wush": lambda: quality(("rtn", "mr_gptq", "wush", "best")),
    "quality smooth": lambda: quality(("rtn", "smoothquant", "gptq")),
    "quality best": lambda: quality(("rtn", "mr_gptq", "best")),
    "low rank": low_rank,
    "low rank speed": low_rank_speed,
    "diffusion mxfp4": lambda: diffusion("mxfp4"),
    "diffusion nvfp4": lambda: diffusion("nvfp4"),
    "kernels w4a16": lambda: kernels("w4a16"),
    "kernels w4a4": lambda: kernels("w4a4"),
    "gptq speed": gptq_speed,
    "quantize speed": quantize_speed,
}
