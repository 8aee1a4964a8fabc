"""Images before and after quantization as one HTML page."""

from __future__ import annotations

import base64
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from mxjax import api
from mxjax.config import QuantConfig
from mxjax.errors import BlockShapeError, MissingExtraError
from mxjax.eval import layer_errors, weight_errors
from mxjax.report import choices, html, plots, sections

_GAIN = 4  # of the difference image
_LEAST_WIDTH = 192  # on the page, in pixels


def png(image: np.ndarray) -> bytes:
    """A PNG file of uint8 [height, width, 3].

    Raises:
      BlockShapeError: another shape or dtype.
    """
    image = np.ascontiguousarray(image)
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or not image.size:
        raise BlockShapeError(f"a PNG is made of uint8 [height, width, 3], not {image.dtype} {image.shape}")

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = image.shape[:2]
    rows = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], axis=1)  # filter 0: none
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def image_report(
    path: str | os.PathLike,
    *,
    title: str,
    label: str,
    prompts: Sequence[str],
    images: np.ndarray,
    reference: np.ndarray | None,
    quality: Mapping[str, Sequence[float]],
    params: Any,
    qparams: Any,
    cfg: str | QuantConfig | None = None,
    stats: Mapping[str, Any] | None = None,
    seconds: Mapping[str, float],
    kept: Sequence[Any] = (),
) -> Path:
    """Write one self-contained page: float and quantized images side by side, and what there is to say about them.

    Parts without pictures need nothing; the plots (errors against depth, outliers of the inputs, use of codes and
    scales) are left out where matplotlib is missing, and the page says so.

    Args:
      path: the file to write; its folder must exist. Written in one step.
      title: heading; plain text.
      label: name of the quantized variant.
      prompts: of each image.
      images: uint8 [B, height, width, 3], drawn by the quantized model.
      reference: the same of the float model, or None.
      quality: measure -> a value for each image.
      params, qparams: float and quantized parameters, as for ``mxjax.report``.
      cfg: the config that made ``qparams``: says which rule decided.
      stats: what ``mxjax.calibrate`` returned, or None; with it outputs and inputs of the layers are shown.
      seconds: "quantize", "images" and "reference" (for one image).
      kept: ``mxjax.nnx.kept(...)``.

    Returns:
      The path.

    Raises:
      BlockShapeError: images that are no uint8 [B, height, width, 3].
    """
    quality = {name: values for name, values in quality.items() if len(values)}
    summary, before = api.summary(qparams), api.summary(params).nbytes
    why = {} if cfg is None else choices.reasons(params, cfg)
    errors = {label: weight_errors(params, qparams)}
    outputs = {} if stats is None or not errors[label] else {label: layer_errors(params, qparams, stats)}
    parts = [
        html.cards(_overview(label, quality, summary, before, seconds)),
        image_section(label, prompts, images, reference, quality),
        choices.choices_section(summary, why),
        *_plotted(label, params, qparams, errors, outputs),
        _kept(kept),
        sections.layers_section(errors, outputs, (), summary, why),
    ]
    subtitle = f"{label}, {len(prompts)} prompt{'s' if len(prompts) > 1 else ''}"
    return html.write(Path(path), html.page(title, subtitle, "".join(parts), html.footer()))


def _overview(
    label: str, quality: Mapping[str, Sequence[float]], summary: Any, float_nbytes: int, seconds: Mapping[str, float]
) -> list[tuple[str, str]]:
    nbytes = summary.nbytes
    items = [
        (f"{float_nbytes / nbytes:.1f}×", f"smaller: {float_nbytes / 1e6:,.1f} MB → {nbytes / 1e6:,.1f} MB"),
        (
            f"{summary.bits_per_weight:.2f} bits",
            f"a quantized weight ({label}), scales, branches and transforms included",
        ),
        (f"{sum(r.quantized for r in summary.rows)} of {len(summary.rows)}", "arrays quantized"),
    ]
    items += [
        (html.number(float(np.mean(v)), 3), f"mean {name} against the float images") for name, v in quality.items()
    ]
    items.append((f"{seconds['quantize']:.1f} s", "to calibrate and quantize"))
    times = f"{seconds['images']:.2f} s"
    if "reference" in seconds:
        times += f" / {seconds['reference']:.2f} s"
    items.append((times, "an image, quantized" + (" / float" if "reference" in seconds else "")))
    return items


def image_section(
    label: str,
    prompts: Sequence[str],
    images: np.ndarray,
    reference: np.ndarray | None = None,
    quality: Mapping[str, Sequence[float]] | None = None,
) -> str:
    """Images side by side as a part of a page, for ``mxjax.report(..., extra=[...])``.

    Args:
      label: name of the quantized variant.
      prompts: of each image.
      images: uint8 [B, height, width, 3], drawn by the quantized model.
      reference: the same of the float model, or None; with it the difference is shown, too.
      quality: measure -> a value for each image.

    Raises:
      BlockShapeError: images that are no uint8 [B, height, width, 3].

    Example:
      >>> image_section("mxfp4", ["a cat"], np.zeros((1, 8, 8, 3), np.uint8)).count("<img")
      1
    """
    quality, boxes = quality or {}, []
    for i, prompt in enumerate(prompts):
        shown = {label: images[i]}
        if reference is not None:
            apart = np.abs(images[i].astype(int) - reference[i].astype(int))
            shown = {
                "float": reference[i],
                **shown,
                f"difference, {_GAIN} times": np.minimum(_GAIN * apart, 255).astype(np.uint8),
            }
        figures = "".join(
            f"<div><b>{escape(name)}</b>{_embedded(image, f'{name}: {prompt}')}</div>" for name, image in shown.items()
        )
        measured = ", ".join(f"{name} {html.number(values[i], 3)}" for name, values in quality.items())
        boxes.append(f'<p class="prompt">{escape(prompt)}</p><div class="samples">{figures}</div><p>{measured}</p>')
    text = "The same prompts and the same noise." if reference is not None else "Drawn by the quantized model."
    return html.section("Images", text, *boxes)


def _embedded(image: np.ndarray, alt: str) -> str:
    data = base64.b64encode(png(image)).decode()
    times = -(-_LEAST_WIDTH // image.shape[1])  # small images are shown larger, a whole number of times
    size = f' width="{times * image.shape[1]}" style="image-rendering: pixelated"' if times > 1 else ""
    return f'<figure><img src="data:image/png;base64,{data}"{size} alt="{escape(alt)}"></figure>'


def _plotted(label: str, params: Any, qparams: Any, errors: Mapping[str, Any], outputs: Mapping[str, Any]) -> list[str]:
    """The parts that are plots; without matplotlib a line that says what is missing."""
    if not errors[label]:
        return []
    try:
        colours = plots.label_colours([label])
        return [
            sections.error_section(errors, outputs, None, colours),
            sections.inputs_section(outputs),
            sections.distribution_section(params, {label: qparams}, errors[label], [colours[label]]),
        ]
    except MissingExtraError as error:
        return [html.section("Where the error sits", f"{error}; then errors are plotted here, layer by layer.")]


def _kept(kept: Sequence[Any]) -> str:
    stay = [[k.path, "×".join(map(str, k.shape)), k.reason] for k in kept]
    if not stay:
        return ""
    text = (
        "Matrices that stay in high precision, and why; published recipes keep them. An exclude list or rules of one's "
        "own decide otherwise."
    )
    return html.section("Kept in high precision", text, html.table(["path", "shape", "why"], stay, sortable=True))
