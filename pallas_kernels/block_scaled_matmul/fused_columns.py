"""bfloat16 x with its columns in the order that "bf16_fragments" decode to (fragments.permute_columns).

In every block of 32 columns 4 x 4 words are transposed. :func:`permuted` is a kernel before the product;
:func:`gather` does it on x's way to the ring of the fused kernel.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _compat
from pallas_kernels import mosaic_asm as ma
from pallas_kernels._compat import pl


def permuted(x: jax.Array) -> jax.Array:
    """fragments.permute_columns as a kernel: a thread transposes 4 x 4 words of 64 bytes. XLA's takes 6 us where this
    takes 1.5 (32 x 8192)."""
    plgpu = _compat.mosaic()
    blocks = x.size // 32
    threads = 2 * ma.WARPGROUP

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
        return_type=(),
    )
    def transpose(_: Any, x_ref: Any, o_ref: Any, block_id: Any) -> tuple:
        d = _compat.mosaic_ir()
        block = ma.add(ma.mul(ma.scalar(block_id), threads), d.utils.thread_idx())

        def move() -> None:
            start = ma.mul(block, 64)
            source, target = ma.offset(ma.pointer(x_ref), start), ma.offset(ma.pointer(o_ref), start)
            words = [ma.load_words(ma.offset(source, 16 * i), 4) for i in range(4)]
            for i in range(4):
                args = [ma.offset(target, 16 * i), *(words[j][i] for j in range(4))]
                ma.asm("st.global.v4.b32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r,~{memory}", args, volatile=True)

        ma.when(ma.below(block, blocks), move)
        return ()

    def w4_permute(x_ref: Any, o_ref: Any) -> None:
        transpose(x_ref, o_ref, lax.axis_index("i").astype(jnp.int32))

    return plgpu.kernel(
        w4_permute,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(pl.cdiv(blocks, threads),),
        grid_names=("i",),
        num_threads=threads // ma.WARPGROUP,
        thread_name="wg",
        kernel_name="w4_permute",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(x)


def gather(x_ref: Any, tile_ref: Any, m0: Any, block0: Any, m: int, k: int) -> None:
    """Rows m0.. and blocks block0..block0 + 3 of 32 columns of bfloat16 x [m, k] to a stage of the ring, permuted.

    A thread takes 64 bytes, one block of a row: the permutation (fragments.permute_columns) is a transposition of 4 x 4
    words, that is only a matter of which register goes where. Zeros beyond m and k.
    """
    plgpu = _compat.mosaic()
    rows = tile_ref.shape[0]
    scalar = plgpu.Layout.WG_SPLAT(())
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(transforms), scalar, scalar), return_type=())
    def move(_: Any, x: Any, tile: Any, m0: Any, block0: Any) -> tuple:
        d = _compat.mosaic_ir()
        arith, i32 = d.arith, ma.i32()
        thread = ma.rem(d.utils.thread_idx(), ma.WARPGROUP)
        source, target = ma.pointer(x), ma.pointer(tile)
        loaded = []
        for part in range(pl.cdiv(4 * rows, ma.WARPGROUP)):
            mine = ma.add(thread, part * ma.WARPGROUP)
            row, quarter = ma.div(mine, 4), ma.rem(mine, 4)
            x_row, block = ma.add(ma.scalar(m0), row), ma.add(ma.scalar(block0), quarter)
            inside = arith.andi(arith.andi(ma.below(x_row, m), ma.below(block, k // 32)), ma.below(row, rows))
            flag = arith.extui(i32, inside)
            start = ma.offset(source, ma.add(ma.mul(x_row, 2 * k), ma.mul(block, 64)))
            words = []
            for i in range(4):
                args = [ma.offset(start, 16 * i), flag]
                words.append(ma.asm(ma.LOAD_IF, "=&r,=&r,=&r,=&r,l,r", args, [i32] * 4, volatile=True))
            loaded.append((row, quarter, words))
        for row, quarter, words in loaded:
            # tiles of 8 rows x 64 columns, 128 bytes a row, whose 16-byte chunks are swizzled by the row
            tile_at = ma.add(
                ma.mul(ma.div(row, 8), 2048), ma.mul(ma.div(quarter, 2), 1024), ma.mul(ma.rem(row, 8), 128)
            )

            def put(row: Any = row, quarter: Any = quarter, words: list = words, tile_at: Any = tile_at) -> None:
                for i in range(4):
                    chunk = arith.xori(ma.add(ma.mul(ma.rem(quarter, 2), 4), i), ma.rem(row, 8))
                    p = ma.offset(target, ma.add(tile_at, ma.mul(chunk, 16)))
                    args = [d.llvm.ptrtoint(i32, p), *(words[j][i] for j in range(4))]
                    ma.asm("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r,~{memory}", args, volatile=True)

            ma.when(ma.below(row, rows), put)
        return ()

    move(x_ref, tile_ref, m0, block0)
