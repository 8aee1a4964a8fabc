"""The parts of the page, each from what was measured: HTML text in, nothing written."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from mxjax import api
from mxjax.eval import ArrayError, LayerError, Sensitivity, WeightError
from mxjax.eval.trees import leaves_by_path
from mxjax.ops.qweight import is_quantized
from mxjax.report import choices, depth, html, plots


@dataclass(frozen=True, kw_only=True)
class Result:
    """One row of the comparison: a model variant and what was measured. None: not measured.

    ``gap_closed`` is how much of the perplexity that round-to-nearest in the same formats loses this variant wins back
    (0 to 1). ``quantize_seconds`` is the wall time of a first call, compilation included; ``tokens_per_second`` is not
    a first call's, and ``speed_of`` says what it was measured on ("writing one sequence").
    """

    label: str
    algorithm: str | None = None
    bits_per_weight: float | None = None
    nbytes: int | None = None
    perplexity: float | None = None
    kl: float | None = None
    top1_agreement: float | None = None
    gap_closed: float | None = None
    tokens_per_second: float | None = None
    quantize_seconds: float | None = None
    speed_of: str | None = None


def overview(
    params: Any, label: str, summary: api.Summary, errors: Sequence[WeightError], results: Sequence[Result]
) -> list[tuple[str, str]]:
    before, after = api.summary(params).nbytes, summary.nbytes
    finite = [e.sqnr_db for e in errors if math.isfinite(e.sqnr_db)]
    worst = min(errors, key=lambda e: e.sqnr_db)
    items = [
        (f"{before / after:.1f}×", f"smaller: {before / 1e6:,.1f} MB → {after / 1e6:,.1f} MB"),
        (f"{summary.bits_per_weight:.2f} bits", f"a quantized weight ({label}), scales included"),
        (f"{len(errors)} of {len(summary.rows)}", "arrays quantized; the rest stay as they were"),
    ]
    if finite:
        items.append((f"{statistics.median(finite):.1f} dB", "median SQNR of the quantized weights"))
        items.append((f"{worst.sqnr_db:.1f} dB", f"lowest SQNR: {worst.path.removesuffix('/kernel')}"))
    measured = [r for r in results if r.perplexity is not None]
    if len(measured) > 1 and measured[0].perplexity is not None:
        best = min(measured[1:], key=lambda r: r.perplexity or math.inf)
        what = "best perplexity" if len(measured) > 2 else "perplexity"
        caption = f"{what} ({best.label}); {measured[0].label}: {measured[0].perplexity:.2f}"
        items.append((f"{best.perplexity:.2f}", caption))
    return items


def results_section(results: Sequence[Result], colours: Mapping[str, str]) -> str:
    if not results:
        return ""
    head = ["format", "algorithm", "bits a weight", "size (MB)", "perplexity", "against float", "gap closed (%)",
            "KL (nats)", "same top token (%)", "tokens/s", "quantized in (s)"]  # fmt: skip
    base = results[0].perplexity
    rows = []
    for r in results:
        ratio = html.Digits(r.perplexity / base, 3, "×") if r.perplexity is not None and base else None
        megabytes = None if r.nbytes is None else r.nbytes / 1e6
        agreement = None if r.top1_agreement is None else 100 * r.top1_agreement
        closed = None if r.gap_closed is None else 100 * r.gap_closed
        rows.append([r.label, r.algorithm, r.bits_per_weight, megabytes, r.perplexity, ratio, closed, r.kl, agreement,
                     r.tokens_per_second, r.quantize_seconds])  # fmt: skip
    keep = [i for i in range(len(head)) if any(row[i] is not None for row in rows)]
    content = [html.table([head[i] for i in keep], [[row[i] for i in keep] for row in rows], sortable=len(rows) > 2)]
    measured = [(r.label, r.perplexity) for r in results if r.perplexity is not None and math.isfinite(r.perplexity)]
    if measured:
        labels, values = zip(*measured, strict=True)
        content.append(html.image(plots.quality(labels, values, base, colours), "Perplexity of each variant"))
    text = "Size counts the whole model, unquantized arrays included. KL and top token compare with the first row."
    if any(r.gap_closed is not None for r in results):
        text += " The gap is what round-to-nearest in the same formats loses against float."
    if any(r.quantize_seconds is not None for r in results):
        text += " The seconds of quantization include compilation."
    if speeds := dict.fromkeys(r.speed_of for r in results if r.tokens_per_second is not None and r.speed_of):
        text += f" The tokens/s are those of {', '.join(speeds)}."
    if any(r.tokens_per_second is not None for r in results) and jax.default_backend() == "cpu":
        text += (
            " A CPU has no 4-bit arithmetic: its tokens/s show what decoding the weights costs, not what a GPU gains."
        )
    return html.section("Quality, size and speed", text, *content)


def error_section(
    errors: Mapping[str, Sequence[WeightError]],
    outputs: Mapping[str, Sequence[LayerError]],
    drift: Mapping[str, Sequence[ArrayError]] | None,
    colours: Mapping[str, str],
) -> str:
    ratio = "Of every weight: 10 log10(sum W² / sum (W - W_q)²)."
    content = [html.image(depth.error_by_depth(errors), "Weight SQNR by depth and kind of projection", ratio)]
    text = "SQNR is the power of what should be there over that of the error, in decibels; 6 dB are one bit."
    if outputs:
        ratio = (
            "Of each layer's output: 10 log10(tr W H Wᵀ / tr E H Eᵀ) with H of the calibration inputs. An error that "
            "the inputs do not see costs nothing."
        )
        picture = depth.output_by_depth(outputs)
        content.append(html.image(picture, "Output SQNR by depth and kind of projection", ratio))
    if drift:
        ratio = (
            "Of the hidden state after each block, against the float model's, activations quantized as well. Drawn is "
            "the token in the middle: over all tokens the sums would show a few massive activations only."
        )
        picture = depth.drift_by_depth(drift, colours)
        content.append(html.image(picture, "SQNR of the hidden state after each block", ratio))
    return html.section("Where the error sits", text, *content)


def sensitivity_section(rows: Sequence[Sensitivity], colour: str) -> str:
    if not rows:
        return ""
    worst = sorted(rows, key=lambda r: -r.kl)[:5]
    head = ["quantized alone", "KL (nats)", "perplexity against float", "same top token (%)"]
    listing = [
        [r.path, html.Digits(r.kl, 5), html.Digits(math.exp(r.nll_increase), 4, "×"), 100 * r.top1_agreement]
        for r in worst
    ]
    text = (
        "What the model says when this part alone is quantized, activations included, and the rest is float: "
        "KL(float || quantized) a token. Below: the parts that cost most, the first to give more bits to."
    )
    picture = html.image(depth.sensitivity_by_depth(rows, colour), "KL of each part quantized alone")
    return html.section("Sensitivity", text, picture, html.table(head, listing, sortable=True))


def inputs_section(outputs: Mapping[str, Sequence[LayerError]]) -> str:
    """How large the outliers of each layer's inputs are, and what quantizing those inputs loses."""
    if not outputs:
        return ""
    rows = next(iter(outputs.values()))
    picture = html.image(depth.inputs_by_depth(outputs), "Outliers and SQNR of the layers' inputs by depth")
    distinct: dict[tuple, list[LayerError]] = {}  # q, k and v see one input
    for row in rows:
        distinct.setdefault((row.path.rpartition("/")[0].rpartition("/")[0], row.input_peak), []).append(row)
    worst = sorted(distinct.values(), key=lambda g: -g[0].input_peak if math.isfinite(g[0].input_peak) else math.inf)
    head = ["input of", "peak / rms", "SQNR (dB, estimate)"]
    listing = [[", ".join(r.path for r in g), g[0].input_peak, g[0].input_sqnr_db] for g in worst[:5]]
    if all(row[2] is None for row in listing):
        head, listing = head[:2], [row[:2] for row in listing]
    text = (
        "The largest magnitude that calibration saw over the root mean square: 4 to 6 are those of normal values, tens "
        "and hundreds are outliers that a block's other values pay for. Below: the inputs with the largest."
    )
    return html.section(
        "Inputs and their outliers", text, picture, html.table(head, listing, sortable=True), kind="choices"
    )


def distribution_section(
    params: Any, trees: Mapping[str, Any], errors: Sequence[WeightError], colours: Sequence[str]
) -> str:
    floats = leaves_by_path(params)
    shown = {e.path: floats[e.path] for e in errors}
    content = [html.image(plots.weight_histogram(shown), "Distribution of the float weights by kind")]
    drawn: dict[str, str] = {}
    for (name, tree), colour in zip(trees.items(), colours, strict=True):
        tensors = plots.qtensors([leaf for leaf in leaves_by_path(tree).values() if is_quantized(leaf)])
        fig = plots.histograms(name, tensors, colour)
        drawn[name] = html.image(fig, f"Element values and block scales of {name}")
    text = "Above: float weights in units of their standard deviation. Below: how formats spend codes and scales."
    return html.section("Weights and scales", text, *content, *drawn.values())


def samples_section(prompt: str, samples: Mapping[str, str] | None) -> str:
    if not samples:
        return ""
    boxes = "".join(
        f"<div><b>{html.escape(name)}</b><pre>{html.escape(text)}</pre></div>" for name, text in samples.items()
    )
    text = f"Greedy decoding from the prompt: {prompt}" if prompt else "Greedy decoding."
    return html.section("Text before and after", text, f'<div class="samples">{boxes}</div>')


def layers_section(
    errors: Mapping[str, Sequence[WeightError]],
    outputs: Mapping[str, Sequence[LayerError]],
    sensitivity: Sequence[Sensitivity],
    summary: api.Summary,
    why: Mapping[str, str],
) -> str:
    names = list(errors)
    recipes = {row.path: choices.recipe_of(row) for row in summary.rows if row.quantized}
    by_path: dict[str, dict[str, WeightError]] = {}
    for name, measured in errors.items():
        for error in measured:
            by_path.setdefault(error.path, {})[name] = error
    output = {name: {row.path: row for row in rows} for name, rows in outputs.items()}
    first = output.get(names[0], {})
    alone = {row.path: row.kl for row in sensitivity}
    head = [
        "path",
        "shape",
        "block",
        *(f"SQNR {n} (dB)" for n in names),
        *(f"output SQNR {n} (dB)" for n in output),
        "input SQNR (dB, estimate)",
        "input peak / rms",
        "tokens seen",
        "KL alone (mnats)",
        *(f"{what} {names[0]}" for what in ("recipe", "cosine", "bits", "bytes")),
    ]
    rows: list[list[Any]] = []
    for path, found in by_path.items():
        error, seen = next(iter(found.values())), first.get(path)
        rows.append(
            [
                path,
                "×".join(map(str, error.shape)),
                plots.place(path)[0],
                *(found[n].sqnr_db if n in found else None for n in names),
                *(rows_of[path].output_sqnr_db if path in rows_of else None for rows_of in output.values()),
                *((seen.input_sqnr_db, seen.input_peak, seen.tokens) if seen else (None, None, None)),
                1000 * alone[path] if path in alone else None,
                recipes.get(path),
                html.Digits(error.cosine, 5),
                error.bits_per_value,
                error.nbytes,
            ]
        )
    shown = [i for i in range(len(head)) if i < 3 or any(row[i] is not None for row in rows)]
    weights = html.table([head[i] for i in shown], [[row[i] for i in shown] for row in rows], sortable=True)
    kept = [
        [r.path, "×".join(map(str, r.shape)), r.weight, r.nbytes, *([why[r.path]] if why.get(r.path) else [])]
        for r in summary.rows
        if not r.quantized
    ]
    rest = ""
    if kept:
        head = ["path", "shape", "dtype", "bytes", "why"][: max(map(len, kept))]
        table = html.table(head, [row + [None] * (len(head) - len(row)) for row in kept], sortable=True)
        rest = f"<details><summary>{len(kept)} arrays that stay as they were</summary>{table}</details>"
    text = f"Every quantized weight; click a heading to sort. Recipe, cosine, bits and bytes are those of {names[0]}."
    if first:
        text += (
            " Input columns are of the calibration's inputs; their SQNR is that of normal channels of the same power, "
            "which single tokens with outliers can fall short of."
        )
    return html.section("Weight by weight", text, weights, rest, kind="layers")
