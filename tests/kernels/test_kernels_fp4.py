"""The FP4 product for Blackwell, as far as it can be checked without one: operands, choice, reasons."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import kernel_cases
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from mxjax.core.formats import get_format
from mxjax.errors import BackendUnsupported
from pallas_kernels import _compat
from pallas_kernels._dispatch import kernels_used
from pallas_kernels.block_scaled_matmul import block_scaled_matmul, mosaic_fp4, prepare


def on(kind, cores=148):
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(kind, cores, "gpu")))


@pytest.mark.parametrize("shape", [(128, 4), (256, 8), (1, 1), (130, 6), (300, 36)])
def test_scale_tiles_are_where_the_matrix_unit_reads_them(shape):
    """tcgen05.cp 32x128b copies 32 rows of 16 bytes; row r's byte 4 q + c is the scale of row 32 q + r, column c."""
    scales = np.random.default_rng(0).integers(1, 256, shape, np.uint8)
    tiles = np.asarray(mosaic_fp4.scale_tiles(jnp.asarray(scales))).reshape(-1)
    tile_columns = -(-shape[1] // 4)
    assert tiles.size == -(-shape[0] // 128) * tile_columns * 512
    want = np.zeros_like(tiles)
    for row in range(shape[0]):
        for column in range(shape[1]):
            tile = (row // 128) * tile_columns + column // 4
            want[512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4] = scales[row, column]
    np.testing.assert_array_equal(tiles, want)


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("shape", [(128, 256), (5, 64), (258, 576)])
def test_operands_hold_the_weight(fmt, shape):
    """Codes and scales read as the matrix unit reads them are the weight, bit for bit, and zero beyond it."""
    fmt, w = get_format(fmt), kernel_cases.weight(*shape, fmt)
    values, tiles = mosaic_fp4.operands(w.codes, w.scales, fmt, 256)
    depth, rows = -(-shape[1] // 256) * 256, -(-shape[0] // 256) * 256
    assert values.shape == (-(-shape[0] // 8) * 8, depth) and values.dtype == jnp.float4_e2m1fn
    assert tiles.shape == (rows // 128, depth // fmt.block_size // 4, 32, 16)
    assert tiles.dtype == (jnp.float8_e8m0fnu if fmt.scale == "e8m0" else jnp.float8_e4m3fn)
    row, column = np.indices((rows, depth // fmt.block_size))
    at = (row // 128, column // 4, row % 32, 4 * (row % 128 // 32) + column % 4)
    scales = np.asarray(tiles)[at].astype(np.float64)[: values.shape[0]]
    got = np.asarray(values).astype(np.float64) * scales.repeat(fmt.block_size, axis=1)
    want = np.zeros_like(got)
    want[: shape[0], : shape[1]] = w.values
    np.testing.assert_array_equal(got, want)


def test_aligned_codes_are_not_copied():
    """Only the axis of nibbles is new: XLA's GPU compiler keeps a bitcast of the same bytes as it is."""
    codes = jax.ShapeDtypeStruct((8, 128), jnp.uint8)
    scales = jax.ShapeDtypeStruct((8, 8), jnp.uint8)
    jaxpr = jax.make_jaxpr(lambda c, s: mosaic_fp4.operands(c, s, get_format("mxfp4"), 128)[0])(codes, scales)
    used = [e.primitive.name for e in jaxpr.jaxpr.eqns if codes.shape == e.invars[0].aval.shape]
    assert used == ["bitcast_convert_type"]


def product(fmt="mxfp4", x_fmt=None, m=8, n=64, k=256):
    """block_scaled_matmul of codes (``x_fmt``) or bfloat16 (None) with a weight in rows, and its arguments."""
    w = prepare(*kernel_cases.weight(n, k, fmt)[:2], fmt, layout="rows")
    if x_fmt is None:
        return lambda implementation: lambda x, w: block_scaled_matmul(x, w, implementation=implementation), (
            jnp.ones((m, k), jnp.bfloat16),
            w,
        )
    x = kernel_cases.weight(m, k, x_fmt, seed=1)

    def call(implementation):
        return lambda x, s, w: block_scaled_matmul(
            x, w, x_scales=s, x_format=x_fmt, out_dtype=jnp.bfloat16, implementation=implementation
        )

    return call, (x.codes, x.scales, w)


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_taken_only_if_asked_for(fmt):
    call, args = product(fmt, fmt)
    with on("NVIDIA B200"):
        assert kernels_used(call("mosaic_gpu"), *args) == ("fp4_matmul",)
        assert "fp4_matmul" not in kernels_used(call(None), *args)


@pytest.mark.parametrize(
    "kind, fmt, x_fmt, reason",
    [
        ("NVIDIA H200", "mxfp4", "mxfp4", "FP4 matrix units of sm_100; this is NVIDIA H200"),
        ("NVIDIA RTX PRO 6000", "nvfp4", "nvfp4", "FP4 matrix units of sm_100"),
        ("NVIDIA B200", "mxfp4", None, "x is not quantized"),
        ("NVIDIA B200", "mxfp4", "mxfp8_e4m3", "x is mxfp8_e4m3, W mxfp4"),
        ("NVIDIA B200", "mxfp8_e4m3", "mxfp8_e4m3", "mxfp4 by mxfp4 and nvfp4 by nvfp4"),
    ],
)
def test_reasons(kind, fmt, x_fmt, reason):
    call, args = product(fmt, x_fmt)
    with on(kind), pytest.raises(BackendUnsupported, match=reason):
        kernels_used(call("mosaic_gpu"), *args)


def test_no_rows_is_a_reason():
    call, args = product("mxfp4", "mxfp4", m=0)
    with on("NVIDIA B200"), pytest.raises(BackendUnsupported, match="x has no rows"):
        kernels_used(call("mosaic_gpu"), *args)
    assert call(None)(*args).shape == (0, 64)


def test_a_jax_without_it(monkeypatch):
    older = SimpleNamespace(**{n: None for n in ("async_copy_scales_to_tmem", "async_load_tmem", "warp_map")})
    monkeypatch.setattr(_compat, "mosaic", lambda: older)
    call, args = product("mxfp4", "mxfp4")
    with on("NVIDIA B200"), pytest.raises(BackendUnsupported, match=r"has no tcgen05_mma, TMEMLayout"):
        kernels_used(call("mosaic_gpu"), *args)
    older.tcgen05_mma, older.TMEMLayout = lambda acc, a, b, barrier: None, None
    with on("NVIDIA B200"), pytest.raises(BackendUnsupported, match=r"has no tcgen05_mma\(a_scale=\)"):
        kernels_used(call("mosaic_gpu"), *args)


@kernel_cases.gpu("mosaic_gpu")
@kernel_cases.gpu("fp4_matmul")
@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("m, n, k", [(128, 256, 256), (1, 258, 576), (300, 512, 2048)])
def test_product_on_the_device(fmt, m, n, k):
    x, w = kernel_cases.weight(m, k, fmt, seed=1), kernel_cases.weight(n, k, fmt)
    packed = prepare(w.codes, w.scales, fmt, jnp.float32(0.5), layout="rows")
    bias = jnp.arange(n, dtype=jnp.float32)
    got = block_scaled_matmul(
        x.codes, packed, x_scales=x.scales, x_format=fmt, bias=bias, out_dtype=jnp.float32, implementation="mosaic_gpu"
    )
    kernel_cases.assert_product(got, x.values, 0.5 * w.values, np.asarray(bias))
