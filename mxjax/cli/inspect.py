"""``mxjax inspect``: what a model folder holds."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from mxjax.cli.console import Console
from mxjax.text import size_text


def run(*, model: str, verify: bool, console: Console) -> None:
    from rich.console import Group
    from rich.table import Table

    import mxjax
    from mxjax.cli.models import is_quantized_folder, open_model, resolve
    from mxjax.io import HOST, layout_of

    path = resolve(model, console)
    checked = _verify(path, console) if verify else None
    layout = None
    if path.is_dir():
        is_quantized_folder(path)  # an error that says what a model folder is
        layout = layout_of(path)
        # Headers only: what a checkpoint holds can be seen on a machine that it does not fit on.
        tree = mxjax.load(path, shardings=HOST)
    else:
        tree = open_model(model, console).params
    summary = mxjax.summary(tree)
    files = path.rglob("*") if path.is_dir() else [path]
    disk = sum(file.stat().st_size for file in files if file.is_file())
    quantized = [row for row in summary.rows if row.quantized]
    data = {
        "model": model,
        "layout": layout,
        "quantized": len(quantized),
        "arrays": len(summary.rows),
        "formats": sorted({row.weight for row in quantized}),
        "bits_per_weight": summary.bits_per_weight if quantized else None,
        "bytes": summary.nbytes,
        "disk_bytes": disk,
        "verified_files": checked,
        "rows": [asdict(row) for row in summary.rows],
    }
    table = Table("path", "shape", "weight", "activation", "extras", box=None)
    table.add_column("bits", justify="right")
    table.add_column("bytes", justify="right")
    for row in summary.rows:
        shape = "x".join(map(str, row.shape))
        cells = (row.path, shape, row.weight, row.activation, row.extras)
        table.add_row(*cells, f"{row.bits_per_value:.2f}", f"{row.nbytes:,}")
    line = f"{len(quantized)} of {len(summary.rows)} arrays quantized, {size_text(summary.nbytes)} in memory"
    line = f"{layout}: {line}" if layout else line
    line += f", {size_text(disk)} on disk"
    if quantized:
        line += f", {summary.bits_per_weight:.2f} bits a quantized weight"
    if checked is not None:
        line += f"; {checked} files are as they were written"
    console.result(data, Group(table, line))


def _verify(path: Path, console: Console) -> int:
    """The number of files whose hashes are right."""
    from mxjax.io import hashes

    with console.progress(f"verifying {path}"):
        return len(list(hashes.verify(path)))
