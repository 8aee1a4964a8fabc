"""A weight in fragments to its e4m3 or bfloat16 values for products with many rows: one pass, bound by what it writes.

Every warpgroup streams blocks of 64 x 128 through a ring of its own in shared memory, decodes them as the products do,
and leaves the way out to TMA.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _compat
from pallas_kernels import mosaic_asm as ma
from pallas_kernels._compat import pl
from pallas_kernels.block_scaled_matmul import fragments
from pallas_kernels.block_scaled_matmul.layout import PackedWeight
from pallas_kernels.block_scaled_matmul.register_decode import TABLE_SHAPE, block_words, decode_bf16, decode_fp8

_WARPGROUPS = 4
_DEPTH = 4  # blocks a warpgroup has in flight
_STORES = 2  # tiles on their way out


def _put(w_ref: Any, table_ref: Any, tile_ref: Any, pairs: tuple[int, ...], fp8: bool, transforms: tuple) -> None:
    """Columns 64 * pair.. of a block to a swizzled tile of 64 rows x 128 bytes."""
    plgpu = _compat.mosaic()

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(transforms)), return_type=())
    def put(_: Any, w: Any, table: Any, tile: Any) -> tuple:
        d = _compat.mosaic_ir()
        thread = ma.rem(d.utils.thread_idx(), ma.WARPGROUP)
        lane, warp = ma.rem(thread, ma.WARP), ma.div(thread, ma.WARP)
        g, column = ma.div(lane, 4), ma.rem(lane, 4)
        base, entries, out = ma.pointer(w), ma.pointer(table), ma.pointer(tile)

        def place(h: int, chunk: Any, byte: Any) -> Any:
            row = ma.add(ma.mul(warp, 16), g, 8 * h)
            swizzled = d.arith.xori(chunk, g)  # g = row % 8
            return ma.offset(out, ma.add(ma.mul(row, 128), ma.mul(swizzled, 16), byte))

        for pair in pairs:
            words, scales = block_words(base, thread, pair)
            for b in range(2):
                for h in range(2):
                    word = words[2 * b + h]
                    if fp8:
                        for u, register in enumerate(decode_fp8(word, scales, 2 * b + h, entries)):
                            ma.store(register, place(h, ma.const(4 * pair + 2 * b + u), ma.mul(column, 4)))
                        continue
                    p = place(h, ma.add(column, 4 * b), 0)
                    registers = decode_bf16(word, scales, 2 * b + h)
                    args = [d.llvm.ptrtoint(ma.i32(), p), *registers]
                    ma.asm("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r,~{memory}", args, volatile=True)
        return ()

    put(w_ref, table_ref, tile_ref)


def _kernel(*refs: Any, rounds: int, per_part: int, fp8: bool, transforms: tuple) -> None:
    """Refs: words, table (fp8), out; ring, table, tiles, barriers of the ring, barrier of the table."""
    plgpu = _compat.mosaic()
    w_gmem, *table_gmem, o_gmem, w_smem, table_smem, out_smem, full, ready = refs
    wg, row, part = lax.axis_index("wg"), lax.axis_index("n"), lax.axis_index("k")

    def block(i: Any) -> Any:
        return part * per_part + i * _WARPGROUPS + wg

    def issue(i: Any, slot: int) -> None:
        plgpu.copy_gmem_to_smem(w_gmem.at[row, block(i)], w_smem.at[wg, slot], full.at[wg, slot])

    for ref in table_gmem:

        @pl.when(wg == 0)
        def _table(ref: Any = ref) -> None:
            plgpu.copy_gmem_to_smem(ref, table_smem, ready)

    for slot in range(_DEPTH):
        issue(slot, slot)
    if table_gmem:
        plgpu.barrier_wait(ready)
    groups = ((0, 1),) if fp8 else ((0,), (1,))
    width = fragments.COLUMNS // len(groups)

    @pl.loop(0, rounds)
    def _round(r: Any) -> None:
        for slot in range(_DEPTH):
            i = r * _DEPTH + slot
            plgpu.barrier_wait(full.at[wg, slot])
            for j, pairs in enumerate(groups):
                out = out_smem.at[wg, (slot * len(groups) + j) % _STORES]
                plgpu.wait_smem_to_gmem(_STORES - 1, wait_read_only=True)
                _put(w_smem.at[wg, slot], table_smem, out, pairs, fp8, transforms)
                plgpu.commit_smem()
                target = pl.ds(block(i) * fragments.COLUMNS + j * width, width)
                plgpu.copy_smem_to_gmem(out, o_gmem.at[pl.ds(row * fragments.ROWS, fragments.ROWS), target])

            @pl.when(r < rounds - 1)
            def _refill(i: Any = i, slot: int = slot) -> None:
                issue(i + _DEPTH, slot)

    plgpu.wait_smem_to_gmem(0)


@partial(jax.jit, static_argnames=("cores",))
def unpack(w: PackedWeight, cores: int) -> jax.Array:
    """A weight in fragments as values [N', K'], to be multiplied by ``row_scale``; zeros beyond N and K.

    "bf16_fragments": bfloat16, exact. "fp8_fragments": e4m3 times 2**FP8_SHIFT, exact for blocks at most 14 binades
    below their row's largest.
    """
    plgpu = _compat.mosaic()
    fp8 = w.layout == "fp8_fragments"
    dtype = jnp.dtype(jnp.float8_e4m3fn if fp8 else jnp.bfloat16)
    rows, blocks = w.codes.shape[:2]
    ring = _WARPGROUPS * _DEPTH
    parts = max(1, min(pl.cdiv(2 * cores, rows), blocks // ring))
    rounds = pl.cdiv(blocks, parts * ring)
    width = 128 // dtype.itemsize
    transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(128))
    args = [w.codes] + ([jnp.asarray(fragments.fp8_table().reshape(TABLE_SHAPE))] if fp8 else [])

    def w4_unpack(*refs: Any) -> None:  # its name is the kernel's
        _kernel(*refs, rounds=rounds, per_part=rounds * ring, fp8=fp8, transforms=transforms)

    return plgpu.kernel(
        w4_unpack,
        out_type=jax.ShapeDtypeStruct((rows * fragments.ROWS, blocks * fragments.COLUMNS), dtype),
        grid=(rows, parts),
        grid_names=("n", "k"),
        num_threads=_WARPGROUPS,
        thread_name="wg",
        kernel_name="w4_unpack",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        scratch_types=(
            plgpu.SMEM((_WARPGROUPS, _DEPTH, fragments.BLOCK_WORDS // 32, 32), jnp.uint32),
            plgpu.SMEM(TABLE_SHAPE, jnp.uint32),
            plgpu.SMEM((_WARPGROUPS, _STORES, fragments.ROWS, width), dtype, transforms=transforms),
            plgpu.Barrier(num_arrivals=1, num_barriers=(_WARPGROUPS, _DEPTH)),
            plgpu.Barrier(num_arrivals=1),
        ),
    )(*args)
