"""The training set of PixArt-Mini: 64x64 pictures on white with captions, in one file.

    python benchmarks/pixart_mini/data.py --packages PACKAGES --out data/pixart_mini.npz --sheet sheet.png

PACKAGES is a folder for the downloads (``sources.py`` says which, and under which licences). The file holds

    pixels    uint8, an xz stream (a delta filter of 3 bytes first) of N x 64 x 64 x 3
    captions  N lines of UTF-8, four ways to ask for the picture, tab-separated (``captions.variants``)
    names     N lines
    groups    N lines, the classifier's classes
    mirror    bool (N,), may be mirrored
    weight    float32 (N,), how often training draws it
    held_out  bool (N,), never trained on: about 1 in 25 families of pictures, by the hash of their name
"""

import argparse
import hashlib
import lzma
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

SIZE = 64
_FILTERS = [{"id": lzma.FILTER_DELTA, "dist": 3}, {"id": lzma.FILTER_LZMA2, "preset": 6}]


class Data(NamedTuple):
    pixels: np.ndarray  # uint8 (N, 64, 64, 3)
    captions: list[list[str]]
    names: list[str]
    groups: list[str]
    mirror: np.ndarray
    weight: np.ndarray
    held_out: np.ndarray

    def where(self, mask: np.ndarray) -> "Data":
        rows = np.flatnonzero(mask)
        return Data(*(x[rows] if isinstance(x, np.ndarray) else [x[i] for i in rows] for x in self))


def load(path: str | Path) -> Data:
    with np.load(path) as z:
        text = {k: z[k].tobytes().decode().split("\n") for k in ("captions", "names", "groups")}
        raw = lzma.decompress(z["pixels"].tobytes(), lzma.FORMAT_XZ)
        pixels = np.frombuffer(raw, np.uint8).reshape(-1, SIZE, SIZE, 3)
        return Data(pixels, [c.split("\t") for c in text["captions"]], text["names"], text["groups"],
                    z["mirror"], z["weight"], z["held_out"])  # fmt: skip


def packed(pixels: np.ndarray) -> np.ndarray:
    """The xz stream, as uint8."""
    return np.frombuffer(lzma.compress(pixels.tobytes(), lzma.FORMAT_XZ, filters=_FILTERS), np.uint8)


def save(path: str | Path, data: Data) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)

    def lines(x: Iterable[str]) -> np.ndarray:
        return np.frombuffer("\n".join(x).encode(), np.uint8)

    with open(path, "wb") as f:
        np.savez(f, pixels=packed(data.pixels), captions=lines(map("\t".join, data.captions)),
                 names=lines(data.names), groups=lines(data.groups), mirror=data.mirror, weight=data.weight,
                 held_out=data.held_out)  # fmt: skip


def square(image, framed: bool) -> np.ndarray | None:
    """RGBA of any size -> (64, 64, 3) on white, cut to what is drawn and centred; None if that is next to nothing."""
    from PIL import Image, ImageChops

    alpha = image.getchannel("A").point(lambda a: 255 if a > 8 else 0)
    box = alpha.getbbox()
    if box is None:
        return None
    image = image.crop(box)
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    white.alpha_composite(image)
    flat = white.convert("RGB")
    if not framed:
        drawn = ImageChops.difference(flat, Image.new("RGB", flat.size, (255, 255, 255))).convert("L")
        box = drawn.point(lambda d: 255 if d > 10 else 0).getbbox()
        if box is None:
            return None
        flat = flat.crop(box)
    side = max(flat.size)
    if side < 24 or min(flat.size) / side < 0.08:
        return None
    inside = SIZE - 4
    scaled = [max(1, round(n * inside / side)) for n in flat.size]
    flat = flat.resize(scaled, Image.Resampling.LANCZOS, reducing_gap=3.0)
    out = Image.new("RGB", (SIZE, SIZE), (255, 255, 255))
    out.paste(flat, ((SIZE - scaled[0]) // 2, (SIZE - scaled[1]) // 2))
    pixels = np.asarray(out)
    ink = (pixels.min(-1) < 200).mean()
    return pixels if ink > 0.015 else None


def _held_out(family: str) -> bool:
    return int.from_bytes(hashlib.sha256(family.encode()).digest()[:4], "big") % 25 == 0


def _thumbnail(pixels: np.ndarray) -> np.ndarray:
    return pixels.reshape(16, 4, 16, 4, 3).mean((1, 3)).astype(np.float32).reshape(-1)


def build(items) -> Data:
    """Cut, caption, drop pictures that nearly repeat another, split."""
    import captions

    rows, thumbs = [], np.empty((20000, 16 * 16 * 3), np.float32)
    for item in items:
        pixels = square(item.image, item.framed)
        texts = captions.variants(item.title, item.keywords, item.style)
        if pixels is None or not any(len(w) > 2 for w in texts[1].split()):
            continue
        thumb = _thumbnail(pixels)
        if len(rows) and np.abs(thumbs[: len(rows)] - thumb).mean(1).min() < 1.0:
            continue
        thumbs[len(rows)] = thumb
        rows.append((item, pixels, texts))
    return Data(
        np.stack([p for _, p, _ in rows]),
        [t for _, _, t in rows],
        [i.name for i, _, _ in rows],
        [i.group for i, _, _ in rows],
        np.array([i.mirror for i, _, _ in rows]),
        np.array([i.weight for i, _, _ in rows], np.float32),
        np.array([_held_out(captions.family(i.name)) for i, _, _ in rows]),
    )


def sheet(pixels: np.ndarray, path: str | Path, columns: int = 16, labels: list[str] | None = None) -> None:
    """A contact sheet as PNG, captions below the pictures where given."""
    from PIL import Image, ImageDraw

    w, h = (104, SIZE + 24) if labels else (SIZE + 2, SIZE + 2)
    out = Image.new("RGB", (columns * w, -(-len(pixels) // columns) * h), (225, 225, 235))
    draw = ImageDraw.Draw(out)
    for i, p in enumerate(pixels):
        x, y = i % columns * w, i // columns * h
        out.paste(Image.fromarray(np.asarray(p)), (x, y))
        for line in range(2 if labels else 0):
            draw.text((x, y + SIZE + 11 * line), labels[i][17 * line :][:17], fill=0)
    out.save(path, format="PNG")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sheet", type=Path, help="a PNG of 256 random pictures with their captions")
    args = parser.parse_args()
    import sources

    sources.fetch(args.packages)
    data = build(item for kind in (sources.emoji, sources.clip_art) for item in kind(args.packages))
    save(args.out, data)
    print(f"{len(data.names)} pictures, {data.held_out.sum()} held out, {args.out.stat().st_size / 1e6:.1f} MB")
    if args.sheet:
        rows = np.random.default_rng(0).choice(len(data.names), 256, replace=False)
        sheet(data.pixels[rows], args.sheet, labels=[data.captions[i][2] for i in rows])


if __name__ == "__main__":
    main()
