"""The routes of a product with an MXFP4 weight in "tiles" or in fragments, best first (H200: benchmarks/NOTES.md).

A weight that is held in 4 bits has to be decoded by whoever multiplies it. Up to some thousand rows the kernels decode
it on the way to the matrix units. Beyond, one pass unpacks it (to e4m3 for quantized x, else to bfloat16) for a product
that reads plain values; that pass costs about as much as a bfloat16 product of 256 rows. Which of the two is taken is a
comparison of predicted times, made from measurements.

With quantized x (e4m3) every route beats the bfloat16 product on all shapes measured but one. With bfloat16 x and more
than about 128 rows none does: the same arithmetic runs with the decode on top. The fastest of them is taken all the
same, 0.74 to 1.0 of bfloat16's speed; such a weight keeps its memory's advantage only (``mxjax bench`` says which).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from mxjax import backend
from pallas_kernels import _dispatch, _tuning
from pallas_kernels._dispatch import Candidate
from pallas_kernels.block_scaled_matmul import (
    fragments,
    fused_tiles,
    mosaic_decode,
    mosaic_fused,
    mosaic_gpu,
    mosaic_unpack,
    reference,
    triton,
    triton_unpack,
)
from pallas_kernels.block_scaled_matmul.epilogue import Epilogue
from pallas_kernels.block_scaled_matmul.layout import PackedWeight
from pallas_kernels.block_scaled_matmul.product import Product

# Rows of x up to which decoding a weight in "tiles" inside the product beats unpacking it first.
DECODE_ROWS = 128
# Beyond that many rows a fused kernel decodes W so often that the unpacked product, which has the better tiles, wins.
FUSED_ROWS = 2048
FP8_FACTOR = 2.0**-fragments.FP8_SHIFT  # of the values that the unpacking of "tiles" and "fp8_fragments" writes
# Rows from which on a low-rank branch is worth unpacking W for, so that it can be part of the product's epilogue.
LOW_RANK_ROWS = 256
# Bytes and operations a microsecond of the unpacking pass and of the product after it (H200).
_UNPACK_BYTES, _FP8_RATE, _BF16_RATE = 3.4e6, 1.45e9, 0.78e9


def decode_config(m: int, w: PackedWeight, target: backend.Target) -> triton.DecodeConfig:
    """Tuned for this device, shape and number of rows, or the heuristic's."""
    tuned = _tuning.lookup("w4_decode", triton.DecodeConfig, target.name, m, w.n, w.k)
    return tuned or triton.decode_config(m, w, target.cores)


def rows_config(m: int, n: int, k: int, target: backend.Target) -> mosaic_decode.RowsConfig:
    """As :func:`decode_config`. Eight rows of x are another kernel than sixteen, in the same bucket."""
    tuned = _tuning.lookup(mosaic_decode.operation(m), mosaic_decode.RowsConfig, target.name, m, n, k)
    return tuned or mosaic_decode.rows_config(m, n, k, target.cores)


def fused_config(m: int, n: int, k: int, fp8: bool, target: backend.Target) -> fused_tiles.FusedConfig:
    """As :func:`decode_config`."""
    operation = "w4_fused_fp8" if fp8 else "w4_fused_bf16"
    tuned = _tuning.lookup(operation, fused_tiles.FusedConfig, target.name, m, n, k)
    return tuned or fused_tiles.fused_config(m, n, k, fp8, target.cores)


def of_tiles(p: Product) -> list[Candidate]:
    """Pallas Triton's decode for few rows; the weight unpacked, then an FP8 or bfloat16 product, for many."""
    x, w = p.x, p.w
    if not backend.has("ptx", p.target):
        p = p.unless(f"weights in tiles are decoded by PTX; this is {p.target.name}")
    taken = x.dtype in (jnp.bfloat16, jnp.float8_e4m3fn)
    decode = Candidate(
        "triton",
        lambda: p.split(lambda b, dtype: triton.decode(x, p.x_scale, w, b, dtype, decode_config(p.m, w, p.target))),
        p.unless(None if taken else f"x is {x.dtype}; the decode kernel multiplies bfloat16").obstacle,
        f"{p.m} rows: the weight is better unpacked first" if p.m > DECODE_ROWS else None,
    )
    fp8 = _fp8_candidate(p, lambda: (triton.unpack(w, jnp.float8_e4m3fn), w.row_scale), FP8_FACTOR)
    # one pass unpacks W to bfloat16, then XLA's own product
    unpacked = Candidate(
        "triton", lambda: p.split(partial(_times, x, p.x_scale, triton.unpack(w, jnp.bfloat16), w)), p.obstacle
    )
    return [decode, fp8, unpacked]


def of_fragments(p: Product) -> list[Candidate]:
    """Mosaic GPU's kernels: ``mma.sync`` for up to 16 bfloat16 rows, fused ``wgmma``, unpacking for many rows."""
    p = p.unless(_dispatch.mosaic_obstacle(p.target, "wgmma"))
    m, w, cores = p.m, p.w, p.target.cores
    fp8 = w.layout == "fp8_fragments"
    if fp8 and p.x.dtype != jnp.float8_e4m3fn:
        p = p.unless(f"x is {p.x.dtype}; the weight is packed for float8_e4m3fn (mxfp4 activations)")
    elif not fp8 and p.x.dtype == jnp.float8_e4m3fn:
        p = replace(p, x=p.x.astype(jnp.bfloat16))
    wide = p.obstacle
    if not fp8 and p.x.dtype != jnp.bfloat16:
        wide = wide or f"x is {p.x.dtype}; the kernel multiplies bfloat16"

    def rows() -> jax.Array:
        config = rows_config(m, w.n, w.k, p.target)
        return p.split(lambda bias, dtype: mosaic_decode.rows_matmul(p.x, w, bias, dtype, config))

    def fused() -> jax.Array:
        config = fused_config(m, w.n, w.k, fp8, p.target)
        if mosaic_fused.takes_whole(p.epilogue, p.out_dtype, config):
            return mosaic_fused.fused_matmul(p.x, p.x_scale, w, p.epilogue, p.out_dtype, config)
        part = partial(mosaic_fused.fused_matmul, p.x, p.x_scale, w)
        return p.split(lambda bias, dtype: part(Epilogue(bias=bias), dtype, config))

    few = wide or ("the kernel for few rows takes no row scale" if fp8 or p.x_scale is not None else None)
    if few is None and m > mosaic_decode.MAX_ROWS:
        few = f"{m} rows; the kernel for few rows holds {mosaic_decode.MAX_ROWS}"
    unpack = partial(mosaic_unpack.unpack, w, cores)
    if fp8:
        many = _fp8_candidate(p, lambda: (unpack(), w.row_scale), FP8_FACTOR)
    else:
        many = Candidate("mosaic_gpu", lambda: p.split(partial(_times, p.x, p.x_scale, unpack(), w)), p.obstacle)
    elsewhere = f"Pallas Triton's kernels read 'tiles' and 'rows', not {w.layout} (prepare, layout=)"
    return [
        Candidate("mosaic_gpu", rows, few),
        Candidate("mosaic_gpu", fused, wide, _better_unpacked(p, fp8)),
        many,
        Candidate("triton", fused, elsewhere),
    ]


def _better_unpacked(p: Product, fp8: bool) -> str | None:
    """Why unpacking a weight in fragments first is faster than the fused kernel, or None."""
    m, n, k, cores = p.m, p.w.n, p.w.k, p.target.cores
    if m == 0:
        return None
    unpacking = n * k * (1.53 if fp8 else 2.53) / _UNPACK_BYTES + 4
    multiplying = 2 * m * n * k / (_FP8_RATE if fp8 else _BF16_RATE)
    if m > FUSED_ROWS or fused_tiles.fused_time(m, n, k, fp8, cores) > unpacking + multiplying:
        return f"{m} rows: the weight is better unpacked first"
    apart = not mosaic_fused.takes_whole(p.epilogue, p.out_dtype, fused_config(m, n, k, fp8, p.target))
    if fp8 and m >= LOW_RANK_ROWS and apart and mosaic_gpu.takes_whole(p.epilogue, p.out_dtype):
        return f"{m} rows: the low-rank branch is better added inside the FP8 product"
    return None


def of_rows(p: Product) -> list[Candidate]:
    """Hopper and the exact-FP8 pair: beyond DECODE_ROWS rows the weight is unpacked once for the FP8 product."""
    slow = f"{p.m} rows: decoding inside the product is faster" if p.m <= DECODE_ROWS else None
    return [_fp8_candidate(p, partial(triton_unpack.unpack_rows, p.w), slow=slow)]


def _fp8_candidate(
    p: Product, unpack: Callable[[], tuple[jax.Array, Any]], factor: float = 1.0, slow: str | None = None
) -> Candidate:
    """One pass unpacks W to e4m3 (``unpack``: values and their row scales), then the FP8 product."""
    p = p.unless(_dispatch.mosaic_obstacle(p.target, "wgmma"))
    if p.x.dtype != jnp.float8_e4m3fn:
        p = p.unless(f"x is {p.x.dtype}; the FP8 product takes float8_e4m3fn and x_scale")
    n, cores = p.w.n, p.target.cores

    def run() -> jax.Array:
        config = mosaic_gpu.fp8_config(p.m, n, cores)
        scale = jnp.ones(p.m, jnp.float32) if p.x_scale is None else p.x_scale
        values, w_scale = unpack()

        def product(epilogue: Epilogue, dtype: Any) -> jax.Array:
            args = (p.x, scale, values, w_scale, epilogue, dtype, n, config, cores, factor)
            return mosaic_gpu.fp8_matmul(*args)

        if mosaic_gpu.takes_whole(p.epilogue, p.out_dtype):
            return product(compact(p.epilogue, n), p.out_dtype)
        return p.split(lambda bias, dtype: product(Epilogue(bias=bias), dtype))

    return Candidate("mosaic_gpu", run, p.obstacle, slow)


def compact(epilogue: Epilogue, n: int) -> Epilogue:
    """The epilogue as ``fp8_matmul`` takes it: a block-diagonal B without its zeros where the blocks meet its tiles."""
    parts, up = epilogue.parts, epilogue.up
    if up is None or not parts or any(p % mosaic_gpu.PART for p in parts) or up.shape[1] % (len(parts) + 1):
        return replace(epilogue, parts=())
    return replace(epilogue, up=diagonal_blocks(up, (*parts, n)))


def diagonal_blocks(up: jax.Array, ends: tuple[int, ...]) -> jax.Array:
    """The blocks of a block-diagonal [N, parts * r], one below the other: [N, r]. ``ends``: the last row of each."""
    rank = up.shape[1] // len(ends)
    starts = (0, *ends)
    return jnp.concatenate([up[a:b, i * rank : (i + 1) * rank] for i, (a, b) in enumerate(pairwise(starts))])


@partial(jax.jit, static_argnums=(5,))
def _times(x: Any, x_scale: Any, values: jax.Array, w: PackedWeight, bias: Any, out_dtype: Any) -> jax.Array:
    dtype = x.dtype if x.dtype in (jnp.float32, jnp.float16) else jnp.bfloat16
    y = jax.lax.dot_general(
        x.astype(dtype), values[: w.n, : w.k].astype(dtype), (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return reference.finish(y, w, x_scale, bias, out_dtype)
