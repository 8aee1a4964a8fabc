"""Sizes and shares on the command line."""

from __future__ import annotations

import re
from typing import Any

import click

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class Size(click.ParamType):
    """A number of bytes with a decimal unit, as Hugging Face writes it: ``5GB``."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]?[bB]?)\s*", value)
        if match is None or match[2].upper() not in _UNITS or float(match[1]) * _UNITS[match[2].upper()] < 1:
            self.fail(f"{value!r} is no size such as 5GB or 500MB", param, ctx)
        return int(float(match[1]) * _UNITS[match[2].upper()])


class Share(click.ParamType):
    """Process I of N, counted from zero: ``0/4``, as a pair of numbers."""

    name = "i/n"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", value)
        if match is None or int(match[1]) >= int(match[2]):
            self.fail(f"{value!r} is no process of several, such as 0/4 (the first of four) to 3/4", param, ctx)
        return int(match[1]), int(match[2])
