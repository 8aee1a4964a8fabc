"""Data that ships with the package."""

from importlib import resources


def demo_text() -> str:
    """Plain English prose written for mxjax (Apache-2.0): what ``mxjax demo`` measures perplexity on."""
    return resources.files("mxjax.data").joinpath("demo_text.txt").read_text(encoding="utf-8")
