"""``SHA256SUMS``: the hash of every file of a folder, in the format of ``sha256sum``."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from mxjax.errors import CheckpointError
from mxjax.io.safetensors import open_regular

SUMS = "SHA256SUMS"
_BUFFER = 1 << 22


def sha256(path: Path) -> str:
    """The hash of a file, in hexadecimal.

    Raises:
      CheckpointError: it cannot be read.
    """
    digest, buffer = hashlib.sha256(), bytearray(_BUFFER)
    try:
        with open_regular(path) as file:
            while count := file.readinto(buffer):  # type: ignore[attr-defined]
                digest.update(memoryview(buffer)[:count])
    except OSError as e:
        raise CheckpointError(f"{path}: {e.strerror or e}") from None
    return digest.hexdigest()


def write_sums(folder: Path, known: Mapping[str, str] | None = None, skip: Collection[str] = ()) -> None:
    """Write the hashes of all files of a folder.

    Args:
      folder: the folder.
      known: hashes by name that need not be computed again.
      skip: files that will not stay.
    """
    known = known or {}
    lines = [f"{known.get(name) or sha256(folder / name)}  {name}\n" for name in _files(folder) if name not in skip]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def verify(folder: Path) -> Iterator[tuple[str, int]]:
    """Compare every file of a folder with its hash; yields name and size of each that is as it was written.

    Raises:
      CheckpointError: no hashes, a file that is missing, changed, or that has no hash.

    Example:
      >>> import tempfile
      >>> folder = Path(tempfile.mkdtemp())
      >>> _ = (folder / "config.json").write_text("{}")
      >>> write_sums(folder)
      >>> list(verify(folder))
      [('config.json', 2)]
    """
    sums = _read_sums(folder)
    if missing := sorted(set(sums) - set(_files(folder))):
        raise CheckpointError(f"{folder / missing[0]}: {SUMS} lists it, but it is not there")
    if extra := sorted(set(_files(folder)) - set(sums)):
        raise CheckpointError(f"{folder / extra[0]}: {SUMS} does not know it")
    for name, expected in sums.items():
        found = sha256(folder / name)
        if found != expected:
            raise CheckpointError(f"{folder / name}: changed since it was written (sha256 {found}, not {expected})")
        yield name, (folder / name).stat().st_size


def _files(folder: Path) -> list[str]:
    found = [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]
    return sorted(name for path in found if (name := path.relative_to(folder).as_posix()) != SUMS)


def _read_sums(folder: Path) -> dict[str, str]:
    path = folder / SUMS
    if folder.is_dir() and not path.exists():
        raise CheckpointError(
            f"{folder} has no {SUMS}: quantize_folder writes it (mxjax quantize, data-free); `sha256sum` can for others"
        )
    try:
        with open_regular(path) as file:
            lines = file.read(_BUFFER).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise CheckpointError(f"{path}: {e}") from None
    sums = {}
    for line in lines:
        match = re.fullmatch(r"([0-9a-f]{64})  (.+)", line)
        if match is None or match[2] in sums:
            raise CheckpointError(f"{path}: {line[:200]!r} is no line of hash and name, or comes twice")
        sums[match[2]] = match[1]
    return sums
