"""Words for hand-written register code inside Mosaic GPU kernels, in the functions that ``plgpu.inline_mgpu`` takes.

Everything here builds MLIR for one thread: 32-bit integers, pointers with byte offsets, PTX with several results. It
runs while a kernel is lowered, never on arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pallas_kernels import _compat

# Products and 16-byte loads of a warp; LOAD_IF gives zeros where its last operand is 0.
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
LOAD = "ld.global.nc.v4.b32 {$0,$1,$2,$3}, [$4];"
LOAD_IF = """{
.reg .pred p;
mov.b32 $0, 0;
mov.b32 $1, 0;
mov.b32 $2, 0;
mov.b32 $3, 0;
setp.ne.u32 p, $5, 0;
@p ld.global.nc.v4.b32 {$0,$1,$2,$3}, [$4];
}"""

WARP = 32
WARPGROUP = 128
DYNAMIC = -2147483648  # MLIR's mark of an index that is a value


def const(v: int) -> Any:
    d = _compat.mosaic_ir()
    i32 = d.ir.IntegerType.get_signless(32)
    return d.arith.constant(i32, d.ir.IntegerAttr.get(i32, v))


def _value(v: Any) -> Any:
    return const(v) if isinstance(v, int) else v


def add(*terms: Any) -> Any:
    out = _value(terms[0])
    for t in terms[1:]:
        out = out if isinstance(t, int) and t == 0 else _compat.mosaic_ir().arith.addi(out, _value(t))
    return out


def mul(a: Any, b: Any) -> Any:
    return _compat.mosaic_ir().arith.muli(_value(a), _value(b))


def div(a: Any, b: int) -> Any:
    return _compat.mosaic_ir().arith.divui(a, const(b))


def rem(a: Any, b: int) -> Any:
    return _compat.mosaic_ir().arith.remui(a, const(b))


def below(a: Any, b: Any) -> Any:
    """``a < b`` of unsigned numbers, as i1."""
    arith = _compat.mosaic_ir().arith
    return arith.cmpi(arith.CmpIPredicate.ult, _value(a), _value(b))


def smaller(a: Any, b: Any) -> Any:
    return _compat.mosaic_ir().arith.minui(_value(a), _value(b))


def scalar(x: Any) -> Any:
    """The value of an int32 scalar that a kernel passed with ``Layout.WG_SPLAT(())``."""
    return x.registers.item()


def f32() -> Any:
    return _compat.mosaic_ir().ir.F32Type.get()


def i32() -> Any:
    return _compat.mosaic_ir().ir.IntegerType.get_signless(32)


def pointer(ref: Any) -> Any:
    return _compat.mosaic_ir().utils.memref_ptr(ref)


def offset(p: Any, nbytes: Any) -> Any:
    """Pointer ``p`` plus ``nbytes``, an unsigned 32-bit value or an int."""
    d = _compat.mosaic_ir()
    i64 = d.ir.IntegerType.get_signless(64)
    return offset64(p, d.arith.extui(i64, _value(nbytes)))


def offset64(p: Any, wide: Any) -> Any:
    """Pointer ``p`` plus a 64-bit number of bytes."""
    d = _compat.mosaic_ir()
    byte = d.ir.IntegerType.get_signless(8)
    return d.llvm.getelementptr(p.type, p, [wide], [DYNAMIC], byte, d.llvm.GEPNoWrapFlags.none)


def load(ty: Any, p: Any, alignment: int) -> Any:
    return _compat.mosaic_ir().llvm.load(ty, p, alignment=alignment)


def load_words(p: Any, n: int) -> list[Any]:
    """``n`` consecutive 32-bit words (1, 2 or 4), in one load."""
    d = _compat.mosaic_ir()
    if n == 1:
        return [load(i32(), p, 4)]
    v = load(d.ir.VectorType.get((n,), i32()), p, 4 * n)
    return [d.vector.extract(v, [], [i]) for i in range(n)]


def store(value: Any, p: Any) -> None:
    _compat.mosaic_ir().llvm.store(value, p)


def asm(
    text: str, constraints: str, args: Sequence[Any], results: Sequence[Any] = (), *, volatile: bool = False
) -> list:
    """PTX; ``$0`` to ``$n-1`` are the results, the arguments follow."""
    d = _compat.mosaic_ir()
    if not results:
        ty = d.ir.Type.parse("!llvm.void")
    elif len(results) == 1:
        ty = results[0]
    else:
        ty = d.llvm.StructType.get_literal(list(results))
    out = d.llvm.inline_asm(ty, list(args), text, constraints, asm_dialect=0, has_side_effects=volatile)
    if len(results) < 2:
        return [out] if results else []
    return [d.llvm.extractvalue(t, out, [i]) for i, t in enumerate(results)]


def barrier() -> None:
    """All threads of the block, and what they wrote to shared memory."""
    asm("bar.sync 0;", "~{memory}", [], volatile=True)


def fragments(words: Sequence[Any], shape: tuple[int, int], dtype: Any, layout: Any) -> Any:
    """A FragmentedArray of 32-bit registers, each ``32 / bits(dtype)`` values of a row."""
    import numpy as np

    d = _compat.mosaic_ir()
    vector = d.ir.VectorType.get((32 // dtype.width,), dtype)
    one = d.ir.VectorType.get((1,), i32())
    registers = np.empty(len(words), dtype=object)
    registers[:] = [d.vector.bitcast(vector, d.vector.broadcast(one, w)) for w in words]
    shaped = registers.reshape(layout.registers_shape(shape))
    return d.mgpu.FragmentedArray(_registers=shaped, _layout=layout, _is_signed=None)


def same_layout(like: Any, registers: Sequence[Any]) -> Any:
    """A FragmentedArray like another one, with these registers (in the order of ``like.registers.flat``)."""
    import numpy as np

    out = np.empty(len(registers), dtype=object)
    out[:] = registers
    shaped = out.reshape(like.registers.shape)
    return _compat.mosaic_ir().mgpu.FragmentedArray(_registers=shaped, _layout=like.layout, _is_signed=None)


def extract(vector: Any, i: int) -> Any:
    return _compat.mosaic_ir().vector.extract(vector, [], [i])


def when(condition: Any, body: Callable[[], None]) -> None:
    with _compat.mosaic_ir().utils.when(condition):
        body()
