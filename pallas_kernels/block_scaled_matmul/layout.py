"""Weights as kernels want them: packed once when a model is loaded.

Three layouts hold the same numbers.

``rows``   codes uint8 [N, K * bits / 8] (low nibble first) and scale bytes uint8 [N, K / block]: the canonical layout
           of checkpoints and of :class:`mxjax.QTensor`. What native FP4 units and every other format take.
``tiles``  MXFP4 for NVIDIA GPUs without FP4 units. uint8 [K/128, N, 64]: a 128 x 128 tile is contiguous. Every four
           bytes are one 32-bit word of eight codes, four of the tile's first 64 columns and four of its last 64, with
           the bits placed so that eight bfloat16 come out with 11 integer operations (:func:`words_to_bf16`). Scales
           are relative to the largest of their row, ``byte - max + 253``, which as a bfloat16 exponent turns the raw
           bits (value * 2**-126) into value * 2**(byte - max); 2**(max - 127) is a factor of the row for the epilogue.
           No scale byte overflows. Blocks more than 130 binades below their row's largest leave bfloat16 and become
           zero, which is far below what float32 sums keep of them. Columns beyond K hold zeros.

``fp8_fragments``, ``bf16_fragments``  MXFP4 for Hopper: see fragments.py.

Bits of a 16-bit half (a word has two; half h holds column 2i + h of its pair): magnitudes of codes 0..3 at bits 8..6,
5..3, 2..0, 11..9; their signs at 15, 12, 14, 13. Codes 0 and 1 belong to the first 64 columns, 2 and 3 to the last.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.core import codec, packing
from mxjax.core.formats import MXFP4, NAN_BYTE, BlockFormat
from pallas_kernels.transform_quantize.reference import exact_binades

TILE_K = 128
TILE_N = 128
LAYOUTS = ("rows", "tiles", "fp8_fragments", "bf16_fragments")
REL_TOP = 253  # relative scale byte of a row's largest block


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """A block-scaled weight [N, K] in a kernel layout; see the module's docstring.

    Attributes:
      codes: uint8, "rows": [N, K * bits / 8]; "tiles": [K'/128, N', 64] with K' and N' rounded up to 128. The
        fragments: uint32 [N'/64, K'/128, 34, 32], scales included.
      scales: uint8, "rows": [N, K / block]; "tiles": [K'/128, N', 4], relative. None for fragments.
      row_scale: float32 [N] ("rows"; None for 1) or [N'] (the others): a factor of each output column.
      format: block format (static).
      layout: one of :data:`LAYOUTS` (static).
      n, k: the weight's own shape (static).
    """

    codes: jax.Array
    scales: jax.Array | None
    row_scale: jax.Array | None
    format: BlockFormat = field(metadata=dict(static=True))
    layout: str = field(metadata=dict(static=True))
    n: int = field(metadata=dict(static=True))
    k: int = field(metadata=dict(static=True))

    @property
    def nbytes(self) -> int:
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(self))


def relative_scales(scales: jax.Array, factor: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scale bytes [N, K / 32] as bytes relative to their row's largest, which blocks are NaN, and the rows' factors."""
    byte = scales.astype(jnp.int32)
    nan = byte == NAN_BYTE
    top = jnp.max(jnp.where(nan, 0, byte), axis=1, keepdims=True)
    # 255 as a bfloat16 exponent is Inf, and Inf times a code of zero is the NaN that is meant
    relative = jnp.where(nan, NAN_BYTE, jnp.maximum(byte - top + REL_TOP, 0)).astype(jnp.uint8)
    row_scale = codec.ldexp(jnp.ones(top.shape[:1], jnp.float32), top[:, 0] - 127)
    return relative, nan, row_scale if factor is None else row_scale * factor


def half_words(c: jax.Array) -> jax.Array:
    """uint32 codes [.., 4, n] to the 16-bit halves [.., n] of a word, with the bits in the order described above."""
    m, s = c & 7, c >> 3
    half = (m[..., 0, :] << 6) | (m[..., 1, :] << 3) | m[..., 2, :] | (m[..., 3, :] << 9)
    return half | (s[..., 0, :] << 15) | (s[..., 1, :] << 12) | (s[..., 2, :] << 14) | (s[..., 3, :] << 13)


def codes_of_halves(half: jax.Array) -> jax.Array:
    """The inverse of :func:`half_words`."""
    magnitude = [(half >> s) & 7 for s in (6, 3, 0, 9)]
    sign = [(half >> s) & 1 for s in (15, 12, 14, 13)]
    return jnp.stack([m | (s << 3) for m, s in zip(magnitude, sign, strict=True)], axis=-2)


@jax.jit
def tiles(codes: jax.Array, scales: jax.Array, factor: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    n, k = codes.shape[0], 2 * codes.shape[1]
    pad_n, pad_k = -n % TILE_N, -k % TILE_K
    relative, nan, row_scale = relative_scales(scales, factor)
    c = jnp.where(jnp.repeat(nan, MXFP4.block_size, axis=1), 0, packing.unpack(codes, 4)).astype(jnp.uint32)
    c = jnp.pad(c, ((0, pad_n), (0, pad_k)))
    relative = jnp.pad(relative, ((0, pad_n), (0, pad_k // MXFP4.block_size)))
    row_scale = jnp.pad(row_scale, (0, pad_n))
    t = (k + pad_k) // TILE_K
    # [N, tile, first or last 64 columns, word, pair, half] -> codes 0..3 of a half: (0: pair 0, 1: pair 1) of each side
    c = c.reshape(n + pad_n, t, 2, 16, 2, 2)
    c = jnp.moveaxis(c, 2, 3).reshape(n + pad_n, t, 16, 4, 2)
    half = half_words(c)
    word = half[..., 0] | (half[..., 1] << 16)
    bytes_ = jax.lax.bitcast_convert_type(word, jnp.uint8).reshape(n + pad_n, t, TILE_K // 2)
    blocks = relative.reshape(n + pad_n, t, TILE_K // MXFP4.block_size)
    return jnp.moveaxis(bytes_, 1, 0), jnp.moveaxis(blocks, 1, 0), row_scale


def words_to_bf16(w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Bytes of a tile, uint8 [.., 64] -> bfloat16 value * 2**-126 of its first and its last 64 columns, each [.., 64].

    The same bit moves as the PTX in triton.py.
    """
    b = w.astype(jnp.uint32).reshape(*w.shape[:-1], w.shape[-1] // 4, 4)
    word = jnp.sum(b << (8 * jax.lax.broadcasted_iota(jnp.uint32, b.shape, b.ndim - 1)), axis=-1, dtype=jnp.uint32)
    code, magnitude, sign = np.uint32(0x81C081C0), np.uint32(0x01C001C0), np.uint32(0x80008000)
    pairs = [
        word & code,
        (word << 3) & code,
        ((word << 6) & magnitude) | ((word << 1) & sign),
        ((word >> 3) & magnitude) | ((word << 2) & sign),
    ]
    values = [
        jax.lax.bitcast_convert_type((p >> shift).astype(jnp.uint16), jnp.bfloat16) for p in pairs for shift in (0, 16)
    ]
    first, last = (jnp.stack(values[i : i + 4], axis=-1).reshape(w.shape) for i in (0, 4))
    return first, last


def relative_values(w: PackedWeight) -> jax.Array:
    """A "tiles" weight as bfloat16 [N, K] without its row scale: exact, magnitudes up to 6. XLA's way to read it."""
    assert w.scales is not None  # "tiles"
    t, n, _ = w.codes.shape
    words = jax.lax.bitcast_convert_type(w.codes.reshape(t, n, 16, 4), jnp.uint32)
    codes = _codes_of_words(words)  # [T, N, 128]
    blocks = codes.reshape(t, n, 4, 32)
    byte = w.scales.astype(jnp.int32)[..., None]
    values = codec.decode(blocks, MXFP4.element, byte - REL_TOP)
    values = jnp.where(byte == NAN_BYTE, jnp.nan, jnp.where(byte == 0, 0.0, values)).reshape(t, n, TILE_K)
    return jnp.moveaxis(values.astype(jnp.bfloat16), 0, 1).reshape(n, t * TILE_K)[: w.n, : w.k]


def _codes_of_words(word: jax.Array) -> jax.Array:
    """uint32 [.., 16] -> uint8 codes [.., 128] in column order."""
    c = codes_of_halves(jnp.stack([word & 0xFFFF, word >> 16], axis=-1))  # [.., 16, 4, half]
    c = c.reshape(*word.shape, 2, 4)  # [.., word, side, pair and half]
    return jnp.moveaxis(c, -2, -3).reshape(*word.shape[:-1], TILE_K).astype(jnp.uint8)


def inexact_blocks(scales: jax.Array, fmt: BlockFormat = MXFP4) -> jax.Array:
    """How many blocks with scale bytes [.., blocks] lie too far below their row's largest to be exact in e4m3.

    Their values are rounded to multiples of 2**-9 of e4m3's range when the exact-FP8 route is taken: 2**-15 of the
    row's largest block scale for MXFP4.
    """
    byte = jnp.where(scales == NAN_BYTE, 0, scales).astype(jnp.int32)
    low = jnp.max(byte, axis=-1, keepdims=True) - exact_binades(fmt.element)
    return jnp.sum((byte < low) & (byte > 0))
