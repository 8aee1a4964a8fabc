"""One memory-mapped weight to a QWeight, a few megabytes at a time.

Round to nearest knows nothing of a weight but its blocks and, in NVFP4, the largest magnitude of a matrix. So a weight
whose blocks lie one after the other in the file is cut into chunks of one size, whatever its shape: XLA compiles once
for a whole model, a chunk stays in the cache, and memory holds the result and one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.algorithms import ALGORITHMS, WeightSpec
from mxjax.algorithms.rtn import transformed
from mxjax.core.formats import NAN_BYTE
from mxjax.core.qtensor import QTensor
from mxjax.core.quantize import quantize_array
from mxjax.core.scales import tensor_scale
from mxjax.errors import NonFiniteError
from mxjax.io.safetensors import Entry
from mxjax.ops.qweight import QWeight
from mxjax.transforms.base import needs_fit

CHUNK = 1 << 20  # values
_WIDTH = 1024  # of a chunk as a matrix, where rows need not be whole


def quantize_entry(
    entry: Entry, spec: WeightSpec, algorithm: str, *, turned: bool = False, check: Callable[[], None] = lambda: None
) -> QWeight:
    """``ALGORITHMS[algorithm]`` on a tensor of a file: the same bits, as NumPy arrays.

    Args:
      entry: the tensor, float, at least two axes.
      spec: how to quantize it; its axis counts in the tree's orientation.
      algorithm: name of a data-free algorithm.
      turned: the tree holds the transpose of the stored matrix.
      check: called between chunks; what it raises ends the work.

    Raises:
      NonFiniteError: NaN or Inf under ``on_nonfinite="raise"``.
    """
    axis = _stored_axis(spec, turned)
    if algorithm != "rtn" or needs_fit(spec.transform) or entry.shape[axis] % spec.format.block_size or axis < -2:
        return _whole(entry.read().T if turned else entry.read(), spec, algorithm)
    stored = replace(spec, axis=axis)
    if axis == -1:
        q = _rows(entry, stored, check)
    else:
        q = _matrices(entry, stored, check)
    transform: Any = spec.transform
    return QWeight(qtensor=replace(q, axis=spec.axis), transform=transform, activation=spec.activation)


def tensor_scales(
    entry: Entry, spec: WeightSpec, algorithm: str, *, turned: bool = False, check: Callable[[], None] = lambda: None
) -> np.ndarray:
    """The tensor scales that :func:`quantize_entry` would choose (NVFP4): float32, one a matrix."""
    if algorithm == "rtn" and _stored_axis(spec, turned) == -1 and not entry.shape[-1] % spec.format.block_size:
        return _tensor_scales(entry, replace(spec, axis=-1), check)
    scale = quantize_entry(entry, spec, algorithm, turned=turned, check=check).qtensor.global_scale
    assert scale is not None
    return np.asarray(scale)


def _stored_axis(spec: WeightSpec, turned: bool) -> int:
    """The contraction axis of the stored array."""
    return -3 - spec.axis if turned else spec.axis


def _whole(view: np.ndarray, spec: WeightSpec, algorithm: str) -> QWeight:
    return jax.tree.map(np.asarray, ALGORITHMS[algorithm](jnp.asarray(view), spec))


def _matrices(entry: Entry, spec: WeightSpec, check: Callable[[], None]) -> QTensor:
    """Stacked matrices one by one: blocks along the second last axis are not contiguous."""
    rows, columns = entry.shape[-2:]
    given = None if spec.tensor_scale is None else np.asarray(spec.tensor_scale).reshape(-1)
    parts = []
    for i in range(entry.size // (rows * columns)):
        check()
        spec = replace(spec, tensor_scale=None if given is None else given[i])
        part = entry.part(i * rows * columns, (i + 1) * rows * columns).reshape(rows, columns)
        parts.append(jax.tree.map(np.asarray, ALGORITHMS["rtn"](jnp.asarray(part), spec).qtensor))
    lead = entry.shape[:-2]
    return jax.tree.map(lambda *x: np.stack(x).reshape((*lead, *x[0].shape)), *parts)


def _rows(entry: Entry, spec: WeightSpec, check: Callable[[], None]) -> QTensor:
    """A weight whose blocks lie along the last axis."""
    fmt, (*lead, size) = spec.format, entry.shape
    matrix = math.prod(entry.shape[-2:])
    codes = np.empty((entry.size // size, fmt.packed_size(size)), np.uint8)
    scales = np.empty((entry.size // size, size // fmt.block_size), np.uint8)
    scale_of = _tensor_scales(entry, spec, check).reshape(-1) if fmt.has_tensor_scale else None
    global_scales: list[Any] = []
    for i in range(entry.size // matrix):
        begin, end = i * matrix, (i + 1) * matrix
        given = None if scale_of is None else scale_of[i]
        q = None
        for at, count, chunk in _chunks(entry, begin, end, spec):
            check()
            q = quantize_array(
                _turned(chunk, spec), fmt, -1, spec.scale, _policy(spec), global_scale=given, path=spec.path
            )
            _put(codes, q.codes, fmt.packed_size(at), fmt.packed_size(count))
            _put(scales, q.scales, at // fmt.block_size, count // fmt.block_size)
        global_scales.append(None if q is None or q.global_scale is None else np.asarray(q.global_scale))
    if spec.on_nonfinite == "raise" and (scales == NAN_BYTE).any():
        raise NonFiniteError(
            f"{spec.path}: NaN or Inf in {entry.name} of {entry.file} (shape {entry.shape}); "
            f"on_nonfinite='nan' marks their blocks, 'saturate' clamps them"
        )
    scaled = bool(global_scales) and global_scales[0] is not None
    arrays: dict[str, Any] = {
        "codes": codes.reshape(*lead, -1),
        "scales": scales.reshape(*lead, -1),
        "global_scale": np.array(global_scales, np.float32).reshape(lead[:-1]) if scaled else None,
    }
    return QTensor(
        **arrays,
        format=fmt,
        axis=-1,
        size=size,
        dtype_name=jax.dtypes.canonicalize_dtype(entry.dtype).name,
    )


def _put(out: np.ndarray, part: jax.Array, at: int, count: int) -> None:
    out.reshape(-1)[at : at + count] = np.asarray(part).reshape(-1)[:count]


def _policy(spec: WeightSpec) -> str:
    return "nan" if spec.on_nonfinite == "raise" else spec.on_nonfinite  # looked for in the whole result


def _chunks(entry: Entry, begin: int, end: int, spec: WeightSpec) -> Iterator[tuple[int, int, np.ndarray]]:
    """Where it begins, how many values it has, and the values, filled up with zeros to one shape."""
    width = _WIDTH if spec.transform is None else entry.shape[-1]
    rows = max(1, CHUNK // width)
    if spec.transform is None:
        rows *= math.lcm(_WIDTH, spec.format.block_size) // _WIDTH  # whole blocks, whatever their size
    for at in range(begin, end, rows * width):
        values = entry.part(at, min(end, at + rows * width))
        count = values.size
        if count < rows * width:
            values = np.concatenate([values, np.zeros(rows * width - count, values.dtype)])
        yield at, count, values.reshape(rows, width)


def _turned(chunk: np.ndarray, spec: WeightSpec) -> Any:
    return chunk if spec.transform is None else transformed(jnp.asarray(chunk), spec.transform, axis=-1)


def _tensor_scales(entry: Entry, spec: WeightSpec, check: Callable[[], None]) -> np.ndarray:
    """NVFP4's scale of every matrix, unless the spec gives them."""
    if spec.tensor_scale is not None:
        return np.asarray(spec.tensor_scale)
    matrix, out = math.prod(entry.shape[-2:]), []
    for begin in range(0, entry.size, matrix):
        largest = 0
        for _, count, chunk in _chunks(entry, begin, begin + matrix, spec):
            check()
            values = np.asarray(_turned(chunk, spec)).reshape(-1)[:count]
            largest = max(largest, _largest_bits(values, spec.format.block_size, spec.on_nonfinite == "saturate"))
        out.append(np.asarray(_tensor_scale_of(jnp.int32(largest), policy=spec.scale)))
    return np.array(out, np.float32).reshape(entry.shape[:-2])


_tensor_scale_of = partial(jax.jit, static_argnames="policy")(tensor_scale)


def _largest_bits(values: np.ndarray, block: int, saturate: bool) -> int:
    """float32 bits of the largest magnitude; a block with NaN or Inf counts as zeros, unless they saturate."""
    if values.dtype.itemsize == 2 and values.dtype != np.float16:
        bits, shift = values.view(np.uint16) & np.uint16(0x7FFF), 16
    else:
        bits, shift = values.astype(np.float32).view(np.uint32) & np.uint32(0x7FFFFFFF), 0
    infinite = 0x7F800000 >> shift
    if bits.size and bits.max() >= infinite:
        if saturate:
            finite = np.nan_to_num(values.astype(np.float32))
            bits, shift = finite.view(np.uint32) & np.uint32(0x7FFFFFFF), 0
        else:
            blocks = bits.reshape(-1, block)
            bits = blocks[(blocks < infinite).all(axis=-1)]
    return int(bits.max(initial=0)) << shift
