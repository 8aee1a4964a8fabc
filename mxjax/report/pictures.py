"""Pictures in rows and columns, small matrices with their numbers, and how a loss falls.

Conventions as in :mod:`mxjax.report.plots`: each function returns a matplotlib ``Figure`` and touches no global state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mxjax.errors import BlockShapeError
from mxjax.report.plots import figure, line_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SMALL = 12  # matrices up to this size have their numbers written in


def image_grid(
    rows: Mapping[str, Any], columns: Sequence[str] = (), notes: Mapping[str, Sequence[str]] | None = None
) -> Figure:
    """Images side by side: a row for each model, say, and a column for each prompt.

    Args:
      rows: label -> uint8 [n, height, width, 3], as many images in each row.
      columns: a title for each column, or nothing.
      notes: label -> what stands below each image of that row, such as its PSNR.

    Raises:
      BlockShapeError: other arrays, or rows, titles or notes of different lengths.

    Example:
      >>> image_grid({"float": np.zeros((2, 8, 8, 3), np.uint8)}, ["a cat", "a dog"]).axes[0].get_title()
      'a cat'
    """
    arrays, notes = {label: np.asarray(images) for label, images in rows.items()}, notes or {}
    count = len(next(iter(arrays.values())))
    lengths = {len(a) for a in arrays.values()} | {len(n) for n in notes.values()} | ({len(columns)} - {0})
    if lengths != {count} or any(a.ndim != 4 or a.shape[3] != 3 or a.dtype != np.uint8 for a in arrays.values()):
        shapes = {label: (a.dtype.name, a.shape) for label, a in arrays.items()}
        raise BlockShapeError(f"rows are uint8 [n, height, width, 3] of one n, with n titles and notes, not {shapes}")
    fig, axes = figure(1.25 * count + 1.3, (1.45 if notes else 1.3) * len(arrays) + 0.3, len(arrays), count)
    for i, (label, images) in enumerate(arrays.items()):
        for j, image in enumerate(images):
            ax = axes[i * count + j]
            ax.grid(visible=False)
            ax.imshow(image, interpolation="nearest")
            ax.set_xticks([])
            ax.set_yticks([])
            ax.spines[:].set_visible(False)
            if i == 0 and len(columns):
                ax.set_title(columns[j], fontsize=9, wrap=True)
            if label in notes:
                ax.set_xlabel(notes[label][j], fontsize=8, labelpad=2)
        axes[i * count].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=9)
    return fig


def matrices(arrays: Mapping[str, Any], unit: str = "value") -> Figure:
    """Signed matrices side by side on one colour scale around zero; small ones with their numbers written in.

    Args:
      arrays: title -> matrix. Its rows are drawn from top to bottom.
      unit: label of the colour bar.

    Raises:
      BlockShapeError: an array that is no matrix.

    Example:
      >>> [t.get_text() for t in matrices({"turn": [[0.0, 1.0], [-1.0, 0.0]]}).axes[0].texts]
      ['0.00', '1.00', '-1.00', '0.00']
    """
    maps = {title: np.asarray(a, np.float32) for title, a in arrays.items()}
    if wrong := {title: m.shape for title, m in maps.items() if m.ndim != 2}:
        raise BlockShapeError(f"only matrices can be drawn, not {wrong}")
    largest = max(float(np.abs(m).max()) for m in maps.values()) or 1.0
    widths = [max(m.shape[1], 4) for m in maps.values()]
    fig, axes = figure(0.37 * sum(widths) + 1.4, 3.2, 1, len(maps), width_ratios=widths)
    for ax, (title, m) in zip(axes, maps.items(), strict=True):
        ax.grid(visible=False)
        drawn = ax.imshow(m, vmin=-largest, vmax=largest, cmap="PuOr", interpolation="nearest")
        ax.set_title(title, fontsize=9)
        ax.set_xticks([])
        ax.set_yticks([])
        for (i, j), value in np.ndenumerate(m) if max(m.shape) <= _SMALL else ():
            colour = "white" if abs(value) > 0.5 * largest else "black"
            ax.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=6.5, color=colour)
    fig.colorbar(drawn, ax=axes, label=unit, shrink=0.8)
    return fig


def falling(lines: Mapping[str, Any], x_name: str = "step", y_name: str = "loss", first: int = 1) -> Figure:
    """How something falls from step to step: a line a label, on a logarithmic axis of values.

    Args:
      lines: label -> positive values of the steps, in order; the last is written in the legend. Not finite: left out.
      x_name, y_name: of the axes.
      first: number of the first step.

    Example:
      >>> falling({"adam": [1.0, 0.5]}).axes[0].get_legend().get_texts()[0].get_text()
      'adam: 0.5 at the end'
    """
    fig, (ax,) = figure(8, 3.4)
    for i, (label, values) in enumerate(lines.items()):
        y = np.asarray(values, np.float64)
        y, x = y[np.isfinite(y)], first + np.flatnonzero(np.isfinite(y))
        style: dict[str, Any] = line_style(i) | {"markevery": max(len(y) // 12, 1), "markersize": 5}
        ax.plot(x, y, linewidth=1.5, label=f"{label}: {y[-1]:.3g} at the end", **style)
    ax.set_yscale("log")
    ax.set_xlabel(x_name)
    ax.set_ylabel(y_name)
    ax.legend(frameon=False, fontsize=9)
    return fig
