"""The two Debian packages with the images, and the three with their names: fetched, unpacked, read one by one.

openclipart-png, openclipart-svg: public domain, as each file's metadata says (files that say otherwise are left out).
fonts-noto-color-emoji: SIL Open Font License 1.1 (images Apache-2.0). unicode-data, unicode-cldr-core: names, groups
and keywords of emoji, Unicode-DFS-2016.
"""

import collections
import io
import re
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import captions
from PIL import Image

PACKAGES = ("openclipart-png", "openclipart-svg", "fonts-noto-color-emoji", "unicode-data", "unicode-cldr-core")
DROPPED = (
    "shapes/stars",
    "special/examples",
    "special/gradients",
    "logos",
    "computer/diagrams",
)
# What is mirrored without harm: no writing, no direction.
MIRROR = ("animals", "buildings", "containers", "food", "people", "plants", "tools", "recreation/toys", "unsorted")
MIRROR += ("transportation/vehicles", "transportation/boating", "science", "recreation/sports", "electronics")
MOST_PIXELS = 200_000_000


class Item(NamedTuple):
    name: str  # unique; captions.family says which are variants of one picture
    image: Image.Image  # RGBA
    title: str
    keywords: list[str]
    style: str
    group: str  # class for the classifier
    mirror: bool
    framed: bool  # its own white margin belongs to it
    weight: float  # how often training draws it


def fetch(folder: Path) -> None:
    """Downloads and unpacks with the system's own tools (Debian and its relatives), once."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        if (folder / package).is_dir():
            continue
        subprocess.run(["apt-get", "download", package], cwd=folder, check=True)
        (archive,) = folder.glob(f"{package}_*.deb")
        subprocess.run(["dpkg-deb", "-x", str(archive), str(folder / package)], check=True)


def clip_art(folder: Path) -> Iterator[Item]:
    root = folder / "openclipart-png/usr/share/openclipart/png"
    vector = folder / "openclipart-svg/usr/share/openclipart/svg"
    files = [f for f in sorted(root.rglob("*.png")) if not str(f.relative_to(root)).startswith(DROPPED)]
    files = [f for f in files if not f.stem.startswith("clouds_jon")]  # a tiny drawing in a corner, ten times
    texts = {f: (vector / f.relative_to(root)).with_suffix(".svg").read_text("utf8", "replace") for f in files}
    titles = collections.Counter(t for text in texts.values() for t in captions.tag(text, "title")[:1])
    generic = {t for t, n in titles.items() if n > 8}
    Image.MAX_IMAGE_PIXELS = None
    for file, text in texts.items():
        path = str(file.relative_to(root).with_suffix(""))
        image = Image.open(file)
        if "GPL" in captions.license_of(text) or image.width * image.height > MOST_PIXELS:
            continue
        title, keywords, style = captions.clip_art(path, text, generic)
        top = path.split("/")[0]
        flag = style == "flag"
        group = "flag" if flag else style if style in ("playing card", "gray icon") else top
        weight = 0.5 if style == "gray icon" else 1.0
        yield Item("clipart/" + path, image.convert("RGBA"), title, keywords, style, group,
                   path.startswith(MIRROR), flag, weight)  # fmt: skip


def emoji(folder: Path) -> Iterator[Item]:
    """Every fully-qualified emoji that the font draws; its skin tones are rarer in training."""
    keywords = _emoji_keywords(folder)
    bitmaps = _Font(next((folder / "fonts-noto-color-emoji").rglob("*.ttf")))
    group = subgroup = ""
    for line in next((folder / "unicode-data").rglob("emoji-test.txt")).read_text("utf8").splitlines():
        if line.startswith(("# group:", "# subgroup:")):
            kind, value = line[2:].split(": ", 1)
            group, subgroup = (value, subgroup) if kind == "group" else (group, value)
        found = re.match(r"([0-9A-F ]+?)\s*; fully-qualified\s*# (\S+) E[\d.]+ (.*)", line)
        image = bitmaps.get(tuple(int(c, 16) for c in found.group(1).split())) if found else None
        if not found or image is None:
            continue
        name = found.group(3)
        flag = group == "Flags"
        title = captions.words(name.replace("flag: ", "flag of "))
        more = [*keywords.get(found.group(2).replace("\ufe0f", ""), []), subgroup.replace("-", " ")]
        mirror = group not in ("Symbols", "Flags") and not re.search(r"left|right|clock|keycap|text|symbol|arrow", name)
        yield Item("emoji/" + name, image, title, captions.distinct(map(captions.words, more), title),
                   "emoji", "emoji " + group, mirror, flag, 0.3 if "skin tone" in name else 1.0)  # fmt: skip


def _emoji_keywords(folder: Path) -> dict[str, list[str]]:
    out = {}
    for part in ("annotations", "annotationsDerived"):
        file = next((folder / "unicode-cldr-core").rglob(f"{part}/en.xml"))
        for node in ET.parse(file).getroot().iter("annotation"):
            if node.get("type") is None and node.text:
                out[node.get("cp")] = [k.strip() for k in node.text.split("|")]
    return out


class _Font:
    """Bitmaps of the table CBDT by code point sequence, ligatures of the table GSUB followed."""

    def __init__(self, file: Path):
        from fontTools.ttLib import TTFont

        font = TTFont(file)
        self.cmap = font.getBestCmap()
        self.bitmaps = font["CBDT"].strikeData[0]
        self.ligatures: dict[tuple[str, ...], str] = {}
        for lookup in font["GSUB"].table.LookupList.Lookup:
            for table in lookup.SubTable:
                table = getattr(table, "ExtSubTable", table)
                for first, choices in getattr(table, "ligatures", {}).items():
                    self.ligatures.update({(first, *c.Component): c.LigGlyph for c in choices})

    def get(self, points: tuple[int, ...]) -> Image.Image | None:
        for sequence in (points, tuple(p for p in points if p != 0xFE0F)):
            glyphs: Any = tuple(self.cmap.get(p) for p in sequence)
            glyph = glyphs[0] if len(glyphs) == 1 else self.ligatures.get(glyphs)
            if glyph in self.bitmaps:
                return Image.open(io.BytesIO(self.bitmaps[glyph].imageData)).convert("RGBA")
        return None
