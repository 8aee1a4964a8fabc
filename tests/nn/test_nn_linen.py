"""``mxjax.linen``: Flax linen modules with QWeight kernels, and the same model in linen and nnx."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import freeze
from flax.errors import ScopeParamShapeError

import mxjax
from mxjax.errors import ConfigError

# As in test_nn_nnx.py: a dozen float32 products with K <= 128 that round by K * 2**-24 of sum |x||w| < 30 each.
ATOL = 12 * 8e-6 * 30
X = jax.random.normal(jax.random.key(0), (2, 5, 64))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        x = x + nn.MultiHeadDotProductAttention(2, name="attn")(nn.LayerNorm(name="norm")(x))
        h = nn.gelu(nn.Dense(128, name="up")(x))
        return x + nn.Dense(64, use_bias=False, name="down")(h), None


class Stack(nn.Module):
    """Three blocks, under scan or in a loop."""

    scan: bool = False

    @nn.compact
    def __call__(self, x):
        if self.scan:
            layers = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            return layers(name="layers")(x, None)[0]
        for i in range(3):
            x, _ = Block(name=f"layer{i}")(x)
        return x


def init(module, x=X):
    return jax.jit(module.init)(jax.random.key(1), x)["params"]


def run(module, params, x=X):
    return jax.jit(lambda p, x: mxjax.linen.apply(module, {"params": p}, x))(params, x)


@pytest.fixture(scope="module")
def stacked():
    return init(Stack(scan=True))


@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4"])
def test_scan_with_remat_equals_a_loop(stacked, recipe):
    q = mxjax.quantize(stacked, recipe)
    assert q["layers"]["attn"]["query"]["kernel"].shape == (3, 64, 2, 32)
    loop = {f"layer{i}": jax.tree.map(lambda leaf, i=i: leaf[i], q["layers"]) for i in range(3)}
    np.testing.assert_allclose(run(Stack(scan=True), q), run(Stack(), loop), atol=ATOL)


def test_without_activation_formats_it_equals_the_dequantized_model(stacked):
    q = mxjax.quantize(stacked, "nvfp4_a16")
    plain = Stack(scan=True).apply({"params": mxjax.dequantize(q)}, X)
    np.testing.assert_allclose(run(Stack(scan=True), q), plain, atol=ATOL)
    assert float(jnp.abs(plain - Stack(scan=True).apply({"params": stacked}, X)).max()) > 10 * ATOL


def test_float_params_are_left_to_flax(stacked):
    expected = jax.jit(lambda p: Stack(scan=True).apply({"params": p}, X))(stacked)
    np.testing.assert_array_equal(run(Stack(scan=True), stacked), expected)


def test_the_context_is_needed_and_ends(stacked):
    q = mxjax.quantize(stacked, "mxfp4")
    with mxjax.linen.quantized():
        Stack(scan=True).apply({"params": q}, X)
    with pytest.raises(ScopeParamShapeError):
        Stack(scan=True).apply({"params": q}, X)


def test_frozen_dicts_and_apply_keywords(stacked):
    q = freeze(mxjax.quantize(stacked, "mxfp4"))
    y, state = mxjax.linen.apply(Stack(scan=True), {"params": q}, X, mutable=["intermediates"])
    np.testing.assert_allclose(y, run(Stack(scan=True), q), atol=ATOL)
    assert not state


def test_gradients_of_x_and_of_the_float_params():
    module = Block()
    params = init(module)
    q = mxjax.quantize(params, "mxfp4_a16")

    def grads(p, apply):
        def loss(norm, x):
            return jnp.mean(apply({"params": {**p, "norm": norm}}, x)[0] ** 2)

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(params["norm"], X)

    quantized = grads(q, lambda *args: mxjax.linen.apply(module, *args))
    plain = grads(mxjax.dequantize(q), module.apply)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=ATOL), quantized, plain)
    assert float(jnp.abs(quantized[1]).max()) > 0


def test_grad_of_a_whole_tree_with_codes_needs_allow_int_only():
    module = nn.Dense(32)
    q = mxjax.quantize(init(module), "mxfp4")
    grads = jax.grad(lambda p: mxjax.linen.apply(module, {"params": p}, X).sum(), allow_int=True)(q)
    assert grads["bias"].shape == (32,) and grads["kernel"].qtensor.codes.dtype == jax.dtypes.float0


LAYERS = [
    nn.Dense(32),
    nn.Dense(32, use_bias=False, dtype=jnp.bfloat16),
    nn.DenseGeneral((4, 8), axis=(-2, -1), bias_init=nn.initializers.normal()),
    nn.DenseGeneral(8, axis=(1, 3), bias_init=nn.initializers.normal()),
    nn.DenseGeneral(8, batch_dims=(0,), bias_init=nn.initializers.normal()),
    nn.Einsum((2, 32, 8), "...hd,hde->...e", bias_init=nn.initializers.normal()),
    nn.Einsum((2, 32, 8), "abhd,hde->haeb", bias_init=nn.initializers.normal()),
    nn.Einsum((2, 32, 8), "abhd,hde->haeb", use_bias=False),
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda m: f"{type(m).__name__}-{LAYERS.index(m)}")
def test_layers_equal_flax_with_dequantized_kernels(layer):
    x = jax.random.normal(jax.random.key(0), (5, 3, 2, 32))
    # Paths say nothing of how many output axes a DenseGeneral has; the rule does.
    several_outputs = isinstance(getattr(layer, "features", None), tuple)
    rule = mxjax.Rule(path="kernel", axis=-3 if several_outputs else None)
    q = mxjax.quantize(init(layer, x), mxjax.QuantConfig(rules=[rule]))
    y = layer.apply({"params": mxjax.dequantize(q)}, x)
    out = run(layer, q, x)
    assert (out.shape, out.dtype) == (y.shape, y.dtype)
    # bfloat16 outputs are rounded once more, by 2**-8 of their size.
    rtol = 2**-7 if y.dtype == jnp.bfloat16 else 0
    np.testing.assert_allclose(out.astype(jnp.float32), y.astype(jnp.float32), atol=ATOL, rtol=rtol)


def test_subclasses_of_dense_and_lifted_layers_run():
    class Twice(nn.Dense):
        @nn.compact
        def __call__(self, x):
            return 2 * super().__call__(x)

    lifted = nn.vmap(nn.Dense, in_axes=None, variable_axes={"params": 0}, split_rngs={"params": True}, axis_size=3)
    for module in (Twice(32), lifted(32), nn.remat(nn.Dense)(32)):
        q = mxjax.quantize(init(module), "mxfp4_a16")
        np.testing.assert_allclose(run(module, q), module.apply({"params": mxjax.dequantize(q)}, X), atol=ATOL)


def test_a_module_that_reads_the_parameter_itself_runs():
    class Own(nn.Module):
        @nn.compact
        def __call__(self, x):
            return mxjax.qdot(x, self.get_variable("params", "w"))

    w = mxjax.quantize({"w": jnp.ones((64, 8))}, "mxfp4")
    np.testing.assert_array_equal(run(Own(), w), mxjax.qdot(X, w["w"]))


class Conv1(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Conv(64, (3,), name="c1")(x)


class RawParam(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", nn.initializers.ones, (64, 64))


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8_e4m3"])  # 8-bit codes of a square kernel have the kernel's shape
@pytest.mark.parametrize("module, path", [(Conv1(), "c1"), (RawParam(), "the module")])
def test_other_modules_are_an_error_with_the_path(module, path, fmt):
    q = mxjax.quantize(init(module), mxjax.QuantConfig(rules=[mxjax.Rule(weight=fmt)]))
    with pytest.raises(ConfigError, match=rf"^{path} \(.*exclude it"):
        mxjax.linen.apply(module, {"params": q}, X)


def test_a_dense_with_its_own_dot_general_is_an_error():
    module = nn.Dense(32, dot_general=lambda *a, **k: jax.lax.dot_general(*a, **k))
    with pytest.raises(ConfigError, match="dot_general"):
        mxjax.linen.apply(module, {"params": mxjax.quantize(init(module), "mxfp4")}, X)


def test_boxed_params_run():
    module = nn.Dense(32, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model")))
    boxed = init(module)
    q = mxjax.quantize(boxed, "mxfp4")
    assert isinstance(q["kernel"], nn.Partitioned)
    unboxed = mxjax.quantize(nn.meta.unbox(boxed), "mxfp4")
    np.testing.assert_array_equal(run(module, q), run(module, unboxed))


def attention(query, key, value, mask=None, **_):
    """linen's: the attention functions of linen and nnx, in float, differ in the last bit."""
    return nn.dot_product_attention(query, key, value, mask=mask)


class NnxBlock(nnx.Module):
    """:class:`Block` in nnx."""

    def __init__(self, rngs):
        self.attn = nnx.MultiHeadAttention(2, 64, rngs=rngs, decode=False, attention_fn=attention)
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.up = nnx.Linear(64, 128, rngs=rngs)
        self.down = nnx.Linear(128, 64, use_bias=False, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.down(nnx.gelu(self.up(x)))


@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp4_a16", "nvfp4", "nvfp4_a16", "nvfp4_a8"])
def test_linen_and_nnx_give_the_same_numbers(recipe):
    params = init(Block())
    model = mxjax.nnx.from_params(nnx.eval_shape(lambda: NnxBlock(nnx.Rngs(0))), params)
    # Outside jit, where XLA fuses nothing, both run the same operations.
    in_nnx = mxjax.nnx.quantize(model, recipe)(X)
    in_linen = mxjax.linen.apply(Block(), {"params": mxjax.quantize(params, recipe)}, X)[0]
    np.testing.assert_array_equal(in_nnx, in_linen)
    assert float(jnp.abs(in_linen - Block().apply({"params": params}, X)[0]).max()) > 10 * ATOL
