"""Weights in fragments and the register code that decodes them, on any machine; the kernels on a Hopper GPU."""

from dataclasses import replace
from math import ceil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kernel_cases import E2M1_VALUES, assert_fp8_product, assert_product, bytes_of, gpu, weight
from ptx_emulator import run_ptx

from pallas_kernels.block_scaled_matmul import (
    Epilogue,
    fragments,
    fused_columns,
    fused_tiles,
    mosaic_decode,
    mosaic_fused,
    mosaic_unpack,
    prepare,
    reference,
    register_decode,
)
from pallas_kernels.block_scaled_matmul.fused_tiles import FusedConfig
from pallas_kernels.block_scaled_matmul.mosaic_decode import RowsConfig
from pallas_kernels.transform_quantize import transform_quantize_fp8

RNG = np.random.default_rng(7)


def f64(x):
    return np.asarray(x, np.float64)


LAYOUTS = ("fp8_fragments", "bf16_fragments")


def packed(n, k, layout):
    q = weight(n, k)
    return q, prepare(q.codes, q.scales, "mxfp4", layout=layout)


def relative(n, k, layout):
    """A weight whose rows have scale 1, and its values: rows of one size, for errors in norm."""
    w = packed(n, k, layout)[1]
    return replace(w, row_scale=jnp.ones_like(w.row_scale)), f64(reference.weight_values(w, jnp.float32))


# --- layout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("n", "k"), [(258, 576), (3, 2880), (64, 128)])
def test_fragments_hold_the_same_numbers(n, k, layout):
    q, w = packed(n, k, layout)
    assert w.codes.shape == (-(-n // 64), -(-k // 128), 34, 32) and w.scales is None
    restored = f64(reference.weight_values(w, jnp.float32)) * f64(w.row_scale[:n])[:, None]
    np.testing.assert_array_equal(restored, q.values)
    assert w.nbytes == w.codes.size * 4 + 4 * w.row_scale.size  # 4.25 bits a weight and one number a row
    assert w.codes.size * 32 == 4.25 * w.codes.shape[0] * 64 * w.codes.shape[1] * 128


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_code_and_scale_is_where_the_docstring_says(layout):
    n, k = 128, 256
    q, w = packed(n, k, layout)
    codes = f64(q.codes).astype(int)
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(n, k)
    words = np.asarray(w.codes).reshape(2, 2, -1)
    scales = np.asarray(q.scales).astype(int)
    scales = scales - scales.max(1, keepdims=True) + 253
    row, column = np.meshgrid(np.arange(n), np.arange(k), indexing="ij")
    warp, h, g = row % 64 // 16, row % 16 // 8, row % 8
    pair, b, inside = column % 128 // 64, column % 64 // 32, column % 32
    if layout == "fp8_fragments":
        half, c, i = inside // 16, inside % 16 // 4, inside % 4
        magnitude, sign = 4 * (4 * half + i), 8 * i + 7 - 4 * half
    else:
        c, i = inside // 8, inside % 8
        magnitude = np.asarray([6, 3, 0, 9])[i // 2] + 16 * (i % 2)
        sign = np.asarray([15, 12, 14, 13])[i // 2] + 16 * (i % 2)
    word = words[row // 64, column // 128, ((4 * pair + warp) * 32 + 4 * g + c) * 4 + 2 * b + h]
    np.testing.assert_array_equal((word >> magnitude & 7) | (word >> sign & 1) << 3, nibbles)
    word = words[row // 64, column // 128, 1024 + 32 * pair + 8 * warp + g]
    np.testing.assert_array_equal(word >> (8 * (2 * b + h)) & 0xFF, scales[row, column // 32])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scale_bytes_at_both_ends(layout):
    codes = jnp.full((4, 32), 0x77, jnp.uint8)  # 6 everywhere
    scales = jnp.asarray([[0, 0], [254, 130], [255, 127], [0, 254]], jnp.uint8)
    w = prepare(codes, scales, "mxfp4", layout=layout)
    values = f64(reference.weight_values(w, jnp.float32))
    np.testing.assert_array_equal(np.log2(f64(w.row_scale[:4])), np.asarray([0, 254, 127, 254]) - 127)
    np.testing.assert_array_equal(values, [[6] * 64, [6] * 32 + [6 * 2.0**-124] * 32, [np.nan] * 32 + [6] * 32,
                                           [0] * 32 + [6] * 32])  # fmt: skip


# --- register code ---------------------------------------------------------------------------------------------------


def every_code(layout):
    """Words in which every code stands in every place, and their codes [words, 8]."""
    codes = np.concatenate([(np.arange(8) + i)[None] % 16 for i in range(16)] + [RNG.integers(0, 16, (500, 8))])
    i = np.arange(8)
    if layout == "fp8_fragments":
        magnitude, sign = 4 * i, np.where(i < 4, 8 * i + 7, 8 * (i - 4) + 3)
    else:
        magnitude = np.asarray([6, 3, 0, 9])[i // 2] + 16 * (i % 2)
        sign = np.asarray([15, 12, 14, 13])[i // 2] + 16 * (i % 2)
    words = ((codes & 7) << magnitude) | ((codes >> 3) << sign)
    return words.sum(1).astype(np.uint32), codes


def test_ptx_decodes_to_bfloat16():
    words, codes = every_code("bf16_fragments")

    def decoded(byte, place):
        scales = np.full_like(words, 0x5A5A5A5A & ~(0xFF << 8 * place) | byte << 8 * place)
        (scale,) = run_ptx(register_decode.SCALE_BF16.format(place), 1, scales)
        registers = run_ptx(register_decode.DECODE_BF16, 4, words, scale)
        return np.stack(registers, axis=1).view(ml_dtypes.bfloat16).astype(np.float64)

    for place, byte in enumerate((1, 100, 252, 253)):
        got, want = decoded(byte, place), E2M1_VALUES[codes] * 2.0 ** (byte - 253)
        exact = np.abs(want) >= 2.0**-126
        np.testing.assert_array_equal(got[exact], want[exact])
        assert np.abs(got - want).max() <= 2.0**-134  # half a step of bfloat16's subnormals
    assert (decoded(0, 0) == 0).all()
    with np.errstate(invalid="ignore"):
        assert np.isnan(decoded(255, 1)[codes % 8 == 0]).all()  # a NaN block is stored with zero codes


def test_ptx_decodes_to_e4m3_at_every_scale():
    words, codes = every_code("fp8_fragments")
    table = fragments.fp8_table()
    for byte in (0, 200, 238, 239, 240, 250, 253, 255):
        (offset,) = run_ptx(register_decode.TABLE_OFFSET.format(1), 1, np.full_like(words, 0xA5A500A5 | byte << 8))
        np.testing.assert_array_equal(offset, 8 * byte)  # bytes into a table of two words an entry
        low, high = (np.full_like(words, table[byte, i]) for i in range(2))
        registers = run_ptx(register_decode.DECODE_FP8, 2, words, low, high)
        got = np.stack(registers, axis=1).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        if byte == 255:
            assert np.isnan(got).all()
            continue
        want = (E2M1_VALUES[codes] * (2.0 ** (byte - 253 + 6) if byte else 0)).astype(ml_dtypes.float8_e4m3fn)
        np.testing.assert_array_equal(got, want.astype(np.float64))
        if byte >= 239:  # 15 binades are exact
            np.testing.assert_array_equal(got, E2M1_VALUES[codes] * 2.0 ** (byte - 247))


def test_permuted_columns_are_those_of_the_registers():
    """A ``wgmma`` step of 16 columns takes columns 2c, 2c + 1 and 8 + 2c, 9 + 2c from lane c, which holds 8c..8c+7."""
    x = jnp.arange(64, dtype=jnp.float32)[None]
    got = np.asarray(fragments.permute_columns(x))[0].astype(int)
    for block in range(2):
        for c in range(4):
            for step in range(2):
                slots = [32 * block + 16 * step + 8 * j + 2 * c + e for j in range(2) for e in range(2)]
                assert got[slots].tolist() == [32 * block + 8 * c + 4 * step + i for i in range(4)]


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("m", [1, 17, 33, 64, 130, 1000])
def test_configurations_fit_the_machine(m, fp8):
    for n, k in ((8192, 8192), (258, 576), (4096, 14336), (3, 32)):
        c, blocks, tiles = fused_tiles.fused_config(m, n, k, fp8, 132), ceil(k / 128), ceil(n / 16)
        assert c.block_m % 8 == 0 and 8 <= c.block_m <= 256 and c.splits <= max(blocks // 4, 1)
        stages, rounds = fused_tiles.ring(blocks, c, 1 if fp8 else 2, True)
        assert stages * rounds * c.splits >= blocks
        # two rounds of overlapping blocks in flight, or all there are
        assert stages >= min(2 * c.overlap, ceil(blocks / c.splits))
        rows = mosaic_decode.rows_config(min(m, 16), n, k, 132)
        assert ceil(tiles / rows.row_tiles) <= 132 or rows.row_tiles == 8


# --- kernels on the device -------------------------------------------------------------------------------------------


@gpu("wgmma")
@pytest.mark.parametrize(
    ("m", "n", "k", "config", "dtype"),
    [
        (1, 258, 576, RowsConfig(1, 8), "bfloat16"),
        (3, 128, 2880, RowsConfig(2, 16, 2), "float32"),
        (16, 448, 512, RowsConfig(7, 16), "float32"),
        (11, 1024, 4096, RowsConfig(4, 32), "float32"),
    ],
)
def test_rows_on_device(m, n, k, config, dtype):
    q, w = packed(n, k, "bf16_fragments")
    x, bias = jnp.asarray(RNG.standard_normal((m, k)), jnp.bfloat16), jnp.asarray(RNG.standard_normal(n), jnp.float32)
    runs = [mosaic_decode.rows_matmul(x, w, bias, jnp.dtype(dtype), config) for _ in range(2)]
    assert_product(runs[0], f64(x), q.values, f64(bias))
    np.testing.assert_array_equal(bytes_of(runs[0]), bytes_of(runs[1]), err_msg="deterministic")


FUSED = [  # m, n, k, config, output dtype
    (33, 258, 576, FusedConfig(2, 40), "bfloat16"),
    (64, 512, 1024, FusedConfig(4, 64, 2, overlap=1), "bfloat16"),
    (200, 576, 1024, FusedConfig(2, 128), "float16"),
    (70, 448, 768, FusedConfig(3, 64, overlap=1), "float32"),
    (5, 64, 128, FusedConfig(1, 8), "bfloat16"),
]
GATHERED = [(m, n, k, replace(config, gather=2), dtype) for m, n, k, config, dtype in FUSED]


@gpu("wgmma")
@pytest.mark.parametrize(("m", "n", "k", "config", "dtype"), FUSED + GATHERED)
def test_fused_bf16_on_device(m, n, k, config, dtype):
    w, values = relative(n, k, "bf16_fragments")
    x, bias = jnp.asarray(RNG.standard_normal((m, k)), jnp.bfloat16), jnp.asarray(RNG.standard_normal(n), jnp.float32)
    runs = [mosaic_fused.fused_matmul(x, None, w, Epilogue(bias=bias), jnp.dtype(dtype), config) for _ in range(2)]
    assert_product(runs[0], f64(x), values, f64(bias))
    np.testing.assert_array_equal(bytes_of(runs[0]), bytes_of(runs[1]), err_msg="deterministic")


@gpu("wgmma")
@pytest.mark.parametrize(("m", "n", "k", "config", "dtype"), FUSED)
def test_fused_fp8_on_device(m, n, k, config, dtype):
    w, values = relative(n, k, "fp8_fragments")
    pair, row_scale = transform_quantize_fp8(jnp.asarray(RNG.standard_normal((m, k)), jnp.bfloat16))
    bias = jnp.asarray(RNG.standard_normal(n), jnp.float32)
    runs = [
        mosaic_fused.fused_matmul(pair, row_scale, w, Epilogue(bias=bias), jnp.dtype(dtype), config) for _ in range(2)
    ]
    assert_fp8_product(runs[0], f64(pair) * f64(row_scale)[:, None], values, f64(bias))
    np.testing.assert_array_equal(bytes_of(runs[0]), bytes_of(runs[1]), err_msg="deterministic")


@gpu("wgmma")
def test_permutation_on_device():
    x = jnp.asarray(RNG.standard_normal((33, 576)), jnp.bfloat16)
    np.testing.assert_array_equal(bytes_of(fused_columns.permuted(x)), bytes_of(fragments.permute_columns(x)))


@gpu("wgmma")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_unpack_on_device(layout):
    q, w = packed(130, 576, layout)
    got = f64(mosaic_unpack.unpack(w, 132))
    factor = 2.0**-fragments.FP8_SHIFT if layout == "fp8_fragments" else 1.0
    np.testing.assert_array_equal((got * factor * f64(w.row_scale)[:, None])[:130, :576], q.values)
    assert (got[130:] == 0).all() and (got[:, 576:] == 0).all()


@gpu("wgmma")
def test_scale_bytes_0_254_255_and_stale_padding_on_device():
    n, k, rng = 40, 96, np.random.default_rng(17)  # its own: the data depend on no other test
    codes = jnp.asarray(rng.integers(0, 256, (n, k // 2)), jnp.uint8)
    scales = (
        jnp.asarray(rng.integers(120, 130, (n, k // 32)), jnp.uint8).at[0].set(0).at[1, 0].set(254).at[2, 1].set(255)
    )
    x = jnp.asarray(rng.standard_normal((3, k)), jnp.bfloat16) * jnp.bfloat16(2.0**-20)
    pair, row_scale = transform_quantize_fp8(x)

    def stale(layout):
        """The weight with 0xFF in the rows that do not exist: the fourth warp's."""
        w = prepare(codes, scales, "mxfp4", layout=layout)
        words = np.asarray(w.codes).copy().reshape(-1)
        words[np.arange(1024).reshape(2, 4, -1)[:, 3].ravel()] = 0xFFFFFFFF
        return replace(w, codes=jnp.asarray(words.reshape(w.codes.shape)))

    w16, w8 = (stale(layout) for layout in ("bf16_fragments", "fp8_fragments"))
    values = f64(reference.weight_values(w16, jnp.float32)) * f64(w16.row_scale[:n])[:, None]
    values[2] = 0
    for got in (
        mosaic_decode.rows_matmul(x, w16, None, jnp.float32, RowsConfig(1, 8)),
        mosaic_fused.fused_matmul(x, None, w16, Epilogue(), jnp.float32, FusedConfig(1, 8)),
    ):
        assert np.isnan(np.asarray(got)[:, 2]).all()
        assert_product(got.at[:, 2].set(0), f64(x), values)
    got = np.asarray(mosaic_fused.fused_matmul(pair, row_scale, w8, Epilogue(), jnp.float32, FusedConfig(1, 8)))
    assert np.isnan(got[:, 2]).all() and np.isfinite(np.delete(got, 2, axis=1)).all()
