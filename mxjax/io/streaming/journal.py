"""What an interrupted run leaves, and how the next one goes on from there.

Everything is written into ``.NAME.partial`` beside the folder NAME. A file of tensors has a temporary name until it is
on the disk; then it gets its own, and after that a line in the journal with its size and hash. The last act is to
remove the journal and to rename the folder. So whenever the process dies, a file in the journal is whole, every other
one is written again, and NAME is whole or not there.

Several processes that share the files of one result have a journal each. They need not know of one another: whoever
finds that all files of all journals are there does the last act, once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from mxjax.errors import CheckpointError
from mxjax.io.atomic import sync
from mxjax.io.hashes import SUMS, sha256
from mxjax.io.safetensors import parse_json

JOURNAL = "mxjax-unfinished.jsonl"
ENDING = "mxjax-unfinished.lock"  # held during the last act of a run that several processes share
JOURNALS = "mxjax-unfinished*"  # all of these, and the locks of the processes
UNFINISHED = ".unfinished"  # suffix of a file of tensors while it is written
VERSION = 1


def partial_folder(folder: Path) -> Path:
    """Where the folder is while it is being written."""
    return folder.parent / f".{folder.name}.partial"


class Journal:
    """The partial folder of one run, which no other process can use meanwhile, but for those that share the run.

    Args:
      folder: the destination.
      run: what the result depends on, as JSON texts by name: ``{"source": ..., "recipe": ...}``.
      restart: throw away what another run left; of a shared run, this process's part.
      index, count: which process of how many that share the run.
      own: the files of this process, where it is one of several.

    Attributes:
      folder: the partial folder.
      finished: size and hash of the files that an earlier run has finished, by name.

    Raises:
      CheckpointError: another process is at work there; or an earlier run was a different one.
    """

    def __init__(
        self,
        folder: Path,
        run: Mapping[str, str],
        *,
        restart: bool = False,
        index: int = 0,
        count: int = 1,
        own: Collection[str] = (),
    ) -> None:
        self.folder, self.run, self.own, self.shared = partial_folder(folder), dict(run), own, count > 1
        self.names = [JOURNAL]
        if self.shared:
            self.names = [JOURNAL.replace(".", f"-{i + 1:05}-of-{count:05}.") for i in range(count)]
        self.path, self.end = self.folder / self.names[index], self.folder / ENDING
        self.lock = threading.Lock()
        self.held: list[int] = []
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            mode = fcntl.LOCK_SH if self.shared else fcntl.LOCK_EX
            self._hold(os.open(self.folder, os.O_RDONLY), mode, folder)
            known = any(self.folder.glob(JOURNALS)) or (self.folder / SUMS).exists()
            if any(self.folder.iterdir()) and not known:
                raise CheckpointError(f"{self.folder} is in the way, and was not left by an interrupted run: move it")
            if self.shared:
                os.close(os.open(self.end, os.O_WRONLY | os.O_CREAT, 0o666))
                mine = os.open(self.path.with_suffix(".lock"), os.O_WRONLY | os.O_CREAT, 0o666)
                self._hold(mine, fcntl.LOCK_EX, folder)
            self._compare_others(restart)
            self.finished = {} if restart else self._resume()
            self._clear()
            if not self.finished:
                self._append({"mxjax": VERSION, "run": self.run})
            sync(self.folder.parent)
        except BaseException:
            self.close()
            raise

    def _hold(self, descriptor: int, mode: int, folder: Path) -> None:
        self.held.append(descriptor)
        try:
            fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointError(f"{self.folder}: another process is writing {folder}") from None

    def _compare_others(self, restart: bool) -> None:
        """Journals of another number of processes, or of one that does something else, are of another run."""
        for path in sorted(self.folder.glob("mxjax-unfinished*.jsonl")):
            if path.name not in self.names and (self.shared or not restart):
                raise CheckpointError(
                    f"{self.folder} was begun by another number of processes ({path.name}): finish it with the same, "
                    f"or remove that folder"
                )
            if self.shared and path.name in self.names and path != self.path:
                self._check_run(_lines(path)[:1])

    def _check_run(self, lines: list[dict[str, Any]]) -> bool:
        """Whether the first line of a journal is there, and of this run.

        Raises:
          CheckpointError: it is of another.
        """
        earlier = lines[0].get("run") if lines else None
        if not lines or lines[0].get("mxjax") != VERSION or not isinstance(earlier, dict):
            return False
        run = self.run
        if other := [f"{key} ({earlier.get(key)}, now {run[key]})" for key in run if earlier.get(key) != run[key]]:
            raise CheckpointError(
                f"{self.folder} was begun with another {', another '.join(other)}: finish it with the same, or restart"
            )
        return True

    def _resume(self) -> dict[str, tuple[int, str]]:
        if not self.path.exists():
            return {}
        whole, _, torn = self.path.read_bytes().rpartition(b"\n")
        if torn:  # the process died during this line
            os.truncate(self.path, len(whole) + 1 if whole else 0)
        lines = _lines(self.path)
        if not self._check_run(lines):
            return {}
        finished = {}
        for line in lines[1:]:
            name, size, digest = line.get("file"), line.get("bytes"), line.get("sha256")
            file = self.folder / str(name)
            if file.is_file() and file.stat().st_size == size and sha256(file) == digest:
                finished[str(name)] = (int(size), str(digest))
        return finished

    def _clear(self) -> None:
        """Remove everything but the finished files and, if there are such, their journal; of a shared run, of mine."""
        everything = list(self.folder.iterdir())
        if self.shared:
            mine = {self.path.name, *self.own, *(f"{name}{UNFINISHED}" for name in self.own)}
            everything = [path for path in everything if path.name in mine]
        for path in everything:
            if path.name in self.finished or (path == self.path and self.finished):
                continue
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def record(self, name: str, size: int, digest: str) -> None:
        """A file is whole and on the disk."""
        with self.lock:
            self._append({"file": name, "bytes": size, "sha256": digest})
            self.finished[name] = (size, digest)

    def _append(self, line: Mapping[str, Any]) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            os.write(descriptor, json.dumps(line).encode() + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync(self.folder)

    @contextlib.contextmanager
    def ending(self, files: Collection[str]) -> Iterator[dict[str, tuple[int, str]] | None]:
        """For the last act: size and hash of all files, if all are there and nobody else does it; else None."""
        if not self.shared:
            yield self.finished
            return
        try:
            descriptor = os.open(self.end, os.O_WRONLY)
        except FileNotFoundError:  # another process was faster
            yield None
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield self._all(files) if self.path.exists() else None
        finally:
            os.close(descriptor)

    def _all(self, files: Collection[str]) -> dict[str, tuple[int, str]] | None:
        found: dict[str, tuple[int, str]] = {}
        for name in self.names:
            lines = _lines(self.folder / name)
            if not self._check_run(lines):
                return None
            found |= {str(line.get("file")): (int(line["bytes"]), str(line["sha256"])) for line in lines[1:]}
        return found if set(files) <= set(found) else None

    def remove(self) -> None:
        """The folder is complete: take the journals away."""
        for path in self.folder.glob(JOURNALS):
            path.unlink()
        sync(self.folder)

    def close(self) -> None:
        while self.held:
            os.close(self.held.pop())


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a journal that are whole; [] where there is none, or a damaged one."""
    try:
        return [parse_json(line, path) for line in path.read_bytes().rpartition(b"\n")[0].split(b"\n")]
    except (CheckpointError, FileNotFoundError):
        return []
