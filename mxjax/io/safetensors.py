"""Safetensors files: 8 bytes of header length, a JSON header, the bytes of the tensors one after the other.

Written here rather than taken from the ``safetensors`` package because its NumPy side knows no 8-bit floats, and
because a header is checked in full before anything is allocated: offsets, sizes, overlaps, gaps and the length of the
file. The files are those of the package, byte for byte (same order of tensors, same padding).
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from mxjax.errors import CheckpointError

# Name in the header -> dtype, in the order in which the package sorts them (the last is written first).
DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "I16": np.int16,
        "U16": np.uint16,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "I32": np.int32,
        "U32": np.uint32,
        "F32": np.float32,
        "C64": np.complex64,
        "F64": np.float64,
        "I64": np.int64,
        "U64": np.uint64,
    }.items()
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_RANK = {name: rank for rank, name in enumerate(DTYPES)}
_MAX_HEADER = 100_000_000  # as in the package


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: where it is and what it is. Nothing is read until :meth:`read`."""

    name: str
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def read(self) -> np.ndarray:
        """A read-only memory map of the tensor. Pages are read when they are touched.

        Raises:
          CheckpointError: the file has become shorter since its header was read.
        """
        return self.part(0, self.size).reshape(self.shape)

    def part(self, begin: int, end: int) -> np.ndarray:
        """The values from ``begin`` to ``end``, counted in memory order: a flat read-only memory map of these alone.

        Raises:
          CheckpointError: as :meth:`read`.
        """
        if begin >= end:
            return np.zeros(0, self.dtype)
        width = self.dtype.itemsize
        try:
            raw = np.memmap(self.file, np.uint8, "r", self.offset + begin * width, ((end - begin) * width,))
        except (OSError, ValueError) as e:
            raise CheckpointError(f"{self.name} in {self.file}: {e}") from None
        # A tensor need not be aligned; a view of another item size is allowed on contiguous bytes.
        return raw.view(np.ndarray).view(self.dtype)


class Spec(NamedTuple):
    """Dtype and shape of a tensor that is yet to be written."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, x: Any) -> Spec:
        return cls(np.dtype(x.dtype), tuple(x.shape))


def layout(
    specs: Mapping[str, Spec], metadata: Mapping[str, str] | None = None, size: int = 0
) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a file with these tensors, and the offset in the file of each, in the order of the offsets.

    Args:
      specs: the tensors by name.
      metadata: texts for the header.
      size: fill the header up to that many bytes at least.

    Raises:
      CheckpointError: a dtype that the format has no name for.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, spec in specs.items():
        if spec.dtype not in NAMES:
            raise CheckpointError(f"{name}: safetensors has no name for the dtype {spec.dtype}")
    offsets, end = {}, 0
    for name in sorted(specs, key=lambda name: (-_RANK[NAMES[specs[name].dtype]], name)):
        spec = specs[name]
        offsets[name], end = end, end + spec.nbytes
        header[name] = {
            "dtype": NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(max(size - 8, len(text) + -len(text) % 8))
    start = len(text).to_bytes(8, "little") + text
    return start, {name: len(start) + offset for name, offset in offsets.items()}


def raw_bytes(x: Any) -> memoryview:
    """The bytes of an array (NumPy or JAX) in memory order."""
    return np.ascontiguousarray(np.asarray(x)).reshape(-1).view(np.uint8).data


def write(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> None:
    """Write arrays (NumPy or JAX, one at a time on the host) to a safetensors file.

    Raises:
      CheckpointError: a dtype that the format has no name for.
    """
    start, offsets = layout({name: Spec.of(x) for name, x in tensors.items()}, metadata)
    with open(path, "wb") as file:
        file.write(start)
        for name in offsets:
            file.write(raw_bytes(tensors[name]))


def open_regular(path: Path) -> BinaryIO:
    """A file opened for reading; a pipe, a device or a folder is an error and does not block.

    Raises:
      CheckpointError: no such file, or no regular one.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path}: {getattr(e, 'strerror', None) or e}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: no regular file")
    return os.fdopen(descriptor, "rb")


def read(path: Path) -> dict[str, Entry]:
    """The tensors of a file, after a check of the whole header against the length of the file.

    Raises:
      CheckpointError: no file, or one that is not what its header says.
    """
    header, size, length = _header(path)
    entries, spans, data = {}, [], length - 8 - size
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        entry, begin, end = _entry(name, fields, path, 8 + size)
        if end > length - 8 - size:
            raise CheckpointError(
                f"{name} in {path}: ends at byte {end} of {length - 8 - size}; is the file truncated?"
            )
        spans.append((begin, end, name))
        entries[name] = entry
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            raise CheckpointError(f"{name} in {path}: begins at byte {begin}, the tensor before it ends at {position}")
        position = end
    if position != data:
        raise CheckpointError(f"{path}: {data - position} bytes after the last tensor")
    return entries


def read_metadata(path: Path) -> dict[str, str]:
    """The texts under ``__metadata__`` of a file's header; {} if there are none.

    Raises:
      CheckpointError: no file, no header, or metadata that are no texts.
    """
    metadata = _header(path)[0].get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ holds texts by name, not {str(metadata)[:200]}")
    return metadata


def _header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The JSON of a header, its size, and the length of the file."""
    try:
        with open_regular(path) as file:
            length = os.fstat(file.fileno()).st_size
            size = int.from_bytes(file.read(8), "little")
            if length < 8 or not 2 <= size <= min(_MAX_HEADER, length - 8):
                raise CheckpointError(f"{path}: {length} bytes cannot hold a header of {size}; is the file truncated?")
            text = file.read(size)
    except OSError as e:
        raise CheckpointError(f"{path}: {e.strerror or e}") from None
    return parse_json(text, path), size, length


def _entry(name: str, fields: Any, path: Path, base: int) -> tuple[Entry, int, int]:
    where = f"{name} in {path}"
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: a header entry has dtype, shape and data_offsets, not {str(fields)[:200]}")
    if not isinstance(fields["dtype"], str) or fields["dtype"] not in DTYPES:
        raise CheckpointError(f"{where}: dtype {str(fields['dtype'])[:50]!r} is not one of {', '.join(DTYPES)}")
    dtype = DTYPES[fields["dtype"]]
    shape = checked_shape(fields["shape"], where)
    offsets = fields["data_offsets"]
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(n) is int and n >= 0 for n in offsets)):
        raise CheckpointError(f"{where}: data_offsets are two sizes, not {str(offsets)[:200]}")
    begin, end = offsets
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(f"{where}: {fields['dtype']} {list(shape)} does not fill bytes {begin} to {end}")
    return Entry(name, path, dtype, shape, base + begin), begin, end


def checked_shape(shape: Any, where: str) -> tuple[int, ...]:
    """A shape out of JSON."""
    ok = isinstance(shape, list) and len(shape) <= 32 and all(type(n) is int and 0 <= n < 2**62 for n in shape)
    # NumPy multiplies the lengths that are not 0, also of an array without values.
    if not ok or math.prod(n or 1 for n in shape) >= 2**59:
        raise CheckpointError(f"{where}: {str(shape)[:200]} is no shape")
    return tuple(shape)


def parse_json(text: bytes, path: Path) -> dict[str, Any]:
    """A JSON object; repeated keys, other values on top and what cannot be parsed are errors."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            raise ValueError("a key appears twice")
        return out

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path}: no valid JSON: {e}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON object, not {type(value).__name__}")
    return value


def read_json(path: Path, limit: int = _MAX_HEADER) -> dict[str, Any]:
    """The JSON object in a file of at most ``limit`` bytes.

    Raises:
      CheckpointError: no file, too long, or no JSON object.
    """
    try:
        with open_regular(path) as file:
            text = file.read(min(limit, os.fstat(file.fileno()).st_size) + 1)  # read(n) takes n bytes of memory first
    except OSError as e:
        raise CheckpointError(f"{path}: {e.strerror or e}") from None
    if len(text) > limit:
        raise CheckpointError(f"{path}: more than {limit} bytes of JSON")
    return parse_json(text, path)
