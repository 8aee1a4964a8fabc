"""Plots against depth: where in a model the error sits. Conventions as in :mod:`mxjax.report.plots`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mxjax.eval import ArrayError, LayerError, Sensitivity, WeightError
from mxjax.report.plots import COLOURS, figure, kinds_of, label_colours, line_style, place, whole_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def error_by_depth(errors: Mapping[str, Sequence[WeightError]]) -> Figure:
    """SQNR of the weights against depth, a line a kind of projection, a panel a label.

    Args:
      errors: label -> rows of :func:`mxjax.eval.weight_errors`. Weights without a number in their path come first, by
        order.
    """
    panels = {label: [(row.path, row.sqnr_db) for row in rows] for label, rows in errors.items()}
    return _panels(panels, "weight SQNR (dB)")


def output_by_depth(errors: Mapping[str, Sequence[LayerError]]) -> Figure:
    """SQNR of the layers' outputs against depth, as :func:`error_by_depth`.

    Args:
      errors: label -> rows of :func:`mxjax.eval.layer_errors`.
    """
    panels = {label: [(row.path, row.output_sqnr_db) for row in rows] for label, rows in errors.items()}
    return _panels(panels, "output SQNR (dB)")


def inputs_by_depth(errors: Mapping[str, Sequence[LayerError]]) -> Figure:
    """Outliers of the layers' inputs against depth, and what quantizing those inputs loses, a line a kind.

    Args:
      errors: label -> rows of :func:`mxjax.eval.layer_errors`. The inputs' peaks are those of the first label (they are
        the float model's); the SQNR of each label that quantizes its inputs has a panel.
    """
    first = next(iter(errors.values()))
    quantized = {n: rows for n, rows in errors.items() if any(r.input_sqnr_db is not None for r in rows)}
    panels = {"peak / rms": [(r.path, r.input_peak) for r in first]}
    for label, rows in quantized.items():
        panels[f"input SQNR (dB), {label}"] = [
            (r.path, math.nan if r.input_sqnr_db is None else r.input_sqnr_db) for r in rows
        ]
    fig = _panels(panels, "", share=False)
    fig.axes[0].set_yscale("log")
    return fig


def _panels(panels: Mapping[str, Sequence[tuple[str, float]]], name: str, share: bool = True) -> Figure:
    columns = min(len(panels), 2)
    rows_of_axes = -(-len(panels) // 2)
    fig, axes = figure(4.8 * columns + 1.6, 2.9 * rows_of_axes + 0.5, rows_of_axes, columns, sharey=share)
    kinds = kinds_of(path for rows in panels.values() for path, _ in rows)
    for ax, (label, rows) in zip(axes, panels.items(), strict=False):
        _lines(ax, kinds, rows)
        ax.set_title(label, fontsize=11)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    for ax in axes[::columns]:
        ax.set_ylabel(name)
    handles = dict(zip(*reversed(axes[0].get_legend_handles_labels()), strict=True))
    if handles:
        fig.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False, fontsize=9)
    return fig


def _lines(ax: Axes, kinds: Mapping[str, str], rows: Sequence[tuple[str, float]]) -> None:
    """A line a kind of projection through the (path, value) of its layers."""
    for i, kind in enumerate(dict.fromkeys(kinds.values())):
        points = [(place(path)[0], y) for path, y in rows if kinds[path] == kind]
        points = [(n if depth is None else depth, y) for n, (depth, y) in enumerate(points) if np.isfinite(y)]
        if points:
            ax.plot(*zip(*sorted(points), strict=True), linewidth=1.3, label=kind, **line_style(i))
    ax.set_xlabel("block")
    whole_numbers(ax)


def lines_by_depth(lines: Mapping[str, Sequence[float]], name: str) -> Figure:
    """Positive values of each block on a logarithmic axis, a line a label: magnitudes of hidden states, say.

    Args:
      lines: label -> a value for each block, in order; NaN where there is none.
      name: of the axis of values.

    Example:
      >>> lines_by_depth({"largest": [4.0, 900.0]}, "magnitude").axes[0].get_yscale()
      'log'
    """
    fig, (ax,) = figure(8, 3.4)
    for i, (label, values) in enumerate(lines.items()):
        ax.plot(range(len(values)), values, linewidth=1.5, label=label, **line_style(i))
    ax.set_yscale("log")
    ax.set_xlabel("block")
    ax.set_ylabel(name)
    whole_numbers(ax)
    fig.legend(loc="outside right center", frameon=False, fontsize=9)
    return fig


def sensitivity_by_depth(rows: Sequence[Sensitivity], colour: str = COLOURS[0]) -> Figure:
    """What each part costs when it alone is quantized.

    For blocks bars with standard errors, for weights a line a kind of projection on a log scale.

    Args:
      rows: of :func:`mxjax.eval.sensitivity`.
      colour: of the bars.
    """
    fig, (ax,) = figure(8, 3.4)
    kinds = kinds_of(row.path for row in rows)
    if len(set(kinds.values())) == 1:
        errors = None if any(row.kl_stderr is None for row in rows) else [row.kl_stderr for row in rows]
        bars: dict[str, Any] = {
            "color": colour,
            "edgecolor": "white",
            "linewidth": 0.6,
            "ecolor": "#111827",
            "capsize": 2,
        }
        ax.bar([place(row.path)[0] or 0 for row in rows], [row.kl for row in rows], yerr=errors, **bars)
        ax.set_xlabel("block")
        whole_numbers(ax)
    else:
        _lines(ax, kinds, [(row.path, row.kl if row.kl > 0 else np.nan) for row in rows])
        ax.set_yscale("log")
        fig.legend(loc="outside right center", frameon=False, fontsize=9)
    ax.set_ylabel("KL(float || quantized) (nats)")
    return fig


def drift_by_depth(drift: Mapping[str, Sequence[ArrayError]], colours: Mapping[str, str] | None = None) -> Figure:
    """SQNR of the hidden state after each block against the float model: where the error enters and how it grows.

    Drawn is the median over tokens. A sum over tokens would show the few with massive activations and little else.

    Args:
      drift: label -> what :func:`mxjax.eval.block_errors` returned.
      colours: label -> colour; default: :func:`label_colours`.
    """
    colours = label_colours(drift) if colours is None else colours
    fig, (ax,) = figure(8, 3.4)
    for i, (label, rows) in enumerate(drift.items()):
        values = [r.median_row_sqnr_db if np.isfinite(r.median_row_sqnr_db) else np.nan for r in rows]
        style = line_style(i) | {"color": colours[label]}
        ax.plot(range(len(values)), values, linewidth=1.5, label=label, **style)
    ax.set_xlabel("block")
    ax.set_ylabel("hidden state SQNR (dB),\nmedian token")
    whole_numbers(ax)
    ax.legend(frameon=False, fontsize=9)
    return fig
