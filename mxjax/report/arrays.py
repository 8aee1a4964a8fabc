"""Pictures of arrays: bytes before and after, heat maps side by side, and which device holds what.

Conventions as in :mod:`mxjax.report.plots`: each function returns a matplotlib ``Figure`` and touches no global state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from mxjax.api import summary
from mxjax.errors import BlockShapeError
from mxjax.report.plots import COLOURS, GREY, figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HATCHES = ("", "//", "..", "xx", "\\\\", "oo", "++", "--")


def sizes(trees: Mapping[str, Any]) -> Figure:
    """Bytes of every leaf, a bar a tree: what quantization makes smaller and what it leaves.

    Args:
      trees: label -> tree, all of one structure; the first label's bars are grey.
    """
    rows = {label: summary(tree) for label, tree in trees.items()}
    paths = [row.path for row in next(iter(rows.values())).rows]
    fig, (ax,) = figure(8.5, 0.26 * len(paths) * (1 + 0.4 * len(rows)) + 1.2)
    ax.grid(axis="y", visible=False)
    ax.grid(axis="x", color="#e5e7eb", linewidth=0.8)
    height = 0.8 / len(rows)
    for i, (label, table) in enumerate(rows.items()):
        colour = GREY if i == 0 else COLOURS[(i - 1) % len(COLOURS)]
        nbytes = [row.nbytes / 1024 for row in table.rows]
        name = f"{label}: {table.nbytes / 1024:,.1f} KiB"
        ax.barh(np.arange(len(paths)) + (i - (len(rows) - 1) / 2) * height, nbytes, height, color=colour, label=name)
    ax.set_yticks(range(len(paths)), paths, fontsize=8)
    ax.invert_yaxis()
    ax.set_xlabel("KiB")
    ax.legend(frameon=False, fontsize=9, loc="lower right")
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
        ax.set_title(f"{title} {array.dtype} {list(array.shape)}", fontsize=9)
    return fig
