"""Packed bytes and the views that JAX's own scaled products and the file formats take."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mxjax.core import packing
from mxjax.core.formats import FORMATS
from mxjax.core.quantize import quantize_array
from mxjax.errors import BlockShapeError, FormatError

GOLDEN = {
    4: ([1, 2, 3, 15], [0x21, 0xF3]),  # low nibble first
    6: ([0b000001, 0b100010, 0b110011, 0b101010], [0b10000001, 0b00111000, 0b10101011]),  # little endian, 24 bits
    8: ([1, 255], [1, 255]),
}


@pytest.mark.parametrize("bits", GOLDEN)
def test_layout(bits):
    codes, packed = GOLDEN[bits]
    assert packing.pack(jnp.array(codes, jnp.uint8), bits).tolist() == packed
    assert packing.unpack(jnp.array(packed, jnp.uint8), bits).tolist() == codes


@pytest.mark.parametrize("shape", [(24,), (3, 24), (2, 0, 24), (2, 5, 0)], ids=str)
@pytest.mark.parametrize("bits", GOLDEN)
def test_round_trip(bits, shape):
    codes = jnp.asarray(np.random.default_rng(0).integers(0, 1 << bits, shape, dtype=np.uint8))
    packed = packing.pack(codes, bits)
    assert packed.dtype == jnp.uint8 and packed.shape == (*shape[:-1], shape[-1] * bits // 8)
    np.testing.assert_array_equal(packing.unpack(packed, bits), codes)
    np.testing.assert_array_equal(jax.jit(packing.pack, static_argnums=1)(codes, bits), packed)


def test_six_bits_are_one_little_endian_number():
    codes = np.random.default_rng(1).integers(0, 64, 4, dtype=np.uint8)
    number = int.from_bytes(bytes(np.asarray(packing.pack(jnp.asarray(codes), 6))), "little")
    assert [number >> (6 * i) & 63 for i in range(4)] == codes.tolist()


def test_signed_zero_survives():
    """numeric_facts 4.5: [-.5, -6, -.5, -1.5, -1, 6, 0, -0]."""
    codes = jnp.array([9, 15, 9, 11, 10, 7, 0, 8], jnp.uint8)
    assert packing.unpack(packing.pack(codes, 4), 4).tolist() == codes.tolist()


@pytest.mark.parametrize(("bits", "size"), [(4, 7), (6, 6)])
def test_codes_that_fill_no_byte_raise(bits, size):
    with pytest.raises(BlockShapeError, match=rf"{size} codes of {bits} bits"):
        packing.pack(jnp.zeros((2, size), jnp.uint8), bits)


def test_bytes_that_hold_no_group_raise():
    with pytest.raises(BlockShapeError, match="4 bytes hold no whole number of 6-bit groups"):
        packing.unpack(jnp.zeros(4, jnp.uint8), 6)


def test_wrong_width_and_dtype_raise():
    with pytest.raises(FormatError, match="4, 6 or 8 bits, not 5"):
        packing.pack(jnp.zeros(4, jnp.uint8), 5)
    with pytest.raises(FormatError, match="uint8, not int32"):
        packing.unpack(jnp.zeros(4, jnp.int32), 4)


def random_qtensor(fmt, rows=3, size=64):
    x = np.random.default_rng(2).standard_normal((rows, size)).astype(np.float32)
    return quantize_array(x, fmt)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_views_are_the_stored_bits(fmt):
    q = random_qtensor(fmt)
    codes = np.asarray(packing.unpack(q.codes, fmt.element.bits))
    view, scales = q.element_view(), q.scale_view()
    element = np.int8 if fmt.element.name == "int8" else getattr(ml_dtypes, fmt.element.dtype)
    assert view.dtype == element and view.shape == (3, 64)
    np.testing.assert_array_equal(np.asarray(view).view(np.uint8), codes)
    assert scales.dtype == getattr(ml_dtypes, fmt.scale_dtype) and scales.shape == q.scales.shape
    np.testing.assert_array_equal(np.asarray(scales).view(np.uint8), q.scales)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_views_multiply_to_the_values(fmt):
    """value = element * scale * global: the views alone are enough to read a tensor without mxjax."""
    q = random_qtensor(fmt)
    element = np.asarray(q.element_view()).astype(np.float64) / (64 if fmt.element.name == "int8" else 1)
    scale = np.repeat(np.asarray(q.scale_view()).astype(np.float64), fmt.block_size, axis=-1)
    values = element * scale * (1.0 if q.global_scale is None else np.float64(q.global_scale))
    # At most two float32 roundings (element * scale is exact, times global rounds once).
    np.testing.assert_allclose(q.dequantize(), values, rtol=0 if q.global_scale is None else 2**-24)


def test_six_bit_view_inside_jit_raises():
    with pytest.raises(FormatError, match="outside jit"):
        jax.jit(lambda q: q.element_view())(random_qtensor("mxfp6_e2m3"))


SCALED = ["mxfp4", "mxfp8_e4m3", "mxfp8_e5m2", "nvfp4"]


def expected_product(a, b):
    """Products of the dequantized values in float64, tensor scales apart, and sum |a||b| for the error bound."""
    a, b = (np.asarray(q.dequantize()).astype(np.float64) / np.float64(q.global_scale or 1.0) for q in (a, b))
    return a @ b.T, np.abs(a) @ np.abs(b).T


@pytest.mark.parametrize("fmt", SCALED)
def test_jax_scaled_matmul_reads_our_views(fmt):
    a, b = random_qtensor(fmt, rows=8), random_qtensor(fmt, rows=4)
    args = [v[None] for v in (a.element_view(), b.element_view(), a.scale_view(), b.scale_view())]
    if jax.__version_info__ < (0, 11):
        pytest.skip("jax.nn.scaled_matmul has no CPU lowering before jax 0.11")
    result = jax.nn.scaled_matmul(*args, preferred_element_type=jnp.float32)[0]
    product, magnitude = expected_product(a, b)
    # 64 float32 products and sums, plus the rounding of dequantize() that the reference above starts from.
    np.testing.assert_array_less(np.abs(result - product), (64 + 4) * 2.0**-24 * magnitude + 1e-30)


@pytest.mark.parametrize("fmt", SCALED)
def test_jax_scaled_dot_reads_our_views(fmt):
    a, b = random_qtensor(fmt, rows=8), random_qtensor(fmt, rows=4)
    result = jax.lax.scaled_dot(
        a.element_view(),
        b.element_view(),
        lhs_scale=a.scale_view(),
        rhs_scale=b.scale_view(),
        dimension_numbers=(((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    product, magnitude = expected_product(a, b)
    # Its fallback multiplies in bfloat16: element * scale has at most 2 + 4 significand bits, so that is exact too.
    np.testing.assert_array_less(np.abs(result - product), (64 + 4) * 2.0**-24 * magnitude + 1e-30)
