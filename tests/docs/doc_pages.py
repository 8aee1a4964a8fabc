"""Pages of the documentation and the fenced blocks in them."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
LANGUAGES = {"python", "text", "sh"}


class Block(NamedTuple):
    """A fenced block: language, text, the line it starts at, and whether it directly follows the block before."""

    language: str
    text: str
    line: int
    follows: bool


def blocks(text: str) -> list[Block]:
    """Fenced blocks, and what stands in ``<!-- setup`` ... ``-->``: Python that runs and is not shown."""
    found, end = [], None
    for m in re.finditer(r"^```(\w*)\n(.*?)^```$|^<!-- setup\n(.*?)^-->$", text, re.M | re.S):
        follows = end is not None and not text[end : m.start()].strip()
        language, source = ("python", m[3]) if m[3] is not None else (m[1], m[2])
        found.append(Block(language, source, text[: m.start()].count("\n") + 1, follows))
        end = m.end()
    return found
