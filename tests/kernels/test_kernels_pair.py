"""The pair from codes by the kernel's own code, and a diffusion layer that is kernels from end to end."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from kernel_cases import IMPLEMENTATIONS, assert_same_bits

import mxjax
from mxjax.core.formats import get_format
from mxjax.transforms import Kronecker
from pallas_kernels.block_scaled_matmul.routes import diagonal_blocks
from pallas_kernels.transform_quantize import Transform, reference, transform_quantize_fp8
from pallas_kernels.transform_quantize.pair import pair_of_codes

RNG = np.random.default_rng(8)


def rows(m, k, dtype=jnp.bfloat16):
    """Blocks of very different sizes, a zero row, a NaN and an infinity."""
    x = RNG.standard_normal((m, k)) * np.exp2(RNG.integers(-20, 20, (m, k // 32))).repeat(32, axis=1)
    x[0] = 0
    x[1, 3], x[2, -1] = np.nan, np.inf
    return jnp.asarray(x, dtype)


@pytest.mark.parametrize("interpret", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.bfloat16])
@pytest.mark.parametrize("k", [32, 576, 2880])
def test_pair_of_codes(k, dtype, interpret):
    x = rows(5, k)
    codes, byte = reference.quantize(x, Transform(), None, get_format("mxfp4"), "even")
    got = pair_of_codes(codes.reshape(5, 1, -1), byte.reshape(5, 1, -1), dtype, interpret=interpret)
    want = reference.quantize_fp8(x, Transform(), "even", dtype)
    finite = np.r_[0, 3, 4]  # values of a row with NaN mean nothing
    assert np.isnan(np.asarray(got[1])[[1, 2]]).all()
    assert_same_bits([g[finite, 0] for g in got], [w[finite] for w in want])


@pytest.mark.parametrize("policy", ["even", "third"])
def test_a_matrix_for_each_block_goes_in_two_passes(policy):
    """On a GPU two kernels, elsewhere XLA: the same pair."""
    x, t = rows(4, 96)[3:], Transform(matrix=jnp.asarray(RNG.integers(-2, 3, (3, 32, 32)), jnp.float32))
    got = transform_quantize_fp8(x, transform=t, policy=policy)
    assert_same_bits(got, reference.quantize_fp8(x, t, policy))


H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
SHARED, GROUPED = (1, 1), (12, 2)


def kroquant_loraq(n, k, groups):
    """What the recipe makes, without its minutes: a Kronecker transform, and a branch of rank 64 in MXFP8."""
    w = mxjax.quantize({"kernel": jnp.ones((k, n), jnp.bfloat16)}, "mxfp4")["kernel"]
    t = Kronecker(*(jnp.tile(jnp.eye(size), (g, 1, 1)) for g, size in zip(groups, (4, 8), strict=True)))
    a, b = (mxjax.quantize_array(jnp.ones(s, jnp.bfloat16), "mxfp8_e4m3") for s in ((64, k), (n, 64)))
    mxfp8 = mxjax.ActivationFormat(format=get_format("mxfp8_e4m3"))
    return replace(w, transform=t, branch=mxjax.LowRank(a=a, b=b, activation=mxfp8))


@pytest.mark.parametrize("groups, quantizers", [
    (SHARED, ("tq_row_fp8",)), (GROUPED, ("tq_kronecker_fp8",)),
])  # fmt: skip
def test_a_diffusion_layer_on_hopper_is_kernels_from_end_to_end(groups, quantizers):
    """No product and no pass over x is left to XLA, nor a float32 result to add a branch to."""
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        fused = mxjax.fuse_shared_inputs({n: kroquant_loraq(256, 768, groups) for n in "qkv"}, [tuple("qkv")])
        packed = jax.eval_shape(mxjax.prepare_kernels, fused)
        x = jax.ShapeDtypeStruct((512, 768), jnp.bfloat16)

        def layer(x, p):
            return mxjax.qdot_shared(x, *(p[n] for n in "qkv"))

        used = mxjax.kernels_used(layer, x, packed)
        text = str(jax.make_jaxpr(layer)(x, packed))
    assert used == ("tq_branch_mxfp8_e4m3", *quantizers, "w4_unpack", "fp8_matmul")
    assert "f32[512,768]" not in text, "no float32 result, and no transformed x"
    assert "bf16[768,64]" in text, "the blocks of B, without the zeros between them"


def test_diagonal_blocks():
    up = np.zeros((7, 6), np.float32)
    up[:3, :2], up[3:4, 2:4], up[4:, 4:] = 1, 2, 3
    np.testing.assert_array_equal(diagonal_blocks(up, (3, 4, 7)), [[1, 1]] * 3 + [[2, 2]] + [[3, 3]] * 3)
