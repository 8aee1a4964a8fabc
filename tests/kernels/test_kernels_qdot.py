"""qdot on packed weights: the same numbers as XLA's qdot, gradients, and which kernels each device would run."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import mxjax
from mxjax import backend
from mxjax.core.formats import MXFP4, MXFP6_E2M3, MXFP6_E3M2, MXFP8_E4M3, NVFP4
from mxjax.errors import BackendUnsupported, BlockShapeError, ConfigError, MxjaxWarning
from mxjax.ops import ActivationFormat, LowRank, QWeight
from mxjax.ops.kernels import kernel_dot
from mxjax.transforms import Hadamard, Kronecker

RNG = np.random.default_rng(3)


def qweight(n=48, k=128, fmt="mxfp4", rank=0, branch_activation=None, **kwargs):
    q = mxjax.quantize_array(jnp.asarray(RNG.standard_normal((k, n)), jnp.float32), fmt, axis=0)
    if rank:
        a, b = (jnp.asarray(RNG.standard_normal(s), jnp.float32) / 8 for s in ((rank, k), (n, rank)))
        kwargs |= dict(branch=LowRank(a=a, b=b, activation=branch_activation))
    return QWeight(qtensor=q, **kwargs)


def activation(fmt, policy="even"):
    return ActivationFormat(format=fmt, scale=policy)


# random and well conditioned; factors of their own for halves and quarters of the blocks
KRONECKER = Kronecker(*(jnp.eye(n) + 0.3 * jnp.asarray(RNG.standard_normal((g, n, n)) / n, jnp.float32)
                        for g, n in ((2, 4), (4, 8))))  # fmt: skip
# as KroQuant makes them: one factor on each side, and scales of each block's rows and columns
SCALED = Kronecker(KRONECKER.left[:1], KRONECKER.right[:1],
                   *(jnp.exp(0.5 * jnp.asarray(RNG.standard_normal((4, n)), jnp.float32)) for n in (4, 8)))  # fmt: skip
CASES = {
    "w4a16": dict(),
    "w4a4": dict(activation=activation(MXFP4), transform=Hadamard(32)),
    "w4a4_third": dict(activation=activation(MXFP4, "third")),
    "w4a8_low_rank": dict(activation=activation(MXFP8_E4M3), rank=4),
    "w4a4_low_rank_mxfp8": dict(activation=activation(MXFP4), rank=32, branch_activation=activation(MXFP8_E4M3)),
    "w4a4_kronecker": dict(
        activation=activation(MXFP4), transform=KRONECKER, rank=32, branch_activation=activation(MXFP8_E4M3)
    ),
    "w4a4_kronecker_scales": dict(activation=activation(MXFP4), transform=SCALED),
    "w4a4_kronecker_right_scales": dict(activation=activation(MXFP4), transform=replace(SCALED, left_scale=None)),
    "w6a6": dict(fmt="mxfp6_e2m3", activation=activation(MXFP6_E2M3), transform=Hadamard(32)),
    "w4a6": dict(activation=activation(MXFP6_E3M2)),
    "nvfp4": dict(fmt="nvfp4", activation=activation(NVFP4), transform=Hadamard(16)),
    "nvfp4_fixed": dict(activation=activation(NVFP4), input_scale=jnp.float32(0.01)),
}


@pytest.mark.parametrize("layout", ["rows", "tiles", "fp8_fragments", "bf16_fragments"])
@pytest.mark.parametrize("case", CASES)
def test_packed_equals_unpacked(case, layout):
    w = qweight(**CASES[case])
    if layout != "rows" and w.format != MXFP4:
        layout = None
    x = jnp.asarray(RNG.standard_normal((2, 3, 128)), jnp.float32)
    want = mxjax.qdot(x, w)
    packed = mxjax.prepare_kernels({"w": w, "bias": x}, layout)
    assert packed["bias"] is x
    got = mxjax.qdot(x, packed["w"])
    assert got.shape == want.shape and got.dtype == want.dtype
    # Sums in another order move a value across a rounding boundary now and then; quantization itself is off by 2**-4.
    tolerance = 2.0**-7 if w.activation is not None else 2.0**-8
    assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)


def test_gradient_is_straight_through_and_reaches_the_low_rank_branch():
    w = qweight(activation=activation(MXFP4), transform=Hadamard(32), rank=4)
    x = jnp.asarray(RNG.standard_normal((5, 128)), jnp.float32)

    def loss(x, branch, leaf):
        return jnp.sum(jnp.sin(mxjax.qdot(x, replace(leaf, branch=branch))))

    want = jax.tree.leaves(jax.grad(loss, (0, 1))(x, w.branch, w))
    packed = mxjax.prepare_kernels(w, "rows")
    got = jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1)))(x, w.branch, packed))
    for g, r in zip(got, want, strict=True):
        assert np.linalg.norm(g - r) <= 2.0**-6 * np.linalg.norm(r)


@pytest.mark.parametrize("function", ["gelu_tanh", "silu"])
def test_activation_function_in_the_epilogue_and_its_gradient(function):
    w = qweight(activation=activation(MXFP4), transform=Hadamard(32), rank=4)
    packed, x = mxjax.prepare_kernels(w, "rows"), jnp.asarray(RNG.standard_normal((5, 128)), jnp.float32)
    bias = jnp.asarray(RNG.standard_normal(48), jnp.float32)
    f = {"gelu_tanh": partial(jax.nn.gelu, approximate=True), "silu": jax.nn.silu}[function]

    def inside(x, bias, branch):
        return kernel_dot(x, replace(packed, branch=branch), bias=bias, activation_function=function)

    def after(x, bias, branch):
        return f(kernel_dot(x, replace(packed, branch=branch), bias=bias))

    np.testing.assert_allclose(inside(x, bias, w.branch), after(x, bias, w.branch), rtol=1e-5, atol=1e-5)

    def gradients(call):
        return jax.tree.leaves(jax.grad(lambda *args: jnp.sum(jnp.sin(call(*args))), (0, 1, 2))(x, bias, w.branch))

    # Both send nearly the same gradient of y through the same products. TF32, a GPU's default, rounds it to 11 bits:
    # what lies next to a tie in one moves by 2**-10 in the other (1.07e-4 of the norm on an H200).
    with jax.default_matmul_precision("highest"):
        parts = gradients(inside), gradients(after)
    for g, r in zip(*parts, strict=True):
        assert g.shape == r.shape and np.linalg.norm(g - r) <= 1e-4 * np.linalg.norm(r) and np.linalg.norm(r) > 0


def test_tree_goes_through_jit_and_scan():
    layers = [mxjax.prepare_kernels(qweight(128, 128, activation=activation(MXFP4)), "tiles") for _ in range(3)]
    x = jnp.asarray(RNG.standard_normal((2, 128)), jnp.float32)
    want = x
    for layer in layers:
        want = mxjax.qdot(want, layer)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    got, _ = jax.jit(lambda x, ws: jax.lax.scan(lambda x, w: (mxjax.qdot(x, w), None), x, ws))(x, stacked)
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2 * float(jnp.abs(want).max()))


def used(device, m, layout, **kwargs):
    w = qweight(256, 256, **kwargs)
    x = jnp.zeros((m, 256), jnp.bfloat16)
    abstract = AbstractDevice(device_kind=device, num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
        leaf = w if layout is None else mxjax.ops.kernels.pack(w, None if layout == "default" else layout)
        return mxjax.kernels_used(lambda x, w: mxjax.qdot(x, w), x, leaf)


@pytest.mark.parametrize(
    ("device", "m", "layout", "case", "kernels"),
    [
        ("NVIDIA H200", 1, "default", "w4a16", ("w4_rows",)),
        ("NVIDIA H200", 64, "default", "w4a16", ("w4_permute", "w4_fused_bf16")),
        ("NVIDIA H200", 4096, "default", "w4a16", ("w4_unpack",)),
        ("NVIDIA H200", 16, "default", "w4a4", ("tq_row_fp8", "w4_fused_fp8")),
        ("NVIDIA H200", 512, "default", "w4a4", ("tq_row_fp8", "w4_fused_fp8")),
        ("NVIDIA H200", 4096, "default", "w4a4", ("tq_row_fp8", "w4_unpack", "fp8_matmul")),
        (
            "NVIDIA H200",
            4096,
            "default",
            "w4a4_kronecker",
            ("tq_branch_mxfp8_e4m3", "tq_kronecker_fp8", "w4_unpack", "fp8_matmul"),
        ),
        ("NVIDIA H200", 4096, "default", "w4a4_kronecker_scales", ("tq_kronecker_fp8", "w4_unpack", "fp8_matmul")),
        (
            "NVIDIA H200",
            4096,
            "default",
            "w4a4_kronecker_right_scales",
            ("tq_kronecker_fp8", "w4_unpack", "fp8_matmul"),
        ),
        (
            "NVIDIA B200",
            64,
            "rows",
            "w4a4_kronecker",
            ("tq_branch_mxfp8_e4m3", "tq_blocks_mxfp4", "matmul_mxfp4_mxfp4_native"),
        ),
        ("NVIDIA H200", 16, "default", "w4a8_low_rank", ("tq_low_rank_mxfp8_e4m3", "w4_rows")),
        ("NVIDIA A100-SXM4-80GB", 1, "default", "w4a16", ("w4_decode",)),
        ("NVIDIA H200", 1, "tiles", "w4a16", ("w4_decode",)),
        ("NVIDIA H200", 64, "default", "w6a6", ("tq_row_fp8", "matmul_float8_e4m3fn_mxfp6_e2m3_fp8")),
        ("NVIDIA H200", 4096, "default", "w6a6", ("tq_row_fp8", "unpack_mxfp6_e2m3", "fp8_matmul")),
        ("NVIDIA H200", 64, "default", "w4a6", ("tq_row_fp8", "w4_fused_fp8")),
        ("gfx942", 64, "default", "w6a6", ("tq_row_fp8", "matmul_float8_e4m3fnuz_mxfp6_e2m3_fp8")),
        ("NVIDIA B200", 64, "default", "w6a6", ("matmul_mxfp6_e2m3_mxfp6_e2m3",)),
        ("NVIDIA H200", 1024, "tiles", "w4a16", ("w4_unpack",)),
        ("NVIDIA H200", 16, "tiles", "w4a4", ("tq_row_fp8", "w4_decode")),
        ("NVIDIA H200", 1024, "tiles", "w4a4", ("tq_row_fp8", "w4_unpack", "fp8_matmul")),
        ("NVIDIA H200", 16, None, "w4a16", ()),  # not packed: XLA
        ("NVIDIA B200", 1024, "rows", "w4a4", ("tq_blocks_mxfp4", "matmul_mxfp4_mxfp4_native")),
        ("gfx950", 1024, "rows", "w4a4", ("tq_blocks_mxfp4", "matmul_mxfp4_mxfp4_native")),
        ("gfx942", 16, "rows", "w4a16", ("matmul_bfloat16_mxfp4",)),
        ("gfx942", 1024, "rows", "w4a4", ("tq_row_fp8", "matmul_float8_e4m3fnuz_mxfp4_fp8")),
        ("gfx950", 1024, "rows", "w4a8_low_rank", ("tq_low_rank_mxfp8_e4m3", "matmul_mxfp8_e4m3_mxfp4_native")),
        ("NVIDIA B200", 1024, None, "w4a4", ()),  # kernels that were never run there are asked for by packing
        ("gfx950", 1024, None, "w4a4", ()),
        ("gfx942", 1024, "rows", "w4a16", ()),  # decoding W for every row tile would lose against XLA
        ("cpu", 16, "tiles", "w4a4", ()),
    ],
)
def test_kernels_by_device(device, m, layout, case, kernels):
    assert used(device, m, layout, **CASES[case]) == kernels


def test_bias_is_added_before_the_rounding_and_has_a_gradient():
    w, bias = qweight(activation=activation(MXFP4)), jnp.asarray(RNG.standard_normal(48), jnp.float32)
    packed, x = mxjax.prepare_kernels(w, "rows"), jnp.asarray(RNG.standard_normal((2, 3, 128)), jnp.bfloat16)
    got = kernel_dot(x, packed, bias=bias)
    exact = mxjax.qdot(x, packed, preferred_element_type=jnp.float32)
    sums = np.asarray(mxjax.qdot(x.astype(jnp.float32), w), np.float64) + np.asarray(bias, np.float64)
    assert got.dtype == jnp.bfloat16 and exact.dtype == jnp.float32
    # one rounding to bfloat16, after float32 sums of 128 products
    np.testing.assert_allclose(np.asarray(got, np.float64), sums, rtol=2.0**-8, atol=128 * 2.0**-22)
    grad = jax.grad(lambda b: jnp.sum(kernel_dot(x, packed, bias=b).astype(jnp.float32)))(bias)
    np.testing.assert_array_equal(grad, np.full(48, 6.0))


def test_blocks_that_fp8_rounds_are_counted(monkeypatch):
    w = qweight(activation=activation(MXFP4))
    scales = w.qtensor.scales.at[:, 0].set(140).at[3, 1:].set(100).at[4, 2].set(125)
    w = replace(w, qtensor=replace(w.qtensor, scales=scales.at[0].set(120)))
    low = int(mxjax.ops.kernels.inexact_blocks(w.qtensor.scales))
    assert low >= 4
    plain = replace(w, activation=None)
    mxjax.prepare_kernels([w, plain])  # no FP8 units here, no warning
    monkeypatch.setattr(backend, "target", lambda device=None: backend.Target("rocm", "gfx942", "gfx942", 304))
    with pytest.warns(MxjaxWarning, match=rf"^{low} of {48 * 4} blocks of weights with 4 or 6 bit"):
        mxjax.prepare_kernels({"a": w, "b": plain})
    mxjax.prepare_kernels({"b": plain, "c": qweight(activation=activation(MXFP4))})


def test_einsum_of_packed_weights():
    w = qweight(activation=activation(MXFP4))
    packed, x = mxjax.prepare_kernels(w, "rows"), jnp.asarray(RNG.standard_normal((2, 128, 3)), jnp.float32)
    assert packed.shape == w.shape and packed.dtype == w.dtype
    np.testing.assert_allclose(mxjax.qeinsum("bkt,kn->nbt", x, packed), mxjax.qeinsum("bkt,kn->nbt", x, w), atol=1e-3)
    with pytest.raises(ConfigError, match="summed along 'k' alone"):
        mxjax.qeinsum("nkt,kn->nt", x[:1].repeat(48, 0), packed)


def test_forced_implementations_say_why_not():
    w = qweight()
    x = jnp.ones((2, 128))
    np.testing.assert_array_equal(mxjax.qdot(x, w, implementation="xla"), mxjax.qdot(x, w))
    if jax.default_backend() == "gpu":
        return
    for leaf in (w, mxjax.prepare_kernels(w, "tiles"), mxjax.prepare_kernels(w, "bf16_fragments")):
        with pytest.raises(BackendUnsupported, match=r"cannot run here: .*What can: xla"):
            mxjax.qdot(x, leaf, implementation="triton")
    with pytest.raises(BlockShapeError, match="does not end in 128"):
        mxjax.qdot(x[:, :64], mxjax.prepare_kernels(w))
