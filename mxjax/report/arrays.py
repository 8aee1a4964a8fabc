"""Pictures of arrays: bytes before and after, heat maps side by side, curves, bars, and which device holds what.

Conventions as in :mod:`mxjax.report.plots`: each function returns a matplotlib ``Figure`` and touches no global state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from mxjax.api import summary
from mxjax.errors import BlockShapeError
from mxjax.report.plots import COLOURS, GREY, figure, line_style, whole_numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HATCHES = ("", "//", "..", "xx", "\\\\", "oo", "++", "--")


def sizes(trees: Mapping[str, Any]) -> Figure:
    """Bytes of every leaf, a bar a tree: what quantization makes smaller and what it leaves.

    Leaves below a hundredth of the largest (biases, norms) share one row.

    Args:
      trees: label -> tree, all of one structure; the first label's bars are grey.
    """
    tables = {label: summary(tree) for label, tree in trees.items()}
    first = next(iter(tables.values())).rows
    small = [i for i, row in enumerate(first) if 100 * row.nbytes < max(r.nbytes for r in first)]
    shown = [i for i in range(len(first)) if i not in small]
    names = [first[i].path for i in shown] + ([f"{len(small)} small arrays"] if small else [])
    fig, (ax,) = figure(8.5, (0.12 + 0.1 * len(tables)) * len(names) + 1.3)
    ax.grid(axis="y", visible=False)
    ax.grid(axis="x", color="#e5e7eb", linewidth=0.8)
    height = 0.8 / len(tables)
    for i, (label, table) in enumerate(tables.items()):
        nbytes = [table.rows[j].nbytes for j in shown]
        nbytes += [sum(table.rows[j].nbytes for j in small)] if small else []
        at = np.arange(len(names)) + (i - (len(tables) - 1) / 2) * height
        colour = GREY if i == 0 else COLOURS[(i - 1) % len(COLOURS)]
        name = f"{label}: {table.nbytes / 1024:,.1f} KiB"
        style: dict[str, Any] = dict(color=colour, hatch=HATCHES[i % len(HATCHES)], edgecolor="white", linewidth=0.3)
        ax.barh(at, np.array(nbytes) / 1024, height, label=name, **style)
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.invert_yaxis()
    ax.set_xlabel("KiB")
    fig.legend(frameon=False, fontsize=9, loc="outside upper right", ncols=3)
    return fig


def heat_maps(arrays: Mapping[str, Any], unit: str = "magnitude") -> Figure:
    """Magnitudes of matrices side by side on one logarithmic colour scale, with the largest of each in its title.

    Args:
      arrays: title -> matrix. Its rows are drawn from top to bottom.
      unit: label of the colour bar.
    """
    from matplotlib.colors import LogNorm

    maps = {title: np.abs(np.asarray(a, np.float32)) for title, a in arrays.items()}
    largest = max(float(m.max()) for m in maps.values()) or 1.0
    norm = LogNorm(vmin=largest / 1e4, vmax=largest, clip=True)
    fig, axes = figure(3.6 * len(maps) + 0.9, 3.2, 1, len(maps))
    for ax, (title, m) in zip(axes, maps.items(), strict=True):
        ax.grid(visible=False)
        image = ax.imshow(m, norm=norm, cmap="cividis", aspect="auto", interpolation="nearest")
        ax.set_title(f"{title}\nlargest {m.max():.3g}", fontsize=9)
        ax.set_xlabel("channel")
    axes[0].set_ylabel("row")
    fig.colorbar(image, ax=axes, label=unit)
    return fig


def curves(x: Sequence[float], lines: Mapping[str, Sequence[float]], x_name: str, y_name: str) -> Figure:
    """Lines over a logarithmic axis from zero up, told apart by colour and by marker.

    Args:
      x: positive positions.
      lines: label -> values at ``x``, NaN where there is none. Labels that begin with the same word have one colour;
        the second of them is dashed.
      x_name, y_name: of the axes.
    """
    fig, (ax,) = figure(8, 3.6)
    first_words = list(dict.fromkeys(label.split()[0] for label in lines))
    for i, (label, y) in enumerate(lines.items()):
        word = label.split()[0]
        earlier = [other for other in list(lines)[:i] if other.split()[0] == word]
        style: dict[str, Any] = line_style(i) | {"color": COLOURS[first_words.index(word) % len(COLOURS)]}
        style |= {"linestyle": "--" if earlier else "-", "markersize": 5}
        known = np.isfinite(np.asarray(y, np.float64))  # a line goes over what was not measured
        ax.plot(np.asarray(x)[known], np.asarray(y)[known], linewidth=1.5, label=label, **style)
    ax.set_xscale("log")
    ax.set_xticks(list(x), [f"{value:g}" for value in x])
    ax.minorticks_off()
    ax.set_ylim(bottom=0)
    ax.set_xlabel(x_name)
    ax.set_ylabel(y_name)
    ax.legend(frameon=False, fontsize=9, ncols=2)
    return fig


def bars(groups: Mapping[str, Mapping[str, float]], name: str) -> Figure:
    """Grouped bars with their values written on them, a colour and a hatch a group.

    Args:
      groups: group -> {category: value}; every group has the categories of the first, in its order.
      name: of the axis of values.
    """
    categories = list(next(iter(groups.values())))
    fig, (ax,) = figure(max(1.5 * len(categories) + 1, 6), 3.4)
    width = 0.8 / len(groups)
    for i, (group, values) in enumerate(groups.items()):
        at = np.arange(len(categories)) + (i - (len(groups) - 1) / 2) * width
        style: dict[str, Any] = dict(color=COLOURS[i % len(COLOURS)], hatch=HATCHES[i % len(HATCHES)])
        drawn = ax.bar(at, [values[c] for c in categories], width, label=group, edgecolor="white", **style)
        ax.bar_label(drawn, fmt="%.3g", fontsize=8, padding=2)
    ax.set_xticks(range(len(categories)), categories)
    ax.set_ylabel(name)
    fig.legend(loc="outside upper right", frameon=False, fontsize=9, ncols=len(groups))
    return fig


def shards(arrays: Mapping[str, jax.Array]) -> Figure:
    """Which device holds which part of each matrix. Parts that several devices hold list all of them.

    Args:
      arrays: title -> matrix, on devices.

    Raises:
      BlockShapeError: an array that is no matrix.
    """
    from matplotlib.patches import Rectangle

    fig, axes = figure(3.4 * len(arrays) + 0.4, 3.0, 1, len(arrays))
    for ax, (title, array) in zip(axes, arrays.items(), strict=True):
        if array.ndim != 2:
            raise BlockShapeError(f"{title}: only matrices can be drawn, not {array.shape}")
        parts: dict[tuple[int, int, int, int], list[int]] = {}
        device: Any
        for device, index in array.sharding.devices_indices_map(array.shape).items():
            (top, bottom, _), (left, right, _) = (s.indices(n) for s, n in zip(index, array.shape, strict=True))
            parts.setdefault((top, bottom, left, right), []).append(device.id)
        ax.grid(visible=False)
        for i, ((top, bottom, left, right), devices) in enumerate(sorted(parts.items())):
            style: dict[str, Any] = dict(facecolor=COLOURS[i % 6], alpha=0.45, hatch=HATCHES[i % len(HATCHES)])
            ax.add_patch(Rectangle((left, top), right - left, bottom - top, edgecolor="white", **style))
            name = "device " + ", ".join(map(str, sorted(devices)))
            name = f"all {len(devices)} devices" if len(parts) == 1 else name
            plate = dict(facecolor="white", alpha=0.85, edgecolor="none", pad=1.5)
            ax.text((left + right) / 2, (top + bottom) / 2, name, ha="center", va="center", fontsize=8, bbox=plate)
        ax.set_xlim(0, array.shape[1])
        ax.set_ylim(array.shape[0], 0)
        whole_numbers(ax)
        ax.set_xlabel("axis 1")
        ax.set_title(f"{title} {array.dtype} {list(array.shape)}", fontsize=9)
    axes[0].set_ylabel("axis 0")
    return fig
