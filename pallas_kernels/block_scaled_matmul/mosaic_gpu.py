"""FP8 product with row and column scales and a whole epilogue for Hopper, in Pallas Mosaic GPU.

A persistent kernel: one block of three warpgroups a multiprocessor. One warpgroup copies tiles of x and W to shared
memory (TMA, a ring of ``stages``); two multiply, side by side along N (``wgmma`` e4m3, float32 accumulators).
Blocks form clusters of two along M that share every W tile through multicast. Rows and columns beyond the arrays are
zero-filled by TMA on the way in and dropped on the way out.

The low-rank branch is one more product on the finished sums, in bfloat16: rows of x A^T from global memory straight to
registers, rows of B through the shared memory that the result leaves by, 64 columns of the rank at a time. Beside the
4 bytes a value that a pass of its own would read and write again, it costs about one more step along K.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _compat
from pallas_kernels._compat import pl
from pallas_kernels.block_scaled_matmul.epilogue import Epilogue
from pallas_kernels.block_scaled_matmul.fp8_epilogue import PIECE, RANK_STEP, Operands, finished

_TILE_K = 128  # one 128-byte swizzle row of e4m3
_WARPGROUPS = 2
# What TMA copies in swizzled tiles must be whole tiles; arrays that are not are padded.
_ALIGN_M, _ALIGN_N = 8, 64
PART = 256  # columns of the widest tile of a block: where another branch may begin


@dataclass(frozen=True)
class Fp8Config:
    """Tile of one compute warpgroup, ring depth, and the order in which tiles are visited.

    Attributes:
      tile_m, tile_n: rows and columns of a warpgroup; a block covers tile_m x 2 * tile_n.
      stages: K tiles in flight.
      cluster: blocks along M that share W tiles (1 or 2).
      grid_tile_width: width of the snake of tiles, for reuse in L2.
    """

    tile_m: int = 128
    tile_n: int = 128
    stages: int = 4
    cluster: int = 2
    grid_tile_width: int = 8


# (tile_m, tile_n, cluster) and the share of the matrix units' rate that each tile reaches (H200)
_TILES = ((128, 128, 2, 1.0), (128, 64, 2, 0.85), (64, 128, 2, 0.8), (64, 64, 2, 0.6), (64, 64, 1, 0.55))


def fp8_config(m: int, n: int, cores: int) -> Fp8Config:
    """The tile with the least work a multiprocessor: rounds of tiles times the time of one."""

    def cost(tile: tuple) -> float:
        tile_m, tile_n, cluster, rate = tile
        blocks = pl.cdiv(m, tile_m * cluster) * cluster * pl.cdiv(n, tile_n * _WARPGROUPS)
        return pl.cdiv(blocks, cores) * tile_m * tile_n / rate

    tile_m, tile_n, cluster, _ = min(_TILES, key=cost)
    return Fp8Config(tile_m=tile_m, tile_n=tile_n, cluster=cluster)


def takes_whole(epilogue: Epilogue, out_dtype: Any) -> bool:
    """Whether the kernel does all of the epilogue; else the low-rank branch and the function follow in XLA."""
    down = epilogue.down
    return epilogue.is_bias_only or (
        jnp.dtype(out_dtype) == jnp.bfloat16 and (down is None or down.dtype == jnp.bfloat16)
    )


def _fp8_matmul(
    x_gmem: Any, w_gmem: Any, row_gmem: Any, column_gmem: Any, *rest: Any, c: Fp8Config, factor: float,
    bias: bool, low_rank: bool, function: str | None, parts: tuple[int, ...],
) -> None:  # fmt: skip
    """``rest``: what there is of the bias and of the low-rank branch's x A^T and B, the output, a barrier."""
    plgpu = _compat.mosaic()
    *given, o_gmem, up_barrier = rest
    operands = Operands(row_gmem, column_gmem, *(given.pop(0) if h else None for h in (bias, low_rank, low_rank)))
    m, k = o_gmem.shape[0], x_gmem.shape[1]
    n = o_gmem.shape[1]
    block_m, block_n = c.tile_m, c.tile_n * _WARPGROUPS
    m_steps, n_steps = pl.cdiv(m, block_m * c.cluster), pl.cdiv(n, block_n)
    transforms = (plgpu.TilingTransform((8, _TILE_K)), plgpu.SwizzleTransform(_TILE_K))
    swizzle = plgpu.find_swizzle(PIECE * jnp.dtype(o_gmem.dtype).itemsize * 8)
    out_columns = swizzle // jnp.dtype(o_gmem.dtype).itemsize
    out_transforms = (plgpu.TilingTransform((8, out_columns)), plgpu.SwizzleTransform(swizzle))

    def pipeline(body: Any, compute_context: Any) -> Any:
        return plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(pl.cdiv(k, _TILE_K),),
            memory_registers=40,
            in_specs=[
                plgpu.BlockSpec((block_m, _TILE_K), lambda i: (0, i), transforms=transforms, memory_space=plgpu.SMEM),
                plgpu.BlockSpec(
                    (block_n, _TILE_K),
                    lambda i: (0, i),
                    transforms=transforms,
                    memory_space=plgpu.SMEM,
                    collective_axes=("cluster",) if c.cluster > 1 else (),
                ),
            ],
            wg_axis="wg",
            num_compute_wgs=_WARPGROUPS,
            max_concurrent_steps=c.stages,
            compute_context=compute_context,
        )

    nothing = lambda *_, **__: None  # noqa: E731
    slots = 2

    @partial(
        pl.run_scoped,
        allocations=pipeline(nothing, nothing).get_allocations(x_gmem, w_gmem),
        out_smem=plgpu.SMEM((_WARPGROUPS, slots * PIECE, PIECE), o_gmem.dtype, transforms=out_transforms),
        collective_axes="wg",
    )
    def _scope(allocations: Any, out_smem: Any) -> None:
        wg = lax.axis_index("wg")
        member = lax.axis_index("cluster")

        @plgpu.nd_loop((m_steps * n_steps,), collective_axes="cluster_grid")
        def _tiles(loop_info: Any) -> None:
            (index,) = loop_info.index
            m_index, n_index = plgpu.planar_snake(index, (m_steps, n_steps), 1, c.grid_tile_width)
            row0 = (m_index * c.cluster + member) * block_m
            column0 = n_index * block_n

            def compute_context(run_pipeline: Any) -> None:
                @partial(pl.run_scoped, acc_ref=plgpu.ACC((c.tile_m, c.tile_n), jnp.float32))
                def _accumulate(acc_ref: Any) -> None:
                    run_pipeline(acc_ref)
                    # asked for again: what depends on it then is computed here, and takes no registers before
                    wg = lax.axis_index("wg")
                    wg_column0 = column0 + wg * c.tile_n
                    branch = sum(((column0 >= end).astype(jnp.int32) for end in parts), jnp.int32(0))
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    staging, barrier = out_smem.at[wg], up_barrier.at[wg]
                    pieces = finished(
                        acc_ref[...], operands, row0, wg_column0, branch, staging, barrier, factor, function
                    )
                    for count, (i, j, piece) in enumerate(pieces):
                        slot = staging.at[pl.ds(count % slots * PIECE, PIECE)]
                        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                        slot[...] = piece.astype(o_gmem.dtype)
                        plgpu.commit_smem()
                        at = (pl.ds(row0 + i, PIECE), pl.ds(wg_column0 + j, PIECE))
                        plgpu.copy_smem_to_gmem(slot, o_gmem.at[at])

            def multiply(_: Any, x_smem: Any, w_smem: Any, acc_ref: Any) -> Any:
                mine = w_smem.at[pl.ds(wg * c.tile_n, c.tile_n)]
                plgpu.wgmma(acc_ref, x_smem, _compat.mosaic_transpose(mine))
                plgpu.wgmma_wait(0)
                return acc_ref

            pipeline(multiply, compute_context)(
                x_gmem.at[pl.ds(row0, block_m), :], w_gmem.at[pl.ds(column0, block_n), :], allocations=allocations
            )

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@partial(jax.jit, static_argnames=("n", "out_dtype", "config", "cores", "factor"))
def fp8_matmul(
    x: jax.Array,
    x_scale: jax.Array,
    w: jax.Array,
    w_scale: jax.Array,
    epilogue: Epilogue,
    out_dtype: Any,
    n: int,
    config: Fp8Config,
    cores: int,
    factor: float = 1.0,
) -> jax.Array:
    """``epilogue((x * x_scale[:, None]) @ (w * w_scale[:, None])^T)`` [M, n], accumulated in float32.

    Args:
      x: e4m3 [M, K].
      x_scale: float32 [M].
      w: e4m3 [N', K'], N' >= n and K' >= K; what lies beyond K is zero.
      w_scale: float32 [N'].
      epilogue: one that :func:`takes_whole` says yes to. With ``parts``, multiples of PART, ``down`` is
        [M, (1 + len(parts)) r], the branches side by side, and ``up`` their blocks one below the other, [n, r].
      out_dtype: bfloat16, float16 or float32.
      n: columns of the result.
      config: tile sizes.
      cores: multiprocessors.
      factor: a constant factor of the product.
    """
    plgpu = _compat.mosaic()
    m, rows, columns = x.shape[0], w.shape[0] + -w.shape[0] % _ALIGN_N, w.shape[1] + -w.shape[1] % _TILE_K
    x = _padded(x, m + -m % _ALIGN_M, columns)
    w = _padded(w, rows, columns)
    # the vectors, and the rows of x A^T, are read without bounds
    full_m = m + -m % (config.tile_m * config.cluster)
    full_n = rows + -rows % (config.tile_n * _WARPGROUPS)
    args = [_padded(x_scale, full_m), _padded(w_scale, full_n)]
    bias, down, up = epilogue.bias, epilogue.down, epilogue.up
    if bias is not None:
        args.append(_padded(bias.astype(jnp.float32), full_n))
    low_rank = down is not None and up is not None
    if low_rank:
        assert down is not None and up is not None
        count, rank = 1 + len(epilogue.parts), up.shape[1] + -up.shape[1] % RANK_STEP
        down = _padded(down.reshape(m, count, -1), full_m, count, rank).reshape(full_m, count * rank)
        args += [down, _padded(up.astype(down.dtype), rows, rank)]
    if jnp.dtype(out_dtype).itemsize == 4:  # twice the staging memory for the output
        config = replace(config, stages=min(config.stages, 3))
    has: dict[str, Any] = dict(bias=bias is not None, low_rank=low_rank, function=epilogue.function)
    has |= dict(parts=epilogue.parts)

    def fp8_matmul(*refs: Any) -> None:  # its name is the kernel's
        _fp8_matmul(*refs, c=config, factor=factor, **has)

    out = plgpu.kernel(
        fp8_matmul,
        out_type=jax.ShapeDtypeStruct((x.shape[0], rows), out_dtype),
        grid=(cores // config.cluster,),
        grid_names=("cluster_grid",),
        cluster=(config.cluster,),
        cluster_names=("cluster",),
        num_threads=_WARPGROUPS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        scratch_types=(plgpu.Barrier(num_barriers=_WARPGROUPS),),
    )(x, w, *args)
    return out[:m, :n]


def _padded(a: jax.Array, *shape: int) -> jax.Array:
    """The array with zeros up to the shape; itself where nothing is missing, so that no kernel copies it."""
    return a if a.shape == shape else jnp.pad(a, [(0, new - old) for old, new in zip(a.shape, shape, strict=True)])
