"""transform_quantize in Pallas Triton.

Two kernels. ``tq_blocks`` sees x as a list of independent blocks, so that any M and K is a flat range with one masked
tail. ``tq_row_fp8`` keeps a whole row in registers, because the exact-FP8 pair needs the row's largest scale before
the first value can be written: one program a row, the row maximum a scalar (a broadcast vector costs a layout
conversion for each use: 41.8 against 33.8 us on an H200 for 4096 x 8192).

A transform is one tensor-core dot with a matrix of 16 to 128. For bfloat16 inputs the matrix goes in as two bfloat16
terms (high and low part, 16 significand bits) except Hadamard's, whose +-1 is exact; float32 inputs use float32 dots.

Rounding is in rounding.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mxjax.core import codec, scales
from mxjax.core.formats import E8M0_BIAS, MXFP4, BlockFormat, ElementFormat
from pallas_kernels import _compat
from pallas_kernels._compat import pl
from pallas_kernels.transform_quantize.reference import (
    FP8_MIN_BYTE,
    Transform,
    fp8_top,
    hadamard_factor,
    hadamard_signs,
    row_scale_of,
)
from pallas_kernels.transform_quantize.rounding import quantize_tile, round_to

POLICIES = ("floor", "even", "ceil", "rceil", "third")
MAX_ROW = 32768
TILE = 4096  # values a program of tq_blocks
MIN_DOT_ROWS = 16  # Triton's smallest dot


def matrix_terms(t: Transform, dtype: Any) -> tuple[jax.Array, ...]:
    """The transform's matrix as one array or as high and low part, in the dtype that is multiplied."""
    if t.hadamard:
        return (jnp.asarray(hadamard_signs(t.hadamard), dtype),)
    if t.matrix is None:
        return ()
    m = t.matrix.astype(jnp.float32)
    if dtype != jnp.bfloat16:
        return (m,)
    # Truncated by bits: XLA would fold a cast to bfloat16 and back into nothing, and with it the low part.
    high = codec.float_of(codec.bits_of(m) & ~0xFFFF)
    return high.astype(jnp.bfloat16), (m - high).astype(jnp.bfloat16)


def transform_tile(x: jax.Array, terms: list[jax.Array]) -> jax.Array:
    """[R, T] times the matrix terms, float32; Hadamard's factor is left to the caller."""
    # HIGHEST matters for float32 operands only: no TF32
    dot = partial(jnp.dot, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    y = dot(x, terms[0])
    for m in terms[1:]:
        y += dot(x, m)
    return y


def factor_of(hadamard: int) -> np.float32:
    return hadamard_factor(hadamard) if hadamard else np.float32(1)


def dot_dtype(x: jax.Array, t: Transform) -> Any:
    """bfloat16 stays for the tensor cores; a channel scale makes float32 of it."""
    return jnp.bfloat16 if x.dtype == jnp.bfloat16 and t.channel_scale is None else jnp.float32


def _power_of_two_below(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)


# --- codes and scales ------------------------------------------------------------------------------------------------


def _blocks_kernel(
    *refs: Any, scaled: bool, hadamard: int, fmt: BlockFormat, policy: str, rows: int, row_len: int, rounding: str
) -> None:
    """A tile [R, T] of ``rows`` rows in all; ``row_len`` of them make one row of x.

    Refs: x, channel scale (if ``scaled``), tensor scale (NVFP4), matrix terms (0 to 2); codes, scales.
    """
    refs_in, (codes_ref, scales_ref) = list(refs[:-2]), refs[-2:]
    x_ref = refs_in.pop(0)
    r, size = x_ref.shape
    row = pl.program_id(0) * r + lax.broadcasted_iota(jnp.int32, (r,), 0)
    mask = None if rows % r == 0 else row < rows

    def wide(n: int) -> jax.Array | None:
        return None if mask is None else jnp.broadcast_to(mask[:, None], (r, n))

    x = _compat.load(x_ref.at[:, :], wide(size), 0)
    if scaled:
        scale_ref = refs_in.pop(0)
        column = (row % row_len)[:, None] * size + lax.broadcasted_iota(jnp.int32, (r, size), 1)
        x = x.astype(jnp.float32) * scale_ref[column].astype(jnp.float32)
    tensor_scale = None
    if fmt.has_tensor_scale:
        g = _compat.load(refs_in.pop(0).at[row // row_len], mask, 1.0)
        tensor_scale = jnp.broadcast_to(g[:, None], (r, size // fmt.block_size)).reshape(-1, 1)
    if refs_in:
        terms = [ref[...].reshape(ref.shape[-2:]) for ref in refs_in]
        y = transform_tile(x.astype(terms[0].dtype), terms)
    else:
        y = x.astype(jnp.float32)
    y = y.reshape(r * size // fmt.block_size, fmt.block_size)
    codes, byte = quantize_tile(y, factor_of(hadamard), tensor_scale, fmt, policy, rounding)
    _compat.store(codes_ref.at[:, :], codes.reshape(codes_ref.shape), wide(codes_ref.shape[1]))
    _compat.store(scales_ref.at[:, :], byte.reshape(scales_ref.shape), wide(scales_ref.shape[1]))


@partial(jax.jit, static_argnames=("fmt", "policy", "interpret", "rounding"))
def quantize(
    x: jax.Array,
    t: Transform,
    tensor_scale: jax.Array | None,
    fmt: BlockFormat,
    policy: str,
    *,
    interpret: bool = False,
    rounding: str = "floats",
) -> tuple[jax.Array, jax.Array]:
    """:func:`pallas_kernels.transform_quantize.reference.quantize` as one kernel."""
    lead, k = x.shape[:-1], x.shape[-1]
    size = max(t.size, fmt.block_size)
    m = x.size // k
    if t.per_block:  # tiles of one block column, so that a tile meets one matrix
        view, row_len, rows = x.reshape(m, k), 1, m
    else:
        view, row_len, rows = x.reshape(m * k // size, size), k // size, m * k // size
    r = max(min(TILE // size, _power_of_two_below(rows)), MIN_DOT_ROWS)
    grid = (pl.cdiv(rows, r), view.shape[1] // size)

    def tile(columns: int) -> Any:
        return pl.BlockSpec((r, columns), lambda i, j: (i, j))

    args: list[jax.Array] = [view]
    specs = [tile(size)]
    channel_scale = t.channel_scale
    if channel_scale is not None:
        if t.matrix is not None and t.per_block:  # the scale folds into the matrices' rows
            t = Transform(matrix=channel_scale.astype(jnp.float32).reshape(-1, size, 1) * t.matrix)
        else:
            args.append(channel_scale)
            specs.append(pl.BlockSpec((k,), lambda i, j: (0,)))
    if tensor_scale is not None:
        args.append(tensor_scale.reshape(m).astype(jnp.float32))
        specs.append(pl.BlockSpec((m,), lambda i, j: (0,)))
    for term in matrix_terms(t, dot_dtype(x, t)):
        args.append(term)
        if t.per_block:
            specs.append(pl.BlockSpec((1, size, size), lambda i, j: (j, 0, 0)))
        else:
            specs.append(pl.BlockSpec((size, size), lambda i, j: (0, 0)))
    code_bytes, blocks = fmt.packed_size(size), size // fmt.block_size
    columns = view.shape[1] // size
    kernel = partial(
        _blocks_kernel,
        scaled=t.channel_scale is not None,
        hadamard=t.hadamard,
        fmt=fmt,
        policy=policy,
        rows=rows,
        row_len=row_len,
        rounding=rounding,
    )
    codes, byte = _compat.triton_call(
        kernel,
        name=f"tq_blocks_{fmt}",
        grid=grid,
        in_specs=specs,
        out_specs=[tile(code_bytes), tile(blocks)],
        out_shape=[
            jax.ShapeDtypeStruct((rows, columns * code_bytes), jnp.uint8),
            jax.ShapeDtypeStruct((rows, columns * blocks), jnp.uint8),
        ],
        num_warps=4,
        num_stages=1,
        interpret=interpret,
    )(*args)
    return codes.reshape(*lead, fmt.packed_size(k)), byte.reshape(*lead, k // fmt.block_size)


# --- exact-FP8 pair --------------------------------------------------------------------------------------------------


def row_chunks(k: int, smallest: int) -> tuple[tuple[int, int], ...]:
    """(offset, length) of power-of-two pieces that cover ``k``: the largest first, the last one may reach beyond."""
    out, offset = [], 0
    while offset < k:
        n = max(_power_of_two_below(k - offset), smallest)
        out.append((offset, n))
        offset += n
    return tuple(out)


def _row_kernel(
    *refs: Any, scaled: bool, hadamard: int, policy: str, k: int, chunks: tuple, element: ElementFormat
) -> None:
    """One row of x. Refs: x, channel scale (if ``scaled``), matrix terms (0 to 2); values, row scale."""
    refs_in, (values_ref, scale_ref) = list(refs[:-2]), refs[-2:]
    x_ref = refs_in.pop(0)
    channel_ref = refs_in.pop(0) if scaled else None
    terms = [ref[...] for ref in refs_in]
    clip = policy == "floor"

    def piece(offset: int, n: int) -> tuple[Any, jax.Array | None]:
        """Index of the columns, and the mask of those that exist."""
        if offset + n <= k:
            return pl.ds(offset, n), None
        columns = offset + lax.broadcasted_iota(jnp.int32, (n,), 0)
        return columns, columns < k

    tiles = []
    for offset, n in chunks:
        columns, mask = piece(offset, n)
        x = _compat.load(x_ref.at[0, columns], mask, 0)
        if channel_ref is not None:
            x = x.astype(jnp.float32) * _compat.load(channel_ref.at[columns], mask, 0).astype(jnp.float32)
        if terms:
            size = terms[0].shape[0]
            x = transform_tile(x.astype(terms[0].dtype).reshape(n // size, size), terms)
        tiles.append(x.astype(jnp.float32).reshape(n // 32, 32))
    row_byte, row_amax, block_bytes = jnp.int32(FP8_MIN_BYTE), jnp.int32(0), []
    for y in tiles:
        amax = jnp.max(codec.bits_of(y) & codec.MAGNITUDE_MASK, axis=1)
        amax = codec.bits_of(codec.float_of(amax) * factor_of(hadamard))
        row_amax = jnp.maximum(row_amax, jnp.max(amax))
        byte = jnp.where(amax == 0, 0, scales.e8m0_bytes(amax, element, policy))
        block_bytes.append(byte)
        row_byte = jnp.maximum(row_byte, jnp.max(byte))
    binade = fp8_top(values_ref.dtype, element)
    top = row_byte - binade
    factor, row_scale = codec.float_of((254 - top) << 23), row_scale_of(row_byte, binade)
    if policy == "third":
        row_scale = row_scale * jnp.float32(1 / 3)
    for (offset, n), y, byte in zip(chunks, tiles, block_bytes, strict=True):
        one = (E8M0_BIAS + jnp.maximum(byte - top, -100)) << 23
        # as in quantize_tile, Hadamard's factor rides on the power of two; three times a value is a second rounding
        z = y * (factor_of(hadamard) * factor)
        values = round_to(3.0 * z if policy == "third" else z, one[:, None], element, clip)
        fnuz = values_ref.dtype == jnp.float8_e4m3fnuz
        values = _compat.to_e4m3fnuz(values) if fnuz else values.astype(values_ref.dtype)
        columns, mask = piece(offset, n)
        _compat.store(values_ref.at[0, columns], values.reshape(n), mask)
    scale_ref[0] = jnp.where(row_amax >= codec.INF_BITS, jnp.float32(jnp.nan), row_scale)


@partial(jax.jit, static_argnames=("policy", "dtype", "fmt", "interpret"))
def quantize_fp8(
    x: jax.Array,
    t: Transform,
    policy: str,
    dtype: Any = jnp.float8_e4m3fn,
    fmt: BlockFormat = MXFP4,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """:func:`pallas_kernels.transform_quantize.reference.quantize_fp8` as one kernel (not for one matrix a block)."""
    lead, k = x.shape[:-1], x.shape[-1]
    m = x.size // k
    args, specs = [x.reshape(m, k)], [pl.BlockSpec((1, k), lambda i: (i, 0))]
    if t.channel_scale is not None:
        args.append(t.channel_scale)
        specs.append(pl.BlockSpec((k,), lambda i: (0,)))
    for term in matrix_terms(t, dot_dtype(x, t)):
        args.append(term)
        specs.append(pl.BlockSpec(term.shape, lambda i: (0, 0)))
    kernel = partial(
        _row_kernel,
        scaled=t.channel_scale is not None,
        hadamard=t.hadamard,
        policy=policy,
        k=k,
        element=fmt.element,
        chunks=row_chunks(k, MIN_DOT_ROWS * max(t.size, 32)),
    )
    values, row_scale = _compat.triton_call(
        kernel,
        name="tq_row_fp8",
        grid=(m,),
        in_specs=specs,
        out_specs=[pl.BlockSpec((1, k), lambda i: (i, 0)), pl.BlockSpec((1,), lambda i: (i,))],
        out_shape=[jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct((m,), jnp.float32)],
        num_warps=4 if k > 4096 else 2,
        num_stages=1,
        interpret=interpret,
    )(*args)
    return values.reshape(*lead, k), row_scale.reshape(lead)
