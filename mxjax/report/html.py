"""The pieces of the page: text is escaped, figures are embedded, nothing is loaded from anywhere."""

from __future__ import annotations

import base64
import io
import math
import os
import tempfile
from collections.abc import Iterable, Sequence
from datetime import date
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from mxjax import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
:root { --ink: #111827; --soft: #4b5563; --line: #e5e7eb; --paper: #fff; --tint: #f8fafc; --mark: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e5e7eb; --soft: #a3adba; --line: #374151; --paper: #1b222d;
  --tint: #11161d; --mark: #56b4e9; } img { background: #fff; border-radius: 8px; padding: 6px; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--tint); color: var(--ink); font: 15px/1.55 system-ui, "Segoe UI", "DejaVu Sans",
  sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 4px; }
h2 { font-size: 19px; margin: 0 0 4px; }
p { margin: 4px 0 14px; color: var(--soft); max-width: 110ch; }
section, .card { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; }
section { padding: 20px 22px; margin-top: 20px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 14px; margin-top: 22px; }
.card { padding: 14px 16px; }
.card b { display: block; font-size: 21px; line-height: 1.3; color: var(--mark); font-variant-numeric: tabular-nums; }
.card span { color: var(--soft); font-size: 13px; line-height: 1.4; display: block; overflow-wrap: anywhere; }
figure { margin: 8px 0 0; }
figcaption { color: var(--soft); font-size: 13.5px; margin: 10px 0 4px; max-width: 110ch; }
img { max-width: 100%; height: auto; display: block; margin: 0 auto; }
.scroll { overflow: auto; max-height: 560px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; }
th { background: var(--paper); position: sticky; top: 0; box-shadow: inset 0 -2px 0 var(--line); }
table.sortable th { cursor: pointer; }
table.sortable th:focus-visible { outline: 2px solid var(--mark); outline-offset: -2px; }
table.sortable th:not([aria-sort])::after { content: " \\21c5"; color: var(--soft); opacity: .5; }
th[aria-sort=ascending]::after { content: " \\25b2"; } th[aria-sort=descending]::after { content: " \\25bc"; }
td.n, th.n { text-align: right; }
.choices td { white-space: normal; overflow-wrap: anywhere; min-width: 11em; }
.choices td.n { white-space: nowrap; min-width: 0; }
tbody tr:hover { background: var(--tint); }
.samples { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 14px; }
.samples div { border: 1px solid var(--line); border-left: 4px solid var(--mark); border-radius: 6px;
  padding: 10px 14px; }
.samples b { font-size: 13px; color: var(--soft); }
.samples pre, .prompt { white-space: pre-wrap; margin: 4px 0 0; font: inherit; color: var(--ink); }
summary { cursor: pointer; color: var(--soft); }
footer { margin-top: 24px; color: var(--soft); font-size: 13px; }
@media (max-width: 640px) { main { padding: 18px 10px 40px; } h1 { font-size: 22px; } section { padding: 14px 12px; }
  .cards { grid-template-columns: repeat(2, 1fr); gap: 8px; } figure { overflow-x: auto; }
  section > figure > img { min-width: 560px; } }
@media print { :root { --ink: #111827; --soft: #4b5563; --line: #e5e7eb; --paper: #fff; --tint: #fff; --mark: #0072b2; }
  table.sortable th::after { content: none; } body { background: #fff; font-size: 12px; }
  main { max-width: none; padding: 0; }
  section, .card { break-inside: avoid; } .layers { break-inside: auto; }
  .scroll { max-height: none; overflow: visible; } th { position: static; } }
"""

SCRIPT = """
for (const th of document.querySelectorAll("table.sortable th")) {
 th.tabIndex = 0;
 th.onkeydown = event => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); th.click(); } };
 th.onclick = () => {
  const body = th.closest("table").tBodies[0], up = th.getAttribute("aria-sort") !== "ascending";
  for (const other of th.parentNode.children) other.removeAttribute("aria-sort");
  th.setAttribute("aria-sort", up ? "ascending" : "descending");
  const key = row => row.cells[th.cellIndex].dataset.v ?? row.cells[th.cellIndex].textContent;
  const compare = (a, b) => isNaN(a) || isNaN(b) ? a.localeCompare(b, "en", {numeric: true}) : a - b;
  [...body.rows].sort((a, b) => (up ? 1 : -1) * compare(key(a), key(b))).forEach(row => body.append(row));
 };
}
"""


class Digits(NamedTuple):
    """A cell of :func:`table`: a number with so many digits and what stands before it. Aligned and sorted by value."""

    value: float
    digits: int = 2
    before: str = ""


def number(value: float | None, digits: int = 2) -> str:
    """A number for people; nothing where there is none."""
    if value is None:
        return ""
    return f"{value:,.{digits}f}" if math.isfinite(value) else ("∞" if value > 0 else str(value))


def cards(items: Iterable[tuple[str, str]]) -> str:
    """(number, caption) pairs as overview cards."""
    inner = "".join(f'<div class="card"><b>{escape(big)}</b><span>{escape(small)}</span></div>' for big, small in items)
    return f'<div class="cards">{inner}</div>'


def section(title: str, text: str, *content: str, kind: str = "") -> str:
    """A titled part; ``text`` is plain, ``content`` is HTML."""
    return f'<section class="{escape(kind)}"><h2>{escape(title)}</h2><p>{escape(text)}</p>{"".join(content)}</section>'


def image(fig: Figure, alt: str, caption: str = "") -> str:
    """A figure inside the page, as SVG: sharp on paper, its text drawn as paths so that no font is needed.

    Args:
      fig: the figure.
      alt: what it shows, for those who do not see it.
      caption: plain text above it: what to look for.
    """
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "mxjax", "svg.fonttype": "path"}):  # the same figure gives the same bytes
        fig.savefig(buffer, format="svg", metadata={"Date": None})
    data = base64.b64encode(buffer.getvalue()).decode()
    above = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure>{above}<img src="data:image/svg+xml;base64,{data}" alt="{escape(alt)}"></figure>'


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], *, sortable: bool = False) -> str:
    """A table; floats are right-aligned with two digits (:class:`Digits`: as many as it says), ints whole; they sort by
    value, the rest as text."""
    numeric = [any(isinstance(row[i], int | float | Digits) for row in rows) for i in range(len(head))]
    classes = [' class="n"' if n else "" for n in numeric]
    out = ["".join(f"<th{c}>{escape(h)}</th>" for h, c in zip(head, classes, strict=True))]
    for row in rows:
        out.append("".join(_cell(value, c) for value, c in zip(row, classes, strict=True)))
    body = "".join(f"<tr>{row}</tr>" for row in out[1:])
    kind = ' class="sortable"' if sortable else ""
    return f'<div class="scroll"><table{kind}><thead><tr>{out[0]}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(value: Any, css: str) -> str:
    if value is None:
        return f'<td{css} data-v="NaN"></td>'
    value, digits, before = value if isinstance(value, Digits) else (value, 2, "")
    if isinstance(value, float):
        sort = "1e308" if value == math.inf else "-1e308" if value == -math.inf else repr(value)
        return f'<td{css} data-v="{sort}">{escape(before)}{number(value, digits)}</td>'
    if isinstance(value, int):
        return f'<td{css} data-v="{value}">{value:,}</td>'
    return f"<td{css}>{escape(str(value))}</td>"


def page(title: str, subtitle: str, body: str, footer: str) -> str:
    """The whole document."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f"<h1>{escape(title)}</h1><p>{escape(subtitle)}</p>{body}<footer>{escape(footer)}</footer>"
        f"</main><script>{SCRIPT}</script></body></html>\n"
    )


def footer() -> str:
    """Versions, device and date."""
    device = jax.devices()[0]  # a CPU's kind is "cpu" again
    kind = device.platform if device.device_kind == device.platform else f"{device.platform}: {device.device_kind}"
    return f"mxjax {__version__}, jax {jax.__version__}, {kind}, {date.today()}"


def write(path: Path, text: str) -> Path:
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
