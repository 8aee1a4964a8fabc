"""What ``mxjax demo`` shows at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mxjax.recipes import get as get_recipe
from mxjax.text import size_text


def shown(demo: Any, checkpoint: Path, page: Path, seconds: float) -> Any:
    """The result for people: table, samples, where the files are."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{demo.title}, {demo.tokens.size} tokens of text")
    table.add_column("format")
    table.add_column("algorithm")
    for name in (
        "bits a\nweight",
        "size",
        "perplexity",
        "against\nfloat",
        "gap\nclosed",
        "KL\n(nats)",
        "same top\ntoken",
        "tokens\na second",
        "quantized\nin",
    ):
        table.add_column(name, justify="right")
    base = demo.results[0].perplexity
    for r in demo.results:
        table.add_row(
            r.label,
            r.algorithm,
            f"{r.bits_per_weight:.2f}",
            size_text(r.nbytes),
            f"{r.perplexity:.2f}",
            f"x {r.perplexity / base:.2f}",
            "" if r.gap_closed is None else f"{100 * r.gap_closed:.0f} %",
            "" if r.kl is None else f"{r.kl:.3f}",
            "" if r.top1_agreement is None else f"{100 * r.top1_agreement:.1f} %",
            f"{r.tokens_per_second:.1f}",
            "" if r.quantize_seconds is None else f"{r.quantize_seconds:.0f} s",
        )
    lines = [Text(f"prompt: {demo.prompt}", style="bold")]
    lines += [Text.assemble((f"{label}: ", "bold"), text) for label, text in demo.samples.items()]
    if any(get_recipe(label).needs_data for label in demo.trees):
        lines.append(Text(
            f"\nCalibrated on {len(demo.calibration)} sequences, {demo.calibration.size} tokens; more text, and text "
            f"like that of your use, gives better results: --calib FILE.txt."
        ))  # fmt: skip
    footer = (
        f"\ncheckpoint {checkpoint}\nreport     {page}\n{seconds:.0f} s in all. A CPU has no 4-bit arithmetic: there, "
        f"tokens a second shows what decoding the weights costs, not what a GPU gains."
    )
    return Group(table, *lines, Text(footer))
