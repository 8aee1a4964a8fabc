"""The exact-FP8 pair of bfloat16 rows times Kronecker factors of their own for each block, on Hopper (Mosaic GPU).

``Y = L^T X R`` for each block X of 4 x 8 values: 12 multiply-adds a value, too few for the matrix units (a dense
32 x 32 matrix takes 32, and as many bytes of matrices as 64 rows have of x). So a lane takes one block: all 32 values
of it are in its registers, L too; R comes from shared memory, where every lane has a copy of its own whose rows lie in
different banks. A warp is 32 blocks, 1024 columns. The block maximum needs no exchange, the row's one number a warp.
Blocks of threads stay and go from row to row; the next row's values are loaded while a row is worked on.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.core.formats import MXFP4, BlockFormat, ElementFormat
from pallas_kernels import _compat
from pallas_kernels import mosaic_asm as ma
from pallas_kernels._compat import pl
from pallas_kernels.transform_quantize.mosaic_rows import (
    POLICIES,
    Place,
    RowScale,
    largest_of,
    number,
    over_rows,
    real,
    row_kernel,
    row_start,
    slots,
    widened,
)
from pallas_kernels.transform_quantize.reference import Transform

P, Q = 4, 8  # the factors' sizes
SIZE = P * Q
MOST_WARPS = 16
_COPY = Q * Q + 4  # words from one lane's R to the next one's: sixteen-byte loads of eight lanes meet different banks
_FMA = "fma.rn.f32 $0, $1, $2, $3;"


def obstacle(x: jax.Array, t: Transform, policy: str, out_dtype: Any) -> str | None:
    """Why this kernel cannot do it, or None."""
    if t.left is None or t.right is None:
        return "the kernel multiplies with Kronecker factors"
    if (t.left.shape[-1], t.right.shape[-1]) != (P, Q):
        return f"the kernel takes factors of {P} and {Q}, not {t.left.shape[-1]} and {t.right.shape[-1]}"
    if t.channel_scale is not None:
        return "the kernel takes no channel scale before Kronecker factors"
    if out_dtype != jnp.float8_e4m3fn:
        return f"the kernel writes float8_e4m3fn, not {out_dtype}"
    if policy not in POLICIES:
        return f"the kernel knows the policies {', '.join(POLICIES)}, not {policy!r}"
    if x.dtype != jnp.bfloat16:
        return f"x is {x.dtype}, the kernel loads bfloat16"
    if x.shape[-1] > MOST_WARPS * ma.WARP * SIZE:
        return f"a row of {x.shape[-1]} values does not stay in registers"
    return None


def _first_word(rows: int, warps: int) -> int:
    """Of the copies of R in shared memory, after the row maxima; at a whole 16 bytes."""
    return -(-2 * rows * slots(warps) // 4) * 4


def shared_words(rows: int, warps: int) -> int:
    return _first_word(rows, warps) + warps * ma.WARP * _COPY


def _body(m: int, k: int, rows: int, blocks: int, groups: tuple[int, int], policy: str, element: ElementFormat) -> Any:
    """``rows`` rows at a time in each of ``blocks`` blocks of threads; ``groups``: how many L and R there are."""
    plgpu = _compat.mosaic()
    count = k // SIZE
    warps = pl.cdiv(count, ma.WARP)
    first_word = _first_word(rows, warps)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 6 + (plgpu.Layout.WG_SPLAT(()),), return_type=())
    def body(_: Any, x_ref: Any, left_ref: Any, right_ref: Any, o_ref: Any, scale_ref: Any, *rest: Any) -> tuple:
        d = _compat.mosaic_ir()
        arith, i32, f32 = d.arith, ma.i32(), ma.f32()
        shared_ref, block_id = rest
        thread = d.utils.thread_idx()
        lane, warp = ma.rem(thread, ma.WARP), ma.div(thread, ma.WARP)
        local = ma.div(warp, warps)
        warp = ma.rem(warp, warps)
        place = Place(warp, local, warps, rows)
        block = ma.add(ma.mul(warp, ma.WARP), lane)  # of a row: this lane's
        exists = ma.below(block, count)
        known = ma.smaller(block, count - 1)
        copy = ma.offset(ma.pointer(shared_ref), ma.add(ma.mul(block, 4 * _COPY), 4 * first_word))

        def put_right() -> None:
            start = ma.mul(ma.div(known, count // groups[1]), 4 * Q * Q)
            for i in range(0, Q * Q, 4):
                words = ma.load_words(ma.offset(ma.pointer(right_ref), ma.add(start, 4 * i)), 4)
                args = [d.llvm.ptrtoint(i32, ma.offset(copy, 4 * i)), *words]
                ma.asm("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r,~{memory}", args, volatile=True)

        ma.when(ma.below(local, 1), put_right)
        ma.barrier()

        def load(row: Any) -> list:
            flag = arith.extui(i32, arith.andi(exists, ma.below(row, m)))
            start = ma.offset(row_start(x_ref, row, 2 * k), ma.mul(known, 2 * SIZE))
            out = []
            for i in range(P):  # a row of X: eight values, 16 bytes
                args = [ma.offset(start, 2 * Q * i), flag]
                out += ma.asm(ma.LOAD_IF, "=&r,=&r,=&r,=&r,l,r", args, [i32] * 4, volatile=True)
            return out

        def work() -> None:
            start = ma.mul(ma.div(known, count // groups[0]), 4 * P * P)
            left = [
                [number(v) for v in ma.load_words(ma.offset(ma.pointer(left_ref), ma.add(start, 4 * P * i)), P)]
                for i in range(P)
            ]

            def fma(a: Any, b: Any, c: Any) -> Any:
                return ma.asm(_FMA, "=f,f,f,f", [a, b, c], [f32])[0]

            def finish(i: Any, row: Any, raw: list) -> None:
                x = [widened(raw[4 * r : 4 * r + 4]) for r in range(P)]
                y = [[real(0.0)] * Q for _ in range(P)]
                for q in range(Q):
                    # read for every row again: 64 registers would not be left
                    right = []
                    for half in range(0, Q, 4):
                        at = [d.llvm.ptrtoint(i32, ma.offset(copy, 4 * (Q * q + half)))]
                        text = "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];"
                        right += ma.asm(text, "=f,=f,=f,=f,r", at, [f32] * 4, volatile=True)
                    y = [[fma(x[r][q], right[c], y[r][c]) for c in range(Q)] for r in range(P)]
                z = [[real(0.0)] * Q for _ in range(P)]
                for r in range(P):
                    z = [[fma(left[r][j], y[r][c], z[j][c]) for c in range(Q)] for j in range(P)]
                largest = largest_of(z[0])
                for part in z[1:]:
                    largest = arith.maxui(largest, largest_of(part))
                scale = RowScale.of(place.largest_of_row(largest, i, shared_ref), np.float32(1), policy, element)
                words = scale.words([v for part in z for v in part], scale.multiplier(), largest)
                at = ma.offset(row_start(o_ref, row, k), ma.mul(block, SIZE))

                def put() -> None:
                    for h in range(2):
                        args = [ma.offset(at, 16 * h), *words[4 * h : 4 * h + 4]]
                        text = "st.global.v4.b32 [$0], {$1, $2, $3, $4};"
                        ma.asm(text, "l,r,r,r,r,~{memory}", args, volatile=True)

                ma.when(arith.andi(exists, ma.below(row, m)), put)
                first = arith.andi(ma.below(block, 1), ma.below(row, m))
                ma.when(first, lambda: scale.store(scale_ref, row))

            first_row = ma.add(ma.mul(ma.scalar(block_id), rows), local)
            over_rows(pl.cdiv(m, rows * blocks), first_row, rows * blocks, load, finish)

        ma.when(ma.below(local, rows), work)  # the last warpgroup may have warps that no row needs
        return ()

    return body


@partial(jax.jit, static_argnames=("policy", "cores", "fmt"))
def quantize_fp8(
    x: jax.Array, t: Transform, policy: str, cores: int, fmt: BlockFormat = MXFP4
) -> tuple[jax.Array, jax.Array]:
    """:func:`pallas_kernels.transform_quantize.reference.quantize_fp8` of bfloat16 x under Kronecker factors."""
    assert t.left is not None and t.right is not None
    lead, k = x.shape[:-1], x.shape[-1]
    m = x.size // k
    warps = pl.cdiv(k // SIZE, ma.WARP)
    rows = min(MOST_WARPS // warps, m)
    blocks = min(pl.cdiv(m, rows), cores)
    body = _body(m, k, rows, blocks, (t.left.shape[0], t.right.shape[0]), policy, fmt.element)
    args = [x.reshape(m, k), t.left.astype(jnp.float32), t.right.astype(jnp.float32)]
    values, scale = row_kernel("tq_kronecker_fp8", body, blocks, rows * warps, m, k, shared_words(rows, warps))(*args)
    return values.reshape(*lead, k), scale.reshape(lead)
