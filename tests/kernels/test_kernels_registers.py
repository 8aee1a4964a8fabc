"""The register code of the Hopper kernels that quantize, run thread by thread on NumPy: bit for bit the reference.

Inputs are small multiples of powers of two, and so are the factors, so that every sum is exact in any order.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import bytes_of, gpu
from mosaic_emulator import Emulator

from mxjax.core.formats import MXFP4, MXFP6_E2M3, MXFP6_E3M2
from pallas_kernels.block_scaled_matmul import fragments, fused_columns
from pallas_kernels.transform_quantize import Transform, mosaic_gpu, mosaic_kronecker, reference, transform_quantize_fp8
from pallas_kernels.transform_quantize.mosaic_rows import slots

RNG = np.random.default_rng(11)


ROUNDED = [(MXFP4, "even"), (MXFP4, "floor"), (MXFP6_E2M3, "even"), (MXFP6_E3M2, "floor")]


def inputs(m, k):
    """Ties, zeros and blocks over 20 binades, so that some leave e4m3's exact range; a zero row, a NaN and an Inf."""
    x = RNG.integers(-12, 13, (m, k // 32, 32)) * np.exp2(RNG.integers(-20, 1, (m, k // 32, 1)))
    x[0, 0], x[m // 2] = 0, 0
    x = x.reshape(m, k)
    if m > 2:
        x[1, 3], x[2, 40 % k] = np.nan, np.inf
    return jnp.asarray(x, jnp.bfloat16)


def powers(*shape):
    """Matrices of few signed powers of two: products and sums are exact."""
    signs = RNG.integers(-1, 2, shape) * np.exp2(RNG.integers(-1, 2, shape))
    return jnp.asarray(signs + np.eye(shape[-1]), jnp.float32)


def assert_pair(got, x, t, policy, fmt=MXFP4):
    values, scale = got
    want_values, want_scale = reference.quantize_fp8(x, t, policy, fmt=fmt)
    np.testing.assert_array_equal(bytes_of(scale), bytes_of(want_scale))
    finite = np.isfinite(np.asarray(want_scale))  # the values of a NaN row mean nothing
    # a code of zero has no sign in the reference; in the kernel x + c - c is +0 too, but a block far below underflows
    got, want = (np.asarray(v).astype(np.float64)[finite] for v in (values, want_values))
    np.testing.assert_array_equal(got, want)


def buffers(m, k, words):
    return np.full((m, k), 0xEE, np.uint8), np.zeros(m, np.float32), np.zeros(words, np.uint32)


@pytest.mark.parametrize(("fmt", "policy"), ROUNDED)
@pytest.mark.parametrize(
    ("m", "k", "left", "right"),
    [(3, 1152, 18, 3), (11, 3072, 48, 8), (2, 4640, 5, 29), (1, 32, 1, 1), (5, 14336, 1, 7)],
)
def test_kronecker(m, k, left, right, fmt, policy, monkeypatch):
    x, t = inputs(m, k), Transform(left=powers(left, 4, 4), right=powers(right, 8, 8)).check(k)
    assert mosaic_kronecker.obstacle(x, t, policy, jnp.float8_e4m3fn) is None
    warps = -(-k // 1024)
    rows = min(16 // warps, m)
    blocks = min(-(-m // rows), 2)  # so that a block has several rounds
    o, scale, shared = buffers(m, k, mosaic_kronecker.shared_words(rows, warps))
    with monkeypatch.context() as patched:
        emulator = Emulator(128 * -(-rows * warps // 4), patched)
        body = mosaic_kronecker._body(m, k, rows, blocks, (left, right), policy, fmt.element)
        emulator.run(body, np.asarray(x), np.asarray(t.left), np.asarray(t.right), o, scale, shared, blocks=blocks)
    assert_pair((o.view(jnp.float8_e4m3fn), scale), x, t, policy, fmt)


@pytest.mark.parametrize(("fmt", "policy"), ROUNDED)
@pytest.mark.parametrize("kind", ["none", "scale", "hadamard", "matrix"])
@pytest.mark.parametrize(("m", "k"), [(3, 576), (9, 3072), (4, 5120)])
def test_rows(m, k, kind, fmt, policy, monkeypatch):
    t = {
        "none": Transform(),
        "scale": Transform(channel_scale=jnp.asarray(np.exp2(RNG.integers(-2, 3, k)), jnp.bfloat16)),
        "hadamard": Transform(hadamard=16),  # whose factor 1/4 is exact
        "matrix": Transform(matrix=powers(32, 32)),
    }[kind]
    x = inputs(m, k)
    config = mosaic_gpu.row_config(m, k, t, 2)
    blocks = min(config.blocks(m, 2), 2)
    factor = reference.hadamard_factor(16) if t.hadamard else np.float32(1)
    extra = {"scale": [t.channel_scale], "hadamard": [mosaic_gpu._hadamard_words(16)], "matrix": [t.matrix]}.get(
        kind, []
    )
    o, scale, shared = buffers(m, k, 2 * config.rows * slots(config.warps))
    with monkeypatch.context() as patched:
        emulator = Emulator(32 * config.rows * config.warps, patched)
        terms = {"hadamard": 1, "matrix": 2}.get(kind, 0)
        body = mosaic_gpu._body(m, k, config, blocks, terms, kind == "scale", factor, policy, fmt.element)
        arrays = [np.ascontiguousarray(np.asarray(a)) for a in (x, *extra)]
        emulator.run(body, *arrays, o, scale, shared, blocks=blocks)
    assert_pair((o.view(jnp.float8_e4m3fn), scale), x, t, policy, fmt)


@pytest.mark.parametrize(("m", "k", "rows"), [(33, 576, 32), (3, 128, 8), (200, 288, 128), (64, 256, 40)])
def test_gathered_columns_are_where_tma_would_put_permuted_ones(m, k, rows, monkeypatch):
    """Every stage of the ring: tiles of 8 x 64, a row's 16-byte chunks at chunk ^ row; zeros beyond the array."""
    x = np.asarray(jnp.asarray(RNG.standard_normal((m, k)), jnp.bfloat16))
    padded = np.zeros((m + rows, k + 128), x.dtype)
    padded[:m, :k] = np.asarray(fragments.permute_columns(jnp.asarray(x)))
    emulator = Emulator(128, monkeypatch)
    for m0 in range(0, m, rows):
        for block0 in range(0, k // 32, 4):
            tile = np.full((rows, 128), np.nan, x.dtype)
            fused_columns.gather(x, tile, np.uint32(m0), np.uint32(block0), m, k)
            stored = tile.reshape(rows // 8, 2, 8, 8, 8)  # row tile, column tile, row, chunk, value
            row = np.arange(8)
            got = stored[:, :, row[:, None], row[None] ^ row[:, None]].transpose(0, 2, 1, 3, 4).reshape(rows, 128)
            want = padded[m0 : m0 + rows, 32 * block0 : 32 * block0 + 128]
            np.testing.assert_array_equal(bytes_of(got), bytes_of(np.ascontiguousarray(want)))
    assert emulator.mask.all()


def test_kronecker_factors_are_a_matrix_for_each_block():
    x = jnp.asarray(RNG.standard_normal((3, 192)), jnp.float32)
    t = Transform(left=powers(3, 4, 4), right=powers(2, 8, 8)).check(192)
    dense = t.dense(192)
    assert dense.matrix.shape == (6, 32, 32) and t.per_block and dense.per_block and t.size == 32
    np.testing.assert_allclose(
        reference.apply_transform(x, t), reference.apply_transform(x, dense), rtol=1e-6, atol=1e-5
    )


@gpu("wgmma")
@pytest.mark.parametrize(("m", "k", "left", "right"), [(3, 1152, 18, 3), (700, 3072, 48, 8), (257, 15360, 160, 60)])
def test_kronecker_on_device(m, k, left, right):
    x, t = inputs(m, k), Transform(left=powers(left, 4, 4), right=powers(right, 8, 8))
    got = transform_quantize_fp8(x, transform=t, implementation="mosaic_gpu")
    assert_pair(got, x, t, "even")
    again = transform_quantize_fp8(x, transform=t, implementation="mosaic_gpu")
    np.testing.assert_array_equal(bytes_of(got[0]), bytes_of(again[0]))
