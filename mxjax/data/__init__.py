"""Data that ships with the package."""

from importlib import resources


def demo_text() -> str:
    """Plain English prose written for mxjax (Apache-2.0): what ``mxjax demo`` measures perplexity on."""
    return resources.files("mxjax.data").joinpath("demo_text.txt").read_text(encoding="utf-8")


def demo_calibration_text() -> str:
    """Other prose of several kinds, written for mxjax (Apache-2.0): what ``mxjax demo`` calibrates on by default."""
    return resources.files("mxjax.data").joinpath("demo_calibration.txt").read_text(encoding="utf-8")


def calibration_prompts() -> list[str]:
    """Prompts of several kinds, written for mxjax (Apache-2.0): what ``mxjax generate`` calibrates on by default."""
    lines = resources.files("mxjax.data").joinpath("calibration_prompts.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.strip()]
