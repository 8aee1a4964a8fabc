"""transform_quantize: one suite for every implementation, byte for byte against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import IMPLEMENTATIONS, ON_GPU, assert_same_bits, gpu

from mxjax import backend
from mxjax.core import codec
from mxjax.core.formats import E2M1, MXFP4, get_format
from mxjax.core.quantize import quantize_array
from mxjax.errors import BackendUnsupported, BlockShapeError, ConfigError, FormatError
from pallas_kernels import transform_quantize as tq
from pallas_kernels.transform_quantize import Transform, api, mosaic_gpu, reference, triton
from pallas_kernels.transform_quantize import rounding as rounding_

RNG = np.random.default_rng(1)


def dyadic(*shape, scale=64):
    """Numbers with few bits, so that sums of 128 of them are exact in float32 in any order; ties among them."""
    return RNG.integers(-256, 257, shape) / scale


def rows(m, k, dtype):
    """Blocks of different magnitude, a zero block, signed zeros."""
    x = dyadic(m, k) * np.exp2(RNG.integers(-3, 4, (m, k // 32)).repeat(32, 1))
    if m:
        x[0, :32] = -0.0
    return jnp.asarray(x, dtype)


def transform(name, k):
    if name == "matrix":
        return Transform(matrix=jnp.asarray(dyadic(32, 32), jnp.float32))
    if name == "per_block":
        return Transform(matrix=jnp.asarray(dyadic(k // 32, 32, 32), jnp.float32))
    if name == "scale":
        return Transform(channel_scale=jnp.asarray(RNG.integers(1, 9, k) / 4, jnp.float32))
    if name == "scale_per_block":
        return Transform(transform("scale", k).channel_scale, transform("per_block", k).matrix)
    return Transform(hadamard=int(name))


CASES = [  # K = 2880: no power of two; M = 33 and 3: tails of the last tile; 1: one row
    ("mxfp4", "even", "32", 33, 2880, "bfloat16"),
    ("mxfp4", "floor", "0", 33, 2880, "float32"),
    ("mxfp4", "third", "64", 3, 576, "bfloat16"),
    ("mxfp4", "rceil", "128", 3, 768, "bfloat16"),
    ("mxfp4", "ceil", "matrix", 3, 768, "bfloat16"),
    ("mxfp4", "even", "per_block", 33, 576, "bfloat16"),
    ("mxfp4", "even", "scale", 33, 576, "bfloat16"),
    ("mxfp4", "even", "scale_per_block", 1, 64, "float32"),
    ("mxfp8_e4m3", "even", "32", 3, 768, "float16"),
    ("mxfp8_e5m2", "floor", "0", 3, 768, "bfloat16"),
    ("nvfp4", "even", "16", 33, 576, "bfloat16"),
]


@pytest.mark.parametrize("interpret", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_codes_and_scales_equal_the_reference(case, interpret):
    fmt, policy, name, m, k, dtype = case
    fmt, x, t = get_format(fmt), rows(m, k, dtype), transform(name, k)
    scale = jnp.asarray(np.exp2(RNG.integers(-3, 3, m)), jnp.float32) if fmt.has_tensor_scale else None
    want = api._quantize_xla(x, t, scale, fmt, policy)
    rounding = "floats" if ON_GPU and backend.target().sm < 89 else "casts"
    assert_same_bits(triton.quantize(x, t, scale, fmt, policy, interpret=interpret, rounding=rounding), want)


PAIR_CASES = [
    ("even", "32", 3, 2880, "bfloat16", "float8_e4m3fn"),
    ("floor", "0", 3, 576, "float32", "float8_e4m3fn"),
    ("third", "matrix", 1, 768, "bfloat16", "float8_e4m3fn"),
    ("rceil", "scale", 3, 768, "bfloat16", "bfloat16"),
]


@pytest.mark.parametrize("interpret", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", PAIR_CASES, ids=lambda c: "-".join(map(str, c)))
def test_exact_fp8_pair_equals_the_reference(case, interpret):
    policy, name, m, k, dtype, out = case
    x, t, out = rows(m, k, dtype), transform(name, k), jnp.dtype(out)
    x = x.at[:, 64:96].multiply(2.0**-20)  # far below the row's largest block: rounded by e4m3
    want = api._quantize_fp8_xla(x, t, policy, out)
    assert_same_bits(triton.quantize_fp8(x, t, policy, out, interpret=interpret), want)


@gpu("wgmma")
@pytest.mark.parametrize(
    ("policy", "name", "m", "k", "config"),
    [
        ("even", "32", 3, 2880, (2, 3, 2)),
        ("floor", "16", 33, 8192, (4, 4, 2)),
        ("even", "32", 300, 14336, (4, 7, 2)),
        ("even", "matrix", 1501, 576, (1, 2, 16)),
        ("floor", "scale", 5, 4096, (8, 1, 1)),
        ("even", "0", 130, 96, (1, 1, 8)),
    ],
)
def test_pair_in_registers_equals_the_reference(policy, name, m, k, config):
    t = transform(name, k)
    if t.channel_scale is not None:
        t = Transform(channel_scale=t.channel_scale.astype(jnp.bfloat16))
    x = rows(m, k, "bfloat16").at[:, 64:96].multiply(2.0**-20)  # far below the row's largest block
    want = api._quantize_fp8_xla(x, t, policy, jnp.dtype(jnp.float8_e4m3fn))
    assert_same_bits(mosaic_gpu.quantize_fp8(x, t, policy, mosaic_gpu.RowConfig(*config), 132), want)
    bad = x.at[0, 7].set(jnp.nan).at[-1, 9].set(jnp.inf)
    scale = np.asarray(mosaic_gpu.quantize_fp8(bad, t, policy, mosaic_gpu.RowConfig(*config), 132)[1])
    assert np.isnan(scale[[0, -1]]).all() and np.isfinite(scale[1:-1]).all()


@pytest.mark.parametrize("name", ["32", "0", "matrix"])
def test_rows_stay_in_registers(name):
    """Configurations of the kernel in registers: every value has a place, at most 7 units of 16 values a thread."""
    for m in (1, 264, 265, 100_000):
        for k in (32, 576, 2880, 4096, 12288, 15360, 32768):
            c = mosaic_gpu.row_config(m, k, transform(name, k), 132)
            threads = 32 * c.warps * c.rows
            assert c.warps * c.units * 512 >= k and c.units <= 7 and c.blocks(m, 132) * c.rows * 1e9 >= m
            assert threads % 128 == 0 and threads <= (512 if c.units <= 4 else 256)
            assert c.warps in (1, 2) or c.warps % 4 == 0


def test_hadamard_words_are_the_matrix():
    """Lane 4g + c holds rows 8c + 4s + 2j (+ 1) of column 8 (g / 2) + 2 tile + g % 2 in word (s, tile, j)."""
    words = mosaic_gpu._hadamard_words(32).reshape(4, 32, 4).transpose(1, 0, 2).reshape(32, 2, 4, 2)
    h = np.asarray(jax.scipy.linalg.hadamard(32), np.float32)
    for lane in range(32):
        g, c = divmod(lane, 4)
        for s, tile, j in np.ndindex(2, 4, 2):
            low, high = words[lane, s, tile, j] & 0xFFFF, words[lane, s, tile, j] >> 16
            pair = (np.asarray([low, high], np.uint32) << 16).view(np.float32)
            row = 8 * c + 4 * s + 2 * j
            assert pair.tolist() == h[[row, row + 1], 8 * (g // 2) + 2 * tile + g % 2].tolist()


def test_reference_is_the_core_quantizer():
    x = rows(3, 64, "float32")
    for policy in ("even", "floor", "third"):
        q = quantize_array(x, "mxfp4", scale=policy)
        codes, scales = tq.transform_quantize(x, "mxfp4", policy=policy, implementation="xla")
        assert_same_bits((codes, scales), (q.codes, q.scales))
        # every block is within 15 binades of its row's largest, so the pair is exact
        values, row_scale = tq.transform_quantize_fp8(x, policy=policy, implementation="xla")
        restored = np.asarray(values, np.float64) * np.asarray(row_scale, np.float64)[:, None]
        np.testing.assert_allclose(
            restored, np.asarray(q.dequantize(), np.float64), rtol=2.0**-23 * (policy == "third")
        )


def test_pair_error_is_what_e4m3_leaves_below_15_binades():
    x = jnp.zeros((1, 64), jnp.float32).at[0, 0].set(6.0).at[0, 32:].set(jnp.linspace(-6, 6, 32) * 2.0**-16)
    values, scale = tq.transform_quantize_fp8(x, implementation="xla")
    q = quantize_array(x, "mxfp4").dequantize()
    error = np.abs(np.asarray(values, np.float64) * float(scale[0]) - np.asarray(q, np.float64))
    # the smallest e4m3 step 2**-9 over the largest block scale's image 2**6, rounded to nearest
    assert 0 < error.max() <= 2.0**-15 / 2


ROUNDINGS = ["codec", pytest.param("floats", marks=pytest.mark.skipif(
    not ON_GPU, reason="XLA's CPU code flushes the subnormals that the fast rounding needs"))]  # fmt: skip


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("policy", triton.POLICIES)
def test_extreme_values(policy, rounding):
    """Scale bytes 0 and 253 and 255: subnormals, FLT_MAX, NaN and Inf."""
    x = np.zeros((8, 64), np.float32)
    tiny = np.float32(2.0**-149)
    x[0] = np.arange(64) * tiny
    x[1] = np.float32(2.0**-126) * np.linspace(-3, 3, 64)
    x[2] = np.finfo(np.float32).max * np.linspace(-1, 1, 64)
    x[3, 5], x[4, 40], x[5, 1] = np.nan, np.inf, -np.inf
    x[6, :32], x[6, 32:] = -0.0, tiny
    x = jnp.asarray(x)
    want = api._quantize_xla(x, Transform(), None, MXFP4, policy)
    assert_same_bits(
        triton.quantize(x, Transform(), None, MXFP4, policy, interpret=not ON_GPU, rounding=rounding), want
    )
    assert np.asarray(want[1])[[3, 4, 5], [0, 1, 0]].tolist() == [255] * 3


def test_fast_rounding_equals_the_codec():
    """Every tie, its neighbours one unit away, and random numbers; |z| < 8 as quantize_tile scales it."""
    ties = np.float32([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7])
    near = np.concatenate([ties, np.nextafter(ties, np.float32(9)), np.nextafter(ties[1:], np.float32(0))])
    z = np.concatenate([near, RNG.uniform(0, 8, 4096), 2.0 ** RNG.uniform(-30, 3, 4096)]).astype(np.float32)
    z = jnp.asarray(np.concatenate([z, -z]))
    want = np.asarray(codec.encode(z, E2M1))
    np.testing.assert_array_equal(np.asarray(jax.jit(rounding_.encode_e2m1, static_argnums=1)(z, True)), want)
    below = np.abs(np.asarray(z)) < 7
    unclipped = np.asarray(jax.jit(rounding_.encode_e2m1, static_argnums=1)(z, False))
    np.testing.assert_array_equal(unclipped[below], want[below])
    value = np.asarray(codec.decode(jnp.asarray(want), E2M1))
    rounded = jax.jit(rounding_.round_to, static_argnums=(2, 3))(z, jnp.int32(127 << 23), E2M1, True)
    np.testing.assert_array_equal(np.asarray(rounded), value)


def test_random_hadamard_differs_only_next_to_a_tie():
    """Sums in another order: a code may differ where the sum lies within rounding of a tie, nowhere else."""
    x = jnp.asarray(np.random.default_rng(5).standard_normal((64, 1024)), jnp.float32)
    t = Transform(hadamard=32)
    got = triton.quantize(x, t, None, MXFP4, "even", interpret=not ON_GPU)[0]
    want = api._quantize_xla(x, t, None, MXFP4, "even")[0]
    # 2**-24 * 32 terms is the relative width around each of 7 ties in 3 binades: under 1e-5 of all values
    assert np.mean(np.asarray(got) != np.asarray(want)) < 1e-4


def test_empty_and_leading_axes():
    codes, scales = tq.transform_quantize(jnp.zeros((0, 64)), "mxfp4")
    assert codes.shape == (0, 32) and scales.shape == (0, 2)
    x = rows(6, 64, "bfloat16")
    flat = tq.transform_quantize_fp8(x)
    deep = tq.transform_quantize_fp8(x.reshape(2, 3, 64))
    assert deep[0].shape == (2, 3, 64) and deep[1].shape == (2, 3)
    assert_same_bits([d.reshape(f.shape) for d, f in zip(deep, flat, strict=True)], flat)


def test_kronecker_matrix_is_the_factors_on_a_block():
    a, b = jnp.asarray(dyadic(4, 4), jnp.float32), jnp.asarray(dyadic(8, 8), jnp.float32)
    x = rows(2, 64, "float32")
    got = reference.apply_transform(x, Transform(matrix=tq.kronecker_matrix(a, b)))
    want = np.einsum("mbij,ik,jl->mbkl", np.asarray(x).reshape(2, 2, 4, 8), a, b).reshape(2, 64)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6 * np.abs(want).max())
    with pytest.raises(BlockShapeError, match="not a 32 x 32 matrix"):
        tq.kronecker_matrix(a, a)


def test_arguments_are_checked():
    x = jnp.zeros((2, 64))
    with pytest.raises(BlockShapeError, match="does not divide the last axis"):
        tq.transform_quantize(jnp.zeros((2, 40)), "mxfp4")
    with pytest.raises(BlockShapeError, match="transform of 128"):
        tq.transform_quantize(x, "mxfp4", transform=Transform(hadamard=128))
    with pytest.raises(ConfigError, match="Hadamard sizes are"):
        tq.transform_quantize(x, "mxfp4", transform=Transform(hadamard=8))
    with pytest.raises(ConfigError, match="a Hadamard size, a matrix or Kronecker factors"):
        tq.transform_quantize(x, "mxfp4", transform=Transform(matrix=jnp.eye(32), hadamard=32))
    with pytest.raises(BlockShapeError, match=r"matrix has shape \(16, 16\)"):
        tq.transform_quantize(x, "mxfp4", transform=Transform(matrix=jnp.eye(16)))
    with pytest.raises(FormatError, match="tensor_scale is for nvfp4"):
        tq.transform_quantize(x, "nvfp4")
    with pytest.raises(FormatError, match="takes a float array"):
        tq.transform_quantize(jnp.zeros((2, 64), jnp.int32), "mxfp4")
    if not ON_GPU:
        with pytest.raises(BackendUnsupported, match="transform_quantize: triton cannot run here"):
            tq.transform_quantize(x, "mxfp4", implementation="triton")
