"""fuse_shared_inputs on trees: the same bits as unfused weights, and the way back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax.errors import BlockShapeError, ConfigError
from mxjax.ops.fused import FusedPart, FusedWeight, fuse
from mxjax.transforms import Hadamard

K, SIZES = 96, {"q": 64, "k": 33, "v": 32}
RECIPES = ["mxfp4", "mxfp4_a16", "nvfp4", "nvfp4_a16"]


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def params(lead=()):
    # of different sizes, so that NVFP4's tensor scales differ
    return {name: {"kernel": normal(i, *lead, K, n) * (i + 1), "bias": normal(9, n)}
            for i, (name, n) in enumerate(SIZES.items())}  # fmt: skip


def apply(p, x):
    ys = mxjax.qdot_shared(x, *(p[name]["kernel"] for name in SIZES))
    return [y + p[name]["bias"] for name, y in zip(SIZES, ys, strict=True)]


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_results_do_not_change_by_a_bit(recipe, dtype):
    p = mxjax.quantize(params(), recipe)
    fused = mxjax.fuse_shared_inputs(p, [tuple(SIZES)])
    assert isinstance(fused["q"]["kernel"], FusedWeight) and fused["q"]["kernel"].weight.shape == (
        K,
        sum(SIZES.values()),
    )
    assert fused["v"]["kernel"] == FusedPart("v", "q", 2)
    x = normal(5, 2, 7, K).astype(dtype)
    assert_same(apply(fused, x), apply(p, x))
    assert_same(jax.jit(apply)(fused, x), jax.jit(apply)(p, x))
    assert_same(mxjax.unfuse_shared_inputs(fused), p)


def test_equal_tensor_scales_stay_one_number_and_others_go_to_rows():
    one = {"q": normal(0, K, 8), "k": normal(0, K, 8)}
    equal = mxjax.fuse_shared_inputs(mxjax.quantize(one, "nvfp4"), [("q", "k")])["q"].weight.qtensor
    assert equal.global_scale.shape == ()
    p = mxjax.quantize(one | {"k": 3 * normal(1, K, 5)}, "nvfp4")
    scale = mxjax.fuse_shared_inputs(p, [("q", "k")])["q"].weight.validate().qtensor.global_scale
    want = [p["q"].qtensor.global_scale] * 8 + [p["k"].qtensor.global_scale] * 5
    np.testing.assert_array_equal(scale, np.asarray(want))


@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4"])
def test_stacks_go_through_scan(recipe):
    p = mxjax.quantize(params((3,)), recipe)
    fused = mxjax.fuse_shared_inputs(p, [tuple(SIZES)])
    for name in SIZES:
        for tree in (p, fused):
            tree[name]["bias"] = jnp.zeros((3, SIZES[name]))

    def run(p, x):
        return jax.lax.scan(lambda x, layer: (x, apply(layer, x)), x, p)[1]

    x = normal(5, 4, K)
    assert_same(jax.jit(run)(fused, x), jax.jit(run)(p, x))
    assert_same(mxjax.unfuse_shared_inputs(fused), p)
    single = jax.tree.map(lambda a: a[1], fused)  # what a scan sees
    assert_same(mxjax.unfuse_shared_inputs(single), jax.tree.map(lambda a: a[1], p))


def test_gradient_is_the_sum_of_the_parts():
    p = mxjax.quantize(params(), mxjax.QuantConfig(rules=[mxjax.Rule(
        path="kernel", weight="mxfp4", activation="mxfp4", transform=Hadamard(32))]))  # fmt: skip
    fused = mxjax.fuse_shared_inputs(p, [tuple(SIZES)])
    x = normal(5, 3, K)

    def loss(x, p):
        return sum(jnp.sum(jnp.sin(y)) for y in apply(p, x))

    want, got = (jax.jit(jax.grad(loss))(x, tree) for tree in (p, fused))
    # three float32 vectors are added before the transform's transpose instead of after it: a few roundings of 2**-24
    # each on values that the 32-term sums can make six times larger than their result's typical size
    np.testing.assert_allclose(got, want, rtol=0, atol=100 * 2.0**-24 * float(jnp.abs(want).max()))


def test_packed_for_kernels_is_one_product():
    p = mxjax.quantize(params(), "mxfp4")
    fused = mxjax.prepare_kernels(mxjax.fuse_shared_inputs(p, [tuple(SIZES)]), "rows")
    assert fused["q"]["kernel"].weight.packed.n == sum(SIZES.values())
    x = normal(5, 2, K)
    for got, want in zip(apply(fused, x), apply(p, x), strict=True):
        # sums of 96 float32 products in another order
        np.testing.assert_allclose(got, want, rtol=0, atol=96 * 2.0**-23 * float(jnp.abs(want).max()))
    with pytest.raises(ConfigError, match="packed for the kernels"):
        mxjax.unfuse_shared_inputs(fused)


@pytest.mark.parametrize("activation, quantized", [(None, False), ("mxfp8_e4m3", False), ("mxfp8_e4m3", True)])
def test_low_rank_branches_go_side_by_side(activation, quantized):
    p, x = mxjax.quantize(params(), "mxfp4"), normal(5, 3, K)
    act = None if activation is None else mxjax.ActivationFormat(format=mxjax.get_format(activation))
    for i, (name, rank) in enumerate({"q": 32, "v": 64}.items()):  # k has none
        a, b = normal(20 + i, rank, K) / 8, normal(30 + i, SIZES[name], rank)
        a, b = (mxjax.quantize_array(f, "mxfp8_e4m3") if quantized else f for f in (a, b))
        branch = mxjax.LowRank(a=a, b=b, activation=act)
        p[name]["kernel"] = dataclasses.replace(p[name]["kernel"], branch=branch)
    fused = mxjax.fuse_shared_inputs(p, [tuple(SIZES)])
    assert fused["q"]["kernel"].ranks == (32, 0, 64) and fused["q"]["kernel"].weight.validate().branch.rank == 96
    assert_same(apply(fused, x), apply(p, x))
    assert_same(mxjax.unfuse_shared_inputs(fused), p)
    packed = mxjax.prepare_kernels(fused, "rows")
    for got, want in zip(apply(packed, x), apply(p, x), strict=True):
        # sums of K and of 96 float32 products after one another, in another order; x A^T to MXFP8 may round apart
        slack = 2.0**-5 if activation else 2 * (K + 96) * 2.0**-23
        np.testing.assert_allclose(got, want, rtol=0, atol=slack * float(jnp.abs(want).max()))


def test_branches_that_do_not_fit_together():
    def with_branch(rank, **kwargs):
        return weight(branch=mxjax.LowRank(a=jnp.ones((rank, K)), b=jnp.ones((32, rank)), **kwargs))

    mxfp8 = mxjax.ActivationFormat(format=mxjax.get_format("mxfp8_e4m3"))
    with pytest.raises(ConfigError, match="b and a differ in the formats of their low-rank branches"):
        fuse([with_branch(32), with_branch(32, activation=mxfp8)], ["a", "b"])
    with pytest.raises(ConfigError, match="would reach over its rank of 8"):
        fuse([with_branch(8, activation=mxfp8)] * 2)


def weight(k=K, n=32, recipe="mxfp4", **kwargs):
    return dataclasses.replace(mxjax.quantize({"w": normal(0, k, n)}, recipe)["w"], **kwargs)


@pytest.mark.parametrize(
    ("other", "error", "match"),
    [
        (lambda: weight(recipe="nvfp4"), ConfigError, "k and q differ in their format"),
        (lambda: weight(recipe="mxfp4_a16"), ConfigError, "differ in their activation"),
        (lambda: weight(transform=Hadamard(32)), ConfigError, "differ in their transform"),
        (lambda: weight(input_scale=jnp.float32(1)), ConfigError, "differ in their input scale"),
        (lambda: weight(k=64), BlockShapeError, r"k \(64, 32\) and q \(96, 32\) do not multiply"),
        (lambda: jnp.ones((K, 32)), ConfigError, "only QWeights can be fused, not ArrayImpl"),
    ],
)
def test_what_differs_is_not_fused(other, error, match):
    with pytest.raises(error, match=match):
        fuse([weight(), other()], ["q", "k"])


@pytest.mark.parametrize("file_format", ["mxjax", "compressed-tensors"])
def test_fused_trees_are_saved_apart(file_format, tmp_path):
    p = mxjax.quantize(params(), "nvfp4_a16")
    fused = mxjax.fuse_shared_inputs(p, [tuple(SIZES)])
    for name, tree in (("fused", fused), ("plain", p)):
        mxjax.save(tmp_path / name, tree, file_format)
    assert_same(mxjax.load(tmp_path / "fused"), mxjax.load(tmp_path / "plain"))


def test_groups_that_fit_nothing_or_half_a_group():
    p = mxjax.quantize(params(), "mxfp4")
    with pytest.raises(ConfigError, match="no quantized weights are called q_proj"):
        mxjax.fuse_shared_inputs(p)
    with pytest.raises(ConfigError, match="z/kernel: not quantized or not there"):
        mxjax.fuse_shared_inputs(p, [("q", "z")])
    with pytest.raises(ConfigError, match="k/kernel: in two groups"):
        mxjax.fuse_shared_inputs(p, [("q", "k"), ("v", "k")])
    fused = mxjax.fuse_shared_inputs(p, [("q", "k")])
    with pytest.raises(ConfigError, match="all its parts"):
        mxjax.qdot_shared(normal(0, 2, K), fused["q"]["kernel"])
    with pytest.raises(ConfigError, match=r"fused into q/kernel, which is not in the tree"):
        mxjax.unfuse_shared_inputs({"k": fused["k"]})
    with pytest.raises(BlockShapeError, match="does not end in 96"):
        mxjax.qdot_shared(normal(0, 2, 64), fused["q"]["kernel"], fused["k"]["kernel"])
