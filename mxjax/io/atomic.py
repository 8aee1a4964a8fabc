"""Folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from mxjax.core import processes
from mxjax.errors import CheckpointError


@contextlib.contextmanager
def atomic_folder(folder: str | os.PathLike[str], *, overwrite: bool = False, together: bool = False) -> Iterator[Path]:
    """Write a folder under a temporary name beside it, and give it its name when everything is on the disk.

    The order is: write, fsync of every file and folder, move the old folder aside, rename, fsync of the parent, remove
    the old folder. Whenever the process dies, ``folder`` is the old one whole, the new one whole, or absent; a leftover
    ``.NAME.*.tmp`` (unfinished) or ``.NAME.*.old`` (the previous version) beside it can be removed by hand. An
    exception, KeyboardInterrupt included, leaves the old folder and no leftovers.

    Args:
      folder: where the result should be; its parents are made. An empty folder may be there already.
      overwrite: replace a folder that is not empty.
      together: all processes of the program write into one folder (``jax.distributed``; a file system that all see).

    Yields:
      The temporary folder to write into.

    Raises:
      CheckpointError: ``folder`` is a file, or holds something and ``overwrite`` is False.

    Example:
      >>> import tempfile
      >>> with atomic_folder(tempfile.mkdtemp() + "/out") as temporary:
      ...     _ = (temporary / "config.json").write_text("{}")
    """
    target = Path(os.path.realpath(folder))  # a link keeps pointing where it points
    first = processes.one_for_all if together else _now  # the first process does it, and all hear of it
    everyone = processes.all_or_none if together else contextlib.nullcontext
    temporary = first(lambda: _begin(folder, target, overwrite))
    try:
        with everyone():
            yield temporary
        first(lambda: _end(temporary, target))
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _now(make: Callable[[], Path]) -> Path:
    return make()


def _begin(folder: str | os.PathLike[str], target: Path, overwrite: bool) -> Path:
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{folder} is a file, not a folder")
    if not overwrite and target.is_dir() and any(target.iterdir()):
        raise CheckpointError(f"{folder} is there already and not empty; pass overwrite=True to replace it")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    temporary.mkdir()
    return temporary


def _end(temporary: Path, target: Path) -> Path:
    sync_tree(temporary)
    swap(temporary, target, temporary.with_suffix(".old"))
    return target


def swap(temporary: Path, target: Path, aside: Path) -> None:
    """Give ``temporary`` the name ``target``; what had that name is moved ``aside`` meanwhile and removed at last."""
    try:
        if target.exists():
            os.rename(target, aside)
        os.rename(temporary, target)
    except BaseException:
        if aside.exists() and not target.exists():
            os.rename(aside, target)
        raise
    sync(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def sync_tree(folder: Path) -> None:
    """Wait until a folder and everything in it are on the disk."""
    for parent, _, files in os.walk(folder):
        for name in files:
            sync(Path(parent, name))
        sync(Path(parent))


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
