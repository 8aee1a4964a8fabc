"""Which recipe each weight got, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mxjax import api, recipes
from mxjax.config import QuantConfig
from mxjax.report import html
from mxjax.transforms.base import describe, needs_fit


def reasons(params: Any, cfg: str | QuantConfig) -> dict[str, str]:
    """Path -> the rule that decided and what it says, or why the array stays as it is.

    Args:
      params: the float tree.
      cfg: the recipe or config it was quantized with.

    Example:
      >>> reasons({"a": {"kernel": jnp.ones((64, 8))}, "norm": {"scale": jnp.ones(64)}}, "gptq_mxfp4")
      {'a/kernel': 'gptq, the rule for all', 'norm/scale': 'not a matrix: it has 1 axes'}
    """
    cfg = recipes.get(cfg).replace(on_uneven="skip")  # uneven axes are reasons here, no errors
    out = {}
    for entry in api.plan(params, cfg).entries:
        out[entry.path] = entry.reason
        if entry.spec is not None:
            rule = next(rule for rule in cfg.rules if rule.matches(entry.path))
            out[entry.path] = f"{rule.algorithm}, " + (f"rule {rule.path!r}" if rule.path else "the rule for all")
            if needs_fit(rule.transform):
                out[entry.path] += f"; transform: {describe(rule.transform)}"
    return out


def recipe_of(row: api.SummaryRow) -> str:
    """The formats of a quantized weight, its transform and its branch, in a line."""
    inputs = row.activation if row.activation != "float" else "float inputs"
    return ", ".join(part for part in (f"{row.weight} × {inputs}", row.extras) if part)


def choices_section(summary: api.Summary, why: Mapping[str, str]) -> str:
    """A row for each distinct recipe: how many weights have it, which, why, and what they take.

    Args:
      summary: of the quantized tree.
      why: what :func:`reasons` says, or empty: not known.
    """
    groups: dict[tuple[str, str], list[api.SummaryRow]] = {}
    for row in summary.rows:
        if row.quantized:
            groups.setdefault((recipe_of(row), why.get(row.path, "")), []).append(row)
    rows = []
    for (recipe, reason), members in sorted(groups.items(), key=lambda item: -len(item[1])):
        nbytes = sum(m.nbytes for m in members)
        values = sum(m.nbytes * 8 / m.bits_per_value for m in members if m.bits_per_value)
        first, last = members[0].path, members[-1].path
        paths = first if len(members) == 1 else f"{first} ... {last}"
        rows.append([recipe, reason or None, len(members), nbytes * 8 / values if values else 0.0, nbytes, paths])
    head = ["weight × inputs, transform", "why", "weights", "bits", "bytes", "which"]
    keep = [i for i in range(len(head)) if any(row[i] is not None for row in rows)]
    table = html.table([head[i] for i in keep], [[row[i] for i in keep] for row in rows], sortable=True)
    text = "What the quantized weights are. A transform that was chosen layer by layer makes a row for each choice."
    if not why:
        text += " The rules that decided are shown where the report is given the config (cfg=...)."
    return html.section("Which recipe each weight got", text, table, kind="choices")
