"""One file of tensors that several threads fill in any order."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from mxjax.errors import CheckpointError
from mxjax.io import safetensors
from mxjax.io.atomic import sync
from mxjax.io.hashes import sha256
from mxjax.io.safetensors import Entry, Spec
from mxjax.io.streaming.journal import UNFINISHED

_CHUNK = 1 << 23  # bytes copied at a time


class ShardFile:
    """A safetensors file of known tensors, under a temporary name until :meth:`finish`.

    The bytes are those of :func:`mxjax.io.safetensors.write` for the same tensors and metadata.

    Args:
      path: of the finished file.
      specs: its tensors.
      metadata: texts for the header.
      reserve: room for metadata that are known at the end only.

    Raises:
      OSError: the disk has no room for it; the same from every method that writes.
    """

    def __init__(self, path: Path, specs: Mapping[str, Spec], metadata: Mapping[str, str], reserve: int = 0) -> None:
        self.path, self.specs, self.metadata = path, specs, metadata
        self.temporary = path.with_name(path.name + UNFINISHED)
        plain, _ = safetensors.layout(specs, metadata)
        self.start = len(plain) + reserve
        self.start += -self.start % 8
        _, self.offsets = safetensors.layout(specs, metadata, self.start)
        self.length = self.start + sum(spec.nbytes for spec in specs.values())
        self.lock, self.missing = threading.Lock(), set(specs)
        self.descriptor = os.open(self.temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.descriptor, 0, self.length)  # a full disk shows now, not in an hour
            else:
                os.ftruncate(self.descriptor, self.length)
        except BaseException:
            self.close()
            raise

    def put(self, name: str, x: np.ndarray) -> None:
        """Write a tensor.

        Raises:
          CheckpointError: not of the dtype and shape that were announced, or a write that fails.
        """
        if Spec.of(x) != self.specs[name]:
            raise CheckpointError(f"{name}: {x.dtype} {x.shape}, but the header of {self.path} says {self.specs[name]}")
        self._write(safetensors.raw_bytes(x), self.offsets[name])
        self._done(name)

    def copy(self, name: str, entry: Entry, check: Callable[[], None]) -> None:
        """Write a tensor of another file: its bytes, or its values in another dtype.

        Args:
          name: of the tensor.
          entry: where it is.
          check: called between chunks; what it raises ends the work.
        """
        spec = self.specs[name]
        if spec.shape != entry.shape:
            raise CheckpointError(f"{name}: {entry.shape}, but the header of {self.path} says {spec.shape}")
        step, offset = max(1, _CHUNK // entry.dtype.itemsize), self.offsets[name]
        for at in range(0, entry.size, step):
            check()
            part = entry.part(at, min(entry.size, at + step)).astype(spec.dtype, copy=False)
            self._write(safetensors.raw_bytes(part), offset)
            offset += part.nbytes
        self._done(name)

    def _write(self, data: memoryview, offset: int) -> None:
        while data.nbytes:
            count = os.pwrite(self.descriptor, data, offset)
            data, offset = data[count:], offset + count

    def _done(self, name: str) -> None:
        with self.lock:
            self.missing.remove(name)

    def finish(self, more: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Write the header, wait for the disk, give the file its name; returns its size and hash.

        Args:
          more: metadata that were not known at the start.
        """
        if self.missing:
            raise CheckpointError(f"{self.path}: {sorted(self.missing)[0]} was never written")
        start, _ = safetensors.layout(self.specs, {**self.metadata, **(more or {})}, self.start)
        if len(start) != self.start:
            raise CheckpointError(f"{self.path}: its metadata need {len(start)} bytes, not the {self.start} reserved")
        self._write(memoryview(start), 0)
        os.fsync(self.descriptor)
        self.close()
        digest = sha256(self.temporary)
        os.rename(self.temporary, self.path)
        sync(self.path.parent)
        return self.length, digest

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
