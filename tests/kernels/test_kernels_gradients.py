"""Training through the kernels: gradients of x, of a transform's parameters and of the low-rank branch are XLA's own.

The kernels' code runs in interpret mode: the fixture pretends to be on a GPU, so that a forced implementation goes
through the whole of dispatch.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax import backend
from mxjax.core.formats import MXFP4, MXFP8_E4M3, NVFP4
from mxjax.ops import ActivationFormat, LowRank, QWeight
from mxjax.ops.kernels import pack
from mxjax.transforms import BlockMatrix, ChannelScale, Hadamard
from mxjax.transforms.base import Chain
from pallas_kernels.block_scaled_matmul import triton, triton_generic
from pallas_kernels.transform_quantize import low_rank
from pallas_kernels.transform_quantize import triton as tq

RNG = np.random.default_rng(7)
M, N, K = 5, 48, 128
TARGETS = {
    "sm_90": backend.Target("cuda", "sm_90", "NVIDIA H200", 132),
    "sm_100": backend.Target("cuda", "sm_100", "NVIDIA B200", 148),
    "gfx942": backend.Target("rocm", "gfx942", "gfx942", 304),
}
KERNELS = [
    (triton_generic, "generic"), (triton, "decode"), (triton, "unpack"),
    (tq, "quantize"), (tq, "quantize_fp8"), (low_rank, "quantize_low_rank"),
]  # fmt: skip


@pytest.fixture(params=TARGETS)
def pretended(request, monkeypatch):
    """A GPU whose kernels run in interpret mode; gives the names of those that ran."""
    ran = []

    def interpreted(module, name):
        kernel = getattr(module, name)

        def run(*args, **kwargs):
            ran.append(name)
            return kernel(*args, **kwargs, interpret=True)

        monkeypatch.setattr(module, name, run)

    for module, name in KERNELS:
        interpreted(module, name)
    monkeypatch.setattr(backend, "target", lambda device=None: TARGETS[request.param])
    return ran


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def turn(size=32):
    return BlockMatrix(jnp.eye(size) + 0.1 * normal(K // size, size, size))


def scale():
    return ChannelScale(jnp.exp(normal(K) / 4))


def act(fmt, scale="even"):
    return ActivationFormat(format=fmt, scale=scale)


def branch(rank=4, **kwargs):
    return LowRank(a=normal(rank, K) / 8, b=normal(N, rank) / 8, **kwargs)


CASES = {
    "w4a16 block matrix": lambda: dict(transform=turn()),
    "w4a4 block matrix, branch": lambda: dict(activation=act(MXFP4), transform=turn(), branch=branch()),
    "w4a4 matrices of 16": lambda: dict(activation=act(MXFP4, "floor"), transform=turn(16), branch=branch()),
    "w4a4 Hadamard, branch": lambda: dict(activation=act(MXFP4), transform=Hadamard(32), branch=branch()),
    "w4a8 scale, branch": lambda: dict(activation=act(MXFP8_E4M3), transform=scale(), branch=branch()),
    "w4a4 scale and Hadamard": lambda: dict(activation=act(MXFP4), transform=Chain((scale(), Hadamard(32)))),
    "nvfp4, branch in MXFP8": lambda: dict(
        fmt="nvfp4", activation=act(NVFP4), branch=branch(32, activation=act(MXFP8_E4M3))
    ),
}


def weight(fmt="mxfp4", **parts):
    return QWeight(qtensor=mxjax.quantize_array(normal(K, N), fmt, -2), **parts).validate()


def trained(w):
    return {"transform": w.transform, "branch": w.branch}


def value_and_grads(dot, w, x, g):
    """The loss is linear in y, so that no gradient depends on how y was rounded."""

    def loss(x, parts):
        y = dot(x, w.__class__(**{**vars(w), **parts}))
        return jnp.vdot(y, g), y

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(x, trained(w))


@pytest.mark.parametrize("case", CASES)
def test_forced_kernels_have_the_gradients_of_xla(case, pretended):
    w, x, g = weight(**CASES[case]()), normal(M, K), normal(M, N)
    (_, y), grads = value_and_grads(partial(mxjax.qdot, implementation="triton"), w, x, g)
    assert "generic" in pretended and (w.activation is None or len(set(pretended)) > 1), "the kernels must have run"
    (_, want_y), want = value_and_grads(mxjax.qdot, w, x, g)
    # Forward: operands are bfloat16 in the kernels of quantized x (exact), float32 sums; a rare code next to a tie.
    assert np.linalg.norm(y - want_y) <= 2.0**-7 * np.linalg.norm(want_y)
    got, want = jax.tree.leaves(grads), jax.tree.leaves(want)
    assert len(got) == len(want) == 1 + len(jax.tree.leaves(trained(w)))
    for a, b in zip(got, want, strict=True):
        # The same float32 products in another order: N, K and 32 terms after one another, each sum off by at most its
        # number of terms times 2**-24 relative to the sum of absolute values, which is at most sqrt(terms) * 4 times
        # the typical size of the result for independent terms.
        bound = (N + K + 32) * 2.0**-24 * 4 * np.sqrt(K) * float(jnp.abs(b).max())
        exact = w.branch is None or w.branch.activation is None
        if not exact:  # x A^T is quantized to MXFP8 on the way: a code next to a tie, 2**-4 of one value of many
            bound += 2.0**-5 * float(jnp.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=0, atol=bound)


@pytest.mark.parametrize("layout", ["rows", "tiles"])
def test_packed_weights_train_the_same(layout, pretended):
    w, x, g = weight(**CASES["w4a4 Hadamard, branch"]()), normal(M, K), normal(M, N)
    if layout == "tiles" and backend.target().platform != "cuda":
        return  # tiles are decoded by PTX
    (_, want_y), want = value_and_grads(mxjax.qdot, w, x, g)
    (_, y), grads = value_and_grads(partial(mxjax.qdot, implementation="triton"), pack(w, layout), x, g)
    assert ("decode" if layout == "tiles" else "generic") in pretended
    assert np.linalg.norm(y - want_y) <= 2.0**-7 * np.linalg.norm(want_y)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        bound = (N + K + 32) * 2.0**-24 * 4 * np.sqrt(K) * float(jnp.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=0, atol=bound)


def test_gradients_under_jit_and_scan(pretended):
    ws = [weight(**CASES["w4a4 block matrix, branch"]()) for _ in range(2)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *ws)
    x, g = normal(M, K), normal(2, M, N)

    def loss(x, stacked, implementation):
        dot = partial(mxjax.qdot, implementation=implementation)
        ys = jax.lax.scan(lambda x, w: (x, dot(x, w)), x, stacked)[1]
        return jnp.vdot(ys, g)

    got, want = (jax.jit(jax.grad(partial(loss, implementation=name)))(x, stacked) for name in ("triton", "xla"))
    assert "generic" in pretended
    bound = 2 * (N + K + 32) * 2.0**-24 * 4 * np.sqrt(K) * float(jnp.abs(want).max())
    np.testing.assert_allclose(got, want, rtol=0, atol=bound)
