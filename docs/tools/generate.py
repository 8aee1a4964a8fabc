"""Write what is made in the documentation: ``python docs/tools/generate.py``; ``--check`` only says what is stale.

Made are ``docs/reference/*.md`` and, in every page, what stands between ``<!-- table: NAME -->`` and ``<!-- end -->``.
tests/docs/test_docs_pages.py fails while something is stale.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from reference import written
from tables import ROOT, TABLES

DOCS = ROOT / "docs"
_TABLE = re.compile(r"(<!-- table: ([\w ]+) -->\n).*?(<!-- end -->)", re.S)


def filled(text: str) -> str:
    """A page with its tables made anew."""
    return _TABLE.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n\n{m[3]}", text)


def stale() -> dict[Path, str]:
    """Pages that differ from what they should be: path -> the text that belongs there."""
    pages = written(DOCS)
    for path in DOCS.rglob("*.md"):
        if path not in pages:
            pages[path] = filled(path.read_text(encoding="utf-8"))
    return {p: text for p, text in pages.items() if not p.exists() or p.read_text(encoding="utf-8") != text}


def main() -> None:
    check = "--check" in sys.argv[1:]
    found = stale()
    for path, text in sorted(found.items()):
        print(path.relative_to(ROOT))
        if not check:
            path.write_text(text, encoding="utf-8")
    if check and found:
        raise SystemExit("stale; run python docs/tools/generate.py")


if __name__ == "__main__":
    main()
