"""The codec against ml_dtypes and float64 numpy, bit for bit, however it is executed."""

import core_reference as ref
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mxjax.core import codec
from mxjax.core.formats import E2M1, E2M3, E3M2, E4M3, E5M2, INT8, MXFP4
from mxjax.core.qtensor import dequantize_blocks

FLOATS = [E2M1, E2M3, E3M2, E4M3, E5M2]
ALL = [*FLOATS, INT8]
named = pytest.mark.parametrize("f", ALL, ids=lambda f: f.name)


def in_range_inputs(f) -> np.ndarray:
    """Every value, every tie, both float neighbours of each, subnormal float32, random; of both signs."""
    rng = np.random.default_rng(0)
    points = np.concatenate([ref.element_values(f), ref.midpoints(f)]).astype(np.float32)
    points = np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(0))])
    subnormal = rng.integers(0, 1 << 23, 500).astype(np.int32).view(np.float32)
    spread = np.ldexp(rng.uniform(0.5, 1, 4000), rng.integers(-30, 17, 4000)).astype(np.float32)
    x = np.concatenate([points, subnormal, np.float32([1e-45, 2**-126]), spread])
    x = x[x <= f.max_value]
    return np.concatenate([x, -x])


def ml_dtypes_encode(x: np.ndarray, f) -> np.ndarray:
    return x.astype(getattr(ml_dtypes, f.dtype)).view(np.uint8)


@pytest.mark.parametrize("f", FLOATS, ids=lambda f: f.name)
def test_encode_equals_ml_dtypes(run, f):
    x = in_range_inputs(f)
    np.testing.assert_array_equal(run(lambda v: codec.encode(v, f), x), ml_dtypes_encode(x, f))


def test_encode_int8_equals_float64(run):
    x = in_range_inputs(INT8)
    expected = np.rint(x.astype(np.float64) * 64).astype(np.int8).view(np.uint8)
    np.testing.assert_array_equal(run(lambda v: codec.encode(v, INT8), x), expected)


@named
def test_encode_saturates(run, f):
    top = np.float32(f.max_value)
    x = np.float32([np.nextafter(top, np.float32(np.inf)), 1.1 * top, 2 * top, 1e30, ref.FLT_MAX, np.inf, np.nan])
    negative = (256 - f.max_code) & 0xFF if f is INT8 else f.max_code | f.sign_mask
    np.testing.assert_array_equal(run(lambda v: codec.encode(v, f), x), np.full(x.size, f.max_code))
    np.testing.assert_array_equal(run(lambda v: codec.encode(v, f), -x), np.full(x.size, negative))


@pytest.mark.parametrize("f", FLOATS, ids=lambda f: f.name)
def test_decode_equals_ml_dtypes(run, f):
    codes = np.arange(1 << f.bits, dtype=np.uint8)  # Inf and NaN codes of the 8-bit formats included
    expected = codes.view(getattr(ml_dtypes, f.dtype)).astype(np.float32)
    decoded = run(lambda c: codec.decode(c, f), codes)
    np.testing.assert_array_equal(decoded, expected)
    np.testing.assert_array_equal(np.signbit(decoded), np.signbit(expected))


def test_decode_int8(run):
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(run(lambda c: codec.decode(c, INT8), codes), codes.view(np.int8) / np.float32(64))


@named
def test_encode_inverts_decode(run, f):
    codes = np.arange(1 << f.bits, dtype=np.uint8)
    codes = codes[(codes != 0x80) if f is INT8 else (codes & (f.sign_mask - 1)) <= f.max_code]
    np.testing.assert_array_equal(run(lambda c: codec.encode(codec.decode(c, f), f), codes), codes)


@named
def test_encode_shift(run, f):
    """encode(x, f, n) = code of x * 2**-n, also where x or the product leaves the float32 normals."""
    rng = np.random.default_rng(1)
    shift = np.repeat(np.arange(-127, 128, dtype=np.int32), 64)
    near = np.ldexp(rng.uniform(-2 * f.max_value, 2 * f.max_value, shift.size), shift - rng.integers(0, 5, shift.size))
    bits = rng.integers(-(1 << 31), 1 << 31, shift.size).astype(np.int32)  # any magnitude at all
    subnormal = (bits & np.int32(-(1 << 31) | 0x7FFFFF)).view(np.float32)
    ties = np.ldexp(rng.choice(np.append(ref.midpoints(f), -ref.midpoints(f)), shift.size), shift)
    with np.errstate(over="ignore"):
        x = np.concatenate([near.astype(np.float32), bits.view(np.float32), subnormal, ties.astype(np.float32)])
    x, shift = np.nan_to_num(x), np.tile(shift, 4)
    expected = ref.encode(np.ldexp(x.astype(np.float64), -shift), f)
    np.testing.assert_array_equal(run(lambda v, n: codec.encode(v, f, n), x, shift), expected)


@named
def test_decode_shift(run, f):
    """decode(c, f, n) = float32(value * 2**n): one rounding where that is subnormal, FLT_MAX where it is too large."""
    codes = np.arange(1 << f.bits, dtype=np.uint8)
    codes = codes[(codes != 0x80) if f is INT8 else (codes & (f.sign_mask - 1)) <= f.max_code]
    shift = np.repeat(np.arange(-127, 128, dtype=np.int32), codes.size)
    codes = np.tile(codes, 255)
    exact = np.ldexp(ref.decode(codes, f), shift)
    expected = np.clip(exact, -ref.FLT_MAX, ref.FLT_MAX).astype(np.float32)
    decoded = run(lambda c, n: codec.decode(c, f, n), codes, shift)
    np.testing.assert_array_equal(decoded.view(np.int32), expected.view(np.int32))


def test_ldexp_rounds_once(run):
    rng = np.random.default_rng(2)
    x = np.ldexp(rng.uniform(1, 2, 20000), rng.integers(-126, 127, 20000)).astype(np.float32)
    x = np.concatenate([x, -x, np.float32([0.0, -0.0, 1.5 * 2.0**-126, 3 * 2.0**-126])])
    n = rng.integers(-260, 260, x.size).astype(np.int32)
    n[-2:] = [-23, -24]  # 1.5 and 0.75 steps of 2**-149
    expected = np.clip(np.ldexp(x.astype(np.float64), n), -ref.FLT_MAX, ref.FLT_MAX).astype(np.float32)
    result = run(lambda v, k: codec.ldexp(v, k), x, n)
    np.testing.assert_array_equal(result.view(np.int32), expected.view(np.int32))


def test_ldexp_passes_nonfinite(run):
    x = np.float32([np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(run(lambda v: codec.ldexp(v, -5), x), x)


def test_decode_saturates_at_max_bits():
    bf16_max = float(jnp.finfo(jnp.bfloat16).max)
    bits = int(np.float32(bf16_max).view(np.int32))
    assert float(codec.decode(jnp.uint8(7), E2M1, 126, bits)) == bf16_max
    assert float(codec.decode(jnp.uint8(15), E2M1, 126, bits)) == -bf16_max


def test_split_of_every_kind(run):
    x = np.float32([1.0, 1.5, 2.0**127, 2.0**-126, 2.0**-127, 3 * 2.0**-149, 2.0**-149])
    bits = x.view(np.int32)
    e, m = (run(lambda b, i=i: codec.split(b)[i], bits) for i in (0, 1))
    np.testing.assert_array_equal(np.ldexp(m / 2.0**23, e), x.astype(np.float64))
    assert ((m >> 23) == 1).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
def test_encode_takes_narrow_floats(dtype):
    x = jnp.asarray(np.random.default_rng(3).uniform(-8, 8, 1000), dtype)
    assert (codec.encode(x, E2M1) == codec.encode(x.astype(jnp.float32), E2M1)).all()


@pytest.mark.parametrize("significand", [1.0, 1.3, 1.9999999])
def test_quotient_is_rounded_as_if_it_were_exact(significand, run):
    """Ties, their neighbours one unit away and random numbers, under every E4M3 scale."""
    d = ref.element_values(E4M3)[1:].astype(np.float32)
    significand = np.float32(significand)
    ties = (ref.midpoints(E2M1).astype(np.float32) * significand) * d[:, None]
    spread = np.random.default_rng(4).uniform(0, 8, (len(d), 64)).astype(np.float32) * d[:, None]
    x = np.concatenate([ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(0)), spread], 1)
    x = np.concatenate([x, -x, np.zeros_like(x[:, :1]), np.full_like(x[:, :1], -np.inf)], 1)
    divisor = np.broadcast_to(d[:, None], x.shape)
    x, divisor = x.reshape(-1), divisor.reshape(-1)
    got = run(lambda x, d: codec.encode_quotient(x, d, significand, E2M1), x, divisor)
    quotient = x.astype(np.float64) / (divisor.astype(np.float64) * np.float64(significand))
    # float64 tells a quotient from a tie: relatively they differ by more than 2**-24, or not at all. With a significand
    # two products are rounded: ties lie within 2**-23 of where they should
    decided = ~ref.near_tie(quotient, E2M1, 2.0**-23) if significand != 1 else np.ones(x.shape, bool)
    np.testing.assert_array_equal(got[decided], ref.encode(quotient, E2M1)[decided])
    assert decided.mean() > 0.7
    assert (got.reshape(len(d), -1)[:, :7] == [0, 2, 2, 4, 4, 6, 6]).all()  # what is a tie is one


def test_rounding_table_of_the_peers():
    """numeric_facts 4.1: round half to even, saturate, keep the sign of zero."""
    x = np.float32([0, 0.1, 0.25, 0.4, 0.6, 0.75, 1.25, 1.6, 1.75, 2.5, 3.5, 5.0, 5.1, 6, 7, 1e9])
    codes = [0, 0, 0, 1, 1, 2, 2, 3, 4, 4, 6, 6, 7, 7, 7, 7]
    assert codec.encode(jnp.asarray(x), E2M1).tolist() == codes
    assert codec.encode(jnp.asarray(-x), E2M1).tolist() == [c | 8 for c in codes]


def test_e8m0_bytes_decode_as_powers_of_two():
    """numeric_facts 4.5: bytes 0, 1, 126, 127, 128, 254, 255 are 2**-127 .. 2**127 and NaN (never Inf)."""
    scales = jnp.array([0, 1, 126, 127, 128, 254, 255], jnp.uint8)
    values = dequantize_blocks(jnp.full((7, 32), 2, jnp.uint8), scales, None, MXFP4)[:, 0]
    expected = np.float32([2.0**-127, 2.0**-126, 0.5, 1, 2, 2.0**127, np.nan])
    np.testing.assert_array_equal(np.asarray(values), expected)
