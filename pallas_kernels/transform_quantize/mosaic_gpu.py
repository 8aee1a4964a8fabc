"""The exact-FP8 pair of bfloat16 rows on Hopper, in registers from load to store (Mosaic GPU).

A warp takes units of 16 blocks of 32 values. A lane loads 16 contiguous bytes of two blocks, which are operand A of
``mma.sync`` m16n8k16 if the rows of the 32 x 32 matrix are permuted to match; the matrix (operand B, constant) sits in
registers in fragment order, with its columns permuted so that a lane ends up with eight contiguous results of each
block. So nothing passes through shared memory but one number a warp: the row's largest magnitude, from which the
largest scale byte follows, because the policies here are monotone. Blocks of threads stay and go from row to row; the
next row's values are loaded while a row is worked on.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    over_rows,
    real,
    row_kernel,
    row_start,
    slots,
    widened,
)
from pallas_kernels.transform_quantize.reference import Transform, hadamard_factor, hadamard_signs

SIZE = 32  # of the matrix: two Hadamard 16 fit too
_UNIT = 512

_QUAD = """{
.reg .b32 t;
shfl.sync.bfly.b32 t, $1, 1, 0x1f, 0xffffffff;
max.u32 $0, $1, t;
shfl.sync.bfly.b32 t, $0, 2, 0x1f, 0xffffffff;
max.u32 $0, $0, t;
}"""


@dataclass(frozen=True)
class RowConfig:
    """How rows are shared out.

    Attributes:
      warps: of a row (1, 2, or a multiple of 4).
      units: of 512 values a warp holds.
      rows: a block of threads works on at once; it goes on to further rows, whose values it loads while it works.
    """

    warps: int
    units: int
    rows: int

    def blocks(self, m: int, cores: int) -> int:
        """Of threads: as many as stay resident at 128 registers a thread, 255 for more than two units."""
        resident = (512 if self.units <= 2 else 256) // (ma.WARP * self.warps * self.rows)
        return min(pl.cdiv(m, self.rows), cores * max(resident, 1))


def row_config(m: int, k: int, t: Transform, cores: int) -> RowConfig:
    """No idle warps in the last unit if that can be; few warps to a row, or many for few rows (H200)."""
    units, matrix = pl.cdiv(k, _UNIT), t.size > 1
    if m <= 2 * cores:
        warps = next((w for w in (1, 2, 4, 8, 12, 16) if w >= units), 16)
        return RowConfig(warps, pl.cdiv(units, warps), max(4 // warps, 1))
    for long in (6, 7):  # six or seven units are best, five and fewer are not: two units are
        if matrix and units % long == 0 and units // long in (1, 2, 4, 8):
            return RowConfig(units // long, long, 8 // (units // long))
    warps = min((w for w in (1, 2, 4, 8, 12, 16) if 2 * w >= units), default=16)
    # a full matrix needs more registers: blocks of 512 threads are held to 128 of them
    together = 16 if t.matrix is not None else 8
    return RowConfig(warps, pl.cdiv(units, warps), max(together // warps, 4 // warps, 1))


def obstacle(x: jax.Array, t: Transform, policy: str, out_dtype: Any) -> str | None:
    """Why this kernel cannot do it, or None."""
    k = x.shape[-1]
    if out_dtype != jnp.float8_e4m3fn:
        return f"the kernel writes float8_e4m3fn, not {out_dtype}"
    if policy not in POLICIES:
        return f"the kernel knows the policies {', '.join(POLICIES)}, not {policy!r}"
    if x.dtype != jnp.bfloat16:
        return f"x is {x.dtype}, the kernel loads bfloat16"
    if k > 16 * 4 * _UNIT:
        return f"a row of {k} values does not stay in registers"
    if t.left is not None:
        return "the kernel multiplies with one matrix of 32 x 32, not with Kronecker factors"
    if t.hadamard not in (0, 16, SIZE) or t.per_block:
        return "the kernel multiplies with one matrix of 32 x 32"
    if t.channel_scale is not None and (t.size > 1 or t.channel_scale.dtype != jnp.bfloat16):
        return "the kernel takes a bfloat16 channel scale, and none before a matrix"
    return None


def _hadamard_words(size: int) -> np.ndarray:
    """A Hadamard matrix (or two of 16) in fragment order, uint32 [4, 128]: four words of every lane are contiguous."""
    signs = np.kron(np.eye(SIZE // size, dtype=np.float32), hadamard_signs(size))
    lane, s, tile, j, e = np.indices((32, 2, 4, 2, 2))
    row, column = _place(lane // 4, lane % 4, s, tile, j, e)
    halves = signs[row, column].view(np.uint32) >> 16
    words = halves[..., 0] | (halves[..., 1] << 16)  # lane, s, tile, j
    return words.reshape(32, 4, 4).transpose(1, 0, 2).reshape(4, 128)


def _place(g: Any, c: Any, s: Any, tile: Any, j: Any, e: Any) -> tuple[Any, Any]:
    """Which entry of the matrix lane 4g + c holds for step s, column tile, register j, half e (integers or arrays)."""
    return 8 * c + 4 * s + 2 * j + e, 8 * (g // 2) + 2 * tile + g % 2


def _load_matrix(ref: Any, g: Any, column: Any) -> list:
    """A float32 [32, 32] matrix as two bfloat16 terms in fragment order: the high parts, then what they leave."""
    arith, i32, f32 = _compat.mosaic_ir().arith, ma.i32(), ma.f32()
    base = ma.offset(
        ma.pointer(ref), ma.mul(ma.add(ma.mul(column, 8 * SIZE), ma.mul(ma.div(g, 2), 8), ma.rem(g, 2)), 4)
    )
    high, low = [], []
    for s in range(2):
        for tile in range(4):
            for j in range(2):
                pair = [ma.load(f32, ma.offset(base, 4 * ((4 * s + 2 * j + e) * SIZE + 2 * tile)), 4) for e in range(2)]
                bits = [arith.andi(arith.bitcast(i32, v), ma.const(-65536)) for v in pair]
                rest = [arith.subf(v, arith.bitcast(f32, b)) for v, b in zip(pair, bits, strict=True)]
                high.append(arith.ori(arith.shrui(bits[0], ma.const(16)), bits[1]))
                low += ma.asm("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", rest, [i32])
    return high + low


def _body(
    m: int, k: int, c: RowConfig, blocks: int, terms: int, scaled: bool, factor: np.float32, policy: str,
    element: ElementFormat,
) -> Any:  # fmt: skip
    """``terms``: 0 no matrix, 1 Hadamard's words, 2 a float32 matrix."""
    plgpu = _compat.mosaic()
    rounds = pl.cdiv(m, c.rows * blocks)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),) * (4 + (terms > 0) + scaled) + (plgpu.Layout.WG_SPLAT(()),), return_type=()
    )
    def body(_: Any, x_ref: Any, *rest: Any) -> tuple:
        d = _compat.mosaic_ir()
        arith, i32, f32 = d.arith, ma.i32(), ma.f32()
        refs = list(rest)
        matrix_ref = refs.pop(0) if terms else None
        channel_ref = refs.pop(0) if scaled else None
        o_ref, scale_ref, shared_ref, block_id = refs

        thread = d.utils.thread_idx()
        lane, warp = ma.rem(thread, ma.WARP), ma.div(thread, ma.WARP)
        local = ma.div(warp, c.warps) if c.rows > 1 else ma.const(0)
        warp = ma.rem(warp, c.warps)
        place = Place(warp, local, c.warps, c.rows)
        first_row = ma.add(ma.mul(ma.scalar(block_id), c.rows), local)
        g, column = ma.div(lane, 4), ma.rem(lane, 4)
        matrix = []
        if terms == 1:
            base = ma.offset(ma.pointer(matrix_ref), ma.mul(lane, 16))
            for i in range(4):
                matrix += ma.asm(ma.LOAD, "=r,=r,=r,=r,l", [ma.offset(base, 512 * i)], [i32] * 4, volatile=True)
        elif terms == 2:
            matrix = _load_matrix(matrix_ref, g, column)

        def block_of(u: int, h: int) -> Any:
            return ma.add(ma.mul(ma.add(warp, u * c.warps), 16), g, 8 * h)

        def load(p: Any, block: Any, row: Any = None) -> list:
            """16 bytes of a block of bfloat16; zeros where there is none."""
            at = ma.offset(p, ma.add(ma.mul(block, 64), ma.mul(column, 16)))
            exists = ma.below(block, k // SIZE)
            flag = arith.extui(i32, exists if row is None else arith.andi(exists, ma.below(row, m)))
            return ma.asm(ma.LOAD_IF, "=&r,=&r,=&r,=&r,l,r", [at, flag], [i32] * 4, volatile=True)

        def load_row(row: Any) -> list:
            start = row_start(x_ref, row, 2 * k)
            return [v for u in range(c.units) for h in range(2) for v in load(start, block_of(u, h), row)]

        def finish_row(i: Any, row: Any, raw: list) -> None:
            values = []  # [unit][h]: eight float32, columns 8c.. of the block
            for u in range(c.units):
                if terms:
                    out: list = [[], []]
                    for tile in range(4):
                        acc = [real(0.0)] * 4
                        for term in range(terms):
                            for s in range(2):
                                a = [raw[(2 * u + h) * 4 + 2 * s + j] for j in range(2) for h in range(2)]
                                at = 16 * term + (4 * s + tile) * 2
                                acc = ma.asm(
                                    ma.MMA,
                                    "=f,=f,=f,=f,r,r,r,r,r,r,0,1,2,3",
                                    [*a, *matrix[at : at + 2], *acc],
                                    [f32] * 4,
                                )
                        out[0] += acc[:2]
                        out[1] += acc[2:]
                else:
                    out = [widened(raw[(2 * u + h) * 4 : (2 * u + h) * 4 + 4]) for h in range(2)]
                    if channel_ref is not None:
                        for h in range(2):
                            channel = widened(load(ma.pointer(channel_ref), block_of(u, h)))
                            out[h] = [arith.mulf(v, s) for v, s in zip(out[h], channel, strict=True)]
                values.append(out)

            largest = [[largest_of(values[u][h]) for h in range(2)] for u in range(c.units)]
            row_largest = largest[0][0]
            for pair in largest:
                for v in pair:
                    row_largest = arith.maxui(row_largest, v)
            scale = RowScale.of(place.largest_of_row(row_largest, i, shared_ref), factor, policy, element)
            multiplier = scale.multiplier()
            for u in range(c.units):
                for h in range(2):
                    block_largest = ma.asm(_QUAD, "=&r,r", [largest[u][h]], [i32], volatile=True)[0]
                    words = scale.words(values[u][h], multiplier, block_largest)
                    block = block_of(u, h)
                    at = ma.offset(row_start(o_ref, row, k), ma.add(ma.mul(block, SIZE), ma.mul(column, 8)))

                    def put(at: Any = at, words: list = words) -> None:
                        ma.asm("st.global.v2.b32 [$0], {$1, $2};", "l,r,r,~{memory}", [at, *words], volatile=True)

                    ma.when(arith.andi(ma.below(block, k // SIZE), ma.below(row, m)), put)
            first = arith.andi(ma.below(ma.add(lane, ma.mul(warp, ma.WARP)), 1), ma.below(row, m))
            ma.when(first, lambda: scale.store(scale_ref, row))

        over_rows(rounds, first_row, c.rows * blocks, load_row, finish_row)
        return ()

    return body


@partial(jax.jit, static_argnames=("policy", "config", "cores", "fmt"))
def quantize_fp8(
    x: jax.Array, t: Transform, policy: str, config: RowConfig, cores: int, fmt: BlockFormat = MXFP4
) -> tuple[jax.Array, jax.Array]:
    """:func:`pallas_kernels.transform_quantize.reference.quantize_fp8` of bfloat16 x, e4m3 values."""
    lead, k = x.shape[:-1], x.shape[-1]
    m = x.size // k
    factor = hadamard_factor(t.hadamard) if t.hadamard else np.float32(1)
    args, terms = [x.reshape(m, k)], 0
    if t.hadamard:
        args, terms = [*args, jnp.asarray(_hadamard_words(t.hadamard))], 1
    elif t.matrix is not None:
        args, terms = [*args, t.matrix.astype(jnp.float32)], 2
    if t.channel_scale is not None:
        args.append(t.channel_scale)
    blocks = config.blocks(m, cores)
    words = 2 * config.rows * slots(config.warps)
    body = _body(m, k, config, blocks, terms, t.channel_scale is not None, factor, policy, fmt.element)

    values, scale = row_kernel("tq_row_fp8", body, blocks, config.rows * config.warps, m, k, words)(*args)
    return values.reshape(*lead, k), scale.reshape(lead)
