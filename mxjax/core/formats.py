"""Formats: what one element, one scale and one block are. Frozen and hashable, so they are static under ``jit``.

A *block format* stores ``block_size`` consecutive values along the contraction axis as small elements that share one
8-bit scale; NVFP4 adds one float32 scale a tensor::

    value = element(code) * scale(byte) * global_scale

========== ======== ===== ===== ============ ========= ===========================
name       element  block scale tensor scale bits/value largest element
========== ======== ===== ===== ============ ========= ===========================
mxfp4      E2M1     32    E8M0  no           4.25      6
nvfp4      E2M1     16    E4M3  float32      4.5       6
mxfp6_e2m3 E2M3     32    E8M0  no           6.25      7.5
mxfp6_e3m2 E3M2     32    E8M0  no           6.25      28
mxfp8_e4m3 E4M3     32    E8M0  no           8.25      448
mxfp8_e5m2 E5M2     32    E8M0  no           8.25      57344
mxint8     INT8     32    E8M0  no           8.25      1 63/64 (code / 64)
========== ======== ===== ===== ============ ========= ===========================

Source: OCP Microscaling Formats (MX) v1.0 for the MX rows; NVFP4 as in NVIDIA's ModelOpt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mxjax.errors import FormatError


@dataclass(frozen=True, kw_only=True)
class ElementFormat:
    """A small signed number format: sign, ``exponent_bits``, ``mantissa_bits``; value of code ``S EE MM`` as in IEEE.

    INT8 is described as sign-magnitude with 6 fraction bits (bias 1, one binade) and stored in two's complement.
    """

    name: str
    bits: int  # stored bits of one element, sign included
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_code: int  # magnitude code of the largest finite value; codes above it are Inf or NaN
    inf_code: int | None = None  # magnitude code of Inf, if there is one
    twos_complement: bool = False
    dtype: str  # name of the ml_dtypes / JAX dtype that a view of the codes has

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number, and of the step grid of the subnormals."""
        return 1 - self.bias

    @property
    def max_value(self) -> float:
        """Largest finite value."""
        return self.value_of(self.max_code)

    def value_of(self, code: int) -> float:
        """The value of a non-negative finite magnitude code."""
        field, fraction = code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1)
        significand = fraction + ((1 << self.mantissa_bits) if field else 0)
        return math.ldexp(significand, max(field, 1) - self.bias - self.mantissa_bits)

    @property
    def max_exponent(self) -> int:
        """floor(log2(max_value)): the `emax` of the MX specification."""
        return math.frexp(self.max_value)[1] - 1

    @property
    def sign_mask(self) -> int:
        return 1 << (self.bits - 1)


E2M1 = ElementFormat(name="e2m1", bits=4, exponent_bits=2, mantissa_bits=1, bias=1, max_code=0x7, dtype="float4_e2m1fn")
E2M3 = ElementFormat(
    name="e2m3", bits=6, exponent_bits=2, mantissa_bits=3, bias=1, max_code=0x1F, dtype="float6_e2m3fn"
)
E3M2 = ElementFormat(
    name="e3m2", bits=6, exponent_bits=3, mantissa_bits=2, bias=3, max_code=0x1F, dtype="float6_e3m2fn"
)
E4M3 = ElementFormat(
    name="e4m3", bits=8, exponent_bits=4, mantissa_bits=3, bias=7, max_code=0x7E, dtype="float8_e4m3fn"
)
E5M2 = ElementFormat(
    name="e5m2", bits=8, exponent_bits=5, mantissa_bits=2, bias=15, max_code=0x7B, inf_code=0x7C, dtype="float8_e5m2"
)
INT8 = ElementFormat(
    name="int8", bits=8, exponent_bits=0, mantissa_bits=6, bias=1, max_code=0x7F, twos_complement=True, dtype="int8"
)

NAN_BYTE = 255  # scale byte of a block that holds NaN, in E8M0 and in E4M3
E8M0_BIAS = 127
E8M0_MAX_BYTE = 254


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """Elements, block length and scale of one storage format."""

    name: str
    element: ElementFormat
    block_size: int
    scale: Literal["e8m0", "e4m3"]

    @property
    def has_tensor_scale(self) -> bool:
        """True where the format itself has a float32 scale a tensor (NVFP4)."""
        return self.scale == "e4m3"

    @property
    def bits_per_value(self) -> float:
        return self.element.bits + 8 / self.block_size

    @property
    def scale_dtype(self) -> str:
        """Name of the JAX dtype that a view of the scale bytes has."""
        return "float8_e8m0fnu" if self.scale == "e8m0" else "float8_e4m3fn"

    def packed_size(self, size: int) -> int:
        """Bytes that ``size`` values take, scales apart; ``size`` is a multiple of the block."""
        return size * self.element.bits // 8

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<{self.name}>"


MXFP4 = BlockFormat(name="mxfp4", element=E2M1, block_size=32, scale="e8m0")
MXFP6_E2M3 = BlockFormat(name="mxfp6_e2m3", element=E2M3, block_size=32, scale="e8m0")
MXFP6_E3M2 = BlockFormat(name="mxfp6_e3m2", element=E3M2, block_size=32, scale="e8m0")
MXFP8_E4M3 = BlockFormat(name="mxfp8_e4m3", element=E4M3, block_size=32, scale="e8m0")
MXFP8_E5M2 = BlockFormat(name="mxfp8_e5m2", element=E5M2, block_size=32, scale="e8m0")
MXINT8 = BlockFormat(name="mxint8", element=INT8, block_size=32, scale="e8m0")
NVFP4 = BlockFormat(name="nvfp4", element=E2M1, block_size=16, scale="e4m3")

FORMATS: dict[str, BlockFormat] = {
    f.name: f for f in (MXFP4, MXFP6_E2M3, MXFP6_E3M2, MXFP8_E4M3, MXFP8_E5M2, MXINT8, NVFP4)
}


def get_format(fmt: str | BlockFormat) -> BlockFormat:
    """The format of that name; a :class:`BlockFormat` is returned as it is.

    Raises:
      FormatError: no format has that name.

    Example:
      >>> get_format("nvfp4").bits_per_value
      4.5
    """
    if isinstance(fmt, BlockFormat):
        return fmt
    try:
        return FORMATS[fmt]
    except (KeyError, TypeError):
        raise FormatError(f"unknown format {fmt!r}; known: {', '.join(FORMATS)}") from None
