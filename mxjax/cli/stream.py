"""``mxjax quantize`` on a Hugging Face folder with a data-free recipe: tensor by tensor, whatever its size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mxjax.cli.console import Console
from mxjax.config import QuantConfig


def applies(src: str, cfg: QuantConfig, file_format: str) -> bool:
    """Whether a model can be quantized without being loaded."""
    return (Path(src) / "config.json").is_file() and not cfg.needs_data and file_format != "orbax"


def run(
    *,
    src: str,
    dst: str,
    cfg: QuantConfig,
    recipe: str,
    file_format: str,
    shard_size: int,
    overwrite: bool,
    restart: bool,
    process: tuple[int, int] | None,
    console: Console,
) -> None:
    """Quantize the folder and print what was done.

    For a model that mxjax knows, rules and our own format see its own paths, as if it had been loaded; for any other
    they see tensor names with slashes.
    """
    import mxjax
    from mxjax.cli.export import outcome
    from mxjax.io.preflight import OWN
    from mxjax.io.streaming.journal import partial_folder

    # transformers unpacks the weights of these layouts to bfloat16: the rest of the model has to be that too.
    dtype = None if file_format in OWN else "bfloat16"
    partial = partial_folder(Path(dst))
    index, count = process or (None, None)
    if process is None and partial.is_dir() and not restart:
        console.note(f"{partial} is there: going on from the files that are finished")
    try:
        with console.progress(f"quantizing with {recipe}", bytes=True) as update:
            report = mxjax.quantize_folder(
                src,
                dst,
                cfg,
                format=file_format,
                names=_names(src),
                dtype=dtype,
                shard_size=shard_size,
                overwrite=overwrite,
                restart=restart,
                progress=update,
                process_index=index,
                process_count=count,
            )
    except KeyboardInterrupt:
        console.note(f"finished files are kept in {partial}; the same command goes on from them, --restart does not")
        raise
    summary = report.summary
    data, text = outcome(src, dst, recipe, file_format, summary, report.float_bytes, report.seconds)
    data |= {
        "files": report.files,
        "resumed_files": report.resumed,
        "gigabytes_per_second": report.gigabytes_per_second,
    }
    if process is not None:
        data |= {"process": index, "processes": count, "complete": report.complete}
    if not report.complete:
        console.note(f"the share of process {index}/{count} is done; {dst} appears when the last process ends")
    console.result(data, f"{text} ({report.gigabytes_per_second:.2f} GB/s read and written)\n{dst}")


def _names(src: str) -> Any:
    """Tensor name -> path in the model, for a model family that mxjax knows; otherwise None."""
    from mxjax_models import params
    from mxjax_models._llama_config import LlamaConfig

    from mxjax.cli.models import read_config
    from mxjax.errors import CheckpointError
    from mxjax.io.hf import default_paths

    try:
        LlamaConfig.from_hf(read_config(Path(src)))
    except (ValueError, KeyError, TypeError):  # another family, or a variant of this one
        return None

    def names(name: str) -> str:
        try:
            return params.path_of(name)
        except CheckpointError:
            return default_paths(name)

    return names
