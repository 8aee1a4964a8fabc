"""qdot_grouped: every expert's rows as qdot gives them, zero tokens, gradients, the low-rank branch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax.core.formats import MXFP4, NVFP4
from mxjax.errors import BlockShapeError
from mxjax.ops import ActivationFormat, LowRank, QWeight
from mxjax.transforms import Hadamard

E, K, N = 4, 96, 40
SIZES = [5, 0, 9, 1]
M = 17  # two rows of no expert


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def experts(fmt="mxfp4", axis=-2, rank=0, **kwargs):
    w = normal(0, E, K, N) if axis == -2 else normal(0, E, N, K)
    if rank:
        kwargs |= dict(branch=LowRank(a=normal(1, E, rank, K) / 8, b=normal(2, E, N, rank) / 8))
    q = mxjax.quantize_array(w, fmt, axis, batch_axes=1 if fmt == "nvfp4" else 0)
    return QWeight(qtensor=q, **kwargs).validate()


def one_by_one(x, w, sizes=SIZES):
    """The same by qdot, an expert at a time."""
    rows, start = [], 0
    for e, size in enumerate(sizes):
        rows.append(mxjax.qdot(x[start : start + size], jax.tree.map(lambda a, e=e: a[e], w)))
        start += size
    return jnp.concatenate([*rows, jnp.zeros((len(x) - start, N), x.dtype)])


CASES = {
    "w4a16": dict(),
    "w4a16_out_in": dict(axis=-1),
    "w4a4": dict(activation=ActivationFormat(format=MXFP4), transform=Hadamard(32)),
    "third": dict(activation=ActivationFormat(format=MXFP4, scale="third")),
    "nvfp4": dict(fmt="nvfp4", activation=ActivationFormat(format=NVFP4)),
    "low_rank": dict(rank=3, activation=ActivationFormat(format=MXFP4)),
}


@pytest.mark.parametrize("case", CASES)
def test_every_expert_is_qdot(case):
    w, x = experts(**CASES[case]), normal(5, M, K)
    sizes = jnp.asarray(SIZES)
    got = jax.jit(mxjax.qdot_grouped)(x, w, sizes)
    want = one_by_one(x, w)
    # quantized operands are multiplied in bfloat16, which holds them exactly (NVFP4's tensor scale is beside them):
    # what differs are the sums of K float32 products and, under a transform, a rare value next to a tie
    assert np.linalg.norm(got - want) <= 2.0**-8 * np.linalg.norm(want)
    if CASES[case].get("transform") is None:
        np.testing.assert_allclose(got, want, rtol=0, atol=2 * K * 2.0**-23 * float(jnp.abs(want).max()))
    np.testing.assert_array_equal(got[sum(SIZES) :], 0)


def test_bias_dtype_and_no_tokens_at_all():
    w, x, bias = experts(), normal(5, M, K).astype(jnp.bfloat16), normal(6, E, N)
    got = mxjax.qdot_grouped(x, w, jnp.asarray(SIZES), bias=bias, preferred_element_type=jnp.float32)
    want = one_by_one(x.astype(jnp.float32), w)
    want = want.at[: sum(SIZES)].add(jnp.repeat(bias, np.asarray(SIZES), axis=0))
    np.testing.assert_allclose(got, want, rtol=0, atol=2 * K * 2.0**-23 * float(jnp.abs(want).max()) + 1e-6)
    np.testing.assert_array_equal(mxjax.qdot_grouped(x, w, jnp.zeros(E, jnp.int32), bias=bias), 0)
    assert mxjax.qdot_grouped(x[:0], w, jnp.zeros(E, jnp.int32)).shape == (0, N)


def test_plain_arrays_take_ragged_dot():
    x, w, sizes = normal(5, M, K), normal(0, E, K, N), jnp.asarray(SIZES)
    np.testing.assert_allclose(mxjax.qdot_grouped(x, w, sizes)[:15], jax.lax.ragged_dot(x, w, sizes)[:15], rtol=1e-6)


@pytest.mark.parametrize("case", ["w4a16", "w4a4", "nvfp4", "low_rank"])
def test_gradients_are_those_of_qdot(case):
    w, x = experts(**CASES[case]), normal(5, M, K)

    def loss(fn):
        def of(x, branch):
            return jnp.sum(jnp.sin(fn(x, dataclasses.replace(w, branch=branch))))

        return jax.jit(jax.grad(of, (0, 1)))(x, w.branch)

    got = loss(lambda x, w: mxjax.qdot_grouped(x, w, jnp.asarray(SIZES)))
    want = loss(one_by_one)
    for g, r in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # the cosine sees outputs that differ by sums in another order, and a rare code next to a tie
        assert np.linalg.norm(g - r) <= 2.0**-7 * np.linalg.norm(r)


def test_shapes_that_do_not_fit():
    w, x = experts(), normal(5, M, K)
    with pytest.raises(BlockShapeError, match="one integer for each of 4 experts"):
        mxjax.qdot_grouped(x, w, jnp.ones(E))
    with pytest.raises(BlockShapeError, match=r"is not \[M, 96\]"):
        mxjax.qdot_grouped(x[:, :64], w, jnp.asarray(SIZES))
    with pytest.raises(BlockShapeError, match=r"experts are \[E, K, N\]"):
        mxjax.qdot_grouped(x, w.qtensor.codes[0].astype(jnp.float32), jnp.asarray(SIZES))
    with pytest.raises(BlockShapeError, match="bias"):
        mxjax.qdot_grouped(x, w, jnp.asarray(SIZES), bias=jnp.ones((E, 3)))
