"""Folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from mxjax.errors import CheckpointError


@contextlib.contextmanager
def atomic_folder(folder: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Write a folder under a temporary name beside it, and give it its name when everything is on the disk.

    The order is: write, fsync of every file and folder, move the old folder aside, rename, fsync of the parent, remove
    the old folder. Whenever the process dies, ``folder`` is the old one whole, the new one whole, or absent; a leftover
    ``.NAME.*.tmp`` (unfinished) or ``.NAME.*.old`` (the previous version) beside it can be removed by hand. An
    exception, KeyboardInterrupt included, leaves the old folder and no leftovers.

    Args:
      folder: where the result should be; its parents are made. An empty folder may be there already.
      overwrite: replace a folder that is not empty.

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
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{folder} is a file, not a folder")
    if not overwrite and target.is_dir() and any(target.iterdir()):
        raise CheckpointError(f"{folder} is there already and not empty; pass overwrite=True to replace it")
    target.parent.mkdir(parents=True, exist_ok=True)
    stem = target.parent / f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}"
    temporary = Path(f"{stem}.tmp")
    try:
        temporary.mkdir()
        yield temporary
        sync_tree(temporary)
        swap(temporary, target, Path(f"{stem}.old"))
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


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
