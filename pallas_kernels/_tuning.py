"""Tuned configurations, by device kind: JSON files that dispatch reads while a function is traced.

``mxjax tune`` writes them. A file is looked for in $MXJAX_TUNINGS (one file), then in ``tunings/`` of the user's cache
folder, then beside this module; the first that has the shape decides, and a heuristic where none has. One file holds
one device kind::

    {"device": "NVIDIA H200", "entries": [
      {"operation": "w4_decode", "m": 16, "n": 8192, "k": 8192, "config": {"block_m": 16, "splits": 2, ...}, ...}]}

``m`` is a bucket: the power of two, at least 16, that holds the rows of x. Entries whose config has other fields than
this version's kernel are passed over.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mxjax import backend
from mxjax.errors import ConfigError

PACKAGED = Path(__file__).parent / "tunings"
SMALLEST_BUCKET = 16
Config = TypeVar("Config")


def bucket(m: int) -> int:
    return max(SMALLEST_BUCKET, 1 << max(m - 1, 0).bit_length())


def file_name(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"


def user_file(device: str) -> Path:
    """Where ``mxjax tune`` stores this device's tunings: $MXJAX_TUNINGS, or the user's cache folder."""
    chosen = os.environ.get("MXJAX_TUNINGS")
    return Path(chosen).expanduser() if chosen else backend.cache_dir() / "tunings" / file_name(device)


def lookup(operation: str, cls: type[Config], device: str, m: int, n: int, k: int) -> Config | None:
    """The tuned config of a kernel for these sizes, or None.

    Raises:
      ConfigError: a file that is no tuning file.
    """
    for path in (user_file(device), PACKAGED / file_name(device)):
        found = _table(str(path), device).get((operation, bucket(m), n, k))
        if found is not None and (config := _config(cls, found)) is not None:
            return config
    return None


def _config(cls: type[Config], values: Any) -> Config | None:
    fields = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    ok = isinstance(values, dict) and set(values) == fields
    ok = ok and all(type(v) is int and v > 0 for v in values.values())
    return cls(**values) if ok else None


@functools.lru_cache(maxsize=64)
def _table(path: str, device: str) -> dict[tuple, Any]:
    return {_key(e): e.get("config") for e in read(Path(path), device)}


def _key(entry: dict[str, Any]) -> tuple:
    return tuple(entry.get(name) for name in ("operation", "m", "n", "k"))


def read(path: Path, device: str) -> list[dict[str, Any]]:
    """The entries of a file; [] where there is no file, or one for another device.

    Raises:
      ConfigError: a file that is no tuning file.
    """
    if not path.is_file():
        return []
    try:
        data = json.loads(path.read_text())
        entries = data["entries"]
        if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
            raise TypeError("entries is no list of objects")
        return entries if data["device"] == device else []
    except (ValueError, TypeError, KeyError, OSError) as e:
        raise ConfigError(f"{path} is no tuning file ({e}); delete it, or write it again with `mxjax tune`") from None


def store(path: Path, device: str, entries: Sequence[dict[str, Any]]) -> None:
    """Put entries into a file, beside those that it has for other sizes. Whole or not at all; dispatch sees it at once.

    An entry whose ``config`` is None takes out what the file has for its sizes: the heuristic was as good.

    Raises:
      ConfigError: a file that is no tuning file, or one of another device.
    """
    if path.is_file() and json.loads(path.read_text() or "{}").get("device", device) != device:
        raise ConfigError(f"{path} holds the tunings of another device; give another file")
    merged = {_key(e): e for e in [*read(path, device), *entries]}
    kept = [e for e in merged.values() if e.get("config") is not None]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    ordered = sorted(kept, key=lambda e: tuple(map(str, _key(e))))
    temporary.write_text(json.dumps({"device": device, "entries": ordered}, indent=1) + "\n")
    temporary.replace(path)
    _table.cache_clear()


def buckets(ms: Sequence[int]) -> Iterator[int]:
    """The buckets that these numbers of rows fall into, each once."""
    yield from dict.fromkeys(map(bucket, ms))
