"""What an interrupted run leaves, and how the next one goes on from there.

Everything is written into ``.NAME.partial`` beside the folder NAME. A file of tensors has a temporary name until it is
on the disk; then it gets its own, and after that a line in the journal with its size and hash. The last act is to
remove the journal and to rename the folder. So whenever the process dies, a file in the journal is whole, every other
one is written again, and NAME is whole or not there.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mxjax.errors import CheckpointError
from mxjax.io.atomic import sync
from mxjax.io.hashes import SUMS, sha256
from mxjax.io.safetensors import parse_json

JOURNAL = "mxjax-unfinished.jsonl"
VERSION = 1


def partial_folder(folder: Path) -> Path:
    """Where the folder is while it is being written."""
    return folder.parent / f".{folder.name}.partial"


class Journal:
    """The partial folder of one run, which no other process can use meanwhile.

    Args:
      folder: the destination.
      run: what the result depends on, as JSON texts by name: ``{"source": ..., "recipe": ...}``.
      restart: throw away what another run left.

    Attributes:
      folder: the partial folder.
      finished: size and hash of the files that an earlier run has finished, by name.

    Raises:
      CheckpointError: another process is at work there; or an earlier run was a different one.
    """

    def __init__(self, folder: Path, run: Mapping[str, str], *, restart: bool = False) -> None:
        self.folder = partial_folder(folder)
        self.lock = threading.Lock()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.held = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self.held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self.held)
            raise CheckpointError(f"{self.folder}: another process is writing {folder}") from None
        try:
            if any(self.folder.iterdir()) and not any((self.folder / name).exists() for name in (JOURNAL, SUMS)):
                raise CheckpointError(f"{self.folder} is in the way, and was not left by an interrupted run: move it")
            self.finished = {} if restart else self._resume(run)
            self._clear()
            if not self.finished:
                self._append({"mxjax": VERSION, "run": dict(run)})
            sync(self.folder.parent)
        except BaseException:
            self.close()
            raise

    def _resume(self, run: Mapping[str, str]) -> dict[str, tuple[int, str]]:
        path = self.folder / JOURNAL
        if not path.exists():
            return {}
        whole, _, torn = path.read_bytes().rpartition(b"\n")
        if torn:  # the process died during this line
            os.truncate(path, len(whole) + 1 if whole else 0)
        try:
            first, *rest = [parse_json(line, path) for line in whole.split(b"\n")]
        except CheckpointError:
            first, rest = {}, []
        earlier = first.get("run")
        if first.get("mxjax") != VERSION or not isinstance(earlier, dict):
            return {}
        if other := [f"{key} ({earlier.get(key)}, now {run[key]})" for key in run if earlier.get(key) != run[key]]:
            raise CheckpointError(
                f"{self.folder} was begun with another {', another '.join(other)}: finish it with the same, or restart"
            )
        finished = {}
        for line in rest:
            name, size, digest = line.get("file"), line.get("bytes"), line.get("sha256")
            file = self.folder / str(name)
            if file.is_file() and file.stat().st_size == size and sha256(file) == digest:
                finished[str(name)] = (int(size), str(digest))
        return finished

    def _clear(self) -> None:
        """Remove everything but the finished files and, if there are such, their journal."""
        for path in self.folder.iterdir():
            if path.name in self.finished or (path.name == JOURNAL and self.finished):
                continue
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def record(self, name: str, size: int, digest: str) -> None:
        """A file is whole and on the disk."""
        with self.lock:
            self._append({"file": name, "bytes": size, "sha256": digest})
            self.finished[name] = (size, digest)

    def _append(self, line: Mapping[str, Any]) -> None:
        path = self.folder / JOURNAL
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            os.write(descriptor, json.dumps(line).encode() + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync(self.folder)

    def remove(self) -> None:
        """The folder is complete: take the journal away."""
        (self.folder / JOURNAL).unlink()
        sync(self.folder)

    def close(self) -> None:
        if self.held >= 0:
            os.close(self.held)
            self.held = -1
