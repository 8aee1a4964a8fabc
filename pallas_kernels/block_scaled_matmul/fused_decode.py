"""Blocks of a weight in fragments, from shared memory to the registers that ``wgmma`` takes its operand A from."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _compat
from pallas_kernels import mosaic_asm as ma
from pallas_kernels.block_scaled_matmul import fragments
from pallas_kernels.block_scaled_matmul.register_decode import block_words, decode_bf16, decode_fp8


def fp8_block(w_ref: Any, table_ref: Any) -> jax.Array:
    """One block in shared memory to e4m3 [64, 128] in ``wgmma``'s registers."""
    plgpu = _compat.mosaic()
    shape = (fragments.ROWS, fragments.COLUMNS)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float8_e4m3fn, layout=plgpu.Layout.WGMMA_8BIT),
    )
    def decode(_: Any, w: Any, table: Any) -> Any:
        d = _compat.mosaic_ir()
        thread = ma.rem(d.utils.thread_idx(), ma.WARPGROUP)
        base, entries, registers = ma.pointer(w), ma.pointer(table), []
        for pair in range(2):
            words, scales = block_words(base, thread, pair)
            for b in range(2):
                halves = [decode_fp8(words[2 * b + h], scales, 2 * b + h, entries) for h in range(2)]
                registers += [halves[h][u] for u in range(2) for h in range(2)]
        return ma.fragments(registers, shape, d.ir.Float8E4M3FNType.get(), d.mgpu.fragmented_array.WGMMA_LAYOUT_8BIT)

    return decode(w_ref, table_ref)


def bf16_half_block(w_ref: Any, pair: int) -> jax.Array:
    """64 columns of a block in shared memory to bfloat16 [64, 64] in ``wgmma``'s registers."""
    plgpu = _compat.mosaic()
    shape = (fragments.ROWS, 64)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def decode(_: Any, w: Any) -> Any:
        d = _compat.mosaic_ir()
        words, scales = block_words(ma.pointer(w), ma.rem(d.utils.thread_idx(), ma.WARPGROUP), pair)
        registers = []
        for b in range(2):
            rows = [decode_bf16(words[2 * b + h], scales, 2 * b + h) for h in range(2)]
            registers += [rows[h][2 * u + j] for u in range(2) for j in range(2) for h in range(2)]
        return ma.fragments(registers, shape, d.ir.BF16Type.get(), d.mgpu.WGMMA_LAYOUT)

    return decode(w_ref)
