"""``mxjax quantize``: a model folder in, a quantized model folder out."""

from __future__ import annotations

import time
from pathlib import Path

from mxjax.cli.console import Console


def run(
    *,
    src: str,
    dst: str,
    recipe: str,
    calib: str | None,
    resume: str | None,
    file_format: str,
    shard_size: int,
    overwrite: bool,
    restart: bool,
    process: tuple[int, int] | None,
    console: Console,
) -> None:
    from mxjax.cli import stream
    from mxjax.cli.export import check_destination, outcome, write_model

    check_destination(dst, overwrite, src)

    import jax
    from mxjax_models.params import hf_name

    import mxjax
    from mxjax.cli.calibrate import quantized_params
    from mxjax.cli.models import open_model
    from mxjax.cli.recipes import recipe_config
    from mxjax.cli.tokens import check_calibration
    from mxjax.config import FUSED
    from mxjax.errors import ConfigError
    from mxjax.io import check_recipe
    from mxjax.io.hf import companions
    from mxjax.io.layouts.gpt_oss import OTHERS
    from mxjax.io.preflight import OWN

    cfg = recipe_config(recipe)  # a typing error should fail before a model is loaded
    check_calibration(calib)
    # The engines that read the layouts of others fuse q/k/v and gate/up.
    if file_format not in OWN:
        cfg = cfg.replace(share_scales=FUSED)
    if file_format == "gpt-oss":
        cfg = cfg.replace(exclude=(*cfg.exclude, OTHERS))
    if stream.applies(src, cfg, file_format):
        if calib is not None:
            console.note(f"recipe {recipe!r} is data-free: --calib is not used")
        if resume is not None:
            console.note(f"recipe {recipe!r} goes on by itself after an interruption: --resume is not used")
        stream.run(
            src=src,
            dst=dst,
            cfg=cfg,
            recipe=recipe,
            file_format=file_format,
            shard_size=shard_size,
            overwrite=overwrite,
            restart=restart,
            process=process,
            console=console,
        )
        return
    if process is not None:
        raise ConfigError(
            "--process shares the work of a data-free recipe on a Hugging Face folder, in any format but orbax; for "
            "others use jax.distributed and mxjax.quantize in a program of your own"
        )
    if Path(src).is_dir():
        companions(Path(src))  # what they refuse should be known before the work, not after it
    opened = open_model(src, console, lazy=cfg.needs_data)  # a block at a time is read from the files
    names = None if file_format in OWN else hf_name
    check_recipe(opened.params, cfg, file_format, names=names)
    start = time.perf_counter()
    with console.progress(f"quantizing with {recipe}") as update:
        qparams = quantized_params(opened, recipe, cfg, calib, console, resume=resume, host=True, update=update)
        jax.block_until_ready(qparams)
    seconds = time.perf_counter() - start
    with console.progress(f"writing {dst}"):
        write_model(Path(dst), opened, qparams, file_format, console, shard_size=shard_size, overwrite=overwrite)
    summary = mxjax.summary(qparams)
    before = mxjax.summary(opened.params).nbytes
    data, text = outcome(src, dst, recipe, file_format, summary, before, seconds)
    console.result(data, f"{text}\n{dst}")
