"""``report``: what a quantized tree looks like and where its error sits, as one HTML file."""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import jax

from mxjax import __version__, api
from mxjax.errors import ConfigError
from mxjax.eval import ArrayError, WeightError, weight_errors
from mxjax.eval.trees import leaves_by_path
from mxjax.ops.qweight import is_quantized
from mxjax.report import html, plots


@dataclass(frozen=True, kw_only=True)
class Result:
    """One row of the comparison: a model variant and what was measured. None: not measured.

    ``gap_closed`` is how much of the perplexity that round-to-nearest in the same formats loses this variant wins back
    (0 to 1). ``quantize_seconds`` is the wall time of a first call, compilation included; ``tokens_per_second`` is not
    a first call's.
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


def report(
    params: Any,
    qparams: Any,
    path: str | os.PathLike = "mxjax-report.html",
    *,
    label: str | None = None,
    also: Mapping[str, Any] | None = None,
    title: str = "Quantization report",
    results: Sequence[Result] = (),
    drift: Mapping[str, Sequence[ArrayError]] | None = None,
    prompt: str = "",
    samples: Mapping[str, str] | None = None,
) -> Path:
    """Write one self-contained HTML page about a quantized tree.

    It holds overview cards, the measured variants, SQNR against depth by kind of projection, the float weights'
    distribution, histograms of element values and block scales, texts before and after, and a sortable table of every
    weight. Plots are embedded, all text is escaped, and nothing is loaded from outside.

    Args:
      params: the float tree (or nnx model).
      qparams: what ``mxjax.quantize(params, cfg)`` made of it.
      path: the file to write; its folder must exist. Written in one step.
      label: name of ``qparams`` in plots and tables; default: its most common format.
      also: further quantized trees of the same ``params``, by label.
      title: heading; plain text.
      results: measured variants; the first is taken as the reference that the others are compared with.
      drift: label -> ``mxjax.eval.block_errors(...)``, for the plot of the hidden states.
      prompt, samples: a prompt and label -> generated text.

    Returns:
      The path.

    Raises:
      ConfigError: nothing in a tree is quantized, or a quantized leaf has no float leaf at its path.
      MissingExtraError: matplotlib is missing.

    Example:
      >>> params = {"layers": [{"proj": {"kernel": jax.random.normal(jax.random.key(0), (64, 32))}}]}
      >>> mxjax.report(params, mxjax.quantize(params, "mxfp4"), "report.html").name
      'report.html'
    """
    main = label or _format_label(qparams)
    trees = {main: qparams, **(also or {})}
    errors = {name: weight_errors(params, tree) for name, tree in trees.items()}
    if empty := [name for name, rows in errors.items() if not rows]:
        raise ConfigError(f"nothing is quantized in {', '.join(empty)}: there is nothing to report")
    errors, trees, shown = _distinct(errors, trees)
    summary = api.summary(qparams)
    reference = results[0].label if results and results[0].label not in trees else None
    colours = plots.label_colours([main, *(also or {}), *(r.label for r in results), *(drift or {})], reference)
    parts = [
        html.cards(_overview(params, main, summary, next(iter(errors.values())), results)),
        _results_section(results, colours),
        _error_section(errors, drift, colours),
        _distribution_section(params, trees, next(iter(errors.values())), [colours[name] for name in shown]),
        _samples_section(prompt, samples),
        _layers_section(errors, summary),
    ]
    footer = f"mxjax {__version__}, jax {jax.__version__}, {_device_text()}, {date.today()}"
    text = html.page(title, f"{main}: {summary.bits_per_weight:.2f} bits a quantized weight", "".join(parts), footer)
    return _write(Path(path), text)


def _device_text() -> str:
    device = jax.devices()[0]  # a CPU's kind is "cpu" again
    return device.platform if device.device_kind == device.platform else f"{device.platform}: {device.device_kind}"


def _distinct(
    errors: Mapping[str, list[WeightError]], trees: Mapping[str, Any]
) -> tuple[dict[str, list[WeightError]], dict[str, Any], list[str]]:
    """Trees with the same weights (they differ in their activations) as one, under a joint label.

    Also returns the first name of each joint label.
    """
    groups: dict[tuple, list[str]] = {}
    for name, rows in errors.items():
        groups.setdefault(tuple((r.path, r.format, r.sqnr_db, r.max_abs) for r in rows), []).append(name)
    labels = {", ".join(names): names[0] for names in groups.values()}
    return {k: errors[v] for k, v in labels.items()}, {k: trees[v] for k, v in labels.items()}, list(labels.values())


def _format_label(tree: Any) -> str:
    leaves = [leaf for leaf in leaves_by_path(tree).values() if is_quantized(leaf)]
    return plots.qtensors(leaves)[0].format.name


def _overview(
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
        caption = f"best perplexity ({best.label}); {measured[0].label}: {measured[0].perplexity:.2f}"
        items.append((f"{best.perplexity:.2f}", caption))
    return items


def _results_section(results: Sequence[Result], colours: Mapping[str, str]) -> str:
    if not results:
        return ""
    head = ["format", "algorithm", "bits a weight", "size (MB)", "perplexity", "against float", "gap closed (%)",
            "KL (nats)", "same top token (%)", "tokens/s", "quantized in (s)"]  # fmt: skip
    base = results[0].perplexity
    rows = []
    for r in results:
        ratio = f"×{r.perplexity / base:.3f}" if r.perplexity is not None and base else None
        megabytes = None if r.nbytes is None else r.nbytes / 1e6
        agreement = None if r.top1_agreement is None else 100 * r.top1_agreement
        closed = None if r.gap_closed is None else 100 * r.gap_closed
        rows.append([r.label, r.algorithm, r.bits_per_weight, megabytes, r.perplexity, ratio, closed, r.kl, agreement,
                     r.tokens_per_second, r.quantize_seconds])  # fmt: skip
    keep = [i for i in range(len(head)) if any(row[i] is not None for row in rows)]
    content = [html.table([head[i] for i in keep], [[row[i] for i in keep] for row in rows])]
    measured = [(r.label, r.perplexity) for r in results if r.perplexity is not None and math.isfinite(r.perplexity)]
    if measured:
        labels, values = zip(*measured, strict=True)
        content.append(html.image(plots.quality(labels, values, base, colours), "Perplexity of each variant"))
    text = "Size counts the whole model, unquantized arrays included. KL and top token compare with the first row."
    if any(r.gap_closed is not None for r in results):
        text += " The gap is what round-to-nearest in the same formats loses against float."
    if any(r.quantize_seconds is not None for r in results):
        text += " The seconds of quantization include compilation."
    if any(r.tokens_per_second is not None for r in results) and jax.default_backend() == "cpu":
        text += (
            " A CPU has no 4-bit arithmetic: its tokens/s show what decoding the weights costs, not what a GPU gains."
        )
    return html.section("Quality, size and speed", text, *content)


def _error_section(
    errors: Mapping[str, Sequence[WeightError]],
    drift: Mapping[str, Sequence[ArrayError]] | None,
    colours: Mapping[str, str],
) -> str:
    content = [html.image(plots.error_by_depth(errors), "Weight SQNR by depth and kind of projection")]
    text = "SQNR = 10 log10(sum W² / sum (W - W_q)²) of every quantized weight; 6 dB are one bit."
    if drift:
        content.append(html.image(plots.drift_by_depth(drift, colours), "SQNR of the hidden state after each block"))
        text += " Below: the hidden state after each block against the float model's, activations quantized as well."
        text += " Drawn is the token in the middle: over all tokens the sums would show a few massive activations only."
    return html.section("Where the error sits", text, *content)


def _distribution_section(
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


def _samples_section(prompt: str, samples: Mapping[str, str] | None) -> str:
    if not samples:
        return ""
    boxes = "".join(
        f"<div><b>{html.escape(name)}</b><pre>{html.escape(text)}</pre></div>" for name, text in samples.items()
    )
    text = f"Greedy decoding from the prompt: {prompt}" if prompt else "Greedy decoding."
    return html.section("Text before and after", text, f'<div class="samples">{boxes}</div>')


def _layers_section(errors: Mapping[str, Sequence[WeightError]], summary: api.Summary) -> str:
    names = list(errors)
    by_path: dict[str, dict[str, WeightError]] = {}
    for name, measured in errors.items():
        for error in measured:
            by_path.setdefault(error.path, {})[name] = error
    head = [
        "path",
        "shape",
        "block",
        *(f"SQNR {n} (dB)" for n in names),
        *(f"{what} {names[0]}" for what in ("cosine", "bits", "bytes")),
    ]
    rows: list[list[Any]] = []
    for path, found in by_path.items():
        first = next(iter(found.values()))
        sqnrs = [found[n].sqnr_db if n in found else None for n in names]
        depth = plots.place(path)[0]
        rows.append([path, "×".join(map(str, first.shape)), depth, *sqnrs, f"{first.cosine:.5f}",
                     first.bits_per_value, first.nbytes])  # fmt: skip
    kept = [[r.path, "×".join(map(str, r.shape)), r.weight, r.nbytes] for r in summary.rows if not r.quantized]
    rest = ""
    if kept:
        table = html.table(["path", "shape", "dtype", "bytes"], kept, sortable=True)
        rest = f"<details><summary>{len(kept)} arrays that stay as they were</summary>{table}</details>"
    text = f"Every quantized weight; click a heading to sort. Cosine, bits a value and bytes are those of {names[0]}."
    return html.section("Weight by weight", text, html.table(head, rows, sortable=True), rest, kind="layers")


def _write(path: Path, text: str) -> Path:
    """In one step: a reader never sees half a page."""
    handle, scratch = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.write(text)
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise
    return path
