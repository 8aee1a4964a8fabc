"""What happens to the accumulators of the fused Hopper kernel: ``wgmma``'s registers to rows of the result."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _compat
from pallas_kernels import mosaic_asm as ma
from pallas_kernels.block_scaled_matmul.fused_tiles import STAGED_ROWS


def _place(thread: Any) -> tuple[Any, Any, Any]:
    """(warp, g, 2c) of a thread of a warpgroup: it holds rows 16 warp + g (+ 8) and columns 8j + 2c (+ 1)."""
    lane = ma.rem(thread, ma.WARP)
    return ma.div(thread, ma.WARP), ma.div(lane, 4), ma.mul(ma.rem(lane, 4), 2)


def store_partial(acc: jax.Array, o_ref: Any, row0: Any, m0: Any, m: int, n: int) -> None:
    """acc [64, BM] to float32 o[m0 + column, row0 + row], inside [m, n]."""
    plgpu = _compat.mosaic()
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), scalar, scalar), return_type=())
    def put(_: Any, values: Any, out: Any, row0: Any, m0: Any) -> tuple:
        warp, g, c2 = _place(ma.rem(_compat.mosaic_ir().utils.thread_idx(), ma.WARPGROUP))
        base, row = ma.pointer(out), ma.add(ma.scalar(row0), ma.mul(warp, 16), g)
        registers = iter(values.registers.flat)
        for j in range(values.shape[1] // 8):
            for h in range(2):
                pair = next(registers)
                for v in range(2):
                    column, r = ma.add(ma.scalar(m0), c2, 8 * j + v), ma.add(row, 8 * h)
                    p = ma.offset(base, ma.mul(ma.add(ma.mul(column, n), r), 4))
                    inside = _compat.mosaic_ir().arith.andi(ma.below(column, m), ma.below(r, n))
                    ma.when(inside, partial(ma.store, ma.extract(pair, v), p))
        return ()

    put(acc, o_ref, row0, m0)


def staging_transforms() -> tuple:
    plgpu = _compat.mosaic()
    return plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)


def scaled(acc: jax.Array, refs: tuple, row0: Any, m0: Any, m: int, n: int, factor: float) -> jax.Array:
    """acc [64, BM] times the weight's row scale, x's row scale and the factor, plus the bias, in its registers.

    The scales are multiplied first (reference.finish); times 2**-6 the smallest is subnormal, which a GPU keeps.

    ``refs``: the weight's row scale, and x's row scale and the bias or None.
    """
    plgpu = _compat.mosaic()
    scalar = plgpu.Layout.WG_SPLAT(())
    given = tuple(r for r in refs if r is not None)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, *(plgpu.RefType() for _ in given), scalar, scalar),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def scale(_: Any, values: Any, *rest: Any) -> Any:
        d = _compat.mosaic_ir()
        *vectors, row0, m0 = rest
        row_scale, x_scale, bias = (ma.pointer(vectors.pop(0)) if r is not None else None for r in refs)
        warp, g, c2 = _place(ma.rem(d.utils.thread_idx(), ma.WARPGROUP))

        def read(p: Any, i: Any, end: int) -> Any:
            return ma.load(ma.f32(), ma.offset(p, ma.mul(ma.smaller(i, end - 1), 4)), 4)

        rows = [ma.add(ma.scalar(row0), ma.mul(warp, 16), g, 8 * h) for h in range(2)]
        constant = d.arith.constant(ma.f32(), d.ir.FloatAttr.get(ma.f32(), factor))
        factors = [d.arith.mulf(read(row_scale, r, n), constant) for r in rows]
        biases = [read(bias, r, n) for r in rows] if bias is not None else None
        registers = list(values.registers.flat)
        for j in range(values.shape[1] // 8):
            x_factors = None
            if x_scale is not None:
                x_factors = [read(x_scale, ma.add(ma.scalar(m0), c2, 8 * j + v), m) for v in range(2)]
            for h in range(2):
                both = [factors[h]] * 2 if x_factors is None else [d.arith.mulf(factors[h], f) for f in x_factors]
                y = [d.arith.mulf(ma.extract(registers[2 * j + h], v), both[v]) for v in range(2)]
                if biases is not None:
                    y = [d.arith.addf(z, biases[h]) for z in y]
                registers[2 * j + h] = d.vector.from_elements(registers[2 * j + h].type, y)
        return ma.same_layout(values, registers)

    return scale(acc, *given, row0, m0)


def stage(acc: jax.Array, chunk: int, smem: Any) -> None:
    """Rows 64 * chunk.. of the result, finished, to a swizzled tile [64 rows of x, 64 weight rows] in shared memory."""
    plgpu = _compat.mosaic()
    half = "bf16x2" if smem.dtype == jnp.bfloat16 else "f16x2"

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(staging_transforms())), return_type=())
    def put(_: Any, values: Any, tile: Any) -> tuple:
        d = _compat.mosaic_ir()
        thread = ma.rem(d.utils.thread_idx(), ma.WARPGROUP)
        warp, lane = ma.div(thread, ma.WARP), ma.rem(thread, ma.WARP)
        registers, base = list(values.registers.flat), ma.pointer(tile)
        columns = min(values.shape[1] - STAGED_ROWS * chunk, STAGED_ROWS) // 8
        for j in range(columns):
            packed = []
            for h in range(2):
                pair = registers[(STAGED_ROWS * chunk + 8 * j) // 4 + h]
                y = [ma.extract(pair, v) for v in range(2)]
                packed += ma.asm(f"cvt.rn.{half}.f32 $0, $2, $1;", "=r,f,f", y, [ma.i32()])
            # lanes 0..7 address the rows of the first 8x8 tile (h = 0), lanes 8..15 those of the second
            m_row = ma.add(ma.rem(lane, 8), 8 * j)
            chunk16 = ma.add(ma.mul(warp, 2), ma.rem(ma.div(lane, 8), 2))
            swizzled = d.arith.xori(chunk16, ma.rem(lane, 8))
            p = ma.offset(base, ma.add(ma.mul(m_row, 128), ma.mul(swizzled, 16)))
            address = d.llvm.ptrtoint(ma.i32(), p)
            text = "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [$0], {$1, $2};"
            ma.asm(text, "r,r,r,~{memory}", [address, *packed], volatile=True)
        return ()

    put(acc, smem)
