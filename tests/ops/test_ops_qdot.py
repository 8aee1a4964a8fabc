"""``qdot`` and ``qeinsum`` against float64 numpy on the dequantized operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax.errors import BlockShapeError, ConfigError
from mxjax.ops import LowRank
from mxjax.transforms import Chain, Hadamard

K, N = 64, 24
FORMATS = ["mxfp4", "nvfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2", "mxint8"]
UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-12}  # half a unit in the last place of 1


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def weight(fmt="mxfp4", *, axis=0, w=None, activation=None, **parts):
    """A QWeight of a random kernel (K, N)."""
    q = mxjax.quantize_array(normal(1, K, N) if w is None else w, fmt, axis)
    act = None if activation is None else mxjax.ActivationFormat(format=mxjax.get_format(activation))
    return mxjax.QWeight(qtensor=q, activation=act, **parts)


def f64(x):
    return np.asarray(jnp.asarray(x, jnp.float32), np.float64)


def assert_product(y, x, w, spec="...k,kn->...n"):
    """y = einsum(x, w) up to rounding.

    Each of the K products is exact in float32 for 16-bit operands and rounds once for float32 ones, the sum rounds K
    times: K * 2**-24 of sum |x||w|. Then the result rounds to its dtype.
    """
    exact = np.einsum(spec, f64(x), f64(w))
    scale = np.einsum(spec, np.abs(f64(x)), np.abs(f64(w)))
    bound = 2 * K * UNIT["float32"] * scale + UNIT[y.dtype.name] * np.abs(exact) * 2
    assert np.all(np.abs(f64(y) - exact) <= bound)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("fmt", FORMATS)
def test_qdot_equals_float64(fmt, dtype):
    x, w = normal(0, 5, K, dtype=dtype), weight(fmt)
    y = mxjax.qdot(x, w)
    assert y.dtype == dtype and y.shape == (5, N)
    assert_product(y, x, w.dequantize(dtype))


@pytest.mark.parametrize("activation", ["mxfp4", "nvfp4", "mxfp8_e4m3"])
def test_activations_are_quantized_row_by_row(activation):
    x, w = normal(0, 5, K) * jnp.logspace(-3, 3, 5)[:, None], weight("nvfp4", activation=activation)
    one_row = jax.jit(lambda row: mxjax.fake_quantize(row, activation))
    rows = jnp.stack([one_row(row) for row in x])
    y = mxjax.qdot(x, w)
    assert_product(y, rows, w.dequantize())
    alone = mxjax.ops.quantize_input(x[2:3], w)
    np.testing.assert_array_equal(alone, mxjax.ops.quantize_input(x, w)[2:3], "no row depends on its neighbours")


def test_a_fixed_input_scale_is_used():
    x, scale = normal(0, 5, K), jnp.float32(0.01)
    w = weight("nvfp4", activation="nvfp4", input_scale=scale)
    assert_product(mxjax.qdot(x, w), mxjax.fake_quantize(x, "nvfp4", global_scale=scale), w.dequantize())


def test_plain_kernels_and_qtensors():
    x, kernel = normal(0, 5, K), normal(1, K, N)
    assert_product(mxjax.qdot(x, kernel), x, kernel)
    q = mxjax.quantize_array(kernel, "mxfp4", 0)
    assert_product(mxjax.qdot(x, q), x, q.dequantize())
    assert_product(mxjax.qeinsum("bk,kn->bn", x, kernel), x, kernel)
    assert_product(mxjax.qeinsum("bk,kn->bn", x, q), x, q.dequantize())


@pytest.mark.parametrize("transform", [Hadamard(16), Hadamard(64), Chain((Hadamard(32), Hadamard(16)))])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_transforms_cancel(transform, dtype):
    kernel, x = normal(1, K, N), normal(0, 5, K, dtype=dtype)
    w = weight("mxfp8_e4m3", w=transform.weight(kernel.T).T, transform=transform)
    y = mxjax.qdot(x, w)
    exact = f64(x) @ f64(w.dequantize())
    # bfloat16: the transformed x, the weight and y round by 2**-9 each; relative to |x T| |W|, at most sqrt(K) |x| |W|.
    unit = K * 2.0**-24 if dtype == jnp.float32 else 4 * 2.0**-9
    norms = np.linalg.norm(f64(x), axis=-1)[:, None] * np.linalg.norm(f64(kernel), axis=0)
    assert np.all(np.abs(f64(y) - exact) <= 4 * unit * norms)


def test_a_bfloat16_transform_does_not_scale_the_result():
    """1/sqrt(32) rounded to bfloat16 is 1e-4 too small: in a mean over many outputs that would show."""
    transform, x = Hadamard(32), normal(0, 256, K, dtype=jnp.bfloat16)
    eye = jnp.eye(K)
    w = mxjax.QWeight(qtensor=mxjax.quantize_array(transform.weight(eye).T, "mxfp8_e5m2", 0), transform=transform)
    rotated = mxjax.ops.quantize_input(x, w)
    exact = np.asarray(transform.activation(jnp.asarray(x, jnp.float32)), np.float64)
    gain = np.vdot(f64(rotated), exact) / np.vdot(exact, exact)
    # 16384 roundings of relative size 2**-9 / sqrt(3) average to 2**-9 / sqrt(3 * 16384) = 9e-6; five sigma.
    assert abs(gain - 1) < 5e-5


@pytest.mark.parametrize("quantized_factors", [False, True])
@pytest.mark.parametrize("transform", [None, Hadamard(32)])
def test_low_rank_branch(quantized_factors, transform):
    r = 32  # a whole block, so that b [N, r] can be a QTensor too
    a, b, x = normal(2, r, K) / 8, normal(3, N, r) / 8, normal(0, 5, K)
    if quantized_factors:
        a, b = mxjax.quantize_array(a, "mxfp8_e4m3"), mxjax.quantize_array(b, "mxfp8_e4m3")
    w = weight("mxfp4", branch=LowRank(a=a, b=b), transform=transform).validate()
    expected = f64(x) @ f64(w.dequantize())
    # Three products follow each other, of K, K and r terms.
    bound = 4 * K * 2.0**-24 * (np.abs(f64(x)).sum(-1, keepdims=True) * np.abs(f64(w.dequantize())).max() + 10)
    assert np.all(np.abs(f64(mxjax.qdot(x, w)) - expected) <= bound)
    assert np.all(np.abs(f64(mxjax.qeinsum("bk,kn->bn", x, w)) - expected) <= bound)


def test_low_rank_branch_is_not_quantized_by_the_activation_format():
    x = normal(0, 5, K)
    zero = jnp.zeros((K, N))
    a, b = normal(2, 4, K), normal(3, N, 4)
    w = weight("mxfp4", w=zero, activation="mxfp4", branch=LowRank(a=a, b=b))
    assert_product(mxjax.qdot(x, w), f64(x) @ f64(a).T, f64(b).T)


def test_preferred_element_type():
    x, w = normal(0, 5, K, dtype=jnp.bfloat16), weight("mxfp4")
    y = mxjax.qdot(x, w, preferred_element_type=jnp.float32)
    assert y.dtype == jnp.float32
    assert_product(y, x, w.dequantize(jnp.bfloat16))
    np.testing.assert_array_equal(mxjax.qeinsum("bk,kn->bn", x, w, preferred_element_type=jnp.float32), y)


def test_weights_of_more_axes():
    kernel, x = normal(1, K, 3, 8), normal(0, 2, 5, K)
    w = mxjax.QWeight(qtensor=mxjax.quantize_array(kernel, "mxfp4", 0))
    assert_product(mxjax.qdot(x, w), x, w.dequantize(), "btk,khd->bthd")


EXPERT_SPECS = ["ebk,ekn->ebn", "bek,ekn->ben", "bk,ekn->ebn", "ebk,ekn->bn"]


@pytest.mark.parametrize("spec", EXPERT_SPECS)
@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4"])
def test_experts(spec, recipe):
    sizes = dict(e=4, b=5, k=K, n=N)
    x = normal(0, *(sizes[c] for c in spec.split(",")[0])) * 3
    w = mxjax.quantize({"w": normal(1, 4, K, N)}, recipe)["w"]
    one_row = jax.jit(lambda row: mxjax.fake_quantize(row, recipe))
    rows = jnp.asarray([one_row(row) for row in x.reshape(-1, K)]).reshape(x.shape)
    y, values = mxjax.qeinsum(spec, x, w), w.dequantize()
    bound = 4 * 2 * K * 2.0**-24 * np.einsum(spec, np.abs(f64(rows)), np.abs(f64(values)))
    assert np.all(np.abs(f64(y) - np.einsum(spec, f64(rows), f64(values))) <= bound)


def test_experts_have_low_rank_branches_of_their_own():
    x, q = normal(0, 4, 5, K), mxjax.quantize_array(normal(1, 4, K, N), "mxfp4", -2)
    w = mxjax.QWeight(qtensor=q, branch=LowRank(a=normal(2, 4, 3, K) / 8, b=normal(3, 4, N, 3) / 8)).validate()
    y = mxjax.qeinsum("ebk,ekn->ebn", x, w)
    np.testing.assert_allclose(y, np.einsum("ebk,ekn->ebn", f64(x), f64(w.dequantize())), atol=1e-3)
    all_pairs = mxjax.qdot(x[0], w)  # [b, e, n]
    np.testing.assert_allclose(all_pairs, np.einsum("bk,ekn->ben", f64(x[0]), f64(w.dequantize())), atol=1e-3)


def test_the_quantized_axis_may_be_any_axis_of_x():
    x, w = normal(0, K, 5), weight("mxfp4", activation="nvfp4")
    expected = mxjax.qdot(x.T, w)
    np.testing.assert_allclose(mxjax.qeinsum("kb,kn->nb", x, w), expected.T, atol=1e-4)
    x = normal(0, 2, 3, 5, K)
    np.testing.assert_allclose(mxjax.qeinsum("...k,kn->...n", x, w), mxjax.qdot(x, w), atol=1e-4)


def test_jit_vmap_scan_remat_take_qweights_as_arguments():
    stack = mxjax.quantize({"w": normal(1, 3, K, K) / 8}, "nvfp4")["w"]
    x = normal(0, 5, K)
    layers = [jax.tree.map(lambda leaf, i=i: leaf[i], stack) for i in range(3)]
    one_by_one = jnp.stack([mxjax.qdot(x, w) for w in layers])
    np.testing.assert_allclose(jax.vmap(mxjax.qdot, (None, 0))(x, stack), one_by_one, atol=1e-4)
    np.testing.assert_allclose(jax.jit(mxjax.qdot)(x, layers[1]), one_by_one[1], atol=1e-4)

    @jax.checkpoint
    def layer(x, w):
        return mxjax.qdot(x, w), None

    scanned = jax.jit(lambda x, stack: jax.lax.scan(layer, x, stack)[0])(x, stack)
    expected = x
    for w in layers:
        expected = mxjax.qdot(expected, w)
    # The second and third layer quantize x: a last bit that differs may move a value to the next code.
    assert float(jnp.linalg.norm(scanned - expected) / jnp.linalg.norm(expected)) < 0.02
    assert jax.grad(lambda x: layer(x, layers[0])[0].sum())(x).shape == x.shape


@pytest.mark.parametrize("transform", [None, Hadamard(32)])
@pytest.mark.parametrize("activation", [None, "mxfp4", "nvfp4"])
def test_the_gradient_of_x_is_that_of_the_dequantized_layer(transform, activation):
    x, g = normal(0, 5, K), normal(7, 5, N)
    branch = LowRank(a=normal(2, 4, K) / 8, b=normal(3, N, 4) / 8)
    w = weight("mxfp4", activation=activation, transform=transform, branch=branch)
    dx = jax.grad(lambda x: jnp.vdot(mxjax.qdot(x, w), g))(x)
    de = jax.grad(lambda x: jnp.vdot(mxjax.qeinsum("bk,kn->bn", x, w), g))(x)
    expected = f64(g) @ f64(w.dequantize()).T
    bound = 8 * K * 2.0**-24 * (np.abs(f64(g)) @ np.abs(f64(w.dequantize()).T) + 10)
    assert np.all(np.abs(f64(dx) - expected) <= bound) and np.all(np.abs(f64(de) - expected) <= bound)


def test_the_low_rank_factors_have_gradients():
    x, w = normal(0, 5, K), weight("mxfp4", branch=LowRank(a=normal(2, 4, K), b=normal(3, N, 4)))
    grads = jax.grad(lambda w: mxjax.qdot(x, w).sum(), allow_int=True)(w)
    np.testing.assert_allclose(grads.branch.b, np.broadcast_to((f64(x) @ f64(w.branch.a).T).sum(0), (N, 4)), atol=1e-3)


# Shape, exponents of the scales, x: everything whose exact result is a normal float32 comes out finite.
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("size, x_size", [(2.0**-126, 1.0), (1e-45, 1.0), (2.0**-130, 2.0**100), (2.0**120, 2.0**-14)])
def test_extreme_scales_give_no_nan(fmt, dtype, size, x_size):
    kernel = jnp.asarray(np.asarray(normal(1, K, N)) * np.float64(size), jnp.float32)
    x = (jnp.clip(normal(0, 3, K), -2, 2) * min(x_size, 100.0 if dtype == jnp.float16 else x_size)).astype(dtype)
    for activation in (None, "mxfp4", "nvfp4"):
        y = mxjax.qdot(x, weight(fmt, w=kernel, activation=activation))
        assert not np.any(np.isnan(f64(y)))
        if dtype == jnp.float32:
            assert np.all(np.isfinite(f64(y)))


@pytest.mark.parametrize(("size", "precision"), [(0.0, None), (1e-45, None), (2.9e38, None), (3e38, "highest")])
@pytest.mark.parametrize("activation", ["mxfp4", "nvfp4", "mxfp8_e4m3"])
def test_extreme_x_gives_no_nan(activation, size, precision):
    """Finite x gives finite y: at any precision up to 1.75 * 2**127 = 2.977e38, beyond in float32 products.

    MXFP4 quantizes the largest value a * 2**e of a block with scale 2**(e - 2), or 2**(e - 1) where a >= 1.75. Below
    1.75 * 2**127 it becomes at most 6 * 2**125 = 1.5 * 2**127, which TF32 (11 bits) and bfloat16 (8) hold. From there
    on the value is 4 * 2**126 = 2**128, and saturates at FLT_MAX = (2 - 2**-23) * 2**127. MXFP8 has the same border
    (448 = 1.75 * 2**8), NVFP4 none: its tensor scale is no power of two. A product whose operands are
    rounded to fewer bits (a GPU's default for float32 is TF32) makes infinity of that, as it does of any x beyond
    (2 - 2**-11) * 2**127: the precision is the caller's, ``jnp.dot`` does the same.
    """
    w = weight("mxfp4", w=normal(1, K, N) * 1e-3, activation=activation)
    with jax.default_matmul_precision("default" if precision is None else precision):
        y = mxjax.qdot(jnp.full((2, K), size), w)
    assert np.all(np.isfinite(f64(y)))
    assert np.any(f64(y) != 0) == (size > 1), "a large x is not flushed; a subnormal one times 1e-3 vanishes in float32"


def test_nan_in_x_or_w_is_not_hidden():
    x = normal(0, 3, K).at[1, 5].set(jnp.nan)
    for activation in (None, "mxfp4", "nvfp4"):
        y = mxjax.qdot(x, weight("mxfp4", activation=activation))
        assert np.isnan(f64(y[1])).all() and np.isfinite(f64(y[jnp.array([0, 2])])).all()
    q = mxjax.quantize_array(normal(1, K, N).at[3, 4].set(jnp.inf), "mxfp4", 0, on_nonfinite="nan")
    assert np.isnan(f64(mxjax.qdot(normal(0, 3, K), q))).any(0).nonzero()[0].tolist() == [4]


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda x, w: mxjax.qdot(x[:, :32], w), BlockShapeError, r"\(5, 32\).*64.*\(64, 24\)"),
        (lambda x, w: mxjax.qdot(jnp.float32(1), w), BlockShapeError, "does not end in 64"),
        (lambda x, w: mxjax.qdot(x, jnp.ones(K)), BlockShapeError, r"\[K, N\]"),
        (lambda x, w: mxjax.qdot(jnp.ones((5, K), int), w), ConfigError, "float array"),
        (lambda x, w: mxjax.qeinsum("bk,kn->bk", x, w), ConfigError, "must be summed over"),
        (lambda x, w: mxjax.qeinsum("bn,kn->bk", x[:, :N], w), ConfigError, "quantized along axis -2 .'k'."),
        (lambda x, w: mxjax.qeinsum("bk,kn", x, w), ConfigError, "takes"),
        (lambda x, w: mxjax.qeinsum("bk,kn,n->b", x, w), ConfigError, "takes"),
        (lambda x, w: mxjax.qeinsum("bk,...n->bn", x, w), ConfigError, "ellipsis"),
        (lambda x, w: mxjax.qeinsum("abk,kn->abn", x, w), BlockShapeError, "that many axes"),
        (lambda x, w: mxjax.qeinsum("bk,kn->bn", x[:, :32], w), BlockShapeError, "'k'"),
    ],
)
def test_errors_name_what_is_wrong(call, error, text):
    with pytest.raises(error, match=text):
        call(normal(0, 5, K), weight("mxfp4"))


@pytest.mark.parametrize(
    "parts, text",
    [
        (dict(branch=LowRank(a=jnp.ones((4, K)), b=jnp.ones((N + 1, 4)))), "do not fit"),
        (dict(branch=LowRank(a=jnp.ones((4, K)), b=jnp.ones((N, 5)))), "do not fit"),
        (dict(branch=LowRank(a=jnp.ones((4, K + 1)), b=jnp.ones((N, 4)))), "do not fit"),
        (dict(transform=Hadamard(128)), "do not divide"),
    ],
)
def test_validate_names_the_path(parts, text):
    with pytest.raises(BlockShapeError, match=rf"^blocks/0: .*{text}"):
        weight("mxfp4", **parts).validate("blocks/0")


BRANCH = LowRank(a=jnp.ones((4, K)), b=jnp.ones((N, 4)))


def test_qweight_says_what_it_is():
    w = weight("nvfp4", activation="mxfp8_e4m3", transform=Hadamard(32), branch=BRANCH)
    assert (w.shape, w.ndim, w.dtype, w.format.name) == ((K, N), 2, jnp.float32, "nvfp4")
    # codes, scales of 16, tensor scale, factors
    assert w.nbytes == K * N // 2 + K * N // 16 + 4 + 4 * 4 * (K + N)
    assert all(part in repr(w) for part in ("nvfp4", "mxfp8_e4m3", "Hadamard", "rank=4"))
