"""FP8 product with row and column scales for Hopper, in Pallas Mosaic GPU.

A persistent kernel: one block of three warpgroups a multiprocessor. One warpgroup copies tiles of x and W to shared
memory (TMA, a ring of ``stages``); two multiply, side by side along N (``wgmma`` e4m3, float32 accumulators).
Blocks form clusters of two along M that share every W tile through multicast. Rows and columns beyond the arrays are
zero-filled by TMA on the way in and dropped on the way out.

A low-rank branch is one step more of the same sum: ``down @ up^T`` in bfloat16 on the accumulators of the FP8 product.
Both factors come divided by the row and column scales, powers of two that the epilogue multiplies with in any case, so
nothing is rounded on the way. ``up`` waits where the result is staged later, ``down`` goes to registers.
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

_TILE_K = 128  # one 128-byte swizzle row of e4m3
_WARPGROUPS = 2
# What TMA copies in swizzled tiles must be whole tiles; arrays that are not are padded.
_ALIGN_M, _ALIGN_N = 8, 64
PART = 256  # columns of the widest tile of a block: where another branch may begin
RANK_STEP = 64  # columns of a branch at a time: one 128-byte swizzle row of bfloat16


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


def _fp8_matmul(
    x_gmem: Any,
    w_gmem: Any,
    row_gmem: Any,
    column_gmem: Any,
    *rest: Any,
    c: Fp8Config,
    factor: float,
    low_rank: bool,
    parts: tuple[int, ...],
) -> None:
    """``rest``: down and up if ``low_rank``, the bias if there is one, and the output."""
    plgpu = _compat.mosaic()
    down_gmem, up_gmem, *rest_ = rest if low_rank else (None, None, *rest)
    *bias_gmem, o_gmem = rest_
    m, k = o_gmem.shape[0], x_gmem.shape[1]
    n = o_gmem.shape[1]
    block_m, block_n = c.tile_m, c.tile_n * _WARPGROUPS
    m_steps, n_steps = pl.cdiv(m, block_m * c.cluster), pl.cdiv(n, block_n)
    transforms = (plgpu.TilingTransform((8, _TILE_K)), plgpu.SwizzleTransform(_TILE_K))
    epi_m, epi_n = 64, 64
    swizzle = plgpu.find_swizzle(epi_n * jnp.dtype(o_gmem.dtype).itemsize * 8)
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
        out_smem=plgpu.SMEM((_WARPGROUPS, slots * epi_m, epi_n), o_gmem.dtype, transforms=out_transforms),
        arrived=plgpu.Barrier(num_arrivals=1, num_barriers=_WARPGROUPS),
        collective_axes="wg",
    )
    def _scope(allocations: Any, out_smem: Any, arrived: Any) -> None:
        wg = lax.axis_index("wg")
        member = lax.axis_index("cluster")

        @plgpu.nd_loop((m_steps * n_steps,), collective_axes="cluster_grid")
        def _tiles(loop_info: Any) -> None:
            (index,) = loop_info.index
            m_index, n_index = plgpu.planar_snake(index, (m_steps, n_steps), 1, c.grid_tile_width)
            row0 = (m_index * c.cluster + member) * block_m
            column0 = n_index * block_n
            wg_column0 = column0 + wg * c.tile_n

            def fetch_up(step: int) -> None:
                """Rows of ``up`` that belong to this warpgroup's columns, to where its result will be staged."""
                piece = (pl.ds(wg_column0, c.tile_n), pl.ds(step * RANK_STEP, RANK_STEP))
                plgpu.copy_gmem_to_smem(up_gmem.at[piece], out_smem.at[wg, pl.ds(0, c.tile_n)], arrived.at[wg])

            def add_low_rank(acc_ref: Any) -> None:
                first = sum(((column0 >= end) * up_gmem.shape[1] for end in parts), jnp.int32(0))
                for step in range(up_gmem.shape[1] // RANK_STEP):
                    if step:
                        fetch_up(step)
                    at = (pl.ds(row0, c.tile_m), pl.ds(first + step * RANK_STEP, RANK_STEP))
                    down = _compat.mosaic_load_at(down_gmem, at, plgpu.Layout.WGMMA)
                    plgpu.barrier_wait(arrived.at[wg])
                    plgpu.wgmma(acc_ref, down, _compat.mosaic_transpose(out_smem.at[wg, pl.ds(0, c.tile_n)]))
                    plgpu.wgmma_wait(0)

            def compute_context(run_pipeline: Any) -> None:
                @partial(pl.run_scoped, acc_ref=plgpu.ACC((c.tile_m, c.tile_n), jnp.float32))
                def _accumulate(acc_ref: Any) -> None:
                    if low_rank:
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        fetch_up(0)
                    run_pipeline(acc_ref)
                    if low_rank:
                        add_low_rank(acc_ref)
                    shape = (c.tile_m, c.tile_n)

                    def vector(ref: Any, start: Any, axis: int) -> jax.Array:
                        """A slice of a vector along ``axis`` of the accumulator, broadcast over the other."""
                        layout = plgpu.Layout.WGMMA.reduce(1 - axis)
                        v = _compat.mosaic_load(ref, start, shape[axis], layout)
                        return lax.broadcast_in_dim(v, shape, (axis,))

                    acc = acc_ref[...] * (vector(row_gmem, row0, 0) * factor) * vector(column_gmem, wg_column0, 1)
                    for ref in bias_gmem:
                        acc = acc + vector(ref, wg_column0, 1)
                    acc = acc.astype(o_gmem.dtype)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    for i in range(c.tile_m // epi_m):
                        for j in range(c.tile_n // epi_n):
                            slot = (i * (c.tile_n // epi_n) + j) % slots
                            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                            staged = pl.ds(slot * epi_m, epi_m)
                            out_smem[wg, staged] = acc[i * epi_m : (i + 1) * epi_m, j * epi_n : (j + 1) * epi_n]
                            plgpu.commit_smem()
                            plgpu.copy_smem_to_gmem(
                                out_smem.at[wg, staged],
                                o_gmem.at[pl.ds(row0 + i * epi_m, epi_m), pl.ds(wg_column0 + j * epi_n, epi_n)],
                            )

            def multiply(_: Any, x_smem: Any, w_smem: Any, acc_ref: Any) -> Any:
                mine = w_smem.at[pl.ds(wg * c.tile_n, c.tile_n)]
                plgpu.wgmma(acc_ref, x_smem, _compat.mosaic_transpose(mine))
                plgpu.wgmma_wait(0)
                return acc_ref

            pipeline(multiply, compute_context)(
                x_gmem.at[pl.ds(row0, block_m), :], w_gmem.at[pl.ds(column0, block_n), :], allocations=allocations
            )

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@partial(jax.jit, static_argnames=("n", "out_dtype", "config", "cores", "factor", "parts"))
def fp8_matmul(
    x: jax.Array,
    x_scale: jax.Array,
    w: jax.Array,
    w_scale: jax.Array,
    bias: jax.Array | None,
    n: int,
    out_dtype: Any,
    config: Fp8Config,
    cores: int,
    factor: float = 1.0,
    low_rank: tuple[jax.Array, jax.Array] | None = None,
    parts: tuple[int, ...] = (),
) -> jax.Array:
    """``(x * x_scale[:, None]) @ (w * w_scale[:, None])^T + down @ up^T + bias`` [M, n], accumulated in float32.

    Args:
      x: e4m3 [M, K].
      x_scale: float32 [M].
      w: e4m3 [N', K'], N' >= n and K' >= K; what lies beyond K is zero.
      w_scale: float32 [N'].
      bias: [n] or None.
      n: columns of the result.
      out_dtype: bfloat16, float16 or float32.
      config: tile sizes.
      cores: multiprocessors.
      factor: a constant power of two, a factor of the product.
      low_rank: bfloat16 ``down`` [M, r] and ``up`` [n, r], or None; for 16-bit results. Exact as far as the scales are
        powers of two: each factor is divided by its scale and rounded to bfloat16.
      parts: columns n1, n2, .. of the result at which another branch begins, multiples of PART; ``down`` then is
        [M, (1 + len(parts)) r], the branches side by side.
    """
    plgpu = _compat.mosaic()
    m, rows, columns = x.shape[0], w.shape[0] + -w.shape[0] % _ALIGN_N, w.shape[1] + -w.shape[1] % _TILE_K
    x = jnp.pad(x, ((0, -m % _ALIGN_M), (0, columns - x.shape[1])))
    w = jnp.pad(w, ((0, rows - w.shape[0]), (0, columns - w.shape[1])))
    # the vectors are read without bounds
    x_scale = jnp.pad(x_scale, (0, -m % (config.tile_m * config.cluster)))
    full_n = rows + -rows % (config.tile_n * _WARPGROUPS)
    vectors = [v if v.shape[0] == full_n else jnp.pad(v, (0, full_n - v.shape[0])) for v in _vectors(w_scale, bias)]
    if low_rank is not None:
        down, up = low_rank
        r, count = up.shape[1], 1 + len(parts)
        pad = -r % RANK_STEP
        down = down.astype(jnp.float32).reshape(m, count, r) / (x_scale[:m, None, None] * factor)
        down = jnp.pad(down, ((0, x_scale.shape[0] - m), (0, 0), (0, pad))).reshape(x_scale.shape[0], -1)
        up = up.astype(jnp.float32) / w_scale[: up.shape[0], None]
        up = jnp.pad(up, ((0, rows - up.shape[0]), (0, pad)))
        vectors = [vectors[0], down.astype(jnp.bfloat16), up.astype(jnp.bfloat16), *vectors[1:]]
    if jnp.dtype(out_dtype).itemsize == 4:  # twice the staging memory for the output
        config = replace(config, stages=min(config.stages, 3))

    def fp8_matmul(*refs: Any) -> None:  # its name is the kernel's
        _fp8_matmul(*refs, c=config, factor=factor, low_rank=low_rank is not None, parts=parts)

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
    )(x, w, x_scale, *vectors)
    return out[:m, :n]


def _vectors(w_scale: jax.Array, bias: jax.Array | None) -> list[jax.Array]:
    return [w_scale] if bias is None else [w_scale, bias.astype(jnp.float32)]
