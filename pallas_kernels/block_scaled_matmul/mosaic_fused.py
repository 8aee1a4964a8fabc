"""Products with weights in fragments on Hopper's ``wgmma``: W is decoded in registers and never written anywhere.

``out^T = W x^T``: W is operand A (64 rows a warpgroup, from registers), x is operand B (from shared memory), so that
few rows of x waste nothing. A block of threads is ``row_groups`` compute warpgroups of 64 weight rows each, and one
that copies W (4 bits) and x to a ring in shared memory (TMA). x is

* e4m3 with a row scale (W4A4, the exact-FP8 pair; "fp8_fragments"): a nibble is a selector of PRMT in an eight-byte
  table that holds the e4m3 images of all magnitudes at the block's scale. The table of all 256 relative scale bytes is
  in shared memory: 9.5 instructions for eight weights, and every scale is handled alike (fragments.fp8_table).
* bfloat16 (W4A16; "bf16_fragments"): shifts and masks give the raw bits value * 2**-126, a multiplication the scale. x
  needs permuted columns: from a kernel before, or permuted on its way to the ring (FusedConfig.gather).

The whole epilogue is here where the result is complete (one split of K): the low-rank branch is a product of rows of B,
in registers, with x A^T, in shared memory since the kernel began; the activation function is applied to the sums.

Tails are TMA's: it fills with zeros on the way in, and drops on the way out. Sums over ``splits`` of K are float32
partial results that XLA adds in a fixed order. Clusters that share x through multicast gained nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _compat
from pallas_kernels._compat import pl
from pallas_kernels.block_scaled_matmul import fragments, fused_columns
from pallas_kernels.block_scaled_matmul.epilogue import FUNCTIONS, Epilogue
from pallas_kernels.block_scaled_matmul.fused_decode import bf16_half_block, fp8_block
from pallas_kernels.block_scaled_matmul.fused_epilogue import scaled, stage, staging_transforms, store_partial
from pallas_kernels.block_scaled_matmul.fused_tiles import STAGED_ROWS, FusedConfig, ring
from pallas_kernels.block_scaled_matmul.layout import PackedWeight
from pallas_kernels.block_scaled_matmul.reference import finish
from pallas_kernels.block_scaled_matmul.register_decode import TABLE_SHAPE

RANK_STEP = 64  # columns of the low-rank factors at a time: 128 bytes, one swizzle row

# Registers of the copying warpgroup, and of the others, by how many there are: within what a launch gets.
_REGISTERS = {1: (24, 232), 2: (24, 240), 3: (24, 160), 4: (24, 112)}
_GATHER_REGISTERS = {1: (64, 232), 2: (88, 208), 3: (64, 144), 4: (64, 104)}


def _kernel(
    x_gmem: Any,
    w_gmem: Any,
    *rest: Any,
    c: FusedConfig,
    rounds: int,
    m: int,
    n: int,
    k: int,
    fp8: bool,
    has: tuple[bool, ...],
    function: str | None,
) -> None:
    """``rest``: table (fp8); row scale, and x scale, bias and the low-rank branch's x A^T and B as ``has`` says, which
    is empty for partial results; out; scratch."""
    plgpu = _compat.mosaic()
    rest_ = list(rest)
    table_gmem = rest_.pop(0) if fp8 else None
    vectors = (rest_.pop(0), *(rest_.pop(0) if present else None for present in has)) if has else None
    down_gmem, up_gmem = vectors[3:] if vectors is not None else (None, None)
    o_gmem = rest_.pop(0)
    w_smem, x_smem, table_smem, out_smem, down_smem, full, empty, ready = rest_
    wg, tile = lax.axis_index("wg"), lax.axis_index("n")
    mt, split = lax.axis_index("m"), lax.axis_index("k")
    stages = w_smem.shape[0]
    memory, compute = (_GATHER_REGISTERS if c.gather == 2 else _REGISTERS)[c.row_groups]

    @pl.when(wg == c.row_groups)
    def _copy() -> None:
        plgpu.set_max_registers(memory, action="decrease")
        if table_gmem is not None:
            plgpu.copy_gmem_to_smem(table_gmem, table_smem, ready.at[0])
        for i in range(down_smem.shape[0] if down_gmem is not None else 0):
            piece = down_gmem.at[pl.ds(mt * c.block_m, c.block_m), pl.ds(i * RANK_STEP, RANK_STEP)]
            plgpu.copy_gmem_to_smem(piece, down_smem.at[i], ready.at[1])

        def issue(i: Any, slot: Any) -> None:
            column = split * rounds * stages + i
            plgpu.copy_gmem_to_smem(
                w_gmem.at[pl.ds(tile * c.row_groups, c.row_groups), column], w_smem.at[slot], full.at[slot]
            )
            if c.gather == 2:
                m0, block0 = ((i * j).astype(jnp.int32) for i, j in ((mt, c.block_m), (column, 4)))
                fused_columns.gather(x_gmem, x_smem.at[slot], m0, block0, m, k)
                plgpu.commit_smem()
                plgpu.barrier_arrive(full.at[slot])
                return
            plgpu.copy_gmem_to_smem(
                x_gmem.at[pl.ds(mt * c.block_m, c.block_m), pl.ds(column * fragments.COLUMNS, fragments.COLUMNS)],
                x_smem.at[slot],
                full.at[slot],
            )

        if c.gather == 2:  # one copy of the code: unrolled, its addresses would fill the registers

            @pl.loop(0, rounds * stages)
            def _fill(i: Any) -> None:
                slot = lax.rem(i, stages)

                @pl.when(i >= stages)
                def _wait() -> None:
                    plgpu.barrier_wait(empty.at[slot])

                issue(i, slot)

            return
        for slot in range(stages):
            issue(slot, slot)

        @pl.loop(1, rounds)
        def _refill(i: Any) -> None:
            for slot in range(stages):
                plgpu.barrier_wait(empty.at[slot])
                issue(i * stages + slot, slot)

    @pl.when(wg < c.row_groups)
    def _multiply() -> None:
        plgpu.set_max_registers(compute, action="increase")
        if fp8:
            plgpu.barrier_wait(ready.at[0])

        def accumulate(acc: Any) -> Any:
            @pl.loop(0, rounds)
            def _round(i: Any) -> None:
                for first in range(0, stages, c.overlap):
                    slots = range(first, min(first + c.overlap, stages))
                    for slot in slots:  # a block is decoded while the matrix units multiply the one before
                        plgpu.barrier_wait(full.at[slot])
                        if fp8:
                            operand = fp8_block(w_smem.at[slot, wg], table_smem)
                            plgpu.wgmma(acc, operand, _transposed(x_smem.at[slot]))
                        else:
                            for pair in range(2):
                                columns = x_smem.at[slot].at[:, pl.ds(64 * pair, 64)]
                                plgpu.wgmma(acc, bf16_half_block(w_smem.at[slot, wg], pair), _transposed(columns))
                    plgpu.wgmma_wait(0)

                    @pl.when(i < rounds - 1)
                    def _release() -> None:
                        for slot in slots:  # noqa: B023
                            plgpu.barrier_arrive(empty.at[slot])

            return acc[...]

        acc = pl.run_scoped(accumulate, plgpu.ACC((fragments.ROWS, c.block_m), jnp.float32))
        row0 = ((tile * c.row_groups + wg) * fragments.ROWS).astype(jnp.int32)
        m0 = (mt * c.block_m).astype(jnp.int32)
        if vectors is None:
            store_partial(acc, o_gmem.at[split], row0, m0, m, n)
            return
        acc = scaled(acc, vectors[:3], row0, m0, m, n, 2.0**-fragments.FP8_SHIFT if fp8 else 1.0)
        if up_gmem is not None:
            plgpu.barrier_wait(ready.at[1])
            up = [
                _compat.mosaic_load_at(
                    up_gmem, (pl.ds(row0, fragments.ROWS), pl.ds(i * RANK_STEP, RANK_STEP)), plgpu.Layout.WGMMA
                )
                for i in range(down_smem.shape[0])
            ]

            def add_low_rank(acc_ref: Any) -> None:
                for i, rows in enumerate(up):
                    plgpu.wgmma(acc_ref, rows, _transposed(down_smem.at[i]))
                plgpu.wgmma_wait(0)

            acc = pl.run_state(add_low_rank)(plgpu.ACC.init(acc))
        if function is not None:
            acc = FUNCTIONS[function](acc)
        rows = min(c.block_m, STAGED_ROWS)
        for chunk in range(pl.cdiv(c.block_m, rows)):
            if chunk:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            stage(acc, chunk, out_smem.at[wg])
            plgpu.commit_smem()
            target = o_gmem.at[pl.ds(m0 + chunk * rows, rows), pl.ds(row0, fragments.ROWS)]
            plgpu.copy_smem_to_gmem(out_smem.at[wg], target)
        plgpu.wait_smem_to_gmem(0)


def _transposed(ref: Any) -> Any:
    return ref.T


@partial(jax.jit, static_argnames=("out_dtype", "config"))
def fused_matmul(
    x: jax.Array,
    x_scale: jax.Array | None,
    w: PackedWeight,
    epilogue: Epilogue,
    out_dtype: Any,
    config: FusedConfig,
) -> jax.Array:
    """x [M, K] (bfloat16, or e4m3 with ``x_scale`` [M]) times a weight in its fragments, [M, N].

    One kernel for one split of K and a 16-bit result; else float32 partial results and XLA's sum. ``epilogue``: the
    bias alone, or one that :func:`takes_whole` says yes to.
    """
    plgpu = _compat.mosaic()
    c, m = config, x.shape[0]
    fp8 = x.dtype == jnp.float8_e4m3fn
    tiles, blocks = w.codes.shape[:2]
    n = tiles * fragments.ROWS
    out_dtype = jnp.dtype(out_dtype)
    whole = c.splits == 1 and out_dtype.itemsize == 2
    staged = min(c.block_m, STAGED_ROWS)
    down, up = epilogue.down, epilogue.up
    steps = 0 if down is None else pl.cdiv(down.shape[1], RANK_STEP)
    stages, rounds = ring(blocks, c, x.dtype.itemsize, whole, 2 * steps * RANK_STEP * c.block_m)
    width = fragments.COLUMNS if fp8 else 64
    x = x if fp8 or c.gather == 2 else fused_columns.permuted(x)
    if c.gather == 1:  # TMA takes swizzled tiles of arrays that are whole tiles
        x = jnp.pad(x, ((0, -m % 8), (0, -x.shape[1] % width)))
    args = [x, w.codes]
    if fp8:
        args.append(jnp.asarray(fragments.fp8_table().reshape(TABLE_SHAPE)))
    bias = epilogue.bias
    extras: tuple[jax.Array | None, ...] = (x_scale,)
    if whole:
        assert w.row_scale is not None  # fragments have one
        if down is not None and up is not None:
            down = jnp.pad(down, ((0, -m % 8), (0, steps * RANK_STEP - down.shape[1])))
            rows = pl.cdiv(tiles, c.row_groups) * c.row_groups * fragments.ROWS  # read without bounds
            up = jnp.pad(up.astype(down.dtype), ((0, rows - w.n), (0, steps * RANK_STEP - up.shape[1])))
        extras = (x_scale, None if bias is None else jnp.pad(bias.astype(jnp.float32), (0, n - w.n)), down, up)
        args += [w.row_scale, *(e for e in extras if e is not None)]
    has = tuple(e is not None for e in extras) if whole else ()
    x_transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(128))
    out_type = (
        jax.ShapeDtypeStruct((m + -m % 8, n), out_dtype)
        if whole
        else jax.ShapeDtypeStruct((c.splits, m, n), jnp.float32)
    )
    many = dict(num_barriers=stages)

    def w4_fused(*refs: Any) -> None:  # its name is the kernel's
        _kernel(*refs, c=c, rounds=rounds, m=m, n=n, k=w.k, fp8=fp8, has=has, function=epilogue.function)

    w4_fused.__name__ = "w4_fused_fp8" if fp8 else "w4_fused_bf16"
    out = plgpu.kernel(
        w4_fused,
        out_type=out_type,
        grid=(pl.cdiv(m, c.block_m), pl.cdiv(tiles, c.row_groups), c.splits),
        grid_names=("m", "n", "k"),
        num_threads=c.row_groups + 1,
        thread_name="wg",
        kernel_name=w4_fused.__name__,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        scratch_types=(
            plgpu.SMEM((stages, c.row_groups, fragments.BLOCK_WORDS // 32, 32), jnp.uint32),
            plgpu.SMEM((stages, c.block_m, fragments.COLUMNS), x.dtype, transforms=x_transforms),
            plgpu.SMEM(TABLE_SHAPE if fp8 else (1, 32), jnp.uint32),
            plgpu.SMEM((c.row_groups, staged, 64) if whole else (1, 8, 64), out_dtype if whole else jnp.bfloat16,
                       transforms=staging_transforms()),
            plgpu.SMEM((steps, c.block_m, RANK_STEP) if steps else (1, 8, 64), jnp.bfloat16,
                       transforms=staging_transforms()),
            plgpu.Barrier(num_arrivals=2, **many),
            plgpu.Barrier(num_arrivals=c.row_groups, **many),
            plgpu.Barrier(num_arrivals=max(steps, 1), num_barriers=2),
        ),
    )(*args)  # fmt: skip
    if whole:
        return out[:m, : w.n]
    factor = 2.0**-fragments.FP8_SHIFT if fp8 else 1.0
    return finish(jnp.sum(out, axis=0) * factor, w, x_scale, bias, out_dtype)


def takes_whole(epilogue: Epilogue, out_dtype: Any, config: FusedConfig) -> bool:
    """Whether the kernel does all of the epilogue; else the low-rank branch and the function follow in XLA."""
    if epilogue.is_bias_only:
        return True
    whole = config.splits == 1 and jnp.dtype(out_dtype).itemsize == 2
    down = epilogue.down
    return whole and (down is None or (down.dtype == jnp.bfloat16 and down.shape[1] <= 2 * RANK_STEP))
