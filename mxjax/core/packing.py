"""Codes to bytes and back: two 4-bit codes a byte (low nibble first), four 6-bit codes in three bytes, 8-bit as is.

The 4-bit order is the one of every dense checkpoint format and of ``bitcast_convert_type(uint8 -> float4_e2m1fn)``. The
6-bit order is little endian: code ``i`` occupies bits ``6 i .. 6 i + 5`` of the 24-bit word.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.errors import BlockShapeError, FormatError


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Pack uint8 codes of ``bits`` (4, 6 or 8) bits along the last axis.

    Example:
      >>> pack(jnp.array([1, 2, 3, 15], jnp.uint8), 4).tolist()
      [33, 243]
    """
    _check(codes, bits)
    per_group = {4: 2, 6: 4, 8: 1}[bits]
    if codes.shape[-1] % per_group:
        raise BlockShapeError(f"{codes.shape[-1]} codes of {bits} bits do not fill whole bytes: shape {codes.shape}")
    if bits == 8:
        return codes
    groups = codes.reshape(*codes.shape[:-1], codes.shape[-1] // per_group, per_group)
    if bits == 4:
        # As one 16-bit word the pair is 0x0h0l; folding it keeps the loop free of strided access.
        word = lax.bitcast_convert_type(groups, jnp.uint16)
        return (word | (word >> 4)).astype(jnp.uint8)
    c = [groups[..., i] for i in range(4)]
    packed = jnp.stack([c[0] | (c[1] << 6), (c[1] >> 2) | (c[2] << 4), (c[2] >> 4) | (c[3] << 2)], axis=-1)
    return packed.reshape(*codes.shape[:-1], codes.shape[-1] // 4 * 3)


def unpack(packed: jax.Array, bits: int) -> jax.Array:
    """The inverse of :func:`pack`: one uint8 code a byte along the last axis."""
    _check(packed, bits)
    if bits == 8:
        return packed
    if bits == 4:
        word = packed.astype(jnp.uint16)
        codes = lax.bitcast_convert_type((word | (word << 4)) & 0x0F0F, jnp.uint8)
        return codes.reshape(*packed.shape[:-1], packed.shape[-1] * 2)
    if packed.shape[-1] % 3:
        raise BlockShapeError(f"{packed.shape[-1]} bytes hold no whole number of 6-bit groups: shape {packed.shape}")
    b = packed.reshape(*packed.shape[:-1], packed.shape[-1] // 3, 3)
    b0, b1, b2 = b[..., 0], b[..., 1], b[..., 2]
    codes = jnp.stack([b0 & 63, (b0 >> 6) | ((b1 & 15) << 2), (b1 >> 4) | ((b2 & 3) << 4), b2 >> 2], axis=-1)
    return codes.reshape(*packed.shape[:-1], packed.shape[-1] // 3 * 4)


def pack_words(codes: jax.Array, bits: int, axis: int) -> jax.Array:
    """Pack along any axis into uint32 words, 8 codes of 4 bits or 4 of 8 bits each, and move that axis last.

    Transposing words is several times faster than transposing codes or bytes. :func:`bytes_of_words` of the result
    is ``pack(moveaxis(codes, axis, -1), bits)``.

    Args:
      codes: uint8, one code a byte; whole words along ``axis``.
      bits: 4 or 8.
      axis: negative.
    """
    _check(codes, bits)
    at, per_word = codes.ndim + axis, 32 // bits
    groups = codes.reshape(*codes.shape[:at], codes.shape[at] // per_word, per_word, *codes.shape[at + 1 :])
    shifts = bits * jnp.arange(per_word, dtype=jnp.uint32).reshape(per_word, *[1] * (-1 - axis))
    # A reduction, which XLA's CPU backend runs along the rows of memory and does not fuse with the transposition.
    words = lax.reduce(groups.astype(jnp.uint32) << shifts, jnp.uint32(0), lax.bitwise_or, (at + 1,))
    return jnp.moveaxis(words, axis, -1)


def bytes_of_words(words: jax.Array) -> jax.Array:
    """uint32 [..., n] to uint8 [..., 4 n], least significant byte first."""
    return lax.bitcast_convert_type(words, jnp.uint8).reshape(*words.shape[:-1], words.shape[-1] * 4)


def _check(x: jax.Array, bits: int) -> None:
    if bits not in (4, 6, 8):
        raise FormatError(f"codes have 4, 6 or 8 bits, not {bits}")
    if x.dtype != jnp.uint8:
        raise FormatError(f"codes are uint8, not {x.dtype}")
