"""Block-scaled products in Pallas Triton.

``decode``   few rows of x against a "tiles" weight (NVIDIA). Bound by memory: W tiles stream through shared memory
             once, are decoded in registers by a few integer operations and meet x on the tensor cores. K is split over
             the grid; the float32 partial sums are added by XLA in a fixed order, together with the epilogue.
``generic``  any rows, formats and GPU, "rows" weights. Operands are decoded to bfloat16 in registers (or float32,
             where x is wider than bfloat16), or go to the matrix units as they are (``native``: ``tt.dot_scaled``).
``unpack``   a "tiles" weight to e4m3 for an FP8 product, or to bfloat16: one pass, bound by the bytes written.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.core import codec
from mxjax.core.formats import NAN_BYTE, BlockFormat
from mxjax.core.scales import scale_by_power
from pallas_kernels import _compat
from pallas_kernels._compat import pl
from pallas_kernels.block_scaled_matmul.layout import TILE_K, TILE_N, PackedWeight, words_to_bf16
from pallas_kernels.block_scaled_matmul.reference import finish

_HALF = TILE_K // 2

# Eight codes of a word to four registers of two bfloat16: 11 integer operations (layout.words_to_bf16 in PTX). With
# pack=4 the assembly takes four *register* elements of a thread. They are the four bytes of a word because a tile's
# rows are loaded 16 bytes a thread; the device tests compare every configuration with the reference.
_WORD_PTX = """
{
.reg .b32 t1, t2, t3, u2, u3;
and.b32 $0, $4, 0x81C081C0;
shl.b32 t1, $4, 3;
and.b32 $1, t1, 0x81C081C0;
shl.b32 t2, $4, 6;
shl.b32 u2, $4, 1;
and.b32 t2, t2, 0x01C001C0;
lop3.b32 $2, u2, 0x80008000, t2, 0xEA;
shr.u32 t3, $4, 3;
shl.b32 u3, $4, 2;
and.b32 t3, t3, 0x01C001C0;
lop3.b32 $3, u3, 0x80008000, t3, 0xEA;
}
"""


def _decode_tile(w: jax.Array, scales: jax.Array, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Bytes [N, 64] and relative scales [N, 4] of a tile to bfloat16 values [N, 64] of its two halves.

    The raw bits of code 0.5 are a subnormal number, which XLA's CPU code would take for zero in the multiplication:
    interpret mode multiplies with integers.
    """
    n = w.shape[0]
    times = _times_in_integers if interpret else jnp.multiply
    first, last = _compat.inline_asm(
        _WORD_PTX,
        w,
        constraints="=&r,=&r,=&r,=&r,r",
        pack=4,
        out_dtypes=[jnp.bfloat16, jnp.bfloat16],
        reference=words_to_bf16,
    )
    factor = lax.bitcast_convert_type(scales.astype(jnp.uint16) << 7, jnp.bfloat16)
    halves = lax.split(factor.reshape(n, 2, 2), (1, 1), axis=1)
    wide = [jnp.broadcast_to(h.reshape(n, 2)[:, :, None], (n, 2, 32)).reshape(n, _HALF) for h in halves]
    return times(first, wide[0]), times(last, wide[1])


def _times_in_integers(raw: jax.Array, factor: jax.Array) -> jax.Array:
    byte = lax.bitcast_convert_type(factor, jnp.uint16).astype(jnp.int32) >> 7
    bits = lax.bitcast_convert_type(raw, jnp.uint16).astype(jnp.int32) << 16
    product = scale_by_power(codec.float_of(bits), byte - 127)
    return jnp.where(byte == NAN_BYTE, jnp.nan, jnp.where(byte == 0, 0.0, product)).astype(jnp.bfloat16)


# --- decode ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodeConfig:
    """Tile sizes of the decode kernel: rows of x a program, programs along K, and the compiler's parameters."""

    block_m: int
    splits: int
    num_warps: int = 4
    num_stages: int = 4


def decode_config(m: int, w: PackedWeight, cores: int) -> DecodeConfig:
    """A heuristic: the smallest row tile that holds x, and as many splits of K as give each core about two programs.

    It picks the measured best, or one within 3 % of it, for M = 16, 64 and 128 on five shapes of an H200.
    """
    tiles, n, _ = w.codes.shape
    block_m = next(b for b in (16, 32, 64) if m <= b or b == 64)
    programs = (n // TILE_N) * pl.cdiv(m, block_m)
    wanted = max(1.0, 2 * max(cores, 1) / programs)
    splits = max(s for s in (1, 2, 4, 8) if s <= max(1.15 * wanted, 1) and s <= max(tiles // 4, 1))
    return DecodeConfig(block_m, splits)


def _decode_kernel(
    x_ref: Any,
    w_ref: Any,
    s_ref: Any,
    o_ref: Any,
    *,
    m: int,
    k: int,
    tiles: int,
    iters: int,
    block_m: int,
    interpret: bool,
) -> None:
    first_tile, row0 = pl.program_id(1) * iters, pl.program_id(2) * block_m  # interpret mode has no program_id in loops
    whole_m, whole_k = m % block_m == 0, tiles % iters == 0 and k % TILE_K == 0

    def half(t: jax.Array, offset: int) -> jax.Array:
        start = t * TILE_K + offset
        if whole_m and whole_k:
            return x_ref[:, pl.ds(start, _HALF)]
        row = lax.broadcasted_iota(jnp.int32, (block_m, _HALF), 0)
        column = start + lax.broadcasted_iota(jnp.int32, (block_m, _HALF), 1)
        return _compat.load(x_ref.at[row, column], (row0 + row < m) & (column < k), 0)

    def step(i: jax.Array, acc: jax.Array) -> jax.Array:
        t = first_tile + i
        # beyond the last tile x is zero, and the last tile is read once more
        tile = t if whole_k else jnp.minimum(t, tiles - 1)
        first, last = _decode_tile(w_ref[tile, :, :], s_ref[tile, :, :], interpret)
        acc += jnp.dot(half(t, 0).astype(jnp.bfloat16), first.T, preferred_element_type=jnp.float32)
        acc += jnp.dot(half(t, _HALF).astype(jnp.bfloat16), last.T, preferred_element_type=jnp.float32)
        return acc

    acc = lax.fori_loop(0, iters, step, jnp.zeros((block_m, TILE_N), jnp.float32))
    out_row = row0 + lax.broadcasted_iota(jnp.int32, (1, block_m, TILE_N), 1)
    _compat.store(o_ref.at[:, :, :], acc[None], None if whole_m else out_row < m)


@partial(jax.jit, static_argnames=("config", "out_dtype", "interpret"))
def decode(
    x: jax.Array,
    x_scale: jax.Array | None,
    w: PackedWeight,
    bias: jax.Array | None,
    out_dtype: Any,
    config: DecodeConfig,
    *,
    interpret: bool = False,
) -> jax.Array:
    """x [M, K] (bfloat16, or e4m3 with ``x_scale`` [M]) times a "tiles" weight, [M, N]."""
    m, k = x.shape
    tiles, n, _ = w.codes.shape
    bm, splits = config.block_m, config.splits
    partial_sums = _compat.triton_call(
        partial(_decode_kernel, m=m, k=k, tiles=tiles, iters=pl.cdiv(tiles, splits), block_m=bm, interpret=interpret),
        name="w4_decode",
        grid=(n // TILE_N, splits, pl.cdiv(m, bm)),
        in_specs=[
            pl.BlockSpec((bm, k), lambda i, j, r: (r, 0)),
            pl.BlockSpec((tiles, TILE_N, _HALF), lambda i, j, r: (0, i, 0)),
            pl.BlockSpec((tiles, TILE_N, TILE_K // 32), lambda i, j, r: (0, i, 0)),
        ],
        out_specs=pl.BlockSpec((1, bm, TILE_N), lambda i, j, r: (j, r, i)),
        out_shape=jax.ShapeDtypeStruct((splits, m, n), jnp.float32),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )(x, w.codes, w.scales)
    return finish(jnp.sum(partial_sums, axis=0), w, x_scale, bias, out_dtype)


# --- unpack ----------------------------------------------------------------------------------------------------------

FP8_SHIFT = 6  # e4m3 image: value * 2**(byte - max + 6), see transform_quantize.reference.FP8_TOP


def _unpack_kernel(w_ref: Any, s_ref: Any, o_ref: Any, *, shift: int, interpret: bool) -> None:
    for offset, values in zip((0, _HALF), _decode_tile(w_ref[0, :, :], s_ref[0, :, :], interpret), strict=True):
        # float32 in between: bfloat16 to e4m3 is one rounding there, and 2**shift cannot overflow
        scaled = values.astype(jnp.float32) * float(2**shift)
        o_ref[:, pl.ds(offset, _HALF)] = scaled.astype(o_ref.dtype)


@partial(jax.jit, static_argnames=("dtype", "rows", "interpret"))
def unpack(w: PackedWeight, dtype: Any, *, rows: int = 32, interpret: bool = False) -> jax.Array:
    """A "tiles" weight as values [N', K'] of ``dtype``, to be multiplied by ``row_scale``; zeros beyond N and K.

    bfloat16: exact. e4m3: times 2**FP8_SHIFT, exact for blocks at most 14 binades below their row's largest.
    """
    tiles, n, _ = w.codes.shape
    shift = FP8_SHIFT if jnp.dtype(dtype) == jnp.float8_e4m3fn else 0
    return _compat.triton_call(
        partial(_unpack_kernel, shift=shift, interpret=interpret),
        name="w4_unpack",
        grid=(n // rows, tiles),
        in_specs=[
            pl.BlockSpec((1, rows, _HALF), lambda i, t: (t, i, 0)),
            pl.BlockSpec((1, rows, TILE_K // 32), lambda i, t: (t, i, 0)),
        ],
        out_specs=pl.BlockSpec((rows, TILE_K), lambda i, t: (i, t)),
        out_shape=jax.ShapeDtypeStruct((n, tiles * TILE_K), dtype),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
    )(w.codes, w.scales)


# --- generic ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GenericConfig:
    """Tile sizes of the generic kernel and the compiler's parameters."""

    block_m: int = 64
    block_n: int = 64
    block_k: int = 128
    num_warps: int = 4
    num_stages: int = 2


def generic_config(m: int, n: int, native: bool) -> GenericConfig:
    """Small tiles for few rows; the tile of the native FP4 instructions for many."""
    if m <= 16:
        return GenericConfig(block_m=16)
    if m <= 64:
        return GenericConfig()
    if native:
        return GenericConfig(block_m=128, block_n=128, block_k=256, num_warps=8)
    return GenericConfig(block_m=128, block_n=128)


# E8M0 operands are decoded as value * 2**(byte - 129): no code overflows bfloat16, none is lost below its subnormals.
_OFFSET = 2


def _decode_e2m1(nibble: jax.Array) -> jax.Array:
    """uint16 nibbles to bfloat16, by integer operations: products with 2**126 would meet flushed subnormals."""
    magnitude = nibble & 7
    exponent = jnp.where(magnitude == 0, 0, 126 << 7).astype(jnp.uint16)
    bits = exponent + jnp.where(magnitude > 1, magnitude << 6, 0).astype(jnp.uint16)
    return lax.bitcast_convert_type(bits | ((nibble & 8) << 12), jnp.bfloat16)


def _decode_rows(codes: jax.Array, scales: jax.Array, fmt: BlockFormat) -> jax.Array:
    """Packed codes [R, ..] and scale bytes [R, B] to bfloat16 [R, B * block], exact; E8M0 over 2**_OFFSET."""
    r, blocks = scales.shape
    if fmt.element.bits == 4:
        wide = codes.astype(jnp.uint16)
        values = jnp.stack([_decode_e2m1(wide & 15), _decode_e2m1(wide >> 4)], axis=-1)
    else:
        values = lax.bitcast_convert_type(codes, jnp.dtype(fmt.element.dtype)).astype(jnp.bfloat16)
    if fmt.scale == "e4m3":
        factor = lax.bitcast_convert_type(scales, jnp.float8_e4m3fn).astype(jnp.bfloat16)
    else:
        byte = scales.astype(jnp.int32)
        bits = jnp.where(byte > _OFFSET, (byte - _OFFSET) << 7, 0x40 >> (_OFFSET - jnp.minimum(byte, _OFFSET)))
        bits = jnp.where(byte == NAN_BYTE, 0x7FC0, bits).astype(jnp.uint16)
        factor = lax.bitcast_convert_type(bits, jnp.bfloat16)
    values = values.reshape(r, blocks, fmt.block_size) * factor[:, :, None]
    return values.reshape(r, blocks * fmt.block_size)


def offset_of(fmt: BlockFormat | None) -> int:
    return _OFFSET if fmt is not None and fmt.scale == "e8m0" else 0


def _triton_type(fmt: BlockFormat | None) -> str:
    return "BF16" if fmt is None else fmt.element.name.upper()


def _dot_scaled_reference(
    a: Any, a_scale: Any, b: Any, b_scale: Any, acc: Any, *, x_fmt: BlockFormat | None, w_fmt: BlockFormat
) -> jax.Array:
    x = a.astype(jnp.float32)
    if x_fmt is not None:
        x = _decode_rows(a, a_scale, x_fmt).astype(jnp.float32) * 2.0**_OFFSET
    w = _decode_rows(b.T, b_scale, w_fmt).astype(jnp.float32) * 2.0**_OFFSET
    return acc + jnp.dot(x, w.T, precision=lax.Precision.HIGHEST)


def _generic_kernel(
    *refs: Any, m: int, n: int, k: int, x_fmt: BlockFormat | None, w_fmt: BlockFormat, c: GenericConfig, native: bool,
    has: tuple[bool, bool, bool],
) -> None:  # fmt: skip
    """Refs: x, its scale bytes if quantized, w, its scale bytes, x_scale, row_scale, bias as ``has`` says; out."""
    left, o_ref = list(refs[:-1]), refs[-1]
    x_ref = left.pop(0)
    xs_ref = left.pop(0) if x_fmt is not None else None
    w_ref, ws_ref = left.pop(0), left.pop(0)
    x_scale_ref, row_scale_ref, bias_ref = (left.pop(0) if present else None for present in has)
    row0, col0 = pl.program_id(1) * c.block_m, pl.program_id(0) * c.block_n

    def tile(ref: Any, first: Any, rows: int, limit: int, i: jax.Array, columns: int, width: int) -> jax.Array:
        """[rows, columns] of ref from (first, i * columns), zero outside [limit, width]."""
        row = first + lax.broadcasted_iota(jnp.int32, (rows, columns), 0)
        column = i * columns + lax.broadcasted_iota(jnp.int32, (rows, columns), 1)
        whole = limit % rows == 0 and width % columns == 0
        return _compat.load(ref.at[row, column], None if whole else (row < limit) & (column < width), 0)

    def operand(ref: Any, s_ref: Any, fmt: BlockFormat, first: Any, rows: int, limit: int, i: jax.Array) -> tuple:
        code_columns, blocks = fmt.packed_size(c.block_k), c.block_k // fmt.block_size
        codes = tile(ref, first, rows, limit, i, code_columns, fmt.packed_size(k))
        return codes, tile(s_ref, first, rows, limit, i, blocks, k // fmt.block_size)

    def step(i: jax.Array, acc: jax.Array) -> jax.Array:
        w, ws = operand(w_ref, ws_ref, w_fmt, col0, c.block_n, n, i)
        if x_fmt is None:
            x, xs = tile(x_ref, row0, c.block_m, m, i, c.block_k, k), None
        else:
            x, xs = operand(x_ref, xs_ref, x_fmt, row0, c.block_m, m, i)
        if native:
            reference = partial(_dot_scaled_reference, x_fmt=x_fmt, w_fmt=w_fmt)
            kinds = [f for f in (x_fmt, w_fmt) if f is not None and f.element.bits == 8]
            assert not kinds or x_fmt is None or x_fmt.element.bits in (4, 8)
            return _compat.dot_scaled(
                _as_element(x, x_fmt), xs, _triton_type(x_fmt), _as_element(w, w_fmt).T, ws, _triton_type(w_fmt), acc,
                reference=reference,
            )  # fmt: skip
        wide = x.dtype if x_fmt is None and x.dtype in (jnp.float32, jnp.float16) else jnp.bfloat16
        wide = jnp.float32 if wide == jnp.float16 else wide  # float16 cannot hold every weight
        x = x.astype(wide) if x_fmt is None else _decode_rows(x, xs, x_fmt).astype(wide)
        w = _decode_rows(w, ws, w_fmt).astype(wide)
        return acc + jnp.dot(x, w.T, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

    acc = lax.fori_loop(0, pl.cdiv(k, c.block_k), step, jnp.zeros((c.block_m, c.block_n), jnp.float32))
    if not native:
        acc = acc * 2.0 ** (offset_of(x_fmt) + offset_of(w_fmt))
    row = row0 + lax.broadcasted_iota(jnp.int32, (c.block_m,), 0)
    column = col0 + lax.broadcasted_iota(jnp.int32, (c.block_n,), 0)
    if row_scale_ref is not None:
        acc = acc * _compat.load(row_scale_ref.at[column], column < n, 0.0)[None, :]
    if x_scale_ref is not None:
        acc = acc * _compat.load(x_scale_ref.at[row], row < m, 0.0)[:, None]
    if bias_ref is not None:
        acc = acc + _compat.load(bias_ref.at[column], column < n, 0.0)[None, :]
    index = (
        row0 + lax.broadcasted_iota(jnp.int32, acc.shape, 0),
        col0 + lax.broadcasted_iota(jnp.int32, acc.shape, 1),
    )
    _compat.store(o_ref.at[index], acc.astype(o_ref.dtype), (index[0] < m) & (index[1] < n))


def _as_element(codes: jax.Array, fmt: BlockFormat | None) -> jax.Array:
    """What ``tt.dot_scaled`` takes: nibbles as bytes, 8-bit codes as their float8."""
    if fmt is None or fmt.element.bits == 4:
        return codes
    return lax.bitcast_convert_type(codes, jnp.dtype(fmt.element.dtype))


@partial(jax.jit, static_argnames=("x_fmt", "out_dtype", "config", "native", "interpret"))
def generic(
    x: jax.Array,
    x_scales: jax.Array | None,
    x_scale: jax.Array | None,
    w: PackedWeight,
    bias: jax.Array | None,
    x_fmt: BlockFormat | None,
    out_dtype: Any,
    config: GenericConfig,
    *,
    native: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """:func:`pallas_kernels.block_scaled_matmul.reference.matmul` for a "rows" weight."""
    m, c = x.shape[0], config
    extras = [x_scale, w.row_scale, None if bias is None else bias.astype(jnp.float32)]
    args = [x, x_scales, w.codes, w.scales, *extras]
    args = [a for a in args if a is not None]
    return _compat.triton_call(
        partial(
            _generic_kernel,
            m=m, n=w.n, k=w.k, x_fmt=x_fmt, w_fmt=w.format, c=c, native=native,
            has=tuple(e is not None for e in extras),
        ),
        name=f"matmul_{x_fmt or x.dtype}_{w.format}" + ("_native" if native else ""),
        grid=(pl.cdiv(w.n, c.block_n), pl.cdiv(m, c.block_m)),
        in_specs=[pl.BlockSpec(a.shape, lambda j, i, r=a.ndim: (0,) * r) for a in args],
        out_specs=pl.BlockSpec((m, w.n), lambda j, i: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((m, w.n), out_dtype),
        num_warps=c.num_warps,
        num_stages=c.num_stages,
        interpret=interpret,
    )(*args)  # fmt: skip
