"""MXFP4 and MXFP6 weights in "rows" to e4m3 values for the FP8 product with many rows of x: one pass, Pallas Triton."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.core import codec
from mxjax.core.formats import BlockFormat
from pallas_kernels import _compat
from pallas_kernels._compat import pl
from pallas_kernels.block_scaled_matmul.decode import decode_fp8, row_top
from pallas_kernels.block_scaled_matmul.layout import PackedWeight
from pallas_kernels.transform_quantize.reference import fp8_top

_ROWS, _COLUMNS = 32, 128


def _kernel(w_ref: Any, s_ref: Any, top_ref: Any, o_ref: Any, *, n: int, k: int, fmt: BlockFormat) -> None:
    row0, tile = pl.program_id(0) * _ROWS, pl.program_id(1)

    def load(ref: Any, columns: int, width: int, step: int = 1, start: int = 0) -> jax.Array:
        row = row0 + lax.broadcasted_iota(jnp.int32, (_ROWS, columns), 0)
        column = tile * columns + lax.broadcasted_iota(jnp.int32, (_ROWS, columns), 1)
        return _compat.load(ref.at[row, column * step + start], (row < n) & (column < width), 0)

    codes: Any
    if fmt.element.bits == 6:
        codes = tuple(load(w_ref, _COLUMNS // 4, k // 4, 3, byte) for byte in range(3))
    else:
        codes = load(w_ref, fmt.packed_size(_COLUMNS), fmt.packed_size(k))
    scales = load(s_ref, _COLUMNS // fmt.block_size, k // fmt.block_size)
    row = row0 + lax.broadcasted_iota(jnp.int32, (_ROWS,), 0)
    top = _compat.load(top_ref.at[row], row < n, 127)
    values = decode_fp8(codes, scales, top, o_ref.dtype, fmt)
    row = row0 + lax.broadcasted_iota(jnp.int32, values.shape, 0)
    column = tile * _COLUMNS + lax.broadcasted_iota(jnp.int32, values.shape, 1)
    _compat.store(o_ref.at[row, column], values, (row < n) & (column < k))


@partial(jax.jit, static_argnames=("interpret",))
def unpack_rows(w: PackedWeight, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """Values e4m3 [N, K] and their row scales float32 [N]: exact for blocks within ``exact_binades`` of the row."""
    assert w.scales is not None  # "rows"
    top = row_top(w.scales)
    values = _compat.triton_call(
        partial(_kernel, n=w.n, k=w.k, fmt=w.format),
        name=f"unpack_{w.format}",
        grid=(pl.cdiv(w.n, _ROWS), pl.cdiv(w.k, _COLUMNS)),
        in_specs=[pl.BlockSpec(a.shape, lambda i, j, r=a.ndim: (0,) * r) for a in (w.codes, w.scales, top)],
        out_specs=pl.BlockSpec((w.n, w.k), lambda i, j: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((w.n, w.k), jnp.float8_e4m3fn),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
    )(w.codes, w.scales, top)
    scale = codec.float_of((top - fp8_top(jnp.float8_e4m3fn, w.format.element)) << codec.MANTISSA_BITS)
    return values, scale if w.row_scale is None else scale * w.row_scale
