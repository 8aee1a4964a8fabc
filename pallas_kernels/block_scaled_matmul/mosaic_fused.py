"""Products with weights in fragments on Hopper's ``wgmma``: W is decoded in registers and never written anywhere.

``out^T = W x^T``: W is operand A (64 rows a warpgroup, from registers), x is operand B (from shared memory), so that
few rows of x waste nothing. A block of threads is ``row_groups`` compute warpgroups of 64 weight rows each, and one
that copies W (4 bits) and x to a ring in shared memory (TMA). x is

* e4m3 with a row scale (W4A4, the exact-FP8 pair; "fp8_fragments"): a nibble is a selector of PRMT in an eight-byte
  table that holds the e4m3 images of all magnitudes at the block's scale. The table of all 256 relative scale bytes is
  in shared memory: 9.5 instructions for eight weights, and every scale is handled alike (fragments.fp8_table).
* bfloat16 (W4A16; "bf16_fragments"): shifts and masks give the raw bits value * 2**-126, a multiplication the scale. x
  comes with permuted columns.

Tails are TMA's: it fills with zeros on the way in, and drops on the way out. Sums over ``splits`` of K are float32
partial results that XLA adds in a fixed order. Clusters that share x through multicast gained nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from pallas_kernels.block_scaled_matmul.reference import finish

TABLE_SHAPE = (4, 128)  # a copy takes at most 256 along an axis
_STAGED_ROWS = 64  # rows of x a warpgroup stages at once on the way out
# Registers of the copying warpgroup, and of the others, by how many there are: within what a launch gets.
_REGISTERS = {1: (24, 232), 2: (24, 240), 3: (24, 160), 4: (24, 112)}
SMEM_LIMIT = 226 * 1024  # a launch with more fails although it compiles


@dataclass(frozen=True)
class FusedConfig:
    """Tiles of the fused kernel.

    Attributes:
      row_groups: compute warpgroups of a block, 64 weight rows each.
      block_m: rows of x a block multiplies; a multiple of 8, at most 256.
      splits: blocks along K.
      stages: ring depth at most; one stage is 128 columns.
      overlap: blocks that are decoded and multiplied before the matrix units are waited for.
    """

    row_groups: int = 2
    block_m: int = 64
    splits: int = 1
    stages: int = 8
    overlap: int = 2


# Microseconds in which a warpgroup decodes and multiplies one block of 64 x 128, by (row_groups, block_m): H200.
_BLOCK_COST = {
    True: {1: {64: 0.25, 128: 0.36, 256: 0.48}, 2: {32: 0.165, 64: 0.19, 128: 0.225, 256: 0.35},
           3: {64: 0.21, 128: 0.233}, 4: {64: 0.2, 128: 0.2}},
    False: {1: {32: 0.3, 64: 0.38, 128: 0.5}, 2: {32: 0.22, 64: 0.25, 128: 0.35},
            3: {32: 0.21, 64: 0.27, 128: 0.4}, 4: {32: 0.19, 64: 0.24}},
}  # fmt: skip
_ROUND, _SUM = 1.8, 2.0  # to fill and to empty the multiprocessors once; XLA's kernel for the partial results
_PARTIAL_BYTES = 2.5e6  # of partial results that a microsecond writes and reads again


def fused_config(m: int, n: int, k: int, fp8: bool, cores: int) -> FusedConfig:
    return _choose(m, n, k, fp8, cores)[1]


def fused_time(m: int, n: int, k: int, fp8: bool, cores: int) -> float:
    """Predicted microseconds of :func:`fused_matmul` with the configuration of :func:`fused_config`."""
    return _choose(m, n, k, fp8, cores)[0]


def _choose(m: int, n: int, k: int, fp8: bool, cores: int) -> tuple[float, FusedConfig]:
    """The tiles with the least predicted time: rounds of blocks, and the sum of the partial results.

    The model is within 15 % of what was measured on seven shapes for M = 32 to 1024, and picks the fastest or one
    within 5 % of it.
    """
    tiles, blocks = pl.cdiv(n, fragments.ROWS), pl.cdiv(k, fragments.COLUMNS)

    def choices() -> Any:
        for row_groups, costs in _BLOCK_COST[fp8].items():
            for most, cost in costs.items():
                block_m = min(most, m + -m % 8)
                for splits in range(1, max(min(8, blocks // 4), 1) + 1):
                    rounds = pl.cdiv(pl.cdiv(tiles, row_groups) * pl.cdiv(m, block_m) * splits, cores)
                    time = rounds * (_ROUND + pl.cdiv(blocks, splits) * row_groups * cost)
                    if splits > 1:
                        time += _SUM + 4 * splits * m * n / _PARTIAL_BYTES
                    yield time, row_groups, block_m, splits

    time, row_groups, block_m, splits = min(choices())
    if fp8:  # what fits the registers without ptxas putting the products in sequence
        overlap = 1 if row_groups == 4 or block_m > 128 else 2
    else:
        overlap = 2 if row_groups <= 2 and block_m <= 64 else 1
    stages = 8 if fp8 or row_groups < 4 else 4
    return time, FusedConfig(row_groups, block_m, splits, stages, overlap)


DECODE_FP8 = """{
.reg .b32 t, u, v, p, q;
and.b32 t, $2, 0x77777777;
prmt.b32 p, $3, $4, t;
lop3.b32 $0, $2, 0x80808080, p, 0xEA;
shr.u32 u, t, 16;
prmt.b32 q, $3, $4, u;
shl.b32 v, $2, 4;
lop3.b32 $1, v, 0x80808080, q, 0xEA;
}"""

TABLE_OFFSET = "{{\n.reg .b32 t;\nprmt.b32 t, $1, 0, 0x444{0};\nshl.b32 $0, t, 3;\n}}"

# layout.words_to_bf16 and a multiplication with the scale, $5 (twice the same bfloat16). Sign and magnitude of a code
# become a bfloat16 of value * 2**-126; the bits are placed so that 11 operations do for eight codes.
DECODE_BF16 = """{
.reg .b32 a, b, c, d, t, u;
and.b32 a, $4, 0x81C081C0;
shl.b32 t, $4, 3;
and.b32 b, t, 0x81C081C0;
shl.b32 t, $4, 6;
shl.b32 u, $4, 1;
and.b32 t, t, 0x01C001C0;
lop3.b32 c, u, 0x80008000, t, 0xEA;
shr.u32 t, $4, 3;
shl.b32 u, $4, 2;
and.b32 t, t, 0x01C001C0;
lop3.b32 d, u, 0x80008000, t, 0xEA;
mul.bf16x2 $0, a, $5;
mul.bf16x2 $1, b, $5;
mul.bf16x2 $2, c, $5;
mul.bf16x2 $3, d, $5;
}"""
SCALE_BF16 = "{{\n.reg .b32 t;\nprmt.b32 t, $1, 0, 0x4{0}4{0};\nshl.b32 $0, t, 7;\n}}"


def decode_bf16(word: Any, scales: Any, byte: int) -> list[Any]:
    """Eight codes, times 2**(b - 253) for byte b of ``scales``, to four registers of two bfloat16: columns 8c..8c+7."""
    scale = ma.asm(SCALE_BF16.format(byte), "=r,r", [scales], [ma.i32()])[0]
    return ma.asm(DECODE_BF16, "=&r,=&r,=&r,=&r,r,r", [word, scale], [ma.i32()] * 4)


def block_words(base: Any, thread: Any, pair: int) -> tuple[list[Any], Any]:
    """This thread's four words of 64 columns, and the scale bytes of its two rows."""
    words = ma.load_words(ma.offset(base, ma.add(ma.mul(thread, 16), 2048 * pair)), 4)
    quad = ma.div(thread, 4)
    return words, ma.load_words(ma.offset(base, ma.add(ma.mul(quad, 4), 4096 + 128 * pair)), 1)[0]


def decode_fp8(word: Any, scales: Any, byte: int, table: Any) -> list[Any]:
    """Eight codes at the scale of byte ``byte`` of ``scales`` to two registers of four e4m3: columns 4c, 16 + 4c."""
    entry = ma.asm(TABLE_OFFSET.format(byte), "=r,r", [scales], [ma.i32()])[0]
    entries = ma.load_words(ma.offset(table, entry), 2)
    return ma.asm(DECODE_FP8, "=&r,=&r,r,r,r", [word, *entries], [ma.i32()] * 2)


def _decode_fp8(w_ref: Any, table_ref: Any) -> jax.Array:
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


def _decode_bf16(w_ref: Any, pair: int) -> jax.Array:
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


def _place(thread: Any) -> tuple[Any, Any, Any]:
    """(warp, g, 2c) of a thread of a warpgroup: it holds rows 16 warp + g (+ 8) and columns 8j + 2c (+ 1)."""
    lane = ma.rem(thread, ma.WARP)
    return ma.div(thread, ma.WARP), ma.div(lane, 4), ma.mul(ma.rem(lane, 4), 2)


def _store_partial(acc: jax.Array, o_ref: Any, row0: Any, m0: Any, m: int, n: int) -> None:
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


def _staging_transforms() -> tuple:
    plgpu = _compat.mosaic()
    return plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)


def _stage(
    acc: jax.Array, chunk: int, smem: Any, refs: tuple, row0: Any, m0: Any, m: int, n: int, factor: float
) -> None:
    """Rows 64 * chunk.. of the result, finished, to a swizzled tile [64 rows of x, 64 weight rows] in shared memory.

    ``refs``: the weight's row scale, and x's row scale and the bias or None.
    """
    plgpu = _compat.mosaic()
    scalar = plgpu.Layout.WG_SPLAT(())
    given = tuple(r for r in refs if r is not None)
    half = "bf16x2" if smem.dtype == jnp.bfloat16 else "f16x2"

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.Layout.WGMMA, plgpu.RefType(_staging_transforms()), *(plgpu.RefType() for _ in given), scalar, scalar,
        ),
        return_type=(),
    )  # fmt: skip
    def put(_: Any, values: Any, tile: Any, *rest: Any) -> tuple:
        d = _compat.mosaic_ir()
        *vectors, row0, m0 = rest
        row_scale, x_scale, bias = (ma.pointer(vectors.pop(0)) if r is not None else None for r in refs)
        thread = ma.rem(d.utils.thread_idx(), ma.WARPGROUP)
        warp, g, c2 = _place(thread)
        lane = ma.rem(thread, ma.WARP)

        def read(p: Any, i: Any, end: int) -> Any:
            return ma.load(ma.f32(), ma.offset(p, ma.mul(ma.smaller(i, end - 1), 4)), 4)

        rows = [ma.add(ma.scalar(row0), ma.mul(warp, 16), g, 8 * h) for h in range(2)]
        constant = d.arith.constant(ma.f32(), d.ir.FloatAttr.get(ma.f32(), factor))
        scale = [d.arith.mulf(read(row_scale, r, n), constant) for r in rows]
        biases = [read(bias, r, n) for r in rows] if bias is not None else None
        registers = list(values.registers.flat)
        base = ma.pointer(tile)
        columns = min(values.shape[1] - _STAGED_ROWS * chunk, _STAGED_ROWS) // 8
        for j in range(columns):
            packed = []
            first = _STAGED_ROWS * chunk + 8 * j
            factors = None
            if x_scale is not None:
                factors = [read(x_scale, ma.add(ma.scalar(m0), c2, first + v), m) for v in range(2)]
            for h in range(2):
                pair = registers[first // 4 + h]
                y = [d.arith.mulf(ma.extract(pair, v), scale[h]) for v in range(2)]
                if factors is not None:
                    y = [d.arith.mulf(z, f) for z, f in zip(y, factors, strict=True)]
                if biases is not None:
                    y = [d.arith.addf(z, biases[h]) for z in y]
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

    put(acc, smem, *given, row0, m0)


def _kernel(
    x_gmem: Any,
    w_gmem: Any,
    *rest: Any,
    c: FusedConfig,
    rounds: int,
    m: int,
    n: int,
    fp8: bool,
    has: tuple[bool, ...],
) -> None:
    """``rest``: table (fp8); row scale, and x scale and bias as ``has`` says, which is empty for partial results; out;
    scratch."""
    plgpu = _compat.mosaic()
    rest_ = list(rest)
    table_gmem = rest_.pop(0) if fp8 else None
    vectors = (rest_.pop(0), *(rest_.pop(0) if present else None for present in has)) if has else None
    o_gmem = rest_.pop(0)
    w_smem, x_smem, table_smem, out_smem, full, empty, ready = rest_
    wg, tile = lax.axis_index("wg"), lax.axis_index("n")
    mt, split = lax.axis_index("m"), lax.axis_index("k")
    stages = w_smem.shape[0]
    memory, compute = _REGISTERS[c.row_groups]

    @pl.when(wg == c.row_groups)
    def _copy() -> None:
        plgpu.set_max_registers(memory, action="decrease")
        if table_gmem is not None:
            plgpu.copy_gmem_to_smem(table_gmem, table_smem, ready)

        def issue(i: Any, slot: Any) -> None:
            column = split * rounds * stages + i
            plgpu.copy_gmem_to_smem(
                w_gmem.at[pl.ds(tile * c.row_groups, c.row_groups), column], w_smem.at[slot], full.at[slot]
            )
            plgpu.copy_gmem_to_smem(
                x_gmem.at[pl.ds(mt * c.block_m, c.block_m), pl.ds(column * fragments.COLUMNS, fragments.COLUMNS)],
                x_smem.at[slot],
                full.at[slot],
            )

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
            plgpu.barrier_wait(ready)

        def accumulate(acc: Any) -> Any:
            @pl.loop(0, rounds)
            def _round(i: Any) -> None:
                for first in range(0, stages, c.overlap):
                    slots = range(first, min(first + c.overlap, stages))
                    for slot in slots:  # a block is decoded while the matrix units multiply the one before
                        plgpu.barrier_wait(full.at[slot])
                        if fp8:
                            operand = _decode_fp8(w_smem.at[slot, wg], table_smem)
                            plgpu.wgmma(acc, operand, _transposed(x_smem.at[slot]))
                        else:
                            for pair in range(2):
                                columns = x_smem.at[slot].at[:, pl.ds(64 * pair, 64)]
                                plgpu.wgmma(acc, _decode_bf16(w_smem.at[slot, wg], pair), _transposed(columns))
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
            _store_partial(acc, o_gmem.at[split], row0, m0, m, n)
            return
        factor = 2.0**-fragments.FP8_SHIFT if fp8 else 1.0
        rows = min(c.block_m, _STAGED_ROWS)
        for chunk in range(pl.cdiv(c.block_m, rows)):
            if chunk:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            _stage(acc, chunk, out_smem.at[wg], vectors, row0, m0, m, n, factor)
            plgpu.commit_smem()
            target = o_gmem.at[pl.ds(m0 + chunk * rows, rows), pl.ds(row0, fragments.ROWS)]
            plgpu.copy_smem_to_gmem(out_smem.at[wg], target)
        plgpu.wait_smem_to_gmem(0)


def ring(blocks: int, c: FusedConfig, itemsize: int, whole: bool) -> tuple[int, int]:
    """(stages, rounds) for ``blocks`` blocks along K: the ring that fits and overshoots the blocks of a split least.

    Args:
      itemsize: bytes of a value of x.
      whole: whether the result is staged in shared memory.
    """
    blocks = pl.cdiv(blocks, c.splits)
    stage = c.row_groups * fragments.BLOCK_BYTES + c.block_m * fragments.COLUMNS * itemsize
    fixed = 4096 + (c.row_groups * min(c.block_m, _STAGED_ROWS) * 128 if whole else 1024)  # table, barriers, output
    most = min(c.stages, (SMEM_LIMIT - fixed) // stage, blocks)
    least = max(most // 2, min(2 * c.overlap, most), 1)
    return min(((s, pl.cdiv(blocks, s)) for s in range(most, least - 1, -1)), key=lambda r: r[0] * r[1])


def _transposed(ref: Any) -> Any:
    return ref.T


def _permuted(x: jax.Array) -> jax.Array:
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


@partial(jax.jit, static_argnames=("out_dtype", "config"))
def fused_matmul(
    x: jax.Array,
    x_scale: jax.Array | None,
    w: PackedWeight,
    bias: jax.Array | None,
    out_dtype: Any,
    config: FusedConfig,
) -> jax.Array:
    """x [M, K] (bfloat16, or e4m3 with ``x_scale`` [M]) times a weight in its fragments, [M, N].

    One kernel for one split of K and a 16-bit result; else float32 partial results and XLA's sum.
    """
    plgpu = _compat.mosaic()
    c, m = config, x.shape[0]
    fp8 = x.dtype == jnp.float8_e4m3fn
    tiles, blocks = w.codes.shape[:2]
    n = tiles * fragments.ROWS
    out_dtype = jnp.dtype(out_dtype)
    whole = c.splits == 1 and out_dtype.itemsize == 2
    staged = min(c.block_m, _STAGED_ROWS)
    stages, rounds = ring(blocks, c, x.dtype.itemsize, whole)
    width = fragments.COLUMNS if fp8 else 64
    x = x if fp8 else _permuted(x)
    # TMA takes swizzled tiles of arrays that are whole tiles
    args = [jnp.pad(x, ((0, -m % 8), (0, -x.shape[1] % width))), w.codes]
    if fp8:
        args.append(jnp.asarray(fragments.fp8_table().reshape(TABLE_SHAPE)))
    extras = (x_scale, None if bias is None else jnp.pad(bias.astype(jnp.float32), (0, n - w.n))) if whole else ()
    if whole:
        args += [w.row_scale, *(e for e in extras if e is not None)]
    x_transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(128))
    out_type = (
        jax.ShapeDtypeStruct((m + -m % 8, n), out_dtype)
        if whole
        else jax.ShapeDtypeStruct((c.splits, m, n), jnp.float32)
    )
    many = dict(num_barriers=stages)

    def w4_fused(*refs: Any) -> None:  # its name is the kernel's
        _kernel(*refs, c=c, rounds=rounds, m=m, n=n, fp8=fp8, has=tuple(e is not None for e in extras))

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
                       transforms=_staging_transforms()),
            plgpu.Barrier(num_arrivals=2, **many),
            plgpu.Barrier(num_arrivals=c.row_groups, **many),
            plgpu.Barrier(num_arrivals=1),
        ),
    )(*args)  # fmt: skip
    if whole:
        return out[:m, : w.n]
    factor = 2.0**-fragments.FP8_SHIFT if fp8 else 1.0
    return finish(jnp.sum(out, axis=0) * factor, w, x_scale, bias, out_dtype)
