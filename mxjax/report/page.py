"""``report``: what a quantized tree looks like and where its error sits, as one HTML file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mxjax import api
from mxjax.config import QuantConfig
from mxjax.errors import ConfigError
from mxjax.eval import ArrayError, Sensitivity, WeightError, layer_errors, weight_errors
from mxjax.eval.trees import leaves_by_path
from mxjax.ops.qweight import is_quantized
from mxjax.report import choices, html, plots, sections
from mxjax.report.sections import Result


def report(
    params: Any,
    qparams: Any,
    stats: Mapping[str, Any] | None = None,
    path: str | os.PathLike = "mxjax-report.html",
    *,
    cfg: str | QuantConfig | None = None,
    label: str | None = None,
    also: Mapping[str, Any] | None = None,
    title: str = "Quantization report",
    results: Sequence[Result] = (),
    drift: Mapping[str, Sequence[ArrayError]] | None = None,
    sensitivity: Sequence[Sensitivity] = (),
    prompt: str = "",
    samples: Mapping[str, str] | None = None,
    extra: Sequence[str] = (),
) -> Path:
    """Write one self-contained HTML page about a quantized tree.

    It holds overview cards, the measured variants, which recipe each weight got, SQNR against depth by kind of
    projection, the outliers of the inputs, the float weights' distribution, histograms of element values and block
    scales, texts before and after, and a sortable table of every weight. Plots are embedded, all text is escaped, and
    nothing is loaded from outside.

    Args:
      params: the float tree (or nnx model).
      qparams: what ``mxjax.quantize(params, cfg)`` made of it.
      stats: what ``mxjax.calibrate`` returned, or None. With it the error of each layer's output is shown
        (:func:`mxjax.eval.layer_errors`), and how large and how hard its inputs are, against depth.
      path: the file to write; its folder must exist. Written in one step.
      cfg: the recipe or config that made ``qparams``: says which rule decided, and why arrays stay as they are.
      label: name of ``qparams`` in plots and tables; default: its most common format.
      also: further quantized trees of the same ``params``, by label.
      title: heading; plain text.
      results: measured variants; the first is taken as the reference that the others are compared with.
      drift: label -> ``mxjax.eval.block_errors(...)``, for the plot of the hidden states.
      sensitivity: ``mxjax.eval.sensitivity(...)`` of ``qparams``, for the plot of what each part costs alone.
      prompt, samples: a prompt and label -> generated text.
      extra: further parts of the page, made by :func:`mxjax.report.html.section`; they come after the samples.

    Returns:
      The path.

    Raises:
      ConfigError: nothing in a tree is quantized, a quantized leaf has no float leaf at its path, or ``stats`` is no
        mapping or of another model.
      MissingExtraError: matplotlib is missing.

    Example:
      >>> params = {"layers": [{"proj": {"kernel": jax.random.normal(jax.random.key(0), (64, 32))}}]}
      >>> mxjax.report(params, mxjax.quantize(params, "mxfp4"), path="report.html").name
      'report.html'
    """
    if stats is not None and not isinstance(stats, Mapping):
        raise ConfigError(f"stats is what mxjax.calibrate returned, not {stats!r}; the file is named by path=...")
    main = label or _format_label(qparams)
    trees = {main: qparams, **(also or {})}
    errors = {name: weight_errors(params, tree) for name, tree in trees.items()}
    if empty := [name for name, rows in errors.items() if not rows]:
        raise ConfigError(f"nothing is quantized in {', '.join(empty)}: there is nothing to report")
    errors, trees, shown = _distinct(errors, trees)
    outputs = {} if stats is None else {name: layer_errors(params, tree, stats) for name, tree in trees.items()}
    summary = api.summary(qparams)
    why = {} if cfg is None else choices.reasons(params, cfg)
    reference = results[0].label if results and results[0].label not in trees else None
    colours = plots.label_colours([main, *(also or {}), *(r.label for r in results), *(drift or {})], reference)
    first = next(iter(errors.values()))
    parts = [
        html.cards(sections.overview(params, main, summary, first, results)),
        sections.results_section(results, colours),
        choices.choices_section(summary, why),
        sections.error_section(errors, outputs, drift, colours),
        sections.sensitivity_section(sensitivity, colours[main]),
        sections.inputs_section(outputs),
        sections.distribution_section(params, trees, first, [colours[name] for name in shown]),
        sections.samples_section(prompt, samples),
        *extra,
        sections.layers_section(errors, outputs, sensitivity, summary, why),
    ]
    subtitle = f"{main}: {summary.bits_per_weight:.2f} bits a quantized weight"
    return html.write(Path(path), html.page(title, subtitle, "".join(parts), html.footer()))


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
