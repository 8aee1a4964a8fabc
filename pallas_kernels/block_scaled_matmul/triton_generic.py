"""Products of block-scaled operands in Pallas Triton, any rows, formats and GPU; weights in "rows".

Operands are decoded to bfloat16 in registers (float32 where x is wider than bfloat16), or go to the matrix units as
they are (``native``: ``tt.dot_scaled``), where the chip has block-scaled instructions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.core.formats import NAN_BYTE, BlockFormat
from pallas_kernels import _compat
from pallas_kernels._compat import pl
from pallas_kernels.block_scaled_matmul.layout import PackedWeight


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


def _decode_rows(codes: jax.Array, scales: Any, fmt: BlockFormat) -> jax.Array:
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
    has: tuple[bool, ...],
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
    args = [a for a in (x, x_scales, w.codes, w.scales, *extras) if a is not None]
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
