"""transform_quantize with the down-projection in the same pass: the same bytes, and x A^T up to its own rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import IMPLEMENTATIONS, assert_product, assert_same_bits

from mxjax.core.formats import get_format
from mxjax.core.quantize import fake_quantize
from mxjax.errors import BackendUnsupported, BlockShapeError
from pallas_kernels.transform_quantize import (
    Transform,
    quantized_down_projection,
    reference,
    transform_quantize_low_rank,
)
from pallas_kernels.transform_quantize.branch import branch_config, quantize_and_project
from pallas_kernels.transform_quantize.low_rank import LowRankConfig, low_rank_config, quantize_low_rank

RNG = np.random.default_rng(6)


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


# Sums of signs times few bits are exact in float32 in any order: the codes are equal bit for bit.
def exact_input(m, k, dtype):
    return jnp.asarray(RNG.integers(-64, 65, (m, k)) / 16, dtype)


CASES = [  # format, transform, m, k, r, splits, rows, dtype
    ("mxfp4", Transform(hadamard=32), 5, 576, 3, 2, 16, "bfloat16"),
    ("mxfp4", Transform(), 33, 288, 64, 1, 32, "float32"),
    ("mxfp8_e4m3", Transform(hadamard=128), 1, 256, 17, 1, 16, "bfloat16"),
    ("nvfp4", Transform(hadamard=16), 16, 400, 8, 4, 16, "bfloat16"),
    ("mxfp4", "scaled", 3, 160, 4, 1, 16, "float16"),
]


@pytest.mark.parametrize("interpret", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, (c[0], *c[2:]))))
def test_one_pass_is_both(case, interpret):
    fmt, t, m, k, r, splits, rows, dtype = case
    fmt, x, a = get_format(fmt), exact_input(m, k, dtype), normal(r, k, dtype=dtype)
    if t == "scaled":
        t = Transform(channel_scale=jnp.exp2(jnp.asarray(RNG.integers(-3, 4, k), jnp.float32)))
    scale = jnp.full((m,), 0.25, jnp.float32) if fmt.has_tensor_scale else None
    config = LowRankConfig(rows=rows, splits=splits)
    *got, down = quantize_low_rank(x, a, t, scale, fmt, "even", config, interpret=interpret)
    assert_same_bits(tuple(got), reference.quantize(x, t, scale, fmt, "even"))
    assert down.shape == (m, r) and down.dtype == x.dtype
    assert_product(down, np.asarray(x, np.float64), np.asarray(a, np.float64))


BRANCHES = [  # format, policy, m, k, r, config
    ("mxfp8_e4m3", "even", 5, 576, 3, LowRankConfig(rows=16, splits=2)),
    ("mxfp8_e4m3", "floor", 70, 288, 64, LowRankConfig(rows=64)),
    ("mxfp8_e5m2", "even", 33, 160, 33, LowRankConfig(rows=32)),
]


@pytest.mark.parametrize("interpret", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", BRANCHES, ids=lambda c: "-".join(map(str, c[:5])))
def test_quantized_input_of_a_branch(case, interpret):
    """The kernel's values are those of ``fake_quantize``: the product equals that of exact operands."""
    fmt, policy, m, k, r, config = case
    x = normal(m, k, dtype=jnp.bfloat16) * jnp.exp2(jnp.asarray(RNG.integers(-40, 40, (m, k // 32)))).repeat(32, 1)
    x, a = x.astype(jnp.bfloat16).at[0, :32].set(0), normal(r, k, dtype=jnp.bfloat16)
    got = quantize_and_project(x, a, get_format(fmt), policy, config, interpret=interpret)
    wanted = fake_quantize(x, fmt, scale=policy)
    assert (np.asarray(wanted) != np.asarray(x)).any()
    assert_product(got, np.asarray(wanted, np.float64), np.asarray(a, np.float64))
    nan = quantize_and_project(x.at[0, 1].set(jnp.nan), a, get_format(fmt), policy, config, interpret=interpret)
    assert np.isnan(np.asarray(nan[0], np.float32)).all() and np.isfinite(np.asarray(nan[1:], np.float32)).all()


def test_quantized_down_projection_chooses_and_checks():
    x, a = normal(2, 3, 64, dtype=jnp.bfloat16), normal(5, 64)
    for fmt in ("mxfp8_e4m3", "mxfp6_e2m3"):
        got = quantized_down_projection(x, a, fmt)
        want = np.asarray(fake_quantize(x, fmt), np.float64).reshape(6, 64)
        assert got.shape == (2, 3, 5)
        assert_product(got.reshape(6, 5), want, np.asarray(a.astype(jnp.bfloat16), np.float64))
    with pytest.raises(BackendUnsupported, match="quantizes to MXFP8, not to mxfp6_e2m3"):
        quantized_down_projection(x, a, "mxfp6_e2m3", implementation="triton")
    with pytest.raises(BlockShapeError, match="A "):
        quantized_down_projection(x, a[:, :32], "mxfp8_e4m3")
    assert len({branch_config(m, k, 132) for m in (1, 64, 1024, 4096, 9000) for k in (64, 576, 4096, 14336)}) <= 8


def test_api_is_the_two_steps_where_no_kernel_runs():
    x, a = normal(2, 3, 64), normal(5, 64)
    codes, scales, down = transform_quantize_low_rank(x, a, "mxfp4", transform=Transform(hadamard=32))
    assert_same_bits((codes, scales), reference.quantize(x, Transform(hadamard=32), None, get_format("mxfp4"), "even"))
    assert_product(down.reshape(6, 5), np.asarray(x, np.float64).reshape(6, 64), np.asarray(a, np.float64))
    with pytest.raises(BlockShapeError, match="A "):
        transform_quantize_low_rank(x, a[:, :32], "mxfp4")
    if jax.default_backend() != "gpu":
        with pytest.raises(BackendUnsupported, match="triton cannot run here"):
            transform_quantize_low_rank(x, a, "mxfp4", implementation="triton")


def test_configs_are_few():
    configs = {low_rank_config(m, k, 132) for m in (1, 16, 64, 1024, 4096, 9000) for k in (64, 576, 4096, 14336)}
    assert len(configs) <= 8
