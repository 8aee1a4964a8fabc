"""QTensor: a quantized array as a pytree of bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mxjax.core import codec, packing
from mxjax.core.formats import E4M3, E8M0_BIAS, NAN_BYTE, BlockFormat
from mxjax.errors import BlockShapeError, FormatError


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class QTensor:
    """A block-quantized array: ``value = element(code) * scale(byte) * global_scale``.

    It is a pytree whose leaves are plain uint8 (and float32) arrays, so it goes through ``jit``, ``vmap``, ``scan``,
    ``device_put`` and Orbax like any other value. Leading axes may be added or stripped by ``vmap`` and ``scan``: only
    what cannot change with them is static.

    Invariants (checked by :meth:`validate`), with ``K' = size`` rounded up to whole blocks:

    * ``codes`` is uint8 ``[*lead, K' * bits / 8]``: the contraction axis is last, whatever ``axis`` is.
    * ``scales`` is uint8 ``[*lead, K' / block_size]``: E8M0 or E4M3 bytes; 255 marks a block that held NaN or Inf.
    * ``global_scale`` is None or float32 with shape ``lead[:n]`` for some n: a multiplier a leading index.
    * ``axis`` is negative; ``shape`` is ``[*lead, size]`` with the last axis moved to ``axis``.

    Attributes:
      codes: packed element codes.
      scales: one scale byte a block.
      global_scale: float32 multiplier, or None (meaning 1).
      format: block format (static).
      axis: where the contraction axis sits in :attr:`shape` (static).
      size: length of the contraction axis, padding not counted (static).
      dtype_name: dtype of the array it was made from, and the default of :meth:`dequantize` (static).
    """

    codes: jax.Array
    scales: jax.Array
    global_scale: jax.Array | None = None
    format: BlockFormat = field(metadata=dict(static=True))
    axis: int = field(default=-1, metadata=dict(static=True))
    size: int = field(metadata=dict(static=True))
    dtype_name: str = field(default="float32", metadata=dict(static=True))

    def __repr__(self) -> str:
        try:
            return f"QTensor({self.format}, {self.dtype_name}{list(self.shape)}, axis={self.axis})"
        except (AttributeError, TypeError):  # leaves that are no arrays, as in a tree of PartitionSpecs
            return f"QTensor({self.format}, codes={self.codes!r}, scales={self.scales!r})"

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, as of the array that was quantized."""
        lead = list(self.codes.shape[:-1])
        lead.insert(len(lead) + 1 + self.axis, self.size)
        return tuple(lead)

    @property
    def ndim(self) -> int:
        return len(self.codes.shape)

    @property
    def dtype(self) -> np.dtype:
        """Logical dtype: what :meth:`dequantize` returns by default."""
        return jnp.dtype(self.dtype_name)

    @property
    def nbytes(self) -> int:
        """Stored bytes, scales included."""
        total = self.codes.size + self.scales.size
        return total + (0 if self.global_scale is None else 4 * self.global_scale.size)

    @property
    def padded_size(self) -> int:
        """Length of the contraction axis in whole blocks."""
        return self.scales.shape[-1] * self.format.block_size

    def element_view(self) -> jax.Array | np.ndarray:
        """The codes as the element dtype (``float4_e2m1fn``, ``float8_e4m3fn``, ...), contraction axis last, padded.

        For export and for JAX's own ``scaled_dot``. The bits are the stored ones: nothing is rounded. 6-bit formats
        give a NumPy array of one code a byte, since XLA cannot compute with such types.

        Raises:
          FormatError: a 6-bit format inside jit.
        """
        dtype = jnp.dtype(self.format.element.dtype)
        if self.format.element.bits == 4:
            view = lax.bitcast_convert_type(self.codes, dtype)
            return view.reshape(*self.codes.shape[:-1], self.padded_size)
        codes = packing.unpack(self.codes, self.format.element.bits)
        if self.format.element.bits == 6:
            if isinstance(codes, jax.core.Tracer):
                raise FormatError(f"{self.format}: a {dtype.name} view can be made outside jit only (XLA lacks it)")
            return np.asarray(codes).view(dtype)
        return lax.bitcast_convert_type(codes, dtype)

    def scale_view(self) -> jax.Array:
        """The scale bytes as ``float8_e8m0fnu`` or ``float8_e4m3fn``, shape ``[*lead, blocks]``."""
        return lax.bitcast_convert_type(self.scales, jnp.dtype(self.format.scale_dtype))

    def dequantize(self, dtype: Any = None) -> jax.Array:
        """The values, in the logical shape.

        A block with scale byte 255 is NaN. A product beyond the largest number of ``dtype`` saturates to it (possible
        only next to FLT_MAX, where rounding up leaves float32); subnormal results are rounded, not flushed.

        Args:
          dtype: result dtype; default :attr:`dtype`.
        """
        dtype = self.dtype if dtype is None else jnp.dtype(dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise FormatError(f"dequantize to a float dtype, not {dtype}")
        return _dequantize(self, dtype.name)

    def blocked_codes(self) -> jax.Array:
        """Unpacked codes, uint8 ``[*lead, blocks, block_size]``."""
        codes = packing.unpack(self.codes, self.format.element.bits)
        return codes.reshape(*self.scales.shape, self.format.block_size)

    def validate(self, path: str = "QTensor") -> QTensor:
        """Check the invariants; returns self.

        Args:
          path: name for the error message.

        Raises:
          BlockShapeError: shapes that contradict each other.
          FormatError: a wrong dtype.
        """
        if self.codes.dtype != jnp.uint8 or self.scales.dtype != jnp.uint8:
            raise FormatError(f"{path}: codes and scales are uint8, not {self.codes.dtype} and {self.scales.dtype}")
        if self.codes.ndim < 1 or self.codes.shape[:-1] != self.scales.shape[:-1]:
            raise BlockShapeError(f"{path}: codes {self.codes.shape} and scales {self.scales.shape} disagree")
        blocks = -(-self.size // self.format.block_size)
        expected = (self.format.packed_size(blocks * self.format.block_size), blocks)
        if (self.codes.shape[-1], self.scales.shape[-1]) != expected:
            raise BlockShapeError(
                f"{path}: a contraction axis of {self.size} in {self.format} takes {expected[0]} code bytes and "
                f"{expected[1]} scales a row, not {self.codes.shape[-1]} and {self.scales.shape[-1]}"
            )
        if not -self.ndim <= self.axis < 0:
            raise BlockShapeError(f"{path}: axis {self.axis} is not in [-{self.ndim}, -1]")
        if self.global_scale is not None:
            if self.global_scale.dtype != jnp.float32:
                raise FormatError(f"{path}: global_scale is float32, not {self.global_scale.dtype}")
            if self.global_scale.shape != self.codes.shape[:-1][: self.global_scale.ndim]:
                raise BlockShapeError(
                    f"{path}: global_scale {self.global_scale.shape} is no leading part of {self.codes.shape}"
                )
        elif self.format.has_tensor_scale:
            raise FormatError(f"{path}: {self.format} needs a global_scale")
        return self


@partial(jax.jit, static_argnames="dtype_name")
def _dequantize(q: QTensor, dtype_name: str) -> jax.Array:
    """Compiled also in eager use: operation by operation it would hold a dozen arrays of the result's size."""
    values = dequantize_blocks(q.blocked_codes(), q.scales, q.global_scale, q.format, jnp.dtype(dtype_name))
    values = values.reshape(*q.codes.shape[:-1], q.padded_size)[..., : q.size]
    return jnp.moveaxis(values, -1, q.axis)


def dequantize_blocks(
    codes: jax.Array, scales: jax.Array, global_scale: jax.Array | None, fmt: BlockFormat, dtype: Any = jnp.float32
) -> jax.Array:
    """Values of unpacked codes: ``element(code) * scale(byte) * global_scale`` with one rounding to float32.

    Args:
      codes: uint8 [*lead, blocks, block_size].
      scales: uint8 [*lead, blocks].
      global_scale: None or float32 with leading axes of ``lead``.
      fmt: block format.
      dtype: result dtype; results saturate at its largest value.

    Returns:
      [*lead, blocks, block_size] of ``dtype``.
    """
    largest = min(float(jnp.finfo(dtype).max), float(np.finfo(np.float32).max))
    max_bits = int(np.float32(largest).view(np.int32))
    byte = scales.astype(jnp.int32)[..., None]
    shift = byte - E8M0_BIAS if fmt.scale == "e8m0" else jnp.zeros_like(byte)
    if global_scale is None and fmt.scale == "e8m0":
        values = codec.decode(codes, fmt.element, shift, max_bits)
    else:
        # element * E4M3 is exact in float32; the significand of global_scale rounds once; exponents are added at last.
        significand = codec.decode(codes, fmt.element)
        if fmt.scale == "e4m3":
            significand = significand * codec.decode(scales, E4M3)[..., None]
        if global_scale is not None:
            g = global_scale.reshape(global_scale.shape + (1,) * (codes.ndim - global_scale.ndim))
            e, m = codec.split(codec.bits_of(g))
            significand = significand * codec.unit_of(m)
            shift = shift + e
        values = codec.ldexp(significand, shift, max_bits)
    # As a mask, since XLA's CPU code turns a select by block into a branch by element.
    nan_bits = jnp.where(byte == NAN_BYTE, codec.NAN_BITS, 0)
    return codec.float_of(codec.bits_of(values) | nan_bits).astype(dtype)
