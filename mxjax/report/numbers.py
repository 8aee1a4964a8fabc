"""Pictures of the formats themselves: what codes exist, how values round, what a scale does to a block.

Conventions as in :mod:`mxjax.report.plots`: each function returns a matplotlib ``Figure`` and touches no global state.

    numbers.number_lines(["mxfp4", "mxfp6_e2m3"]).savefig("codes.png")
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.core import codec
from mxjax.core.formats import BlockFormat, ElementFormat, get_format
from mxjax.core.qtensor import QTensor
from mxjax.core.quantize import quantize_array
from mxjax.core.scales import POLICIES, check_policy
from mxjax.errors import BlockShapeError, FormatError
from mxjax.report.plots import COLOURS, GREY, block_scales, code_values, figure, line_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NORMAL, SUBNORMAL, ROUNDED, CLIPPED = COLOURS[0], COLOURS[1], COLOURS[0], COLOURS[5]


def element_values(element: ElementFormat) -> np.ndarray:
    """The finite values that an element format has, in order; the two zeros are one value."""
    values = code_values(element)
    return np.unique(values[np.isfinite(values)] + 0.0)


def policies_of(fmt: str | BlockFormat) -> list[str]:
    """The scale policies that go with a format.

    Example:
      >>> policies_of("mxfp4")
      ['floor', 'even', 'ceil', 'rceil', 'mse', 'third']
    """
    fmt, fitting = get_format(fmt), []
    for policy in POLICIES:
        try:
            check_policy(policy, fmt)
        except FormatError:
            continue
        fitting.append(policy)
    return fitting


def number_lines(formats: Sequence[str | BlockFormat], *, log: bool = False) -> Figure:
    """Every value that the elements of each format can take, a line a format.

    Subnormal values (those below the smallest normal one, zero included) have a colour and a length of their own.
    Lines of up to 15 values are labelled, every second value of them on the logarithmic axis.

    Args:
      formats: names or BlockFormats.
      log: positive values only, on an axis of powers of two. Default: all of them, divided by the largest, so that
        formats can be compared.
    """
    shown = [get_format(f) for f in formats]
    fig, (ax,) = figure(9, 0.75 * len(shown) + 0.9)
    ax.grid(visible=False)
    ax.spines["left"].set_visible(False)
    for row, fmt in enumerate(reversed(shown)):
        element = fmt.element
        values = element_values(element)
        values = values[values > 0] if log else values
        at = values if log else values / element.max_value
        tiny = np.abs(values) < 2.0**element.min_exponent
        ax.axhline(row, color="#d1d5db", linewidth=0.8, zorder=0)
        for chosen, colour, half in ((~tiny, NORMAL, 0.26), (tiny, SUBNORMAL, 0.16)):
            ax.vlines(at[chosen], row - half, row + half, color=colour, linewidth=1.4 if len(values) < 80 else 0.7)
        if len(values) <= 15:
            # Of powers of two a line shows few values close together: every second one has room for a number.
            for x, value in list(zip(at, values, strict=True))[:: 2 if log else 1]:
                ax.annotate(f"{value:g}", (x, row - 0.29), ha="center", va="top", fontsize=7)
    ax.set_yticks(range(len(shown)), [f"{f.name} ({f.element.name})" for f in reversed(shown)])
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(-0.6, len(shown) - 0.55)
    if log:
        ax.set_xscale("log", base=2)
        ax.set_xlabel("element (positive values)")
    else:
        ax.set_xlabel("element / largest element")
    names = (("normal", NORMAL), ("subnormal", SUBNORMAL))
    handles = [ax.vlines([], 0, 0, color=colour, linewidth=2, label=name) for name, colour in names]
    fig.legend(handles=handles, loc="outside upper right", frameon=False, fontsize=9, ncols=2)
    return fig


def rounding_staircase(fmt: str | BlockFormat, limit: float | None = None) -> Figure:
    """What rounding makes of each number, ties marked, and the error below.

    Half way between two elements a number goes to the one with the even code; beyond the largest it saturates.

    Args:
      fmt: the format whose elements are meant.
      limit: draw 0 to ``limit``; default: a quarter beyond the largest element.
    """
    element = get_format(fmt).element
    limit = 1.25 * element.max_value if limit is None else limit
    values = element_values(element)
    values = values[(values >= 0) & (values <= limit)]
    ties = (values[:-1] + values[1:]) / 2
    x = np.union1d(
        np.linspace(0, limit, 2001), np.concatenate([np.nextafter(ties, -np.inf), np.nextafter(ties, np.inf)])
    )
    fig, (top, bottom) = figure(7.5, 5.4, 2, 1, sharex=True, height_ratios=[3, 1])
    rounded = _round(x, element)
    top.plot(x, x, color=GREY, linestyle="--", linewidth=1, label="no rounding")
    top.plot(x, rounded, color=NORMAL, linewidth=1.6, label="rounded")
    if len(ties) <= 40:
        to = _round(ties, element)
        other = np.where(to == values[1:], values[:-1], values[1:])
        top.plot(ties, to, "o", color=CLIPPED, markersize=5, label="a tie goes here (even code)")
        top.plot(ties, other, "o", markerfacecolor="white", markeredgecolor=CLIPPED, markersize=5, label="and not here")
    if len(values) <= 20:
        top.set_yticks(values, [f"{v:g}" for v in values])
    top.set_ylabel("rounded")
    top.set_title(f"{element.name}: round to nearest, ties to even, saturate at {element.max_value:g}", fontsize=10)
    top.legend(frameon=False, fontsize=9)
    bottom.plot(x, rounded - x, color=NORMAL, linewidth=1.2)
    bottom.axhline(0, color=GREY, linewidth=0.8)
    bottom.set_xlabel("value / block scale")
    bottom.set_ylabel("error")
    return fig


def _round(x: np.ndarray, element: ElementFormat) -> np.ndarray:
    return np.asarray(codec.decode(codec.encode(jnp.asarray(x, jnp.float32), element), element))


def block_policies(
    block: Any, fmt: str | BlockFormat = "mxfp4", policies: Sequence[str] | None = None, *, tensor_amax: Any = None
) -> Figure:
    """One block under several scale policies: the grid that each scale gives, the values and where they land.

    Panels are titled with the policy, the scale, the number of clipped values and the relative error
    ``|x - q| / |x|``.

    Args:
      block: one block of floats, [block_size].
      fmt: its format.
      policies: default: all that go with the format.
      tensor_amax: the largest magnitude of the tensor that the block is part of (NVFP4); default: the block's own.

    Raises:
      BlockShapeError: not one block.
    """
    fmt = get_format(fmt)
    policies = policies_of(fmt) if policies is None else policies
    values = np.asarray(block, np.float32)
    if values.shape != (fmt.block_size,):
        raise BlockShapeError(f"one block of {fmt} has shape ({fmt.block_size},), not {values.shape}")
    columns = min(len(policies), 3)
    rows = -(-len(policies) // columns)
    fig, axes = figure(max(3.3 * columns + 0.6, 6.0), 2.7 * rows + 0.3, rows, columns, sharex=True, sharey=True)
    largest = 0.0
    for ax, policy in zip(axes, policies, strict=False):
        q = quantized_blocks(values, fmt, policy, tensor_amax)
        _block_panel(ax, values, q, policy)
        largest = max(largest, float(np.abs(values).max()), float(jnp.abs(q.dequantize()).max()))
    for ax in axes[len(policies) :]:
        ax.set_visible(False)
    for ax in axes[::columns]:
        ax.set_ylabel("value")
    axes[0].set_ylim(-1.12 * (largest or 1), 1.12 * (largest or 1))
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", frameon=False, fontsize=9, ncols=len(labels))
    return fig


def _block_panel(ax: Axes, values: np.ndarray, q: QTensor, policy: str) -> None:
    rounded = np.asarray(q.dequantize(jnp.float32))
    log2 = float(block_scales([q])[0]) if np.any(values) else 0.0
    grid = element_values(q.format.element) * 2.0**log2
    clipped = np.abs(values) > grid[-1] * (1 + 2e-7)  # two roundings of float32 above the largest are none
    at = np.arange(len(values))
    ax.grid(visible=False)
    ax.hlines(grid, -0.5, len(values) - 0.5, color="#d1d5db", linewidth=0.7, zorder=0)
    ax.vlines(at, values, rounded, color=GREY, linewidth=0.9)
    ax.plot(at, values, "o", markerfacecolor="white", markeredgecolor="#111827", markersize=4, label="float")
    ax.plot(at, rounded, "D", color=ROUNDED, markersize=3.2, label="quantized")
    ax.plot(at[clipped], rounded[clipped], "X", color=CLIPPED, markersize=6, label="clipped")
    error = relative_error(values, rounded)
    scale = f"$2^{{{log2:.0f}}}$" if log2 == round(log2) else f"{2.0**log2:.3g}"
    ax.set_title(f"{policy}: scale {scale}, {int(clipped.sum())} clipped, error {100 * error:.1f} %", fontsize=9)
    ax.set_xlabel("position in the block")


def policy_sweep(
    block: Any,
    fmt: str | BlockFormat = "mxfp4",
    policies: Sequence[str] | None = None,
    *,
    octaves: float = 2.0,
    points: int = 129,
    tensor_amax: Any = None,
) -> Figure:
    """The relative error of one block as it grows, a line a policy: where in a binade each policy is good.

    The block is multiplied so that its largest magnitude goes from 4 to ``4 * 2**octaves``; E8M0 scales repeat every
    octave, E4M3 scales are eight times finer.

    Args:
      block, fmt, policies: as :func:`block_policies`.
      octaves: how far it grows.
      points: how many sizes are measured.
      tensor_amax: as :func:`block_policies`; default: 100 times the largest size.
    """
    fmt = get_format(fmt)
    policies = policies_of(fmt) if policies is None else policies
    unit = np.asarray(block, np.float32) / np.abs(np.asarray(block, np.float32)).max()
    amax = 4 * 2 ** np.linspace(0, octaves, points)
    blocks = (amax[:, None] * unit).astype(np.float32)
    tensor_amax = 100 * amax[-1] if tensor_amax is None else tensor_amax
    fig, (ax,) = figure(8, 3.6)
    for i, policy in enumerate(policies):
        rounded = np.asarray(quantized_blocks(blocks, fmt, policy, tensor_amax).dequantize(jnp.float32))
        error = [100 * relative_error(*pair) for pair in zip(blocks, rounded, strict=True)]
        style = line_style(i) | {"markevery": (4 * i, max(points // 6, 1)), "markersize": 5}
        # Policies often agree: the later line is the thinner one, so that the one below shows.
        ax.plot(amax, error, linewidth=max(3.4 - 0.5 * i, 1.0), label=policy, **style)
    ax.set_xscale("log", base=2)
    ax.set_xlabel("largest magnitude of the block")
    ax.set_ylabel("relative error (%)")
    ax.set_ylim(bottom=0)
    ax.set_title(f"{fmt}: error by scale policy", fontsize=10)
    ax.legend(frameon=False, fontsize=9, ncols=min(len(policies), 4))
    return fig


def quantized_blocks(blocks: Any, fmt: str | BlockFormat, policy: str, tensor_amax: Any = None) -> QTensor:
    """Blocks as they are quantized within a tensor whose largest magnitude is ``tensor_amax`` (NVFP4's tensor scale).

    Args:
      blocks: float32 [..., K].
      fmt: block format.
      policy: scale policy.
      tensor_amax: default: the largest of ``blocks``. MX formats have no tensor scale; it means nothing for them.
    """
    fmt, blocks = get_format(fmt), jnp.asarray(blocks, jnp.float32)
    if tensor_amax is None or not fmt.has_tensor_scale:
        return quantize_array(blocks, fmt, scale=policy)
    whole = jnp.zeros(fmt.block_size).at[0].set(tensor_amax)
    return quantize_array(blocks, fmt, scale=policy, global_scale=quantize_array(whole, fmt, scale=policy).global_scale)


def relative_error(x: jax.Array | np.ndarray, q: jax.Array | np.ndarray) -> float:
    """``|x - q| / |x|`` in float64; 0 where both are zero."""
    x, q = np.asarray(x, np.float64), np.asarray(q, np.float64)
    return float(np.linalg.norm(x - q) / (np.linalg.norm(x) or 1.0))
