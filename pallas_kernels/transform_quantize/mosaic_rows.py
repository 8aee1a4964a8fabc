"""Register code that the kernels of the exact-FP8 pair share: from values to e4m3 bytes, for one row of a warp or more.

A row is scaled by its largest magnitude, from which its largest scale byte follows, because the policies here are
monotone. Codes are those of rounding.py: adding 1.5 * 2**22 units of the value's binade and taking it away again
rounds half to even.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mxjax.core import codec
from mxjax.core.formats import ElementFormat
from pallas_kernels import _compat
from pallas_kernels import mosaic_asm as ma
from pallas_kernels.transform_quantize.reference import FP8_MIN_BYTE, fp8_top
from pallas_kernels.transform_quantize.rounding import magic_step

POLICIES = ("even", "floor")

# max.NaN keeps a NaN, whose bits are above all others; abs is a modifier of the instruction
LARGEST = """{
.reg .f32 a, b, c, d, e, f, g, h;
abs.f32 a, $1; abs.f32 b, $2; abs.f32 c, $3; abs.f32 d, $4; abs.f32 e, $5; abs.f32 f, $6; abs.f32 g, $7; abs.f32 h, $8;
max.NaN.f32 a, a, b; max.NaN.f32 c, c, d; max.NaN.f32 e, e, f; max.NaN.f32 g, g, h;
max.NaN.f32 a, a, c; max.NaN.f32 e, e, g;
max.NaN.f32 $0, a, e;
}"""
# $1 value, $2 factor, $3 bits of one + step: z, then (z + c) - c
ROUND = """{{
.reg .f32 z;
.reg .b32 c;
mul.rn.f32 z, $1, $2;
mov.b32 c, z;
and.b32 c, c, 0x7F800000;
add.s32 c, c, {step:#010x};
max.s32 c, c, $3;
.reg .f32 f;
mov.b32 f, c;
add.rn.f32 z, z, f;
sub.rn.f32 $0, z, f;
}}"""
CONVERT = """{
.reg .b16 a, b;
cvt.rn.satfinite.e4m3x2.f32 a, $2, $1;
cvt.rn.satfinite.e4m3x2.f32 b, $4, $3;
mov.b32 $0, {a, b};
}"""


def real(v: Any) -> Any:
    return _compat.mosaic_ir().arith.constant(ma.f32(), _compat.mosaic_ir().ir.FloatAttr.get(ma.f32(), float(v)))


def bits(v: Any) -> Any:
    return _compat.mosaic_ir().arith.bitcast(ma.i32(), v)


def number(v: Any) -> Any:
    return _compat.mosaic_ir().arith.bitcast(ma.f32(), v)


def widened(words: Sequence[Any]) -> list:
    """Two float32 of every register of two bfloat16."""
    arith = _compat.mosaic_ir().arith
    low = [number(arith.shli(w, ma.const(16))) for w in words]
    high = [number(arith.andi(w, ma.const(-65536))) for w in words]
    return [v for pair in zip(low, high, strict=True) for v in pair]


def row_start(ref: Any, row: Any, row_bytes: int) -> Any:
    """The pointer to a row; 64-bit offsets: an array may be larger than 4 GiB."""
    d = _compat.mosaic_ir()
    i64 = d.ir.IntegerType.get_signless(64)
    width = d.arith.constant(i64, d.ir.IntegerAttr.get(i64, row_bytes))
    return ma.offset64(ma.pointer(ref), d.arith.muli(d.arith.extui(i64, row), width))


def largest_of(values: Sequence[Any]) -> Any:
    """Bits of the largest magnitude of eight values; a NaN's are above all others."""
    return bits(ma.asm(LARGEST, "=f" + ",f" * 8, values, [ma.f32()])[0])


def slots(warps: int) -> int:
    """Words of shared memory for one number a warp of a row, read in whole loads."""
    return warps if warps <= 2 else warps + -warps % 4


@dataclass(frozen=True)
class Place:
    """Where a warp is: ``warp`` of ``warps`` of a row, the ``local``-th of ``rows`` that its block works on."""

    warp: Any
    local: Any
    warps: int
    rows: int

    def largest_of_row(self, largest: Any, i: Any, shared_ref: Any) -> Any:
        """The maximum over a row of one number (bits) a lane, for every lane; ``i`` counts the rows of this warp."""
        arith, i32 = _compat.mosaic_ir().arith, ma.i32()
        largest = ma.asm("redux.sync.max.u32 $0, $1, 0xffffffff;", "=r,r", [largest], [i32], volatile=True)[0]
        if self.warps == 1:
            return largest
        # two sets of slots in turn: a warp is at most one barrier ahead of the others
        turn = ma.add(ma.mul(ma.rem(i, 2), self.rows), self.local)
        shared = ma.offset(ma.pointer(shared_ref), ma.mul(turn, 4 * slots(self.warps)))
        ma.store(largest, ma.offset(shared, ma.mul(self.warp, 4)))
        name = ma.add(self.local, 1)
        ma.asm(f"bar.sync $0, {ma.WARP * self.warps};", "r,~{memory}", [name], volatile=True)
        step = 4 if self.warps > 2 else 2
        for other in range(0, slots(self.warps), step):
            for j, v in enumerate(ma.load_words(ma.offset(shared, 4 * other), step)):
                if other + j < self.warps:
                    largest = arith.maxui(largest, v)
        return largest


@dataclass(frozen=True)
class RowScale:
    """What every value of a row is multiplied by, from the bits of the row's largest magnitude.

    Attributes:
      bits: of the largest magnitude, Hadamard's factor in it.
      top: the E8M0 byte of the row's scale.
      factor: Hadamard's, or 1.
      policy: scale policy.
      element: what values are rounded to.
    """

    bits: Any
    top: Any
    factor: np.float32
    policy: str
    element: ElementFormat

    @classmethod
    def of(cls, largest: Any, factor: np.float32, policy: str, element: ElementFormat) -> RowScale:
        arith = _compat.mosaic_ir().arith
        scaled = _scaled(largest, factor)
        byte = arith.maxsi(_scale_byte(scaled, policy, element), ma.const(FP8_MIN_BYTE))
        return cls(scaled, ma.add(byte, -fp8_top(jnp.float8_e4m3fn, element)), factor, policy, element)

    def multiplier(self) -> Any:
        arith = _compat.mosaic_ir().arith
        power = number(arith.shli(arith.subi(ma.const(254), self.top), ma.const(23)))
        return power if self.factor == 1 else arith.mulf(power, real(self.factor))

    def words(self, values: Sequence[Any], multiplier: Any, block_largest: Any) -> list:
        """e4m3 of values of one block, whose largest magnitude has these bits; four a word."""
        arith = _compat.mosaic_ir().arith
        relative = arith.subi(_scale_byte(_scaled(block_largest, self.factor), self.policy, self.element), self.top)
        one = arith.shli(ma.add(arith.maxsi(relative, ma.const(-100)), 127), ma.const(23))
        step = magic_step(self.element)
        floor = ma.add(one, step + (self.element.min_exponent << codec.MANTISSA_BITS))
        rounded = [ma.asm(ROUND.format(step=step), "=f,f,f,r", [v, multiplier, floor], [ma.f32()])[0] for v in values]
        if self.policy == "floor":
            limit = arith.mulf(number(one), real(self.element.max_value))
            low = arith.negf(limit)
            rounded = [arith.minimumf(arith.maximumf(v, low), limit) for v in rounded]
        out = []
        for first in range(0, len(rounded), 4):
            out += ma.asm(CONVERT, "=r,f,f,f,f", rounded[first : first + 4], [ma.i32()])
        return out

    def store(self, scale_ref: Any, row: Any) -> None:
        """The row scale; NaN for a row with NaN or Inf."""
        arith = _compat.mosaic_ir().arith
        finite = number(arith.shli(self.top, ma.const(23)))
        y = arith.select(ma.below(self.bits, codec.INF_BITS), finite, real(float("nan")))
        ma.store(y, ma.offset(ma.pointer(scale_ref), ma.mul(row, 4)))


def _scaled(v: Any, factor: np.float32) -> Any:
    return v if factor == 1 else bits(_compat.mosaic_ir().arith.mulf(number(v), real(factor)))


def _scale_byte(v: Any, policy: str, element: ElementFormat) -> Any:
    """The policy's byte of a block whose largest magnitude has these bits; "even" rounds to the element's bits."""
    arith = _compat.mosaic_ir().arith
    half = 1 << (codec.MANTISSA_BITS - element.mantissa_bits - 1) if policy == "even" else 0
    exponent = arith.shrui(ma.add(v, half), ma.const(23))
    return arith.maxsi(ma.add(exponent, -element.max_exponent), ma.const(0))


def over_rows(rounds: int, first: Any, step: int, load: Any, finish: Any) -> None:
    """``finish(i, row, load(row))`` for rows ``first + i * step``: the next row is loaded while one is worked on."""
    d = _compat.mosaic_ir()
    raw = load(first)
    if rounds == 1:
        finish(ma.const(0), first, raw)
        return
    index = d.ir.IndexType.get()
    bounds = [d.arith.constant(index, d.ir.IntegerAttr.get(index, v)) for v in (0, rounds, 1)]
    loop = d.scf.ForOp(*bounds, raw)
    with d.ir.InsertionPoint(loop.body):
        i = d.arith.index_cast(ma.i32(), loop.induction_variable)
        row = ma.add(first, ma.mul(i, step))
        following = load(ma.add(row, step))
        finish(i, row, list(loop.inner_iter_args))
        d.scf.YieldOp(following)


def row_kernel(name: str, body: Any, blocks: int, warps: int, m: int, k: int, words: int) -> Callable[..., Any]:
    """``blocks`` blocks of ``warps`` warps (rounded up to warpgroups) that run ``body(*arrays, values, scales, shared,
    block)`` on rows of K values.

    Args:
      words: uint32 of shared memory.
    """
    plgpu = _compat.mosaic()

    def kernel(*refs: Any) -> None:
        body(*refs, lax.axis_index("row").astype(jnp.int32))

    kernel.__name__ = name  # the kernel's name comes from it
    return plgpu.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((m, k), jnp.float8_e4m3fn), jax.ShapeDtypeStruct((m,), jnp.float32)),
        grid=(blocks,),
        grid_names=("row",),
        num_threads=-(-warps // 4),
        thread_name="wg",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        scratch_types=(plgpu.SMEM((words,), jnp.uint32),),
    )
