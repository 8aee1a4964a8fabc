"""Sizes on the command line."""

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
