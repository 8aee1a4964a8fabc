"""Pictures of how things work inside: GPTQ's choices in a plane and along columns, exact FP8, and a roofline.

Conventions as in :mod:`mxjax.report.plots`: each function returns a matplotlib ``Figure`` and touches no global state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from mxjax.core import codec
from mxjax.core.formats import E2M1, E4M3
from mxjax.errors import BlockShapeError
from mxjax.report.arrays import HATCHES
from mxjax.report.numbers import element_values
from mxjax.report.plots import COLOURS, GREY, MARKERS, figure, line_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def lattice(hessian: Any, weight: Any, choices: Mapping[str, Any], values: Sequence[float]) -> Figure:
    """Two weights of a row as a point, the grid they can be rounded to, and what each choice costs.

    The ellipse through a choice holds all points of its cost ``(w - q) H (w - q)^T``: a choice is good if its ellipse
    is small, not if it is near.

    Args:
      hessian: [2, 2], positive definite.
      weight: [2], the point.
      choices: label -> point [2].
      values: what each coordinate can be.

    Raises:
      BlockShapeError: other than two weights.
    """
    h, w = np.asarray(hessian, np.float64), np.asarray(weight, np.float64)
    if h.shape != (2, 2) or w.shape != (2,):
        raise BlockShapeError(f"two weights have a Hessian (2, 2), not {h.shape} and {w.shape}")
    fig, (ax,) = figure(6.4, 4.6)
    ax.grid(visible=False)
    grid = np.array([(a, b) for a in values for b in values])
    ax.plot(*grid.T, ".", color="#9ca3af", markersize=6, zorder=1)
    angle = np.linspace(0, 2 * np.pi, 200)
    circle = np.linalg.solve(np.linalg.cholesky(h).T, np.array([np.cos(angle), np.sin(angle)]))
    reach = [np.abs(grid - w).max() * 0.45]
    for i, (label, q) in enumerate(choices.items()):
        d = np.asarray(q, np.float64) - w
        cost = d @ h @ d
        style: dict[str, Any] = dict(color=COLOURS[i], linewidth=1.3, linestyle=("-", "--", ":")[i % 3])
        ax.plot(*(w[:, None] + np.sqrt(cost) * circle), **style)
        ax.plot(*q, MARKERS[i], color=COLOURS[i], markersize=9, label=f"{label}: cost {cost:.3g}", zorder=3)
        reach.append(float(np.abs(d).max() * 1.25))
    ax.plot(*w, "*", color="#111827", markersize=13, label="weight", zorder=4)
    half = max(reach)
    ax.set_xlim(w[0] - half, w[0] + half)
    ax.set_ylim(w[1] - half, w[1] + half)
    ax.set_aspect("equal")
    ax.set_xlabel("first weight")
    ax.set_ylabel("second weight")
    fig.legend(loc="outside right upper", frameon=False, fontsize=9)
    return fig


def running_cost(costs: Mapping[str, Any], x_name: str = "columns done", y_name: str = "cost so far") -> Figure:
    """How a cost grows from step to step, a line a label.

    Args:
      costs: label -> cost of each step, in order.
      x_name, y_name: of the axes.
    """
    fig, (ax,) = figure(8, 3.4)
    for i, (label, cost) in enumerate(costs.items()):
        total = np.cumsum(np.asarray(cost, np.float64))
        style = line_style(i) | {"markevery": (i * max(len(total) // 24, 1), max(len(total) // 8, 1)), "markersize": 5}
        ax.plot(np.arange(1, len(total) + 1), total, linewidth=1.5, label=f"{label}: {total[-1]:.3g}", **style)
    ax.set_xlabel(x_name)
    ax.set_ylabel(y_name)
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False, fontsize=9)
    return fig


def spectrum(lines: Mapping[str, Any], x_name: str, y_name: str, marks: Mapping[str, float] | None = None) -> Figure:
    """Positive values in falling order on a logarithmic axis, a line a label.

    Args:
      lines: label -> values, in any order.
      x_name, y_name: of the axes.
      marks: label -> position in the order that gets a thin vertical line.
    """
    fig, (ax,) = figure(8, 3.2)
    for label, at in (marks or {}).items():
        ax.axvline(at + 0.5, color=GREY, linestyle=":", linewidth=1)
        ax.text(at + 1.5, 0.98, label, transform=ax.get_xaxis_transform(), va="top", fontsize=8, color=GREY)
    for i, (label, values) in enumerate(lines.items()):
        y = np.sort(np.asarray(values, np.float64))[::-1]
        style = line_style(i) | {"markevery": max(len(y) // 12, 1), "markersize": 5}
        ax.plot(np.arange(1, len(y) + 1), np.where(y > 0, y, np.nan), linewidth=1.5, label=label, **style)
    ax.set_yscale("log")
    ax.set_xlabel(x_name)
    ax.set_ylabel(y_name)
    if len(lines) > 1:
        ax.legend(frameon=False, fontsize=9)
    return fig


def exact_binades(shifts: Sequence[int], top: int = 6) -> Figure:
    """The E2M1 values of blocks whose scales lie ``shift`` powers of two below the row's largest, as E4M3 numbers.

    A block's values are multiplied by ``2**(top - shift)``. Those that are E4M3 numbers are drawn full; those that E4M3
    must round are drawn hollow: that starts where even its subnormal numbers are too coarse.

    Args:
      shifts: a row each, from top to bottom.
      top: power of two of the largest block's values.
    """
    positive = [v for v in element_values(E2M1) if v > 0]
    fig, (ax,) = figure(9, 0.21 * len(shifts) + 1.4)
    ax.grid(visible=False)
    comb = [v for v in element_values(E4M3) if v > 0]
    ax.vlines(comb, -0.6, len(shifts) - 0.4, color="#e5e7eb", linewidth=0.6, zorder=0)
    for row, shift in enumerate(reversed(shifts)):
        values = np.array(positive) * 2.0 ** (top - shift)
        back = np.asarray(codec.decode(codec.encode(jnp.asarray(values, jnp.float32), E4M3), E4M3))
        exact = back == values
        ax.plot(values[exact], np.full(exact.sum(), row), "o", color=COLOURS[0], markersize=5)
        ax.plot(values[~exact], np.full((~exact).sum(), row), "D", markerfacecolor="white", markeredgecolor=COLOURS[5],
                markersize=5)  # fmt: skip
    ax.plot([], [], "o", color=COLOURS[0], label="an E4M3 number")
    ax.plot([], [], "D", markerfacecolor="white", markeredgecolor=COLOURS[5], label="rounded")
    ax.set_xscale("log", base=2)
    ax.set_yticks(range(len(shifts)), [f"{shift}" for shift in reversed(shifts)])
    ax.set_ylabel("powers of two below\nthe row's largest scale")
    ax.set_xlabel("value in FP8; grey: every E4M3 number")
    fig.legend(loc="outside upper right", frameon=False, fontsize=9, ncols=2)
    return fig


def roofline(
    points: Mapping[str, Sequence[tuple[float, float, float]]], bandwidth: float, peaks: Mapping[str, float]
) -> Figure:
    """Measured kernels under the machine's limits: operations a second against operations a byte, both logarithmic.

    Left of a ridge a kernel waits for memory, right of it for the arithmetic units.

    Args:
      points: label -> (operations, bytes, seconds) of each kernel.
      bandwidth: bytes a second.
      peaks: name of a unit -> operations a second.
    """
    fig, (ax,) = figure(8.4, 4.6)
    ax.grid(color="#e5e7eb", linewidth=0.6)
    intensity = [ops / size for rows in points.values() for ops, size, _ in rows]
    x = np.geomspace(min(intensity) / 2, max(intensity) * 2, 400)
    for i, (name, peak) in enumerate(peaks.items()):
        style: dict[str, Any] = dict(color="#111827", linestyle=("-", "--", ":")[i % 3], linewidth=1.4)
        ax.plot(x, np.minimum(peak, bandwidth * x) / 1e12, label=f"{name}: {peak / 1e12:,.0f} TFLOP/s", **style)
    for i, (label, rows) in enumerate(points.items()):
        ops, size, seconds = np.array(rows, np.float64).T
        ax.plot(ops / size, ops / seconds / 1e12, MARKERS[i % len(MARKERS)], color=COLOURS[i % len(COLOURS)],
                markersize=6, label=label)  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("operations a byte")
    ax.set_ylabel("TFLOP/s")
    ax.set_title(f"memory: {bandwidth / 1e12:.2f} TB/s", fontsize=10)
    fig.legend(loc="outside right upper", frameon=False, fontsize=9)
    return fig


def traffic(routes: Mapping[str, Mapping[str, float]], unit: str = "bytes a value") -> Figure:
    """What each way of doing a thing moves through memory: a stacked bar a route.

    Args:
      routes: label -> {part: amount}; a part has one colour and hatch wherever it occurs.
      unit: of the amounts.
    """
    fig, (ax,) = figure(8, 0.5 * len(routes) + 1.3)
    ax.grid(axis="y", visible=False)
    ax.grid(axis="x", color="#e5e7eb", linewidth=0.8)
    parts = list(dict.fromkeys(part for route in routes.values() for part in route))
    y, left = np.arange(len(routes))[::-1], np.zeros(len(routes))
    for i, part in enumerate(parts):
        amount = np.array([route.get(part, 0.0) for route in routes.values()])
        style: dict[str, Any] = dict(color=COLOURS[i % len(COLOURS)], hatch=HATCHES[i % len(HATCHES)])
        ax.barh(y, amount, 0.6, left=left, label=part, edgecolor="white", **style)
        left += amount
    for at, total in zip(y, left, strict=True):
        ax.text(total, at, f" {total:.3g}", va="center", fontsize=9)
    ax.set_yticks(y, list(routes))
    ax.set_xlabel(unit)
    ax.set_xlim(0, 1.12 * left.max())
    fig.legend(loc="outside upper right", frameon=False, fontsize=9, ncols=len(parts))
    return fig
