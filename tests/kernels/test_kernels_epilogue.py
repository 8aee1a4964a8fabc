"""Epilogues and operand pairs on every route, against float64 with tolerances that are derived."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import IMPLEMENTATIONS, assert_product, bytes_of, gpu, weight

from mxjax.core.formats import FORMATS, MXFP4, get_format
from mxjax.core.quantize import quantize_array
from mxjax.errors import BackendUnsupported, BlockShapeError, ConfigError, FormatError
from pallas_kernels.block_scaled_matmul import (
    FUNCTIONS,
    Epilogue,
    block_scaled_matmul,
    fragments,
    inexact_blocks,
    mosaic_fused,
    mosaic_gpu,
    mosaic_unpack,
    prepare,
    reference,
    triton,
    triton_generic,
)
from pallas_kernels.block_scaled_matmul import api as matmul_api
from pallas_kernels.block_scaled_matmul.epilogue import split
from pallas_kernels.block_scaled_matmul.fused_tiles import FusedConfig
from pallas_kernels.block_scaled_matmul.triton_unpack import unpack_rows
from pallas_kernels.linear import quantized_linear
from pallas_kernels.transform_quantize import transform_quantize_fp8
from pallas_kernels.transform_quantize import triton as tq
from pallas_kernels.transform_quantize.reference import exact_binades

RNG = np.random.default_rng(5)
ERF = np.vectorize(math.erf)
EXACT = {  # float64
    None: lambda y: y,
    "relu": lambda y: np.maximum(y, 0),
    "silu": lambda y: y / (1 + np.exp(-y)),
    "gelu": lambda y: 0.5 * y * (1 + ERF(y / np.sqrt(2))),
    "gelu_tanh": lambda y: 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3))),
}


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def f64(x):
    return np.asarray(x, np.float64)


def assert_epilogue(got, x, w, bias, down, up, function):
    """As ``assert_product`` for the sums; then no function here is steeper than 1.13 (gelu), and each takes a dozen
    float32 operations on numbers up to |y| and 1: 16 * 2**-24 * (|y| + 1). The output is rounded once."""
    y = x @ w.T + down @ up.T + bias
    terms = np.abs(x) @ np.abs(w.T) + np.abs(down) @ np.abs(up.T) + np.abs(bias)
    exact = EXACT[function](y)
    sums = 2 * (x.shape[1] + up.shape[1] + 2) * 2.0**-24 * terms
    bound = 1.13 * sums + 16 * 2.0**-24 * (np.abs(y) + 1) + float(jnp.finfo(got.dtype).eps) / 2 * np.abs(exact)
    error = np.abs(f64(got) - exact)
    assert (error <= 1.01 * bound).all(), (error / bound).max()


def layer(m=5, n=130, k=160, rank=3):
    """x, a packed-to-be weight whose products have size 1, bias and branch."""
    q = weight(n, k)
    scales = jnp.asarray(RNG.integers(121, 126, q.scales.shape), jnp.uint8)
    values = f64(reference.dequantize(q.codes, scales, MXFP4, jnp.float32))
    x, bias = normal(m, k, dtype=jnp.bfloat16), normal(n)
    down, up = normal(m, rank, dtype=jnp.bfloat16), normal(n, rank, dtype=jnp.bfloat16)
    return q.codes, scales, values, x, bias, down, up


@pytest.mark.parametrize("function", EXACT)
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("route", ["xla rows", "xla tiles", "generic", "decode", "unpacked"])
def test_epilogue_on_every_route(route, out_dtype, function):
    """The kernels' own code in interpret mode; what a kernel leaves to XLA is what the api adds after it."""
    codes, scales, values, x, bias, down, up = layer()
    epilogue = Epilogue(bias=bias, down=down, up=up, function=function)
    dtype = jnp.dtype(out_dtype)
    w = prepare(codes, scales, "mxfp4", layout="rows" if route in ("xla rows", "generic") else "tiles")
    if route.startswith("xla"):
        got = reference.matmul(x, None, None, w, epilogue, None, dtype)
    elif route == "generic":
        config = triton_generic.generic_config(5, 130, False)
        got = triton_generic.generic(x, None, None, w, epilogue, None, dtype, config, interpret=True)
    else:

        def run(bias, dtype):
            if route == "decode":
                return triton.decode(x, None, w, bias, dtype, triton.DecodeConfig(16, 1), interpret=True)
            unpacked = triton.unpack(w, jnp.bfloat16, interpret=True)
            return reference.finish(f64_product(x, unpacked), w, None, bias, dtype)

        got = split(epilogue, dtype, run)
    assert got.dtype == dtype and got.shape == (5, 130)
    assert_epilogue(got, f64(x), values, f64(bias), f64(down), f64(up), function)


def f64_product(x, values):
    return jnp.asarray(f64(x) @ f64(values)[:, : x.shape[1]].T, jnp.float32)


def test_api_takes_the_epilogue_and_checks_it():
    codes, scales, values, x, bias, down, up = layer(m=6)
    w = prepare(codes, scales, "mxfp4", layout="rows")
    got = block_scaled_matmul(
        x.reshape(2, 3, -1), w, bias=bias, low_rank=(down.reshape(2, 3, -1), up), activation_function="silu"
    )
    assert got.shape == (2, 3, 130)
    assert_epilogue(got.reshape(6, -1), f64(x), values, f64(bias), f64(down), f64(up), "silu")
    with pytest.raises(ConfigError, match="activation functions are silu, gelu, gelu_tanh, relu, not 'swish'"):
        block_scaled_matmul(x, w, activation_function="swish")
    with pytest.raises(BlockShapeError, match="do not fit a product"):
        block_scaled_matmul(x, w, low_rank=(down, up[1:]))
    with pytest.raises(BlockShapeError, match="bias"):
        block_scaled_matmul(x, w, bias=bias[1:])
    assert set(FUNCTIONS) == set(EXACT) - {None}


# --- Hopper: the whole epilogue inside the kernels -------------------------------------------------------------------


def test_what_the_hopper_kernels_take():
    one, two = FusedConfig(2, 64, 1), FusedConfig(2, 64, 2)
    low = Epilogue(down=normal(4, 64, dtype=jnp.bfloat16), up=normal(8, 64))
    for kernel in (lambda e, d: mosaic_fused.takes_whole(e, d, one), mosaic_gpu.takes_whole):
        assert kernel(Epilogue(bias=normal(8)), jnp.float32)
        assert kernel(low, jnp.bfloat16) and kernel(Epilogue(function="gelu"), jnp.bfloat16)
        assert not kernel(low, jnp.float32)
        assert not kernel(Epilogue(down=normal(4, 64), up=normal(8, 64)), jnp.bfloat16)  # float32 factors
    assert not mosaic_fused.takes_whole(low, jnp.bfloat16, two)  # partial results: XLA adds them, and the branch
    assert not mosaic_fused.takes_whole(
        Epilogue(down=normal(4, 160, dtype=jnp.bfloat16), up=normal(8, 160)), jnp.bfloat16, one
    )


HOPPER = [  # m, n, k, rank, kernel
    (33, 258, 576, 16, FusedConfig(2, 40)),
    (200, 576, 1024, 64, FusedConfig(2, 128)),
    (300, 448, 768, 128, FusedConfig(3, 64, overlap=1)),
    (300, 776, 1024, 64, mosaic_gpu.Fp8Config()),
    (130, 258, 576, 80, mosaic_gpu.Fp8Config(tile_m=128, tile_n=64)),
]


@gpu("wgmma")
@pytest.mark.parametrize("function", EXACT)
@pytest.mark.parametrize(("m", "n", "k", "rank", "config"), HOPPER)
def test_epilogue_inside_the_hopper_kernels(m, n, k, rank, config, function):
    codes, scales, values, x, bias, down, up = layer(m=m, n=n, k=k, rank=rank)
    pair, row_scale = transform_quantize_fp8(x)
    w = prepare(codes, scales, "mxfp4", layout="fp8_fragments")
    epilogue, dtype = Epilogue(bias=bias, down=down, up=up, function=function), jnp.dtype(jnp.bfloat16)
    if isinstance(config, FusedConfig):
        got = mosaic_fused.fused_matmul(pair, row_scale, w, epilogue, dtype, config)
    else:
        unpacked, factor = mosaic_unpack.unpack(w, 132), 2.0**-fragments.FP8_SHIFT
        got = mosaic_gpu.fp8_matmul(pair, row_scale, unpacked, w.row_scale, epilogue, dtype, n, config, 132, factor)
    x = f64(pair) * f64(row_scale)[:, None]
    y = x @ values.T + f64(down) @ f64(up).T + f64(bias)
    # Hopper's FP8 units cut a running sum 13 bits behind its leading one, once every 32 products (kernel_cases); the
    # branch is a float32 sum; no function is steeper than 1.13; the result is rounded to 8 bits
    sums = (k / 32) * 2.0**-13 * (np.abs(x) @ np.abs(values.T))
    sums += 2 * rank * 2.0**-24 * (np.abs(f64(down)) @ np.abs(f64(up)).T)
    want = EXACT[function](y)
    error = np.abs(f64(got) - want)
    assert (error <= 1.13 * sums + 2.0**-8 * np.abs(want) + 2.0**-20 * (np.abs(y) + 1)).all()
    assert np.linalg.norm(error) <= 2.0**-7 * np.linalg.norm(want)


@pytest.mark.parametrize("activation", [None, MXFP4])
def test_linear_passes_the_epilogue_on(activation):
    codes, scales, _, x, bias, down, up = layer()
    a = normal(3, 160, dtype=jnp.bfloat16)
    for layout in ("rows", "tiles"):
        w = prepare(codes, scales, "mxfp4", layout=layout)
        rest = dict(activation=activation, bias=bias, out_dtype=jnp.float32, activation_function="gelu")
        plain = quantized_linear(x, w, activation=activation, out_dtype=jnp.float32)
        for branch in (dict(low_rank_a=a), dict(low_rank_down=down)):
            got = quantized_linear(x, w, low_rank_up=up, **branch, **rest)
            low = (x @ a.T) if "low_rank_a" in branch else down
            want = EXACT["gelu"](f64(plain) + f64(low) @ f64(up).T + f64(bias))
            # x A^T is rounded to bfloat16 by both, after sums in different orders: one may be the next number
            assert np.linalg.norm(f64(got) - want) <= 2.0**-7 * np.linalg.norm(want)


PAIRS = [(x, w) for x in FORMATS for w in ("mxfp4", "nvfp4")] + [
    ("mxfp6_e2m3", "mxfp6_e2m3"),
    ("mxfp6_e3m2", "mxfp6_e3m2"),
    ("mxfp8_e4m3", "mxfp8_e4m3"),
    ("mxfp8_e5m2", "mxfp8_e4m3"),
    ("mxint8", "mxint8"),
    ("mxfp4", "mxfp6_e2m3"),
    ("mxfp8_e4m3", "mxfp6_e3m2"),
]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_pairs_of_formats(pair):
    """XLA's route for every pair; the kernel for those it decodes. MXINT8 says that XLA dequantizes it."""
    x_fmt, w_fmt = map(get_format, pair)
    m, n, k = 3, 34, 96
    xq, wq = quantize_array(normal(m, k), x_fmt, batch_axes=1 if x_fmt.has_tensor_scale else 0), None
    wq = quantize_array(normal(n, k), w_fmt)
    w = prepare(wq.codes, wq.scales, w_fmt, wq.global_scale, layout="rows")
    args = (xq.codes, xq.scales, xq.global_scale, w, Epilogue(), x_fmt, jnp.float32)
    wanted = f64(xq.dequantize(jnp.float32)), f64(wq.dequantize(jnp.float32))
    # a tensor scale is applied to the sums here and to each value there: one more rounding of 2**-24
    runs = [reference.matmul(*args)]
    kernel = not any(f.element.twos_complement for f in (x_fmt, w_fmt))
    if kernel:
        config = triton_generic.generic_config(m, n, False)
        runs.append(triton_generic.generic(*args, config, interpret=True))
    else:
        from mxjax import backend

        h200 = backend.Target("cuda", "sm_90", "NVIDIA H200", 132)
        assert "XLA dequantizes it" in matmul_api.rows_obstacle(xq.codes, x_fmt, w_fmt, h200)
    for got in runs:
        assert_product(got, *wanted)


# --- MXFP6 in FP8 ----------------------------------------------------------------------------------------------------


def spread(fmt, n, k, binades):
    """A weight whose blocks lie up to ``binades`` below their row's largest, and its float64 values."""
    q = weight(n, k, fmt)
    below = RNG.integers(0, binades + 1, q.scales.shape)
    below[:, 0], below[:, -1] = 0, binades
    scales = jnp.asarray(RNG.integers(110, 140, (n, 1)) - below, jnp.uint8)
    return q.codes, scales, f64(reference.dequantize(q.codes, scales, get_format(fmt), jnp.float32))


@pytest.mark.parametrize("interpret", IMPLEMENTATIONS)
@pytest.mark.parametrize(("x_fmt", "w_fmt"), [("mxfp6_e2m3", "mxfp6_e2m3"), ("mxfp6_e3m2", "mxfp6_e3m2"),
                                              ("mxfp6_e2m3", "mxfp4"), ("mxfp4", "mxfp6_e3m2")])  # fmt: skip
def test_exact_fp8_product_of_six_bits(x_fmt, w_fmt, interpret):
    """W6A6, W4A6 and W6A4: the pair and the unpacked weight hold every value exactly, down to the last binade."""
    m, n, k = 5, 34, 160
    w_fmt, x_fmt = get_format(w_fmt), get_format(x_fmt)
    codes, scales, values = spread(w_fmt, n, k, exact_binades(w_fmt.element))
    w = prepare(codes, scales, w_fmt, layout="rows")
    assert int(inexact_blocks(scales, w_fmt)) == 0
    unpacked, w_scale = unpack_rows(w, interpret=interpret)
    np.testing.assert_array_equal(f64(unpacked) * f64(w_scale)[:, None], values)
    assert int(inexact_blocks(scales.at[0, 1].set(scales[0, 0] - exact_binades(w_fmt.element) - 1), w_fmt)) == 1

    x = normal(m, k) * jnp.exp2(jnp.asarray(RNG.integers(-4, 1, (m, k // 32)), jnp.float32)).repeat(32, 1)
    pair, row_scale = tq.quantize_fp8(x, Nothing, "even", jnp.float8_e4m3fn, x_fmt, interpret=interpret)
    quantized = f64(quantize_array(x, x_fmt).dequantize(jnp.float32))
    np.testing.assert_array_equal(f64(pair) * f64(row_scale)[:, None], quantized)
    want = transform_quantize_fp8(x, fmt=x_fmt, implementation="xla")
    np.testing.assert_array_equal(bytes_of(pair), bytes_of(want[0]))
    config = triton_generic.generic_config(m, n, False)
    got = triton_generic.generic(pair, None, row_scale, w, Epilogue(), None, jnp.float32, config, interpret=interpret)
    assert_product(got, quantized, values)


def test_pairs_of_six_bits_are_checked():
    with pytest.raises(FormatError, match="holds mxfp4, mxfp6_e2m3, mxfp6_e3m2, not mxfp8_e4m3"):
        transform_quantize_fp8(normal(2, 64), fmt="mxfp8_e4m3")


# --- exact FP8 on gfx942: e4m3fnuz -----------------------------------------------------------------------------------

FNUZ = jnp.float8_e4m3fnuz


def fnuz_input(m, k):
    """Values over 20 binades, so that some blocks leave the exact range; a zero block and a negative that vanishes."""
    x = RNG.standard_normal((m, k // 32, 32)) * np.exp2(RNG.integers(-12, 8, (m, k // 32, 1)))
    x[0, 0], x[0, 1, :], x[1, 0] = 0.0, -(2.0**-24), 2.0**7
    return jnp.asarray(x.reshape(m, k), jnp.float32)


FNUZ_DEVICE = pytest.param(False, id="device", marks=gpu("fp8_fnuz_matmul"))  # NVIDIA has no such format


@pytest.mark.parametrize("interpret", [IMPLEMENTATIONS[0], FNUZ_DEVICE])
def test_fnuz_pair_is_the_bytes_of_the_fn_pair_and_never_0x80(interpret):
    x = fnuz_input(4, 256)
    fn, fn_scale = transform_quantize_fp8(x, implementation="xla")
    values, scale = transform_quantize_fp8(x, dtype=FNUZ, implementation="xla")
    want = np.where(bytes_of(fn) == 0x80, 0, bytes_of(fn))
    np.testing.assert_array_equal(bytes_of(values), want)
    np.testing.assert_array_equal(scale, 2 * fn_scale)  # the same bits are half the value
    assert (bytes_of(fn) == 0x80).any() and np.isfinite(f64(values)).all() and np.abs(f64(values)).max() <= 192
    got, got_scale = tq.quantize_fp8(x, Nothing, "even", FNUZ, interpret=interpret)
    np.testing.assert_array_equal(bytes_of(got), want)
    np.testing.assert_array_equal(got_scale, scale)


Nothing = tq.Transform()


XLA = pytest.param(None, id="xla")


@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "interpret"),
    [
        pytest.param(*case, *i.values, id=f"{case[-1].__name__}-{i.id}", marks=i.marks)
        for case, device in (
            ((3, 130, 576, FNUZ), FNUZ_DEVICE),
            ((17, 64, 96, jnp.float8_e4m3fn), IMPLEMENTATIONS[1]),
        )
        for i in (XLA, IMPLEMENTATIONS[0], device)
    ],
)
def test_fp8_product_of_rows_weights(m, n, k, dtype, interpret):
    q = weight(n, k)
    scales = q.scales.at[:, -1].set(q.scales[:, :-1].max(axis=1) - 13)  # the last binade that is exact everywhere
    values = f64(reference.dequantize(q.codes, scales, MXFP4, jnp.float32))
    w = prepare(q.codes, scales, "mxfp4", jnp.float32(0.5), layout="rows")
    x, row_scale = transform_quantize_fp8(normal(m, k), dtype=dtype, implementation="xla")
    args = (x, None, row_scale, w, Epilogue(bias=normal(n)), None, jnp.float32)
    if interpret is None:
        got = reference.matmul(*args)
    else:
        got = triton_generic.generic(*args, triton_generic.generic_config(m, n, False), interpret=interpret)
    assert_product(got, f64(x) * f64(row_scale)[:, None], values * 0.5, f64(args[4].bias))


def test_fnuz_needs_gfx942():
    q = weight(8, 64)
    w = prepare(q.codes, q.scales, "mxfp4", layout="rows")
    x, scale = transform_quantize_fp8(normal(2, 64), dtype=FNUZ)
    assert block_scaled_matmul(x, w, x_scale=scale).shape == (2, 8)
    if jax.default_backend() != "gpu":
        with pytest.raises(BackendUnsupported, match="triton cannot run here"):
            transform_quantize_fp8(normal(2, 64), dtype=FNUZ, implementation="triton")


@pytest.mark.parametrize("layout", ["rows", "tiles", "bf16_fragments"])
def test_no_rows_with_a_branch_or_codes(layout):
    q = weight(64, 128)
    w = prepare(q.codes, q.scales, "mxfp4", layout=layout)
    branch = (jnp.zeros((2, 0, 16)), jnp.ones((64, 16)))
    assert block_scaled_matmul(jnp.zeros((2, 0, 128)), w, low_rank=branch, bias=jnp.ones(64)).shape == (2, 0, 64)
    codes = dict(x_scales=jnp.zeros((0, 4), jnp.uint8), x_format="mxfp4")
    assert block_scaled_matmul(jnp.zeros((0, 64), jnp.uint8), w, activation_function="gelu", **codes).shape == (0, 64)


@pytest.mark.parametrize("rank", [None, 16])
@pytest.mark.parametrize("activation", ["mxfp4", "nvfp4", "mxfp8_e4m3"])
@pytest.mark.parametrize("layout", ["rows", "tiles", "fp8_fragments"])
def test_no_rows_to_quantize(layout, activation, rank):
    q = weight(64, 128)
    w = prepare(q.codes, q.scales, "mxfp4", layout=layout)
    factors = {} if rank is None else dict(low_rank_a=jnp.ones((rank, 128)), low_rank_up=jnp.ones((64, rank)))
    x = jnp.zeros((0, 128), jnp.bfloat16)
    assert quantized_linear(x, w, activation=get_format(activation), **factors).shape == (0, 64)
