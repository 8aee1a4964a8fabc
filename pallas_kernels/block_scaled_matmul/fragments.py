"""The layouts "fp8_fragments" and "bf16_fragments": MXFP4 weights in the order of Hopper's matrix instructions.

uint32 [N'/64, K'/128, 34, 32], N' and K' rounded up to 64 and 128. One block holds 64 rows x 128 columns in 4352 bytes:
4.25 bits a weight. The weight is operand A, in registers, of ``wgmma`` m64nNk32 with e4m3 (W4A4: "fp8_fragments"), or
of ``wgmma`` m64nNk16 and ``mma.sync`` m16n8k16 with bfloat16 (W4A16: "bf16_fragments"). The two differ in what a word
is; words and scales are in the same places.

Words 0..1023: word ((4P + w) * 32 + lane) * 4 + 2b + h holds eight codes of row 16w + 8h + g, block 2P + b of 32
columns, where lane = 4g + c. A lane's four words are one 16-byte load.

* "fp8": codes 0..3 are columns 4c..4c+3 of the block, codes 4..7 columns 16+4c..16+4c+3. Code n has its magnitude in
  bits 4n..4n+2: a nibble is a selector of PRMT, which looks up four bytes in a table of eight at once. The sign of code
  n < 4 is bit 8n + 7, of code n >= 4 bit 8(n - 4) + 3: one mask, 0x80808080, takes the signs of four bytes.
* "bf16": codes 0..7 are columns 8c..8c+7 of the block; even codes in the low half of the word, odd ones in the high
  half, in the bit order of "tiles" (layout.py): four registers of two bfloat16 come out with eleven operations.

Words 1024..1087: word 1024 + 32P + 8w + g holds the scale bytes of rows 16w + g, 16w + 8 + g: byte 2b + h. They are
relative to the row's largest as in layout.py (253 for the largest, 0 for zero, 255 for NaN); ``row_scale`` is the
row's factor.

The eight columns of a lane are two steps of a 16-column instruction. ``mma.sync`` has x in registers too and reads the
same columns; ``wgmma`` has x in shared memory and needs its columns permuted (:func:`permute_columns`).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from mxjax.core import codec, packing
from mxjax.core.formats import MXFP4, NAN_BYTE
from pallas_kernels.block_scaled_matmul.layout import (
    REL_TOP,
    PackedWeight,
    codes_of_halves,
    half_words,
    relative_scales,
)

ROWS = 64
COLUMNS = 128
FP8_SHIFT = 6  # e4m3 image: value * 2**(byte - max + 6); 6 * 2**6 = 384 is within e4m3's 448
BLOCK_WORDS = ROWS * COLUMNS // 8 + ROWS * COLUMNS // 32 // 4
BLOCK_BYTES = 4 * BLOCK_WORDS


def _code_bits(c: jax.Array, fp8: bool) -> jax.Array:
    """Codes [.., block of 32] to words [.., 4] of its four lanes."""
    if fp8:
        c = c.reshape(*c.shape[:-1], 2, 4, 4)  # half, c, i
        half, i = lax.broadcasted_iota(jnp.uint32, (2, 1, 4), 0), lax.broadcasted_iota(jnp.uint32, (2, 1, 4), 2)
        bits = ((c & 7) << (16 * half + 4 * i)) | ((c >> 3) << (8 * i + 7 - 4 * half))
        return jnp.sum(bits, axis=(-3, -1), dtype=jnp.uint32)  # disjoint bits
    halves = half_words(c.reshape(*c.shape[:-1], 4, 4, 2))
    return halves[..., 0] | (halves[..., 1] << 16)


@partial(jax.jit, static_argnames=("fp8",))
def pack(codes: jax.Array, scales: jax.Array, factor: jax.Array | None, *, fp8: bool) -> tuple[jax.Array, jax.Array]:
    """uint8 codes [N, K/2] and scale bytes [N, K/32] to words [T, B, 34, 32] and row_scale float32 [64 T]."""
    n, k = codes.shape[0], 2 * codes.shape[1]
    relative, nan, row_scale = relative_scales(scales, factor)
    pad_n, pad_k = -n % ROWS, -k % COLUMNS
    c = jnp.where(jnp.repeat(nan, MXFP4.block_size, axis=1), 0, packing.unpack(codes, 4))
    c = jnp.pad(c, ((0, pad_n), (0, pad_k))).astype(jnp.uint32)
    t, b = (n + pad_n) // ROWS, (k + pad_k) // COLUMNS
    words = _code_bits(c.reshape(t, 4, 2, 8, b, 2, 2, 32), fp8)  # T, w, h, g, B, P, b, c
    words = words.transpose(0, 4, 5, 1, 3, 7, 6, 2).reshape(t, b, ROWS * COLUMNS // 8)
    r = jnp.pad(relative, ((0, pad_n), (0, pad_k // MXFP4.block_size))).astype(jnp.uint32)
    r = r.reshape(t, 4, 2, 8, b, 2, 2).transpose(0, 4, 5, 1, 3, 6, 2)  # T, B, P, w, g, b, h
    place = lax.broadcasted_iota(jnp.uint32, (2, 2), 0) * 16 + lax.broadcasted_iota(jnp.uint32, (2, 2), 1) * 8
    scale_words = jnp.sum(r << place, axis=(-2, -1), dtype=jnp.uint32).reshape(t, b, ROWS)
    words = jnp.concatenate([words, scale_words], axis=2).reshape(t, b, BLOCK_WORDS // 32, 32)
    return words, jnp.pad(row_scale, (0, pad_n))


def unpack(words: jax.Array, *, fp8: bool) -> tuple[jax.Array, jax.Array]:
    """Words to uint8 codes [64 T, 128 B], one a byte, and relative scale bytes [64 T, 4 B]."""
    t, b = words.shape[:2]
    flat = words.reshape(t, b, BLOCK_WORDS)
    w = flat[..., : ROWS * COLUMNS // 8].reshape(t, b, 2, 4, 8, 4, 2, 2)  # T B P w g c b h
    w = w.transpose(0, 3, 7, 4, 1, 2, 6, 5)  # T w h g B P b c
    if fp8:
        half, i = lax.broadcasted_iota(jnp.uint32, (2, 1, 4), 0), lax.broadcasted_iota(jnp.uint32, (2, 1, 4), 2)
        w = w[..., None, :, None]
        codes = ((w >> (16 * half + 4 * i)) & 7) | (((w >> (8 * i + 7 - 4 * half)) & 1) << 3)
    else:
        codes = codes_of_halves(jnp.stack([w & 0xFFFF, w >> 16], axis=-1))
    codes = codes.reshape(t * ROWS, b * COLUMNS).astype(jnp.uint8)
    s = flat[..., ROWS * COLUMNS // 8 :].reshape(t, b, 2, 4, 8)[..., None, None]
    place = lax.broadcasted_iota(jnp.uint32, (2, 2), 0) * 16 + lax.broadcasted_iota(jnp.uint32, (2, 2), 1) * 8
    scales = ((s >> place) & 0xFF).transpose(0, 3, 6, 4, 1, 2, 5).reshape(t * ROWS, b * COLUMNS // 32)
    return codes, scales.astype(jnp.uint8)


def relative_values(w: PackedWeight) -> jax.Array:
    """A weight in fragments as bfloat16 [N, K] without its row scale: exact. XLA's way to read it."""
    codes, byte = unpack(w.codes, fp8=w.layout == "fp8_fragments")
    byte = byte.astype(jnp.int32)[..., None]
    values = codec.decode(codes.reshape(*byte.shape[:-1], MXFP4.block_size), MXFP4.element, byte - REL_TOP)
    values = jnp.where(byte == NAN_BYTE, jnp.nan, jnp.where(byte == 0, 0.0, values)).astype(jnp.bfloat16)
    return values.reshape(codes.shape)[: w.n, : w.k]


def fp8_table() -> np.ndarray:
    """uint32 [256, 2]: for every relative scale byte the e4m3 bytes of the eight magnitudes, times 2**FP8_SHIFT.

    The 15 binades from 253 down are exact; further down a value is rounded to the nearest e4m3 number, ties to even.
    """
    magnitudes = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    exponent = np.arange(256) - REL_TOP + FP8_SHIFT
    exponent[exponent > FP8_SHIFT] = FP8_SHIFT  # 254 does not occur
    values = np.ldexp(magnitudes, exponent[:, None])
    values[0], values[NAN_BYTE] = 0, np.nan
    return values.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint32)


def permute_columns(x: jax.Array) -> jax.Array:
    """x [M, K] with the columns of every 32-block in the order of ``wgmma`` on "bf16_fragments".

    Lane c has columns 2c, 2c + 1, 8 + 2c, 9 + 2c of a step; there stand columns 8c + 4 * step .. + 3.
    """
    m, k = x.shape
    return x.reshape(m, k // 32, 4, 2, 2, 2).transpose(0, 1, 3, 4, 2, 5).reshape(m, k)
