"""Products with "tiles" weights in Pallas Triton (NVIDIA: the decode is PTX).

``decode``   few rows of x. Bound by memory: W tiles stream through shared memory
             once, are decoded in registers by a few integer operations and meet x on the tensor cores. K is split over
             the grid; the float32 partial sums are added by XLA in a fixed order, together with the epilogue.
``unpack``   the weight to e4m3 for an FP8 product, or to bfloat16: one pass, bound by the bytes written.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.core import codec
from mxjax.core.formats import NAN_BYTE
from mxjax.core.scales import scale_by_power
from pallas_kernels import _compat
from pallas_kernels._compat import pl
from pallas_kernels.block_scaled_matmul.fragments import FP8_SHIFT
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
