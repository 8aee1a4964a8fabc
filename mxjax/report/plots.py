"""Plots of a quantized tree. Every function returns a ``matplotlib.figure.Figure`` and touches no global state.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; lines differ in their markers as well, so that a
print in grey can be read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from mxjax.core import codec, packing
from mxjax.core.formats import E4M3, E8M0_BIAS, NAN_BYTE, ElementFormat
from mxjax.core.qtensor import QTensor
from mxjax.errors import ConfigError, MissingExtraError
from mxjax.ops.qweight import QWeight

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
MARKERS = "osD^vPX"
GREY = "#6b7280"


def place(path: str) -> tuple[int | None, str]:
    """Depth and kind of a weight: ``layers/3/mlp/up_proj/kernel`` -> (3, "up_proj")."""
    parts = [p for p in path.split("/") if p not in ("kernel", "weight", "embedding", "qtensor")]
    depth = next((int(m.group()) for p in parts if (m := re.search(r"\d+", p))), None)
    kind = next((p for p in reversed(parts) if not p.isdigit()), path)
    return depth, kind


def kinds_of(paths: Iterable[str]) -> dict[str, str]:
    """Path -> kind of projection, as :func:`place`, with what it is part of where a block has several of one name.

    Example:
      >>> list(kinds_of([f"blocks/0/{name}/kernel" for name in ("attn1/to_q", "attn2/to_q", "ff/up")]).values())
      ['attn1/to_q', 'attn2/to_q', 'up']
    """
    placed = {path: place(path) for path in paths}
    several = {kind for (depth, kind), n in Counter(placed.values()).items() if n > 1 and depth is not None}
    kinds = {}
    for path, (_, kind) in placed.items():
        names = [part for part in path.split("/") if not part.isdigit()]
        kinds[path] = f"{names[at - 1]}/{kind}" if kind in several and (at := _last(names, kind)) else kind
    return kinds


def _last(names: Sequence[str], name: str) -> int:
    return len(names) - 1 - list(reversed(names)).index(name) if name in names else 0


def figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, row by row.

    Raises:
      MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise MissingExtraError("plots need matplotlib: pip install 'mxjax[plot]'") from e
    fig = Figure(figsize=(width, height), layout="constrained")
    axes = list(np.ravel(fig.subplots(rows, columns, **options)))
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="#e5e7eb", linewidth=0.8)
        ax.set_axisbelow(True)
    return fig, axes


def label_colours(labels: Iterable[str], reference: str | None = None) -> dict[str, str]:
    """One colour a label, for every plot of a page: a variant looks the same wherever it is drawn.

    Args:
      labels: in the order of the palette; repetitions count once.
      reference: the label of the float model, which is grey.
    """
    named = [label for label in dict.fromkeys(labels) if label != reference]
    colours = {label: COLOURS[i % len(COLOURS)] for i, label in enumerate(named)}
    return colours if reference is None else {**colours, reference: GREY}


def line_style(i: int) -> dict[str, Any]:
    """Colour, marker and dashes of the ``i``-th line, as keywords for ``Axes.plot``; 28 differ without colour, too."""
    dashes = ("-", "--", ":", "-.")[i // len(MARKERS) % 4]
    colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
    return {"color": colour, "marker": marker, "markersize": 3.5, "linestyle": dashes}


def whole_numbers(ax: Axes) -> None:
    """Put the ticks of the x axis at whole numbers, as for blocks."""
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def qtensors(tree_leaves: Sequence[Any]) -> list[QTensor]:
    """The QTensors of quantized leaves, of the most common format among them (their histograms add up)."""
    found = [leaf.qtensor if isinstance(leaf, QWeight) else leaf for leaf in tree_leaves]
    found = [q for q in found if isinstance(q, QTensor)]
    if not found:
        raise ConfigError("nothing in this tree is quantized")
    names = [q.format.name for q in found]
    return [q for q in found if q.format.name == max(set(names), key=names.count)]


def code_values(element: ElementFormat) -> np.ndarray:
    """The value of every code of an element format, in the order of the codes; some may be Inf or NaN."""
    return np.asarray(codec.decode(jnp.arange(1 << element.bits, dtype=jnp.uint8), element))


def element_counts(tensors: Sequence[QTensor]) -> tuple[np.ndarray, np.ndarray]:
    """How often each element value occurs: (values in order, counts). The two zeros are one value."""
    element = tensors[0].format.element
    counts = np.zeros(256, np.int64)
    for q in tensors:
        codes = q.codes if element.bits != 6 else packing.unpack(q.codes, 6)
        counts += np.bincount(np.asarray(codes).reshape(-1), minlength=256)
    if element.bits == 4:  # two codes a byte: count bytes first, then their halves
        pairs = counts.reshape(16, 16)
        counts = pairs.sum(axis=0) + pairs.sum(axis=1)
    values = code_values(element)
    finite = np.isfinite(values)
    distinct = np.unique(values[finite] + 0.0)
    at = np.searchsorted(distinct, values[finite] + 0.0)
    return distinct, np.bincount(at, weights=counts[: len(values)][finite], minlength=len(distinct)).astype(np.int64)


def block_scales(tensors: Sequence[QTensor]) -> np.ndarray:
    """``log2`` of every block's scale, tensor scale included; zero and NaN blocks are left out. float32 [blocks]."""
    every_byte = jnp.arange(256, dtype=jnp.uint8)
    if tensors[0].format.scale == "e8m0":
        log2_of = np.arange(256, dtype=np.float32) - E8M0_BIAS
    else:
        with np.errstate(divide="ignore"):  # byte 0; left out below
            log2_of = np.log2(np.abs(np.asarray(codec.decode(every_byte, E4M3))))
    out = []
    for q in tensors:
        byte = np.asarray(q.scales)
        log2 = log2_of[byte]
        if q.global_scale is not None:
            g = np.log2(np.asarray(q.global_scale))
            log2 = log2 + g.reshape(g.shape + (1,) * (log2.ndim - g.ndim))
        out.append(log2[(byte != 0) & (byte != NAN_BYTE)].reshape(-1))
    return np.concatenate(out).astype(np.float32)


def histograms(label: str, tensors: Sequence[QTensor], colour: str = COLOURS[0]) -> Figure:
    """Two panels: the share of each element value, and the distribution of the block scales.

    Args:
      label: for the titles.
      tensors: QTensors of one format.
      colour: of the bars.
    """
    fig, (left, right) = figure(9, 3.1, 1, 2)
    values, counts = element_counts(tensors)
    share = 100 * counts / max(counts.sum(), 1)
    if len(values) <= 32:
        left.bar(np.arange(len(values)), share, color=colour, edgecolor="white", linewidth=0.6)
        left.set_xticks(np.arange(len(values)), [f"{v:g}" for v in values], fontsize=8)
    else:
        left.hist(values, bins=64, weights=share, color=colour)
    left.set_title(f"{label}: element values", fontsize=10)
    left.set_xlabel("element (value / block scale)")
    left.set_ylabel("share of weights (%)")
    scales = block_scales(tensors)
    if scales.size:
        low, high = np.floor(scales.min()), np.ceil(scales.max()) + 1
        step = 1.0 if tensors[0].format.scale == "e8m0" else 0.25
        edges = (np.arange(low, high + step, step) - step / 2).tolist()
        right.hist(scales, bins=edges, weights=np.full(scales.size, 100 / scales.size), color=colour,
                   edgecolor="white", linewidth=0.6)  # fmt: skip
    right.set_title(f"{label}: block scales", fontsize=10)
    right.set_xlabel("log2(scale)")
    whole_numbers(right)
    right.set_ylabel("share of blocks (%)")
    return fig


def weight_histogram(weights: Mapping[str, Any]) -> Figure:
    """Distribution of float weights in units of each weight's own standard deviation, a line a kind, log scale.

    A normal distribution is drawn for comparison: what lies outside it are the outliers that blocks suffer from.

    Args:
      weights: path -> float array.
    """
    fig, (ax,) = figure(8, 3.4)
    edges = np.linspace(-12, 12, 121)
    counts: dict[str, np.ndarray] = {}
    for path, w in weights.items():
        flat = np.asarray(w, np.float32).reshape(-1)
        unit = np.clip(flat / (flat.std() or 1.0), edges[0], edges[-1])
        kind = place(path)[1]
        counts[kind] = counts.get(kind, 0) + np.histogram(unit, edges)[0]
    middle = (edges[:-1] + edges[1:]) / 2
    for i, (kind, n) in enumerate(counts.items()):
        density = n / n.sum() / (edges[1] - edges[0])
        style = line_style(i) | {"markevery": 5}
        ax.plot(middle, np.where(density > 0, density, np.nan), linewidth=1.2, label=kind, **style)
    normal = np.exp(-(middle**2) / 2) / np.sqrt(2 * np.pi)
    ax.plot(middle, np.where(normal > 1e-8, normal, np.nan), color=GREY, linestyle="--", linewidth=1.2, label="normal")
    ax.set_yscale("log")
    ax.set_xlabel("weight / standard deviation (the ends collect what lies beyond)")
    ax.set_ylabel("density")
    ax.legend(frameon=False, fontsize=8, ncols=2, loc="upper right")
    return fig


def quality(
    labels: Sequence[str],
    perplexities: Sequence[float],
    reference: float | None = None,
    colours: Mapping[str, str] | None = None,
) -> Figure:
    """Perplexity of each variant as bars, with the float model as a line.

    Args:
      labels, perplexities: of the variants.
      reference: where the line is.
      colours: label -> colour; default: :func:`label_colours`.
    """
    colours = label_colours(labels) if colours is None else colours
    fig, (ax,) = figure(8, max(0.42 * len(labels) + 1.1, 1.8))
    ax.grid(axis="y", visible=False)
    ax.grid(axis="x", color="#e5e7eb", linewidth=0.8)
    y = np.arange(len(labels))[::-1]
    bars = ax.barh(y, perplexities, color=[colours[label] for label in labels], height=0.62)
    ax.bar_label(bars, [f"{p:.2f}" for p in perplexities], padding=4, fontsize=9)
    ax.set_yticks(y, labels)
    ax.set_xlim(0, 1.12 * max(perplexities, default=1))
    ax.set_xlabel("perplexity, lower is better")
    if reference is not None:
        ax.axvline(reference, color=GREY, linestyle="--", linewidth=1.2)
    return fig
