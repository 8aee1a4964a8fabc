"""Scales of x and W at opposite ends of float32: what a product goes through on the way must not leave it.

Each case has a generator of its own, so that its data depend on no other test.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import E2M1_VALUES, IMPLEMENTATIONS, assert_fp8_product, assert_product, gpu, weight
from mosaic_emulator import Emulator, of_wgmma_registers, wgmma_registers

from mxjax.core.formats import NVFP4
from mxjax.core.quantize import quantize_array
from pallas_kernels.block_scaled_matmul import (
    Epilogue,
    fragments,
    fused_epilogue,
    mosaic_fused,
    mosaic_gpu,
    mosaic_unpack,
    prepare,
    reference,
    triton,
    triton_generic,
)
from pallas_kernels.block_scaled_matmul.fused_tiles import FusedConfig
from pallas_kernels.grouped_matmul import api as grouped_api
from pallas_kernels.grouped_matmul import expert_stack
from pallas_kernels.grouped_matmul import reference as grouped_reference
from pallas_kernels.transform_quantize import transform_quantize_fp8

# Exponent of x, largest scale byte of W. Beside each, what one scale alone makes of sums up to 2**20:
ENDS = [
    (-20, 254),  # 2**147, and the result is 2**110
    (-110, 254),  # 2**147, and the result is 2**20
    (110, 3),  # 2**-124 * 2**-18 (the smallest sum), and the result is 2**-14
]


def f64(x):
    return np.asarray(x, np.float64)


def pair(m, k, exponent):
    x = np.random.default_rng(31).standard_normal((m, k)) * 2.0**exponent
    return transform_quantize_fp8(jnp.asarray(x, jnp.float32), implementation="xla")


def mxfp4(n, k, top):
    """Codes, scale bytes up to ``top``, float64 values."""
    rng = np.random.default_rng(32)
    nibbles = rng.integers(0, 16, (n, k), np.uint8)
    scales = np.full((n, k // 32), top) - rng.integers(0, 3, (n, k // 32))
    scales[:, 0] = top
    values = E2M1_VALUES[nibbles] * np.exp2(scales - 127.0).repeat(32, 1)
    return jnp.asarray(nibbles[:, ::2] | (nibbles[:, 1::2] << 4)), jnp.asarray(scales, jnp.uint8), values


@pytest.mark.parametrize("interpret", IMPLEMENTATIONS)
@pytest.mark.parametrize("route", ["generic", "decode", "xla tiles", "xla fragments"])
@pytest.mark.parametrize(("exponent", "top"), ENDS)
def test_pair_and_weight_at_opposite_ends(exponent, top, route, interpret):
    m, n, k = 3, 40, 96
    x, x_scale = pair(m, k, exponent)
    codes, scales, values = mxfp4(n, k, top)
    layout = {"generic": "rows", "decode": "tiles", "xla tiles": "tiles", "xla fragments": "fp8_fragments"}[route]
    w = prepare(codes, scales, "mxfp4", layout=layout)
    if route == "generic":
        config = triton_generic.generic_config(m, n, False)
        got = triton_generic.generic(x, None, x_scale, w, Epilogue(), None, jnp.float32, config, interpret=interpret)
    elif route == "decode":
        got = triton.decode(x, x_scale, w, None, jnp.float32, triton.DecodeConfig(16, 1), interpret=interpret)
    else:
        got = reference.matmul(x, None, x_scale, w, Epilogue(), None, jnp.float32)
    assert_product(got, f64(x) * f64(x_scale)[:, None], values)


@pytest.mark.parametrize("interpret", [pytest.param(None, id="xla"), *IMPLEMENTATIONS])
@pytest.mark.parametrize(("x_scale", "factor"), [(2.0**-100, 2.0**120), (2.0**112, 2.0**-118)])
def test_tensor_scales_of_nvfp4_at_opposite_ends(x_scale, factor, interpret):
    """One weight and a stack of experts; sums are up to (6 * 448)**2 * 64."""
    m, n, k = 4, 33, 64
    q = weight(n, k, "nvfp4", seed=33)
    x = quantize_array(jnp.asarray(np.random.default_rng(34).standard_normal((m, k)), jnp.float32), NVFP4)
    values = f64(x.dequantize(jnp.float32)) / f64(x.global_scale)
    rows = jnp.full((m,), x_scale, jnp.float32)
    w = prepare(q.codes, q.scales, NVFP4, jnp.float32(factor), layout="rows")
    stack = expert_stack(q.codes[None], q.scales[None], NVFP4, jnp.full((1,), factor, jnp.float32))
    one = (x.codes, x.scales, rows, w, Epilogue(), NVFP4, jnp.float32)
    experts = (x.codes, x.scales, rows, stack, jnp.asarray([m]), None, NVFP4, jnp.float32)
    if interpret is None:
        results = reference.matmul(*one), grouped_reference.matmul(*experts)
    else:
        config = triton_generic.generic_config(m, n, False)
        results = (
            triton_generic.generic(*one, config, interpret=interpret),
            grouped_api._triton(*experts, False, interpret=interpret),
        )
    # the values are dequantized with one rounding more, of 2**-24
    for got in results:
        assert_product(got, values * x_scale, q.values * factor)


@pytest.mark.parametrize(("x_exponent", "w_exponent"), [(-26, 127), (121, -127), (-120, 127)])
def test_register_code_scales_sums_at_opposite_ends(x_exponent, w_exponent, monkeypatch):
    """The fused Hopper kernel's epilogue on NumPy: sums from the smallest of two e4m3 numbers to 2**24, and 0."""
    m, n, columns = 21, 100, 24
    rng = np.random.default_rng(35)
    acc = np.exp2(rng.integers(-18, 25, (64, columns)).astype(np.float32)) * rng.choice([-1, 0, 1], (64, columns))
    acc = acc.astype(np.float32)
    x_scale = np.exp2(x_exponent + rng.integers(0, 3, m) - 2.0 * (x_exponent == 121)).astype(np.float32)
    row_scale, bias = np.full(n, 2.0**w_exponent, np.float32), rng.standard_normal(n).astype(np.float32)
    row0, m0 = 64, 0
    with monkeypatch.context() as patched:
        Emulator(128, patched)
        registers = fused_epilogue.scaled(
            wgmma_registers(acc), (row_scale, x_scale, bias), np.uint32(row0), np.uint32(m0), m, n, 2.0**-6
        )
    got = of_wgmma_registers(registers)[: n - row0, :m]
    exact = f64(acc)[: n - row0, :m] * f64(row_scale)[row0:, None] * f64(x_scale) * 2.0**-6
    want = exact.astype(np.float32) + bias[row0:, None]
    assert np.isfinite(want).all()
    np.testing.assert_array_equal(got, want)


@gpu("wgmma")
@pytest.mark.parametrize(("exponent", "top"), ENDS)
def test_pair_and_weight_at_opposite_ends_on_hopper(exponent, top):
    m, n, k = 3, 40, 96
    x, x_scale = pair(m, k, exponent)
    codes, scales, values = mxfp4(n, k, top)
    w = prepare(codes, scales, "mxfp4", layout="fp8_fragments")
    wanted = f64(x) * f64(x_scale)[:, None], values
    factor, config = 2.0**-fragments.FP8_SHIFT, mosaic_gpu.Fp8Config()
    for dtype in (jnp.bfloat16, jnp.float32):  # scaled in the kernel, and after partial sums
        assert_fp8_product(mosaic_fused.fused_matmul(x, x_scale, w, Epilogue(), dtype, FusedConfig(1, 8)), *wanted)
        unpacked = mosaic_unpack.unpack(w, 132)
        got = mosaic_gpu.fp8_matmul(x, x_scale, unpacked, w.row_scale, Epilogue(), dtype, n, config, 132, factor)
        assert_fp8_product(got, *wanted)
