"""``mxjax generate``: images before and after quantization, from a text-to-image model and prompts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from mxjax.cli.console import Console
from mxjax.errors import ConfigError


def run(
    *,
    model: str,
    recipe: str,
    prompt: tuple[str, ...],
    steps: int | None,
    guidance: float | None,
    seed: int,
    size: str | None,
    calib_prompts: str | None,
    calib_steps: int,
    calib_times: str,
    keep: tuple[str, ...],
    no_default_keep: bool,
    dtype: str | None,
    out: str,
    report: str | None,
    no_float: bool,
    console: Console,
) -> None:
    from mxjax.cli.recipes import recipe_config

    cfg = recipe_config(recipe)  # what is spelled wrong should fail before a model is loaded
    height, width = _size(size)
    texts = None if calib_prompts is None else _lines(calib_prompts)
    folder = Path(out)
    page = Path(report) if report else folder / "report.html"
    folder.mkdir(parents=True, exist_ok=True)
    page.parent.mkdir(parents=True, exist_ok=True)

    import jax.numpy as jnp
    from mxjax_models.image_models import compare, open_image_model

    with console.progress(f"loading {model}"):
        source = open_image_model(model, dtype and jnp.dtype(dtype), height=height, width=width)
    cfg = _kept(cfg, source.transformer, keep, no_default_keep).replace(name=Path(recipe).stem)  # as the user calls it
    if texts is not None and not cfg.needs_data:
        console.note(f"recipe {recipe!r} is data-free: --calib-prompts is not used")
    with _Stages(console) as stages:
        found = compare(
            source,
            cfg,
            prompt,
            seeds=seed,
            calibration=texts,
            calibration_options={"each": calib_steps, "times": calib_times},
            reference=not no_float,
            inputs=True,
            progress=stages,
            steps=steps,
            guidance=guidance,
        )
    found.report(page, f"{Path(model).name} in four bits")
    data = _result(found, model, recipe, page)
    data["images"] = _write_images(folder, found, recipe)
    console.result(data, _shown(found, data))


class _Stages:
    """One progress bar after the other, as ``compare`` says what it is doing."""

    def __init__(self, console: Console):
        self.console, self.text = console, ""
        self.bar: Any = None
        self.update: Any = None

    def __enter__(self) -> _Stages:
        return self

    def __call__(self, text: str, done: int, total: int) -> None:
        if text != self.text:
            self.__exit__()
            self.text, self.bar = text, self.console.progress(text)
            self.update = self.bar.__enter__()
        self.update(done, total)

    def __exit__(self, *_: Any) -> None:
        if self.bar is not None:
            self.bar.__exit__(None, None, None)
            self.bar = None


def _kept(cfg: Any, transformer: Any, keep: tuple[str, ...], no_default: bool) -> Any:
    """The config with the model's own list of what stays, or without it, and what the user adds."""
    for pattern in keep:
        try:
            re.compile(pattern)
        except re.error as e:
            raise ConfigError(f"--keep {pattern!r} is no regular expression: {e}") from None
    if not keep and not no_default:
        return cfg
    from mxjax.nn.nnx_graph import config_for

    own = () if no_default else tuple(config_for(transformer, cfg).exclude)
    return cfg.replace(exclude=(*own, *keep))


def _size(text: str | None) -> tuple[int | None, int | None]:
    """``HEIGHTxWIDTH``, or one number for both."""
    if text is None:
        return None, None
    found = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
    if found is None or int(found[1]) < 1 or int(found[2] or 1) < 1:
        raise ConfigError(f"--size is HEIGHTxWIDTH in pixels, such as 768x1024, or one number; not {text!r}")
    return int(found[1]), int(found[2] or found[1])


def _lines(file: str) -> list[str]:
    try:
        lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist") from None
    except UnicodeDecodeError as e:
        raise ConfigError(f"{file} is not UTF-8 text: {e}") from e
    if not any(lines):
        raise ConfigError(f"{file} holds no prompt; write one a line")
    return [line for line in lines if line]


def _result(found: Any, model: str, recipe: str, page: Path) -> dict[str, Any]:
    return {
        "model": model,
        "recipe": recipe,
        "prompts": list(found.prompts),
        "seeds": list(found.seeds),
        "psnr": found.psnr,
        "ssim": found.ssim,
        "bits_per_weight": found.summary.bits_per_weight,
        "bytes": found.summary.nbytes,
        "float_bytes": found.float_nbytes,
        "seconds": found.seconds,
        "kept": [{"path": k.path, "shape": list(k.shape), "reason": k.reason} for k in found.kept],
        "report": str(page),
    }


def _write_images(folder: Path, found: Any, recipe: str) -> list[str]:
    from mxjax.report.images import png

    label = Path(recipe).stem
    sets: dict[str, np.ndarray | None] = {label: found.images, "float": found.reference}
    files = []
    for name, images in sets.items():
        for i, image in enumerate(() if images is None else images):
            file = folder / f"{i}-{name}.png"
            file.write_bytes(png(image))
            files.append(str(file))
    return files


def _shown(found: Any, data: dict[str, Any]) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from mxjax.text import size_text

    table = Table("prompt", "seed", title=f"{data['model']} with {data['recipe']}")
    for name in ("PSNR (dB)", "SSIM") if found.psnr else ():
        table.add_column(name, justify="right")
    for i, (prompt, seed) in enumerate(zip(found.prompts, found.seeds, strict=True)):
        measured = (f"{found.psnr[i]:.2f}", f"{found.ssim[i]:.4f}") if found.psnr else ()
        table.add_row(prompt, str(seed), *measured)
    kept = Table("kept in high precision", "shape", "why", box=None)
    for k in found.kept:
        kept.add_row(k.path, "x".join(map(str, k.shape)), k.reason)
    s = found.seconds
    times = f"{s['quantize']:.1f} s to quantize; an image {s['images']:.2f} s"
    if "reference" in s:
        times += f", float {s['reference']:.2f} s"
    size = f"{size_text(found.float_nbytes)} -> {size_text(found.summary.nbytes)}"
    footer = f"\n{size}, {found.summary.bits_per_weight:.2f} bits a quantized weight\n{times}\nreport {data['report']}"
    return Group(table, kept, Text(footer))
