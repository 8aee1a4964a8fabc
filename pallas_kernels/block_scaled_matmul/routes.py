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
from pallas_kernels.block_scaled_matmul.epilogue import Epilogue, split
from pallas_kernels.block_scaled_matmul.layout import PackedWeight

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


def of_tiles(
    x: jax.Array,
    x_scale: jax.Array | None,
    w: PackedWeight,
    epilogue: Epilogue,
    out_dtype: Any,
    target: backend.Target,
    obstacle: str | None,
) -> list[Candidate]:
    """Pallas Triton's decode for few rows; the weight unpacked, then an FP8 or bfloat16 product, for many."""
    m, after = x.shape[0], partial(split, epilogue, out_dtype)
    if not backend.has("ptx", target):
        obstacle = obstacle or f"weights in tiles are decoded by PTX; this is {target.name}"
    decode_obstacle = obstacle
    if x.dtype not in (jnp.bfloat16, jnp.float8_e4m3fn):
        decode_obstacle = obstacle or f"x is {x.dtype}; the decode kernel multiplies bfloat16"
    decode = Candidate(
        "triton",
        lambda: after(lambda b, dtype: triton.decode(x, x_scale, w, b, dtype, decode_config(m, w, target))),
        decode_obstacle,
        f"{m} rows: the weight is better unpacked first" if m > DECODE_ROWS else None,
    )
    fp8 = _fp8_candidate(
        x, x_scale, w, epilogue, out_dtype, target, obstacle,
        lambda: (triton.unpack(w, jnp.float8_e4m3fn), w.row_scale), FP8_FACTOR,
    )  # fmt: skip
    # one pass unpacks W to bfloat16, then XLA's own product
    unpacked = Candidate(
        "triton", lambda: after(partial(_times, x, x_scale, triton.unpack(w, jnp.bfloat16), w)), obstacle
    )
    return [decode, fp8, unpacked]


def of_fragments(
    x: jax.Array,
    x_scale: jax.Array | None,
    w: PackedWeight,
    epilogue: Epilogue,
    out_dtype: Any,
    target: backend.Target,
    obstacle: str | None,
) -> list[Candidate]:
    """Mosaic GPU's kernels: ``mma.sync`` for up to 16 bfloat16 rows, fused ``wgmma``, unpacking for many rows."""
    m, after = x.shape[0], partial(split, epilogue, out_dtype)
    obstacle = obstacle or _dispatch.mosaic_obstacle(target, "wgmma")
    fp8 = w.layout == "fp8_fragments"
    wide = obstacle
    if fp8 and x.dtype != jnp.float8_e4m3fn:
        obstacle = obstacle or f"x is {x.dtype}; the weight is packed for float8_e4m3fn (mxfp4 activations)"
        wide = obstacle
    elif not fp8 and x.dtype == jnp.float8_e4m3fn:
        x = x.astype(jnp.bfloat16)
    elif not fp8 and x.dtype != jnp.bfloat16:
        wide = obstacle or f"x is {x.dtype}; the kernel multiplies bfloat16"

    def rows() -> jax.Array:
        config = rows_config(m, w.n, w.k, target)
        return after(lambda bias, dtype: mosaic_decode.rows_matmul(x, w, bias, dtype, config))

    def fused() -> jax.Array:
        config = fused_config(m, w.n, w.k, fp8, target)
        if mosaic_fused.takes_whole(epilogue, out_dtype, config):
            return mosaic_fused.fused_matmul(x, x_scale, w, epilogue, out_dtype, config)
        part = partial(mosaic_fused.fused_matmul, x, x_scale, w)
        return after(lambda bias, dtype: part(Epilogue(bias=bias), dtype, config))

    few = wide or ("the kernel for few rows takes no row scale" if fp8 or x_scale is not None else None)
    if few is None and m > mosaic_decode.MAX_ROWS:
        few = f"{m} rows; the kernel for few rows holds {mosaic_decode.MAX_ROWS}"
    unpacked = (
        w.n * w.k * (1.53 if fp8 else 2.53) / _UNPACK_BYTES + 4 + 2 * m * w.n * w.k / (_FP8_RATE if fp8 else _BF16_RATE)
    )
    slow = None
    if m > FUSED_ROWS or (m > 0 and fused_tiles.fused_time(m, w.n, w.k, fp8, target.cores) > unpacked):
        slow = f"{m} rows: the weight is better unpacked first"
    apart = m > 0 and not mosaic_fused.takes_whole(epilogue, out_dtype, fused_config(m, w.n, w.k, fp8, target))
    if fp8 and m >= LOW_RANK_ROWS and apart and mosaic_gpu.takes_whole(epilogue, out_dtype):
        slow = slow or f"{m} rows: the low-rank branch is better added inside the FP8 product"
    unpack = partial(mosaic_unpack.unpack, w, target.cores)
    if fp8:
        many = _fp8_candidate(
            x, x_scale, w, epilogue, out_dtype, target, obstacle, lambda: (unpack(), w.row_scale), FP8_FACTOR
        )
    else:
        many = Candidate("mosaic_gpu", lambda: after(partial(_times, x, x_scale, unpack(), w)), obstacle)
    elsewhere = f"Pallas Triton's kernels read 'tiles' and 'rows', not {w.layout} (prepare, layout=)"
    return [
        Candidate("mosaic_gpu", rows, few),
        Candidate("mosaic_gpu", fused, wide, slow),
        many,
        Candidate("triton", fused, elsewhere),
    ]


def _fp8_candidate(
    x: jax.Array,
    x_scale: jax.Array | None,
    w: PackedWeight,
    epilogue: Epilogue,
    out_dtype: Any,
    target: backend.Target,
    obstacle: str | None,
    unpack: Callable[[], tuple[jax.Array, Any]],
    factor: float = 1.0,
    slow: str | None = None,
) -> Candidate:
    """One pass unpacks W to e4m3 (``unpack``: values and their row scales), then the FP8 product."""
    obstacle = obstacle or _dispatch.mosaic_obstacle(target, "wgmma")
    if x.dtype != jnp.float8_e4m3fn:
        obstacle = obstacle or f"x is {x.dtype}; the FP8 product takes float8_e4m3fn and x_scale"

    def run() -> jax.Array:
        config = mosaic_gpu.fp8_config(x.shape[0], w.n, target.cores)
        scale = jnp.ones(x.shape[:1], jnp.float32) if x_scale is None else x_scale
        values, w_scale = unpack()

        def product(epilogue: Epilogue, dtype: Any) -> jax.Array:
            args = (x, scale, values, w_scale, epilogue, dtype, w.n, config, target.cores, factor)
            return mosaic_gpu.fp8_matmul(*args)

        if mosaic_gpu.takes_whole(epilogue, out_dtype):
            return product(compact(epilogue, w.n), out_dtype)
        return split(epilogue, out_dtype, lambda bias, dtype: product(Epilogue(bias=bias), dtype))

    return Candidate("mosaic_gpu", run, obstacle, slow)


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


def of_rows(
    x: jax.Array,
    x_scale: jax.Array | None,
    w: PackedWeight,
    epilogue: Epilogue,
    out_dtype: Any,
    target: backend.Target,
    obstacle: str | None,
) -> list[Candidate]:
    """Hopper and the exact-FP8 pair: beyond DECODE_ROWS rows the weight is unpacked once for the FP8 product."""
    slow = f"{x.shape[0]} rows: decoding inside the product is faster" if x.shape[0] <= DECODE_ROWS else None
    unpack = partial(triton_unpack.unpack_rows, w)
    return [_fp8_candidate(x, x_scale, w, epilogue, out_dtype, target, obstacle, unpack, slow=slow)]


@partial(jax.jit, static_argnums=(5,))
def _times(x: Any, x_scale: Any, values: jax.Array, w: PackedWeight, bias: Any, out_dtype: Any) -> jax.Array:
    dtype = x.dtype if x.dtype in (jnp.float32, jnp.float16) else jnp.bfloat16
    y = jax.lax.dot_general(
        x.astype(dtype), values[: w.n, : w.k].astype(dtype), (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return reference.finish(y, w, x_scale, bias, out_dtype)
