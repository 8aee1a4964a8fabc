"""Native block-scaled FP4 product for Blackwell (sm_100): MXFP4 and NVFP4 in Pallas Mosaic GPU.

``tcgen05.mma`` multiplies E2M1 codes and applies both operands' block scales (E8M0 for 32 values, E4M3 for 16) inside
the matrix unit; sums are float32 in tensor memory. A block of one warpgroup computes 128 rows of x times ``tile_n``
rows of W. One warp copies codes and scales to a ring in shared memory (TMA), a second moves the scales on to tensor
memory and multiplies; then the whole warpgroup takes the sums, scales rows and columns, adds the bias, and stores.

Scales have to lie in memory as ``tcgen05.cp`` reads them, 128 x 4 of them as 512 contiguous bytes: :func:`scale_tiles`.

Compiled to machine code and never run: nobody here has the chip. Dispatch takes this kernel only if it is asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax import backend
from mxjax.core.formats import MXFP4, NVFP4, BlockFormat
from pallas_kernels import _compat
from pallas_kernels._compat import pl
from pallas_kernels.block_scaled_matmul.layout import PackedWeight

TILE_M = 128  # rows of x of a block: what the matrix unit takes
TILE_K = 256  # codes that make one 128-byte swizzle row
SCALE_ROWS, SCALE_COLUMNS = 128, 4  # scales of a tile
_STAGED = 64  # columns that leave through shared memory at once


@dataclass(frozen=True)
class Fp4Config:
    """Tile and ring.

    Attributes:
      tile_n: rows of W of a block, 128 or 256.
      stages: K tiles in flight.
    """

    tile_n: int = 128
    stages: int = 3


def fp4_config(n: int) -> Fp4Config:
    """256 rows of W where there are as many. Not tuned: nobody has measured it."""
    return Fp4Config(tile_n=256 if n > 128 else 128)


def scale_tiles(scales: jax.Array) -> jax.Array:
    """Scale bytes [R, B] to [R'/128, B'/4, 32, 16], the order in which the matrix unit's copy reads them.

    R' and B' are R and B rounded up to 128 and 4; what is added is zero. Scale ``[128 i + 32 q + r, 4 j + c]`` goes to
    ``[i, j, r, 4 q + c]``: the four columns of the four rows r, r + 32, r + 64 and r + 96 are 16 neighbouring bytes
    (PTX ISA, scale factor layouts of tcgen05.mma).

    Example:
      >>> scale_tiles(jnp.arange(512, dtype=jnp.uint8).reshape(128, 4))[0, 0, 1].tolist()
      [4, 5, 6, 7, 132, 133, 134, 135, 4, 5, 6, 7, 132, 133, 134, 135]
    """
    rows, columns = scales.shape[0] + -scales.shape[0] % SCALE_ROWS, scales.shape[1] + -scales.shape[1] % SCALE_COLUMNS
    s = jnp.pad(scales, ((0, rows - scales.shape[0]), (0, columns - scales.shape[1])))
    s = s.reshape(rows // SCALE_ROWS, 4, 32, columns // SCALE_COLUMNS, SCALE_COLUMNS)
    return jnp.transpose(s, (0, 3, 2, 1, 4)).reshape(rows // SCALE_ROWS, columns // SCALE_COLUMNS, 32, 16)


def obstacle(x_format: BlockFormat | None, w: PackedWeight, target: backend.Target) -> str | None:
    """Why the kernel cannot take these operands here, or None."""
    if not (backend.has("mosaic_gpu", target) and backend.has("fp4_matmul", target)):
        here = f"{target.name} ({target.arch or target.platform})"
        return f"this Mosaic GPU kernel needs the FP4 matrix units of sm_100; this is {here}"
    if x_format is None:
        return "x is not quantized; the FP4 units multiply codes by codes (x_scales, x_format)"
    if x_format != w.format or w.format not in (MXFP4, NVFP4):
        return f"x is {x_format}, W {w.format}; the kernel multiplies mxfp4 by mxfp4 and nvfp4 by nvfp4"
    return _compat.block_scaled_mma_missing()


def operands(codes: jax.Array, scales: jax.Array, fmt: BlockFormat, rows: int) -> tuple[jax.Array, jax.Array]:
    """Codes [R, K / 2] and scale bytes [R, B] as the kernel's copies take them.

    Returns:
      E2M1 [R', K'], which is the same bytes, and the scales of [R'', K'] as :func:`scale_tiles` orders them, E8M0 or
      E4M3. K' is K rounded up to 256, R' is R rounded up to 8 and R'' to ``rows``; what is added is zero. Where K is a
      multiple of 256 and R of 8 the codes are not copied.
    """
    depth = 2 * codes.shape[1] + -2 * codes.shape[1] % TILE_K
    if codes.shape[0] % 8 or 2 * codes.shape[1] < depth:
        codes = jnp.pad(codes, ((0, -codes.shape[0] % 8), (0, depth // 2 - codes.shape[1])))
    scales = jnp.pad(scales, ((0, -scales.shape[0] % rows), (0, depth // fmt.block_size - scales.shape[1])))
    dtype = jnp.float8_e8m0fnu if fmt.scale == "e8m0" else jnp.float8_e4m3fn
    values = lax.bitcast_convert_type(codes, jnp.float4_e2m1fn).reshape(codes.shape[0], depth)
    return values, lax.bitcast_convert_type(scale_tiles(scales), dtype)


def _kernel(
    x_gmem: Any, w_gmem: Any, x_scales_gmem: Any, w_scales_gmem: Any, *rest: Any,
    c: Fp4Config, block: int, has: tuple[bool, ...],
) -> None:  # fmt: skip
    """``rest``: what there is of x's row factors, W's row factors and the bias; the result; scratch."""
    plgpu = _compat.mosaic()
    given = list(rest)
    row_gmem, column_gmem, bias_gmem = (given.pop(0) if h else None for h in has)
    o_gmem, x_smem, w_smem, xs_smem, ws_smem, out_smem, acc, x_scales, w_scales, full, empty, done = given
    steps = x_gmem.shape[1] // TILE_K
    m_tile, n_tile, w_tiles = lax.axis_index("m"), lax.axis_index("n"), c.tile_n // SCALE_ROWS
    row0, column0 = m_tile * TILE_M, n_tile * c.tile_n
    scale_steps = TILE_K // block // SCALE_COLUMNS

    @plgpu.warp_map
    def _roles(warp: Any) -> None:
        @pl.when(warp == 0)
        def _copy() -> None:
            @pl.loop(0, steps)
            def _step(i: Any) -> None:
                slot = lax.rem(i, c.stages)

                @pl.when(i >= c.stages)
                def _wait() -> None:
                    plgpu.barrier_wait(empty.at[slot])

                columns, scales = pl.ds(i * TILE_K, TILE_K), pl.ds(i * scale_steps, scale_steps)
                x_tile, w_tile = pl.ds(m_tile, 1), pl.ds(n_tile * w_tiles, w_tiles)
                plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(row0, TILE_M), columns], x_smem.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(w_gmem.at[pl.ds(column0, c.tile_n), columns], w_smem.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(x_scales_gmem.at[x_tile, scales], xs_smem.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(w_scales_gmem.at[w_tile, scales], ws_smem.at[slot], full.at[slot])

        @pl.when(warp == 1)
        def _multiply() -> None:
            @pl.loop(0, steps)
            def _step(i: Any) -> None:
                slot = lax.rem(i, c.stages)
                plgpu.barrier_wait(full.at[slot])
                # the matrix unit does copies and products of one warp in order
                plgpu.async_copy_scales_to_tmem(xs_smem.at[slot], x_scales)
                plgpu.async_copy_scales_to_tmem(ws_smem.at[slot], w_scales)
                plgpu.tcgen05_mma(
                    acc, x_smem.at[slot], _compat.mosaic_transpose(w_smem.at[slot]), empty.at[slot],
                    a_scale=x_scales, b_scale=w_scales, accumulate=i > 0,
                )  # fmt: skip

            plgpu.tcgen05_commit_arrive(done)

    plgpu.barrier_wait(done)
    shape = (TILE_M, _STAGED)

    def vector(ref: Any, start: Any, axis: int) -> jax.Array:
        values = _compat.mosaic_load(ref, start, shape[axis], plgpu.Layout.TCGEN05.reduce(1 - axis))
        return plgpu.layout_cast(lax.broadcast_in_dim(values, shape, (axis,)), plgpu.Layout.TCGEN05)

    for j in range(0, c.tile_n, _STAGED):
        y = plgpu.async_load_tmem(acc.at[:, pl.ds(j, _STAGED)], layout=plgpu.Layout.TCGEN05)
        scales = [vector(row_gmem, row0, 0)] if row_gmem is not None else []
        scales += [vector(column_gmem, column0 + j, 1)] if column_gmem is not None else []
        if scales:  # one with the other first: reference.finish
            y = y * math.prod(scales[1:], start=scales[0])
        if bias_gmem is not None:
            y = y + vector(bias_gmem, column0 + j, 1)
        slot = out_smem.at[j // _STAGED % 2]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        slot[...] = y.astype(o_gmem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(slot, o_gmem.at[pl.ds(row0, TILE_M), pl.ds(column0 + j, _STAGED)])
    plgpu.wait_load_tmem()
    plgpu.wait_smem_to_gmem(0)


@partial(jax.jit, static_argnames=("out_dtype", "config"))
def fp4_matmul(
    x: jax.Array,
    x_scales: jax.Array,
    x_scale: jax.Array | None,
    w: PackedWeight,
    bias: jax.Array | None,
    out_dtype: Any,
    config: Fp4Config,
) -> jax.Array:
    """``(x * x_scale[:, None]) @ (W * row_scale[:, None])^T + bias`` [M, N], summed in float32.

    Args:
      x: codes uint8 [M, K / 2] of W's format, low nibble first.
      x_scales: scale bytes uint8 [M, K / block].
      x_scale: float32 [M], or None.
      w: weight in "rows" of MXFP4 or NVFP4.
      bias: [N], or None.
      out_dtype: bfloat16, float16 or float32.
      config: tile and ring.
    """
    plgpu = _compat.mosaic()
    m, n, c = x.shape[0], w.n, config
    block, out_dtype = w.format.block_size, jnp.dtype(out_dtype)
    if out_dtype.itemsize == 4:  # twice the staging memory for the output
        c = replace(c, stages=min(c.stages, 2))
    assert w.scales is not None  # "rows"
    a, a_scales = operands(x, x_scales, w.format, TILE_M)
    b, b_scales = operands(w.codes, w.scales, w.format, c.tile_n)
    # read without bounds
    vectors = [
        None if v is None else jnp.pad(v.astype(jnp.float32), (0, -v.shape[0] % tile))
        for v, tile in ((x_scale, TILE_M), (w.row_scale, c.tile_n), (bias, c.tile_n))
    ]
    scale_steps = TILE_K // block // SCALE_COLUMNS
    transforms = (plgpu.TilingTransform((8, TILE_K)), plgpu.SwizzleTransform(128))
    swizzle = plgpu.find_swizzle(_STAGED * out_dtype.itemsize * 8)
    out_transforms = (plgpu.TilingTransform((8, swizzle // out_dtype.itemsize)), plgpu.SwizzleTransform(swizzle))
    tensor = partial(plgpu.TMEM, dtype=b_scales.dtype, layout=plgpu.TMEMLayout.SCALES_LAYOUT)

    def fp4_matmul(*refs: Any) -> None:  # its name is the kernel's
        _kernel(*refs, c=c, block=block, has=tuple(v is not None for v in vectors))

    out = plgpu.kernel(
        fp4_matmul,
        out_type=jax.ShapeDtypeStruct((m + -m % 8, n + -n % _STAGED), out_dtype),
        grid=(pl.cdiv(m, TILE_M), pl.cdiv(n, c.tile_n)),
        grid_names=("m", "n"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        scratch_types=(
            plgpu.SMEM((c.stages, TILE_M, TILE_K), jnp.float4_e2m1fn, transforms=transforms),
            plgpu.SMEM((c.stages, c.tile_n, TILE_K), jnp.float4_e2m1fn, transforms=transforms),
            plgpu.SMEM((c.stages, 1, scale_steps, 32, 16), b_scales.dtype),
            plgpu.SMEM((c.stages, c.tile_n // SCALE_ROWS, scale_steps, 32, 16), b_scales.dtype),
            plgpu.SMEM((2, TILE_M, _STAGED), out_dtype, transforms=out_transforms),
            plgpu.TMEM((TILE_M, c.tile_n), jnp.float32),
            tensor((TILE_M, TILE_K // block)),
            tensor((c.tile_n, TILE_K // block)),
            plgpu.Barrier(num_arrivals=4, num_barriers=c.stages),
            plgpu.Barrier(num_barriers=c.stages, orders_tensor_core=True),
            plgpu.Barrier(orders_tensor_core=True),
        ),
    )(a, b, a_scales, b_scales, *(v for v in vectors if v is not None))
    return out[:m, :n]
