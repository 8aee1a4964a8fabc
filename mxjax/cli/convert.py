"""``mxjax convert``: a quantized folder in, the same weights in another layout out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mxjax.cli.console import Console
from mxjax.text import size_text


def run(*, src: str, dst: str, to: str, shard_size: int, overwrite: bool, console: Console) -> None:
    from mxjax.cli.export import check_destination, shard_option

    check_destination(dst, overwrite, src)

    import mxjax
    from mxjax.cli.models import is_quantized_folder
    from mxjax.errors import CheckpointError
    from mxjax.io import HOST, convert

    if not Path(src).is_dir():
        raise CheckpointError(f"{src} is no folder; convert takes quantized checkpoints")
    if not is_quantized_folder(Path(src)):
        raise CheckpointError(f"{src} is not quantized; `mxjax quantize --format {to}` quantizes it")
    with console.progress(f"writing {dst} as {to}"):
        convert(src, dst, to, **shard_option(to, shard_size), overwrite=overwrite, **_maps(Path(src), to))
    summary = mxjax.summary(mxjax.load(dst, shardings=HOST))
    disk = sum(file.stat().st_size for file in Path(dst).rglob("*") if file.is_file())
    quantized = [row for row in summary.rows if row.quantized]
    data = {
        "source": src,
        "destination": dst,
        "format": to,
        "quantized": len(quantized),
        "kept": len(summary.rows) - len(quantized),
        "formats": sorted({row.weight for row in quantized}),
        "bytes": summary.nbytes,
        "disk_bytes": disk,
    }
    console.result(data, f"{len(quantized)} quantized weights as {to}, {size_text(disk)} on disk\n{dst}")


def _maps(source: Path, to: str) -> dict[str, Any]:
    """Names and paths of a model family that is known here, so that the result opens as a model."""
    from mxjax_models import names

    import mxjax
    from mxjax.cli.models import read_config
    from mxjax.errors import MxjaxError

    own, own_target = (source / "mxjax.json").exists(), to in ("mxjax", "orbax")
    if own == own_target:
        return {}
    try:
        family = names.family(read_config(source))
        for row in mxjax.summary(mxjax.load(source, shardings=mxjax.io.HOST)).rows:
            family.hf_name(row.path) if own else family.path_of(row.path.replace("/", "."))
    except MxjaxError:  # a family of somebody else, or a tensor that is not of this one: names stay as they are
        return {}
    return {"names": family.hf_name} if own else {"paths": family.path_of}
