"""Products of few bfloat16 rows with "bf16_fragments" on Hopper: W4A16, up to 16 rows, bound by the weight's bytes.

One block of threads owns ``16 * row_tiles`` weight rows and all of K. Its warps take units of 64 columns in turn; a
lane reads its part of a unit in one 16-byte load, decodes it in registers and multiplies with ``mma.sync`` m16n8k16. x
comes from L2 straight into registers. The warps' sums meet in shared memory once, at the end, in a fixed order. No
ring in shared memory, no second kernel: with 16 warps a multiprocessor, loads one or two units ahead cover the latency.
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
from pallas_kernels.block_scaled_matmul.register_decode import decode_bf16

MAX_ROWS = 16
_UNIT = 64  # columns

_LOAD_W = "ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {$0,$1,$2,$3}, [$4];"
_LOAD_SCALE = "ld.global.nc.b32 $0, [$1];"


@dataclass(frozen=True)
class RowsConfig:
    """How the kernel for few rows divides the work.

    Attributes:
      row_tiles: 16-row tiles of W a block owns.
      warps: of a block, a multiple of 4; they share K.
      depth: units a warp has in flight.
    """

    row_tiles: int = 4
    warps: int = 16
    depth: int = 1


def operation(m: int) -> str:
    """The kernel's key in tuning files: one for each number of column tiles, which share a bucket of rows."""
    return f"w4_rows_{8 * pl.cdiv(m, 8)}"


def rows_config(m: int, n: int, k: int, cores: int) -> RowsConfig:
    """As few rows a block as give each multiprocessor at most one; two units in flight if the registers hold them."""
    tiles, warps = pl.cdiv(n, 16), 16
    row_tiles = next(r for r in range(1, 9) if pl.cdiv(tiles, r) <= cores or r == 8)
    steps = pl.cdiv(2 * pl.cdiv(k, fragments.COLUMNS), warps)
    if m > 8 and 3 <= row_tiles <= 5:
        return RowsConfig(row_tiles, warps, 1)
    if row_tiles <= 2 and steps == 4:  # a short K, all of it in flight at once
        return RowsConfig(row_tiles, warps, 4)
    return RowsConfig(row_tiles, warps, next(d for d in (2, 3, 1) if steps % d == 0))


def _add_products(words: list, x: list, acc: list) -> list:
    """acc + W x of one unit: 4 words and the scale word; x: four registers for each (n tile, block)."""
    acc = list(acc)
    f32 = [ma.f32()] * 4
    for b in range(2):
        rows = [decode_bf16(words[2 * b + h], words[4], 2 * b + h) for h in range(2)]
        for u in range(2):
            a = [rows[h][2 * u + j] for j in range(2) for h in range(2)]
            for t in range(len(acc) // 4):
                first = ((t * 2 + b) * 2 + u) * 2
                args = [*a, *x[first : first + 2], *acc[4 * t : 4 * t + 4]]
                acc[4 * t : 4 * t + 4] = ma.asm(ma.MMA, "=f,=f,=f,=f,r,r,r,r,r,r,0,1,2,3", args, f32)
    return acc


def _body(m: int, n: int, k: int, tiles: int, blocks: int, c: RowsConfig, bias: bool, dtype: Any) -> Any:
    plgpu = _compat.mosaic()
    n_tiles, units = pl.cdiv(m, 8), 2 * blocks
    steps = pl.cdiv(pl.cdiv(units, c.warps), c.depth) * c.depth
    rows = 16 * c.row_tiles
    leading = rows + 4  # of a partial sum: four banks further a row of x
    checked = m % 8 != 0 or _UNIT * c.warps * steps != k

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * (5 + bias) + (plgpu.Layout.WG_SPLAT(()),), return_type=())
    def body(_: Any, x_ref: Any, w_ref: Any, scale_ref: Any, *rest: Any) -> tuple:
        d = _compat.mosaic_ir()
        i32, f32 = ma.i32(), ma.f32()
        bias_ref = rest[0] if bias else None
        o_ref, part_ref, block_id = rest[bias:]
        thread, block = d.utils.thread_idx(), ma.scalar(block_id)
        lane, warp = ma.rem(thread, ma.WARP), ma.div(thread, ma.WARP)
        g, column = ma.div(lane, 4), ma.rem(lane, 4)
        w_base, x_base = ma.pointer(w_ref), ma.pointer(x_ref)
        # A warp meets its 64 columns at one parity: unit i is half ``warp % 2`` of block ``warp / 2 + i * warps / 2``.
        pair = ma.rem(warp, 2)
        codes0 = ma.add(ma.mul(lane, 16), ma.mul(pair, 2048))
        scales0 = ma.add(ma.mul(g, 4), ma.mul(pair, 128), 4096)
        tile_starts = []  # of codes and of scales, the same for all threads
        for r in range(c.row_tiles):
            tile = ma.smaller(ma.add(ma.mul(block, c.row_tiles), r), 4 * tiles - 1)
            start, part = ma.mul(ma.div(tile, 4), blocks * fragments.BLOCK_BYTES), ma.rem(tile, 4)
            tile_starts.append((ma.add(start, ma.mul(part, 512)), ma.add(start, ma.mul(part, 32))))
        x_rows = [ma.add(g, 8 * t) for t in range(n_tiles)]
        x_bases = [ma.offset(x_base, ma.add(ma.mul(row, 2 * k), ma.mul(column, 16))) for row in x_rows]

        def unit_of(i: Any) -> Any:
            return ma.add(warp, ma.mul(i, c.warps))

        def load_w(i: Any, r: int) -> list:
            position = ma.add(ma.div(warp, 2), ma.mul(i, c.warps // 2))
            if c.warps * steps != units:
                position = ma.smaller(position, blocks - 1)
            start = ma.mul(position, fragments.BLOCK_BYTES)
            codes = ma.offset(w_base, ma.add(tile_starts[r][0], start, codes0))
            scales = ma.offset(w_base, ma.add(tile_starts[r][1], start, scales0))
            words = ma.asm(_LOAD_W, "=r,=r,=r,=r,l", [codes], [i32] * 4, volatile=True)
            return words + ma.asm(_LOAD_SCALE, "=r,l", [scales], [i32], volatile=True)

        def load_x(unit: Any) -> list:
            out = []
            for t in range(n_tiles):
                for b in range(2):
                    first = ma.add(ma.mul(unit, _UNIT), 32 * b)
                    p = ma.offset(x_bases[t], ma.mul(first, 2))
                    if not checked:
                        out += ma.asm(ma.LOAD, "=r,=r,=r,=r,l", [p], [i32] * 4, volatile=True)
                        continue
                    inside = d.arith.andi(ma.below(x_rows[t], m), ma.below(first, k))
                    flag = d.arith.extui(i32, inside)
                    out += ma.asm(ma.LOAD_IF, "=&r,=&r,=&r,=&r,l,r", [p, flag], [i32] * 4, volatile=True)
            return out

        # what is in flight, as a flat list of loop values: W of every (step, row tile), x of every step, the sums
        zero = d.arith.constant(f32, d.ir.FloatAttr.get(f32, 0.0))
        per_x, per_acc = 8 * n_tiles, 4 * n_tiles

        def flatten(w: list, x: list, acc: list) -> list:
            return [v for s in w for r in s for v in r] + [v for s in x for v in s] + [v for a in acc for v in a]

        def unflatten(values: Any) -> tuple[list, list, list]:
            rest = iter(list(values))
            w = [[[next(rest) for _ in range(5)] for _ in range(c.row_tiles)] for _ in range(c.depth)]
            x = [[next(rest) for _ in range(per_x)] for _ in range(c.depth)]
            return w, x, [[next(rest) for _ in range(per_acc)] for _ in range(c.row_tiles)]

        w, x = [], []
        for s in range(c.depth):
            x.append(load_x(unit_of(ma.const(s))))
            w.append([load_w(ma.const(s), r) for r in range(c.row_tiles)])
        values = flatten(w, x, [[zero] * per_acc for _ in range(c.row_tiles)])
        if steps > c.depth:
            index = d.ir.IndexType.get()
            bounds = [d.arith.constant(index, d.ir.IntegerAttr.get(index, v)) for v in (0, steps // c.depth - 1, 1)]
            loop = d.scf.ForOp(*bounds, values)
            with d.ir.InsertionPoint(loop.body):
                w, x, acc = unflatten(loop.inner_iter_args)
                done = ma.mul(d.arith.index_cast(i32, loop.induction_variable), c.depth)
                for s in range(c.depth):
                    following = ma.add(done, s + c.depth)
                    x_next = load_x(unit_of(following))
                    for r in range(c.row_tiles):
                        acc[r] = _add_products(w[s][r], x[s], acc[r])
                        w[s][r] = load_w(following, r)
                    x[s] = x_next
                d.scf.YieldOp(flatten(w, x, acc))
            values = loop.results
        w, x, acc = unflatten(values)
        for s in range(c.depth):
            for r in range(c.row_tiles):
                acc[r] = _add_products(w[s][r], x[s], acc[r])

        part = ma.pointer(part_ref)
        mine, column2 = ma.mul(warp, n_tiles * 8 * leading), ma.mul(column, 2)
        for r in range(c.row_tiles):
            for t in range(n_tiles):
                for h in range(2):
                    for v in range(2):
                        at = ma.mul(ma.add(column2, 8 * t + v), leading)
                        place = ma.add(mine, at, g, 16 * r + 8 * h)
                        ma.store(acc[r][4 * t + 2 * h + v], ma.offset(part, ma.mul(place, 4)))
        ma.barrier()
        out, row_scale = ma.pointer(o_ref), ma.pointer(scale_ref)
        size = jnp.dtype(dtype).itemsize
        for i in range(pl.cdiv(m * rows, ma.WARP * c.warps)):
            e = ma.add(thread, ma.WARP * c.warps * i)
            x_row, row = ma.div(e, rows), ma.rem(e, rows)
            column_out = ma.add(ma.mul(block, rows), row)
            inside = d.arith.andi(ma.below(x_row, m), ma.below(column_out, n))

            def finish(x_row: Any = x_row, row: Any = row, column_out: Any = column_out) -> None:
                total = None
                for s in range(c.warps):
                    place = ma.add(ma.mul(x_row, leading), row, s * n_tiles * 8 * leading)
                    v = ma.load(f32, ma.offset(part, ma.mul(place, 4)), 4)
                    total = v if total is None else d.arith.addf(total, v)
                y = d.arith.mulf(total, ma.load(f32, ma.offset(row_scale, ma.mul(column_out, 4)), 4))
                if bias_ref is not None:
                    b = ma.load(f32, ma.offset(ma.pointer(bias_ref), ma.mul(column_out, 4)), 4)
                    y = d.arith.addf(y, b)
                if size == 2:
                    kind = d.ir.BF16Type.get() if dtype == jnp.bfloat16 else d.ir.F16Type.get()
                    y = d.arith.truncf(kind, y)
                ma.store(y, ma.offset(out, ma.mul(ma.add(ma.mul(x_row, n), column_out), size)))

            ma.when(inside, finish)
        return ()

    return body


@partial(jax.jit, static_argnames=("out_dtype", "config"))
def rows_matmul(x: jax.Array, w: PackedWeight, bias: jax.Array | None, out_dtype: Any, config: RowsConfig) -> jax.Array:
    """bfloat16 x [M, K], M at most 16, times a "bf16_fragments" weight, plus bias: [M, N]."""
    plgpu = _compat.mosaic()
    m, k = x.shape
    tiles, blocks = w.codes.shape[:2]
    out_dtype = jnp.dtype(out_dtype)
    body = _body(m, w.n, k, tiles, blocks, config, bias is not None, out_dtype)
    args = [x, w.codes, w.row_scale] + ([] if bias is None else [bias.astype(jnp.float32)])

    def w4_rows(*refs: Any) -> None:  # its name is the kernel's
        body(*refs, lax.axis_index("n").astype(jnp.int32))

    return plgpu.kernel(
        w4_rows,
        out_type=jax.ShapeDtypeStruct((m, w.n), out_dtype),
        grid=(pl.cdiv(4 * tiles, config.row_tiles),),
        grid_names=("n",),
        num_threads=config.warps // 4,
        thread_name="wg",
        kernel_name="w4_rows",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        scratch_types=(plgpu.SMEM((config.warps, pl.cdiv(m, 8) * 8, 16 * config.row_tiles + 4), jnp.float32),),
    )(*args)
