"""transform_quantize in plain JAX: what every kernel equals bit for bit, and what runs where none can."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.core import codec, packing
from mxjax.core.formats import (
    E2M1,
    E4M3,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    NAN_BYTE,
    BlockFormat,
    ElementFormat,
)
from mxjax.core.quantize import quantize_blocks
from mxjax.errors import BlockShapeError, ConfigError

HADAMARD_SIZES = (16, 32, 64, 128)
MATRIX_SIZE = 32
# Formats whose values times a power of two are e4m3 numbers: what the exact-FP8 pair can hold.
PAIR_FORMATS = (MXFP4, MXFP6_E2M3, MXFP6_E3M2)
# Rows whose largest scale byte is smaller are treated as if it were this: their row scale is a normal float32.
FP8_MIN_BYTE = 7


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Transform:
    """What happens to x [.., K] before quantization: ``((x * channel_scale) reshaped to blocks) @ matrix``.

    Kronecker factors are such a matrix too, ``L (x) R``, one for each block: ``L^T X R`` for a block X of p x q values.
    The blocks are cut into as many runs of equal length as there are L, and as there are R.

    Attributes:
      channel_scale: float [K], or None.
      matrix: float [32, 32], or one a block [K/32, 32, 32], or None.
      left, right: float [groups, p, p] and [groups, q, q] with p q = 32, in place of ``matrix``, or None.
      hadamard: size of a Sylvester-Hadamard rotation in place of ``matrix``, 0 for none (static).
    """

    channel_scale: jax.Array | None = None
    matrix: jax.Array | None = None
    left: jax.Array | None = None
    right: jax.Array | None = None
    hadamard: int = field(default=0, metadata=dict(static=True))

    @property
    def size(self) -> int:
        """Length of the blocks that are multiplied by a matrix, 1 for none."""
        return self.hadamard or (MATRIX_SIZE if self.matrix is not None or self.left is not None else 1)

    @property
    def per_block(self) -> bool:
        """Whether each block has a matrix of its own."""
        return self.left is not None or (self.matrix is not None and self.matrix.ndim == 3)

    def dense(self, k: int) -> Transform:
        """Kronecker factors as a matrix for each block; anything else as it is."""
        if self.left is None or self.right is None:
            return self
        left, right = _spread(self.left, k // MATRIX_SIZE), _spread(self.right, k // MATRIX_SIZE)
        product = left[:, :, None, :, None] * right[:, None, :, None, :]
        return Transform(channel_scale=self.channel_scale, matrix=product.reshape(-1, MATRIX_SIZE, MATRIX_SIZE))

    def check(self, k: int) -> Transform:
        """Raise BlockShapeError or ConfigError where it cannot act on an axis of length ``k``; returns self."""
        if (self.left is None) != (self.right is None):
            raise ConfigError("Kronecker factors are both left and right")
        if bool(self.hadamard) + (self.matrix is not None) + (self.left is not None) > 1:
            raise ConfigError(
                "transform_quantize takes a Hadamard size, a matrix or Kronecker factors: multiply them first"
            )
        if self.hadamard and self.hadamard not in HADAMARD_SIZES:
            raise ConfigError(f"Hadamard sizes are {HADAMARD_SIZES}, not {self.hadamard}")
        if k % self.size:
            raise BlockShapeError(f"a transform of {self.size} values does not divide the contraction axis of {k}")
        if self.channel_scale is not None and self.channel_scale.shape != (k,):
            raise BlockShapeError(f"channel_scale has shape {self.channel_scale.shape}, x ends in {k}")
        if self.left is not None and self.right is not None:
            blocks, (p, q) = k // MATRIX_SIZE, (self.left.shape[-1], self.right.shape[-1])
            shapes = (self.left.shape[1:], self.right.shape[1:])
            runs = self.left.shape[0], self.right.shape[0]
            if shapes != ((p, p), (q, q)) or p * q != MATRIX_SIZE or any(n < 1 or blocks % n for n in runs):
                raise BlockShapeError(
                    f"Kronecker factors {self.left.shape} and {self.right.shape} do not fit {blocks} blocks of 32: "
                    f"they are [groups, p, p] and [groups, q, q], p q = 32, and the groups divide the number of blocks"
                )
        if self.matrix is not None:
            one = (MATRIX_SIZE, MATRIX_SIZE)
            if self.matrix.shape not in (one, (k // MATRIX_SIZE, *one)):
                raise BlockShapeError(
                    f"matrix has shape {self.matrix.shape}; for a contraction axis of {k} it is {one} or "
                    f"{(k // MATRIX_SIZE, *one)}"
                )
        return self


def hadamard_signs(size: int) -> np.ndarray:
    """The +-1 Sylvester matrix: exact in every dtype. ``hadamard_factor`` is applied to the sums."""
    h = np.ones((1, 1), np.float32)
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h


def hadamard_factor(size: int) -> np.float32:
    return np.float32(1 / math.sqrt(size))


def apply_transform(x: jax.Array, t: Transform) -> jax.Array:
    """float32 ``x`` transformed, same shape."""
    y = x.astype(jnp.float32)
    if t.channel_scale is not None:
        y = y * t.channel_scale.astype(jnp.float32)
    if t.size == 1:
        return y
    blocks = y.reshape(*y.shape[:-1], y.shape[-1] // t.size, t.size)
    high = jax.lax.Precision.HIGHEST
    if t.left is not None and t.right is not None:
        count, (p, q) = blocks.shape[-2], (t.left.shape[-1], t.right.shape[-1])
        left, right = _spread(t.left, count), _spread(t.right, count)
        grouped = blocks.reshape(*blocks.shape[:-1], p, q)
        half = jnp.einsum("...gpq,gqj->...gpj", grouped, right.astype(jnp.float32), precision=high)
        blocks = jnp.einsum("...gpj,gpi->...gij", half, left.astype(jnp.float32), precision=high)
    elif t.hadamard:
        blocks = jnp.matmul(blocks, hadamard_signs(t.hadamard), precision=high) * hadamard_factor(t.hadamard)
    else:
        assert t.matrix is not None
        spec = "...bi,bij->...bj" if t.per_block else "...bi,ij->...bj"
        blocks = jnp.einsum(spec, blocks, t.matrix.astype(jnp.float32), precision=high)
    return blocks.reshape(y.shape)


def _spread(factors: jax.Array, blocks: int) -> jax.Array:
    """The factor of each block: [groups, p, p] to [blocks, p, p]."""
    return jnp.repeat(factors, blocks // factors.shape[0], axis=0)


def quantize(
    x: jax.Array, t: Transform, tensor_scale: jax.Array | None, fmt: BlockFormat, policy: str
) -> tuple[jax.Array, jax.Array]:
    """Packed codes [.., K * bits / 8] and scale bytes [.., K / block] (uint8)."""
    y = apply_transform(x, t)
    blocks = y.reshape(*y.shape[:-1], y.shape[-1] // fmt.block_size, fmt.block_size)
    codes, byte, _ = quantize_blocks(blocks, fmt, policy, x.ndim - 1, tensor_scale)
    return packing.pack(codes.reshape(y.shape), fmt.element.bits), byte


def quantize_fp8(
    x: jax.Array, t: Transform, policy: str, dtype: Any = jnp.float8_e4m3fn, fmt: BlockFormat = MXFP4
) -> tuple[jax.Array, jax.Array]:
    """The exact-FP8 pair of a quantization of x: values [.., K] of ``dtype`` and float32 row scales [..]."""
    y = apply_transform(x, t)
    blocks = y.reshape(*y.shape[:-1], y.shape[-1] // fmt.block_size, fmt.block_size)
    codes, byte, third = quantize_blocks(blocks, fmt, policy, x.ndim - 1, None)
    dtype, element = jnp.dtype(dtype), fmt.element
    if dtype == jnp.bfloat16:
        values, row_byte = bf16_of_codes(codes, byte, element)
    else:
        values, row_byte = fp8_of_codes(codes, byte, dtype, element)
    row_scale = row_scale_of(row_byte, fp8_top(dtype, element)) * (1.0 if third is None else third)
    row_scale = jnp.where(jnp.any(byte == NAN_BYTE, axis=-1), jnp.nan, row_scale)
    return values.reshape(x.shape), row_scale


def fp8_top(dtype: Any, element: ElementFormat = E2M1) -> int:
    """The binade of the value 1 of a row's largest block in the pair of ``dtype``.

    The highest at which the element's largest value is within e4m3's 448: 6 * 2**6, 7.5 * 2**5 (E2M3), 28 * 2**4
    (E3M2). e4m3fnuz (gfx942) has bias 8 for 7: the same bits are half the value, one binade less.
    """
    top = math.floor(math.log2(E4M3.max_value / element.max_value))
    return top - (jnp.dtype(dtype) == jnp.float8_e4m3fnuz)


def exact_binades(element: ElementFormat) -> int:
    """How many binades below its row's largest a block still is exact in e4m3, whose smallest number is 2**-9.

    14 for E2M1, 11 for E2M3, 9 for E3M2: the more an element has of its own, the fewer are left.
    """
    step = element.min_exponent - element.mantissa_bits
    return step + fp8_top(jnp.float8_e4m3fn, element) + 9


def fp8_of_codes(
    codes: jax.Array, byte: jax.Array, dtype: Any = jnp.float8_e4m3fn, element: ElementFormat = E2M1
) -> tuple[jax.Array, jax.Array]:
    """Codes [.., B, 32] and E8M0 bytes [.., B] to e4m3 values of the codes' shape and the row's byte (int32 [..]).

    ``value(code) * 2**(byte - row_byte + fp8_top(dtype, element))``: exact for blocks up to ``exact_binades`` below the
    row's largest, rounded to the nearest e4m3 number (ties to even) further below. A zero code is +0 whatever its sign.
    The bits of both dtypes are the same, except that e4m3fnuz has no -0 (0x80 is its NaN): what rounds to zero is +0
    there.
    """
    row_byte, shift = _row_shift(byte, element)
    value = codec.decode(codes, element)
    bits = codec.encode(value, E4M3, -shift[..., None])
    nothing = (bits == 0x80) if jnp.dtype(dtype) == jnp.float8_e4m3fnuz else (value == 0)
    bits = jnp.where(nothing, 0, bits).astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(bits, dtype), row_byte


def bf16_of_codes(codes: jax.Array, byte: jax.Array, element: ElementFormat = E2M1) -> tuple[jax.Array, jax.Array]:
    """:func:`fp8_of_codes` with bfloat16 values: exact for blocks up to 100 binades below the row's largest."""
    row_byte, shift = _row_shift(byte, element)
    value = codec.decode(codes, element, jnp.maximum(shift, -100)[..., None])
    return jnp.where(value == 0, 0.0, value).astype(jnp.bfloat16), row_byte


def _row_shift(byte: jax.Array, element: ElementFormat) -> tuple[jax.Array, jax.Array]:
    byte = byte.astype(jnp.int32)
    row_byte = jnp.maximum(jnp.max(jnp.where(byte == NAN_BYTE, 0, byte), axis=-1), FP8_MIN_BYTE)
    return row_byte, byte - row_byte[..., None] + fp8_top(jnp.float8_e4m3fn, element)


def row_scale_of(row_byte: jax.Array, top: int) -> jax.Array:
    """``2**(row_byte - 127 - top)`` as float32."""
    return codec.float_of((row_byte - top) << codec.MANTISSA_BITS)
