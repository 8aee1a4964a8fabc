"""block_scaled_matmul and quantized_linear: one suite for all implementations, against float64 on the true operands."""

from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import E2M1_VALUES, IMPLEMENTATIONS, assert_fp8_product, assert_product, bytes_of, gpu, weight

from mxjax.core import packing
from mxjax.core.formats import MXFP4, NVFP4, get_format
from mxjax.core.quantize import fake_quantize, quantize_array
from mxjax.errors import BackendUnsupported, BlockShapeError, FormatError
from pallas_kernels.block_scaled_matmul import (
    Epilogue,
    PackedWeight,
    block_scaled_matmul,
    inexact_blocks,
    layout,
    mosaic_gpu,
    prepare,
    reference,
    triton,
    triton_generic,
)
from pallas_kernels.linear import quantized_linear
from pallas_kernels.transform_quantize import Transform, transform_quantize_fp8

RNG = np.random.default_rng(2)


def activations(m, k, dtype="bfloat16"):
    return jnp.asarray(RNG.standard_normal((m, k)), dtype)


def f64(x):
    return np.asarray(x, np.float64)


# --- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k"), [(258, 576), (3, 2880)])
def test_tiles_hold_the_same_numbers(n, k):
    q = weight(n, k)
    w = prepare(q.codes, q.scales, "mxfp4", layout="tiles")
    assert w.codes.shape == (-(-k // 128), -(-n // 128) * 128, 64)
    restored = f64(reference.weight_values(w, jnp.float32)) * f64(w.row_scale[:n])[:, None]
    np.testing.assert_array_equal(restored, q.values)


def test_word_decode_is_the_bits_of_the_codes():
    """What the PTX computes, in JAX: raw bfloat16 with magnitude << 6 and sign << 15, every code in every place."""
    codes = jnp.asarray(RNG.integers(0, 256, (128, 64)), jnp.uint8)
    w = prepare(codes, jnp.full((128, 4), 127, jnp.uint8), "mxfp4", layout="tiles")
    first, last = layout.words_to_bf16(w.codes[0])
    got = jax.lax.bitcast_convert_type(jnp.concatenate([first, last], axis=1), jnp.uint16)
    c = packing.unpack(codes, 4).astype(jnp.uint16)
    np.testing.assert_array_equal(got, ((c & 8) << 12) | ((c & 7) << 6))


def test_scale_bytes_at_both_ends():
    codes = jnp.full((4, 32), 0x77, jnp.uint8)  # 6 everywhere
    scales = jnp.asarray([[0, 0], [254, 130], [255, 127], [0, 254]], jnp.uint8)
    w = prepare(codes, scales, "mxfp4", layout="tiles")
    values = f64(reference.weight_values(w, jnp.float32))
    np.testing.assert_array_equal(np.log2(f64(w.row_scale[:4])), np.asarray([0, 254, 127, 254]) - 127)
    np.testing.assert_array_equal(values[0], 6)
    np.testing.assert_array_equal(values[1], [6] * 32 + [6 * 2.0**-124] * 32)
    np.testing.assert_array_equal(values[2], [np.nan] * 32 + [6] * 32)
    # 254 binades below its row's largest: out of bfloat16's range, and far out of any float32 sum's
    np.testing.assert_array_equal(values[3], [0] * 32 + [6] * 32)


def test_inexact_blocks_counts_what_e4m3_rounds():
    scales = jnp.asarray([[127, 113, 112, 0, 255], [10, 10, 10, 10, 10]], jnp.uint8)
    assert int(inexact_blocks(scales)) == 1
    q = weight(64, 256)
    assert int(inexact_blocks(q.scales)) == 0


def test_prepare_checks_shapes_and_layouts():
    q = weight(8, 64)
    with pytest.raises(FormatError, match="'rows' for every format"):
        prepare(q.codes, q.scales, "mxfp4", layout="columns")
    with pytest.raises(FormatError, match="has no layout 'tiles'"):
        prepare(q.codes, q.scales, "mxfp8_e4m3", layout="tiles")
    with pytest.raises(BlockShapeError, match="do not fit"):
        prepare(q.codes[:, :-1], q.scales, "mxfp4")


# --- kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interpret", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("m", "n", "k", "splits", "block_m"),
    [(1, 258, 576, 2, 16), (3, 128, 2880, 4, 16), (33, 128, 768, 1, 64), (16, 256, 512, 4, 16), (70, 130, 256, 1, 64)],
)
def test_decode(m, n, k, splits, block_m, interpret):
    q = weight(n, k)
    x, bias = activations(m, k), jnp.asarray(RNG.standard_normal(n), jnp.float32)
    w = prepare(q.codes, q.scales, "mxfp4", layout="tiles")
    got = triton.decode(x, None, w, bias, jnp.bfloat16, triton.DecodeConfig(block_m, splits), interpret=interpret)
    assert_product(got, f64(x), q.values, f64(bias))
    # the pair: e4m3 values with a scale a row
    pair, row_scale = transform_quantize_fp8(x, implementation="xla")
    got = triton.decode(
        pair, row_scale, w, None, jnp.float32, triton.DecodeConfig(block_m, splits), interpret=interpret
    )
    assert_product(got, f64(pair) * f64(row_scale)[:, None], q.values)


@pytest.mark.parametrize("interpret", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_unpack(dtype, interpret):
    q = weight(130, 576)
    w = prepare(q.codes, q.scales, "mxfp4", layout="tiles")
    got = f64(triton.unpack(w, dtype, interpret=interpret))
    factor = 2.0**-triton.FP8_SHIFT if dtype == jnp.float8_e4m3fn else 1.0
    np.testing.assert_array_equal((got * factor * f64(w.row_scale)[:, None])[:130, :576], q.values)
    assert (got[130:] == 0).all() and (got[:, 576:] == 0).all()


PAIRS = [  # x format, weight format, m, n, k, native
    (None, "mxfp4", 3, 258, 576, False),
    (None, "nvfp4", 33, 65, 2880, False),
    (None, "mxfp8_e5m2", 1, 64, 768, False),
    ("mxfp4", "mxfp4", 33, 258, 768, False),
    ("mxfp4", "mxfp4", 33, 258, 768, True),
    ("mxfp8_e4m3", "mxfp4", 3, 64, 576, True),
    ("nvfp4", "nvfp4", 3, 64, 576, False),
]


@pytest.mark.parametrize("interpret", IMPLEMENTATIONS)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: "-".join(map(str, p)))
def test_generic(pair, interpret):
    x_fmt, w_fmt, m, n, k, native = pair
    q = weight(n, k, w_fmt)
    factor = np.float32(0.75) if w_fmt == "nvfp4" else None
    w = prepare(q.codes, q.scales, w_fmt, factor, layout="rows")
    values = q.values * (1.0 if factor is None else 0.75)
    x, x_scales, x_scale = activations(m, k), None, None
    wanted = f64(x)
    if x_fmt is not None:
        xq = quantize_array(x, x_fmt)
        x, x_scales, wanted, x_fmt = xq.codes, xq.scales, f64(xq.dequantize(jnp.float32)), get_format(x_fmt)
        if xq.global_scale is not None:
            x_scale = jnp.full((m,), xq.global_scale)
    bias = jnp.asarray(RNG.standard_normal(n), jnp.bfloat16)
    config = triton_generic.generic_config(m, n, native)
    got = triton_generic.generic(
        x, x_scales, x_scale, w, Epilogue(bias=bias), x_fmt, jnp.float32, config, native=native, interpret=interpret
    )
    assert_product(got, wanted, values, f64(bias))
    if not interpret:  # the XLA reference is an implementation of its own, and must not be folded on a GPU
        got = reference.matmul(x, x_scales, x_scale, w, Epilogue(bias=bias), x_fmt, jnp.float32)
        assert_product(got, wanted, values, f64(bias))


@pytest.mark.parametrize("interpret", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_generic_keeps_wide_inputs(dtype, interpret):
    q = weight(64, 576)
    x = activations(3, 576, dtype)
    w = prepare(q.codes, q.scales, "mxfp4", layout="rows")
    config = triton_generic.generic_config(3, 64, False)
    got = triton_generic.generic(x, None, None, w, Epilogue(), None, jnp.float32, config, interpret=interpret)
    assert_product(got, f64(x), q.values)


@pytest.mark.parametrize("interpret", IMPLEMENTATIONS)
def test_scale_bytes_0_254_255_and_stale_padding(interpret):
    """Bytes at both ends in one weight; 0xFF around the used part of the arrays must not matter."""
    n, k = 64, 96
    codes = jnp.asarray(RNG.integers(0, 256, (n + 1, k // 2 + 1)), jnp.uint8)
    scales = jnp.asarray(RNG.integers(120, 130, (n + 1, k // 32 + 1)), jnp.uint8)
    codes, scales = codes.at[n].set(255).at[:, -1].set(255), scales.at[n].set(255).at[:, -1].set(255)
    scales = scales.at[0].set(0).at[1, 0].set(254).at[2, 1].set(255)
    x = activations(3, k) * jnp.bfloat16(2.0**-20)
    value = E2M1_VALUES[packing.unpack(codes[:n, : k // 2], 4)]
    values = value * np.exp2(np.repeat(f64(scales[:n, : k // 32]), 32, axis=1) - 127)
    values[2] = 0
    rows = PackedWeight(codes=codes, scales=scales, row_scale=None, format=MXFP4, layout="rows", n=n, k=k)
    tiles = prepare(codes[:n, : k // 2], scales[:n, : k // 32], "mxfp4", layout="tiles")
    stale = replace(tiles, codes=tiles.codes.at[:, n:].set(255), scales=tiles.scales.at[:, n:].set(255))
    config = triton_generic.generic_config(3, n, False)
    for got in (
        triton_generic.generic(x, None, None, rows, Epilogue(), None, jnp.float32, config, interpret=interpret),
        triton.decode(x, None, stale, None, jnp.float32, triton.DecodeConfig(16, 1), interpret=interpret),
        reference.matmul(x, None, None, stale, Epilogue(), None, jnp.float32),
    ):
        assert np.isnan(np.asarray(got)[:, 2]).all()
        assert_product(got.at[:, 2].set(0), f64(x), values)


@gpu("wgmma")
@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        (256, 512, 512, mosaic_gpu.Fp8Config()),
        (1000, 776, 2944, mosaic_gpu.Fp8Config()),
        (33, 258, 576, mosaic_gpu.Fp8Config(tile_m=64, tile_n=64, cluster=1)),
        (200, 384, 768, mosaic_gpu.Fp8Config(tile_m=128, tile_n=64)),
    ],
)
@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32])
def test_mosaic_fp8_on_device(m, n, k, config, out_dtype):
    q = weight(n, k)
    pair, row_scale = transform_quantize_fp8(activations(m, k))
    w = prepare(q.codes, q.scales, "mxfp4", layout="tiles")
    unpacked, factor = triton.unpack(w, jnp.float8_e4m3fn), 2.0**-triton.FP8_SHIFT
    bias = jnp.asarray(RNG.standard_normal(n), jnp.float32)
    runs = [
        mosaic_gpu.fp8_matmul(
            pair, row_scale, unpacked, w.row_scale, Epilogue(bias=bias), out_dtype, n, config, 132, factor
        )
        for _ in range(2)
    ]
    assert_fp8_product(runs[0], f64(pair) * f64(row_scale)[:, None], q.values, f64(bias))
    np.testing.assert_array_equal(bytes_of(runs[0]), bytes_of(runs[1]), err_msg="deterministic")


@gpu("wgmma")
@pytest.mark.parametrize(
    ("m", "n", "k", "rank", "parts", "config"),
    [
        (1000, 776, 2944, 64, (), mosaic_gpu.Fp8Config()),
        (300, 1024, 576, 80, (256, 768), mosaic_gpu.Fp8Config()),
        (33, 520, 576, 16, (256,), mosaic_gpu.Fp8Config(tile_m=64, tile_n=64, cluster=1)),
    ],
)
def test_mosaic_fp8_with_a_branch_on_device(m, n, k, rank, parts, config):
    """The branch is a few more columns of the same product, and its factors are exact."""
    q = weight(n, k)
    pair, row_scale = transform_quantize_fp8(activations(m, k))
    w = prepare(q.codes, q.scales, "mxfp4", layout="tiles")
    unpacked, factor = triton.unpack(w, jnp.float8_e4m3fn), 2.0**-triton.FP8_SHIFT
    # columns of the size that the main product has, so that a branch in the wrong place would show
    size = np.abs(q.values).max(axis=1, keepdims=True)
    up = jnp.asarray(RNG.standard_normal((n, rank)) * np.exp2(np.round(np.log2(size))), jnp.bfloat16)
    down = activations(m, rank * (1 + len(parts)))
    bias = jnp.asarray(RNG.standard_normal(n), jnp.float32)
    epilogue, dtype = Epilogue(bias=bias, down=down, up=up, parts=parts), jnp.dtype(jnp.bfloat16)
    got = mosaic_gpu.fp8_matmul(pair, row_scale, unpacked, w.row_scale, epilogue, dtype, n, config, 132, factor)
    wide = np.zeros((n, down.shape[1]))
    for i, (a, b) in enumerate(pairwise((0, *parts, n))):
        wide[a:b, i * rank : (i + 1) * rank] = f64(up)[a:b]
    x = np.concatenate([f64(pair) * f64(row_scale)[:, None], f64(down)], axis=1)
    assert_fp8_product(got, x, np.concatenate([q.values, wide], axis=1), f64(bias))


# --- api -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows", "tiles"])
@pytest.mark.parametrize("activation", [None, MXFP4, NVFP4])
def test_linear_is_quantize_then_multiply(name, activation):
    q = weight(64, 128)
    x = activations(6, 128).reshape(2, 3, 128)
    t = Transform(hadamard=32)
    w = prepare(q.codes, q.scales, "mxfp4", layout=name)
    got = quantized_linear(x, w, activation=activation, transform=t, out_dtype=jnp.float32)
    h = np.kron(np.eye(4), np.asarray(jax.scipy.linalg.hadamard(32)) / np.sqrt(32))
    y = jnp.asarray(f64(x).reshape(6, 128) @ h, jnp.float32)
    y = y.astype(jnp.bfloat16) if activation is None else fake_quantize(y, activation, batch_axes=1)
    assert got.shape == (2, 3, 64)
    # a value next to a tie may fall to the other side: compare in norm, far below one quantization step (2**-2)
    want = f64(y) @ q.values.T
    assert np.linalg.norm(f64(got).reshape(6, 64) - want) < 2.0**-8 * np.linalg.norm(want)


def test_api_checks_and_explains():
    q = weight(8, 64)
    w = prepare(q.codes, q.scales, "mxfp4", layout="tiles")
    x = activations(2, 64)
    assert block_scaled_matmul(x[:0], w).shape == (0, 8)
    with pytest.raises(BlockShapeError, match="does not end in 64"):
        block_scaled_matmul(x[:, :32], w)
    with pytest.raises(FormatError, match="uint8 codes with x_scales and x_format"):
        block_scaled_matmul(x, w, x_format="mxfp4")
    if jax.default_backend() != "gpu":
        with pytest.raises(BackendUnsupported, match=r"mosaic_gpu cannot run here: .*What can: xla"):
            block_scaled_matmul(x, w, implementation="mosaic_gpu")
