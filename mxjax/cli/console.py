"""What a command may print: results to stdout, everything else to stderr."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import click


@dataclass(frozen=True)
class Console:
    """The output of one command.

    Attributes:
      json: print the result as one JSON object and nothing else on stdout.
      quiet: no notes and no progress bars.
    """

    json: bool = False
    quiet: bool = False

    def note(self, text: str) -> None:
        """One line of progress or advice, on stderr."""
        if not self.quiet:
            click.echo(text, err=True)

    def result(self, data: dict[str, Any], shown: Any = None) -> None:
        """The result: ``data`` as JSON, or ``shown`` (text or a rich renderable) for people."""
        if self.json:
            click.echo(json_text(data))
            return
        from rich.console import Console as RichConsole

        width = None if sys.stdout.isatty() else 140  # a pipe has no width: 80 would cut tables
        RichConsole(file=sys.stdout, width=width, highlight=False, markup=False).print(shown)

    @contextlib.contextmanager
    def progress(self, text: str, *, bytes: bool = False) -> Iterator[Callable[[int, int], None]]:
        """A progress bar on stderr; yields ``update(done, total)``. Nothing is drawn off a terminal.

        Args:
          text: what is being done.
          bytes: what is counted are bytes: show them, and how many a second.
        """
        if self.json or self.quiet or not sys.stderr.isatty():
            self.note(text)
            yield lambda done, total: None
            return
        from rich.console import Console as RichConsole
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )  # fmt: skip

        amounts = (DownloadColumn(), TransferSpeedColumn()) if bytes else ()
        columns = (TextColumn("{task.description}"), BarColumn(), *amounts, TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=RichConsole(stderr=True)) as bar:
            task = bar.add_task(text, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


def json_text(data: dict[str, Any]) -> str:
    """One line of JSON."""
    return json.dumps(_plain(data), allow_nan=False)


def _plain(value: Any) -> Any:
    """JSON has no Inf and no NaN: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
