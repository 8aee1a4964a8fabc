"""Numbers for people."""

from __future__ import annotations


def size_text(nbytes: float) -> str:
    """A size for people: ``59.6 MB`` (decimal megabytes)."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} GB"
