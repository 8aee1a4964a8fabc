"""Eight codes of a word in fragments to the registers of a matrix instruction: PTX, for kernels of Mosaic GPU."""

from __future__ import annotations

from typing import Any

from pallas_kernels import mosaic_asm as ma

TABLE_SHAPE = (4, 128)  # of fragments.fp8_table in shared memory; a copy takes at most 256 along an axis

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
