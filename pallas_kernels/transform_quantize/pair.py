"""MXFP4 codes and scale bytes to the exact pair (float8 or bfloat16 values and a row scale): the second of two passes.

With one matrix a block a tile has the rows of one block column, and a row's largest scale is known only at the end. So
the first pass (``tq_blocks``) stores codes, and this one reads them again: 2 + 0.53 + 0.53 + 1 bytes a value, where one
pass with one matrix for all blocks moves 3.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.core import codec
from mxjax.core.formats import E8M0_BIAS, MXFP4, NAN_BYTE
from pallas_kernels import _compat
from pallas_kernels._compat import pl
from pallas_kernels.transform_quantize.reference import FP8_MIN_BYTE, fp8_top, row_scale_of
from pallas_kernels.transform_quantize.triton import row_chunks

_SMALLEST = 128  # columns of a piece: four blocks


def _e2m1(code: jax.Array) -> jax.Array:
    """float32 values of int32 codes, by their bits; a zero code is +0 whatever its sign."""
    m = code & 7
    bits = jnp.where(m < 2, m * (126 << 23), ((m >> 1) + 126) << 23 | (m & 1) << 22)
    return codec.float_of(bits | jnp.where(m == 0, 0, (code & 8) << 28))


def _kernel(codes_ref: Any, bytes_ref: Any, values_ref: Any, scale_ref: Any, *, k: int, chunks: tuple) -> None:
    """One row."""

    def piece(offset: int, n: int, end: int) -> tuple[Any, jax.Array | None]:
        if offset + n <= end:
            return pl.ds(offset, n), None
        at = offset + lax.broadcasted_iota(jnp.int32, (n,), 0)
        return at, at < end

    block = MXFP4.block_size
    tiles, row_byte, bad = [], jnp.int32(FP8_MIN_BYTE), jnp.int32(0)
    for offset, n in chunks:
        at, mask = piece(offset // block, n // block, k // block)
        byte = _compat.load(bytes_ref.at[0, at], mask, 0).astype(jnp.int32)
        tiles.append(byte)
        bad = jnp.maximum(bad, jnp.max(byte))
        row_byte = jnp.maximum(row_byte, jnp.max(jnp.where(byte == NAN_BYTE, 0, byte)))
    top = row_byte - fp8_top(values_ref.dtype)
    for (offset, n), byte in zip(chunks, tiles, strict=True):
        at, mask = piece(offset // 2, n // 2, k // 2)
        pairs = _compat.load(codes_ref.at[0, at], mask, 0).astype(jnp.int32).reshape(n // block, block // 2)
        scale = codec.float_of((E8M0_BIAS + jnp.maximum(byte - top, -100)) << 23)[:, None]
        values = jnp.stack([_e2m1(pairs & 15) * scale, _e2m1(pairs >> 4) * scale], axis=-1)
        at, mask = piece(offset, n, k)
        _compat.store(values_ref.at[0, at], values.astype(values_ref.dtype).reshape(n), mask)
    scale = row_scale_of(row_byte, fp8_top(values_ref.dtype))
    scale_ref[0] = jnp.where(bad == NAN_BYTE, jnp.float32(jnp.nan), scale)


@partial(jax.jit, static_argnames=("dtype", "interpret"))
def pair_of_codes(
    codes: jax.Array, byte: jax.Array, dtype: Any = jnp.float8_e4m3fn, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """MXFP4 codes [.., K / 2] and scale bytes [.., K / 32] as ``values * row_scale[.., None]``.

    What :func:`pallas_kernels.transform_quantize.transform_quantize_fp8` returns for them, as one kernel.

    Args:
      dtype: float8_e4m3fn or bfloat16.
    """
    lead, k = codes.shape[:-1], 2 * codes.shape[-1]
    m = codes.size // codes.shape[-1]
    args = [codes.reshape(m, -1), byte.reshape(m, -1)]

    def row(n: int) -> Any:
        return pl.BlockSpec((1, n), lambda i: (i, 0))

    values, scale = _compat.triton_call(
        partial(_kernel, k=k, chunks=row_chunks(k, _SMALLEST)),
        name="tq_pair",
        grid=(m,),
        in_specs=[row(arg.shape[1]) for arg in args],
        out_specs=[row(k), pl.BlockSpec((1,), lambda i: (i,))],
        out_shape=[jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct((m,), jnp.float32)],
        num_warps=4,
        num_stages=1,
        interpret=interpret,
    )(*args)
    return values.reshape(*lead, k), scale.reshape(lead)
