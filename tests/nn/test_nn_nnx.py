"""``mxjax.nnx``: surgery on Flax nnx models, and nnx transformations of the result."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mxjax
from mxjax.errors import ConfigError, MxjaxWarning

# A dozen float32 products with K <= 128 follow each other in these models. Each rounds by at most K * 2**-24 = 8e-6 of
# sum |x||w|, which is below 30 here.
ATOL = 12 * 8e-6 * 30


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(2, 64, rngs=rngs, decode=False)
        self.up = nnx.Linear(64, 128, rngs=rngs)
        self.down = nnx.Linear(128, 64, use_bias=False, rngs=rngs)

    def __call__(self, x):
        h = x + self.attn(self.norm(x))
        return h + self.down(nnx.gelu(self.up(h)))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(11, 64, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(2)])
        self.lm_head = nnx.Linear(64, 11, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


TOKENS = jnp.arange(10).reshape(2, 5)
X = jax.random.normal(jax.random.key(3), (2, 5, 64))


@pytest.fixture(scope="module")
def model():
    return Model(nnx.Rngs(0))


@pytest.fixture(scope="module")
def qmodel(model):
    return mxjax.nnx.quantize(model, "mxfp4")


@nnx.jit
def call(model, x):
    return model(x)


def kinds(model):
    return {"/".join(map(str, p)): type(m).__name__ for p, m in nnx.iter_modules(model)}


def test_replaces_the_layers_that_the_config_matches_and_no_other(model, qmodel):
    before, after = kinds(model), kinds(qmodel)
    assert after.keys() == before.keys()
    assert {p for p in after if after[p] != before[p]} == {
        f"layers/{i}/{name}"
        for i in (0, 1)
        for name in ("attn/query", "attn/key", "attn/value", "attn/out", "up", "down")
    }
    assert after["layers/1/up"] == "QLinear" and after["layers/0/attn/out"] == "QLinearGeneral"
    assert before["layers/1/up"] == "Linear", "the model that was given is untouched"


def test_paths_are_those_of_plan(model):
    on_state = mxjax.plan(nnx.state(model, nnx.Param), "mxfp4")
    assert mxjax.nnx.plan(model, "mxfp4") == on_state
    assert "layers/0/attn/query/kernel" in [e.path for e in on_state.quantized]


def test_computes_with_the_weights_of_quantize(model, qmodel):
    expected = mxjax.quantize(nnx.state(model, nnx.Param), "mxfp4")
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(nnx.state(qmodel)), jax.tree.leaves(expected))


@pytest.mark.parametrize("recipe", ["mxfp4_a16", "nvfp4_a16", "mxfp8_e4m3_a16", "mxint8_a16"])
def test_without_activation_formats_it_equals_the_dequantized_model(model, recipe):
    q = mxjax.nnx.quantize(model, recipe)
    d = mxjax.nnx.dequantize(q)
    assert kinds(d) == kinds(model)
    np.testing.assert_allclose(call(q, TOKENS), call(d, TOKENS), atol=ATOL)
    assert float(jnp.abs(call(d, TOKENS) - call(model, TOKENS)).max()) > 10 * ATOL, "the weights did change"


def test_unquantized_arrays_are_shared_not_copied(model, qmodel):
    kept = qmodel.embed.embedding.get_value()
    assert kept is model.embed.embedding.get_value()
    assert qmodel.embed.embedding is not model.embed.embedding, "but not the Variable: training one leaves the other"


def test_shared_modules_and_shared_variables_stay_shared():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Linear(32, 32, rngs=rngs)
            self.same_module = self.a
            self.same_kernel = nnx.Linear(32, 32, rngs=rngs)
            self.same_kernel.kernel = self.a.kernel

    q = mxjax.nnx.quantize(Tied(nnx.Rngs(0)), "mxfp4")
    assert isinstance(q.a, mxjax.nnx.QLinear) and q.same_module is q.a
    assert isinstance(q.same_kernel, mxjax.nnx.QLinear) and q.same_kernel.kernel is q.a.kernel
    d = mxjax.nnx.dequantize(q)
    assert d.same_module is d.a and d.same_kernel.kernel is d.a.kernel


def test_a_kernel_shared_with_a_module_that_cannot_run_it_is_an_error():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Linear(32, 32, rngs=rngs)
            self.table = nnx.Embed(32, 32, rngs=rngs)
            self.table.embedding = self.a.kernel

    with pytest.raises(ConfigError, match=r"table \(Embed\)"):
        mxjax.nnx.quantize(Tied(nnx.Rngs(0)), "mxfp4")


class Unrunnable(nnx.Module):
    def __init__(self, rngs):
        self.c1 = nnx.Conv(32, 64, (3,), rngs=rngs)
        self.w = nnx.Param(jnp.ones((32, 8)))
        self.custom = nnx.Linear(32, 32, dot_general=lambda *a, **k: jax.lax.dot_general(*a, **k), rngs=rngs)
        self.good = nnx.Linear(32, 32, rngs=rngs)


def test_weights_in_other_modules_are_all_listed_with_the_way_out():
    with pytest.raises(ConfigError) as e:
        mxjax.nnx.quantize(Unrunnable(nnx.Rngs(0)), "mxfp4")
    text = str(e.value)
    assert "c1/kernel" in text and "Conv" in text and "w (32, 8)" in text and "custom/kernel" in text
    assert "good" not in text and "exclude" in text and "quantized_params" in text
    cfg = mxjax.recipes.get("mxfp4").replace(exclude=(r"^c1|^w$|^custom",))
    q = mxjax.nnx.quantize(Unrunnable(nnx.Rngs(0)), cfg)
    assert isinstance(q.good, mxjax.nnx.QLinear) and isinstance(q.c1, nnx.Conv)


def test_a_subclass_of_linear_is_not_taken_for_linear():
    class Twice(nnx.Linear):
        def __call__(self, x):
            return 2 * super().__call__(x)

    with pytest.raises(ConfigError, match="Twice"):
        mxjax.nnx.quantize(nnx.Sequential(Twice(32, 32, rngs=nnx.Rngs(0))), "mxfp4")


def test_a_rule_axis_that_the_layer_does_not_sum_over_is_an_error():
    cfg = mxjax.QuantConfig(rules=[mxjax.Rule(axis=-1)])
    with pytest.raises(ConfigError, match=r"sums over the axes \(-2,\)"):
        mxjax.nnx.quantize(nnx.Linear(32, 64, rngs=nnx.Rngs(0)), cfg)


def test_layers_in_a_tuple_are_an_error_that_names_the_way_out():
    class InTuple(nnx.Module):
        def __init__(self, rngs):
            self.parts = nnx.data((nnx.Linear(32, 32, rngs=rngs),))

    with pytest.raises(ConfigError, match=r"nnx\.List"):
        mxjax.nnx.quantize(InTuple(nnx.Rngs(0)), "mxfp4")


def test_a_module_of_ones_own_runs_when_it_declares_its_weights():
    class Experts(nnx.Module):
        quantized_params: ClassVar = {"up": -1}

        def __init__(self, rngs):
            self.up = nnx.Param(jax.random.normal(rngs.params(), (4, 8, 64)))  # [E, out, in]

        def __call__(self, x):
            return mxjax.qeinsum("ebk,enk->ebn", x, self.up[...])

    experts, x = Experts(nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (4, 3, 64))
    q = mxjax.nnx.quantize(experts, "nvfp4_a16")
    w = q.up[...]
    assert isinstance(q.up, mxjax.nnx.QParam) and w.qtensor.axis == -1 and w.qtensor.global_scale.shape == (4,)
    np.testing.assert_allclose(q(x), jnp.einsum("ebk,enk->ebn", x, w.dequantize()), atol=ATOL)
    assert isinstance(mxjax.nnx.dequantize(q).up, nnx.Param)


def test_lora_layers_keep_their_float_factors_and_train(qmodel):
    layer = nnx.LoRALinear(64, 32, lora_rank=4, rngs=nnx.Rngs(0), b_initializer=jax.nn.initializers.normal())
    wrapped = nnx.LoRA(64, 4, 32, base_module=nnx.Linear(64, 32, rngs=nnx.Rngs(1)), rngs=nnx.Rngs(2))
    for module in (layer, wrapped):
        q = mxjax.nnx.quantize(module, "mxfp4_a16")
        np.testing.assert_allclose(q(X), mxjax.nnx.dequantize(q)(X), atol=ATOL)
        grads = nnx.grad(lambda m: jnp.sum(m(X) ** 2), argnums=nnx.DiffState(0, nnx.LoRAParam))(q)
        leaves = jax.tree.leaves(grads)
        assert sorted(g.shape for g in leaves) == [(4, 32), (64, 4)]


def test_grad_sees_params_and_not_the_codes(qmodel):
    def loss(m):
        return jnp.mean(m(TOKENS) ** 2)

    grads = nnx.jit(nnx.grad(loss))(qmodel)
    assert all(jnp.issubdtype(g.dtype, jnp.floating) for g in jax.tree.leaves(grads))
    grads = nnx.to_pure_dict(grads)
    assert set(grads["layers"][0]["up"]) == {"bias"}
    # The same model with the dequantized weights has the same gradient: quantizing x is straight-through. Only A16
    # also has the same values in the forward pass.
    q = mxjax.nnx.quantize(Model(nnx.Rngs(0)), "mxfp4_a16")
    g, gd = (nnx.to_pure_dict(nnx.jit(nnx.grad(loss))(m)) for m in (q, mxjax.nnx.dequantize(q)))
    np.testing.assert_allclose(g["layers"][0]["up"]["bias"], gd["layers"][0]["up"]["bias"], atol=ATOL)
    np.testing.assert_allclose(g["layers"][0]["norm"]["scale"], gd["layers"][0]["norm"]["scale"], atol=ATOL)


def test_an_optimizer_step_changes_params_and_no_code(model):
    q = mxjax.nnx.quantize(model, "mxfp4")
    codes = jax.tree.map(np.asarray, nnx.state(q, mxjax.nnx.QParam))
    optimizer = nnx.Optimizer(q, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(m, optimizer):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(TOKENS) - 1.0) ** 2))(m)
        optimizer.update(m, grads)
        return loss

    first, second = step(q, optimizer), step(q, optimizer)
    assert second < first
    jax.tree.map(np.testing.assert_array_equal, codes, jax.tree.map(np.asarray, nnx.state(q, mxjax.nnx.QParam)))


def test_split_merge_update_jit(qmodel):
    expected = call(qmodel, TOKENS)
    graphdef, qparams, rest = nnx.split(qmodel, mxjax.nnx.QParam, ...)
    assert all(leaf.dtype == jnp.uint8 for leaf in jax.tree.leaves(qparams))
    np.testing.assert_array_equal(call(nnx.merge(graphdef, qparams, rest), TOKENS), expected)
    np.testing.assert_allclose(qmodel(TOKENS), expected, atol=ATOL)
    other = mxjax.nnx.quantize(Model(nnx.Rngs(9)), "mxfp4")
    nnx.update(other, nnx.state(qmodel))
    np.testing.assert_array_equal(call(other, TOKENS), expected)


@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4", "hadamard_mxfp4"])
def test_scan_and_remat_over_stacked_layers_equal_a_loop(recipe):
    stacked = nnx.vmap(lambda key: Block(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 3))
    q = mxjax.nnx.quantize(stacked, recipe)
    assert q.attn.query.kernel.shape == (3, 64, 2, 32) and q.attn.query.kernel[...].qtensor.axis == -3

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def scanned(x, block):
        return nnx.remat(lambda block, x: block(x))(block, x)

    graphdef, state = nnx.split(q)
    one_layer = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
    x = X
    for i in range(3):
        x = one_layer(jax.tree.map(lambda leaf, i=i: leaf[i], state), x)
    loss, grads = nnx.jit(nnx.value_and_grad(lambda q: jnp.sum(scanned(X, q) * x) / jnp.sum(x * x)))(q)
    assert abs(loss - 1) < 1e-4, "the scan computed the x of the loop"
    assert nnx.to_pure_dict(grads)["up"]["bias"].shape == (3, 128)
    if recipe == "nvfp4":
        assert jax.eval_shape(nnx.vmap(lambda block, x: block(x), in_axes=(0, None)), q, X).shape == (3, 2, 5, 64)


def test_a_stacked_layer_outside_scan_is_a_clear_error():
    stacked = nnx.vmap(lambda key: nnx.Linear(64, 32, rngs=nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 3))
    with pytest.raises(mxjax.errors.BlockShapeError, match="under scan or vmap"):
        mxjax.nnx.quantize(stacked, "mxfp4")(X)


def test_quantize_under_jit_and_eval_shape(model, qmodel):
    jitted = nnx.jit(lambda m: mxjax.nnx.quantize(m, "mxfp4"))(model)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(nnx.state(jitted)), jax.tree.leaves(nnx.state(qmodel)))
    abstract = nnx.eval_shape(lambda: mxjax.nnx.quantize(Model(nnx.Rngs(0)), "mxfp4"))
    assert abstract.layers[0].up.kernel.shape == (64, 128)


@pytest.mark.parametrize("start", ["abstract", "concrete", "abstract quantized", "string keys"])
def test_from_params_restores_a_quantized_tree(model, qmodel, start):
    tree = mxjax.quantize(nnx.state(model, nnx.Param), "mxfp4")
    target = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    if start == "concrete":
        target = Model(nnx.Rngs(5))
    if start == "abstract quantized":
        target, tree = nnx.eval_shape(lambda: mxjax.nnx.quantize(Model(nnx.Rngs(0)), "mxfp4")), nnx.state(qmodel)
    if start == "string keys":  # as from a file
        tree = nnx.to_pure_dict(tree)
        tree["layers"] = {str(i): layer for i, layer in tree["layers"].items()}
    np.testing.assert_array_equal(call(mxjax.nnx.from_params(target, tree), TOKENS), call(qmodel, TOKENS))


def test_from_params_lists_all_that_does_not_fit(model):
    tree = nnx.to_pure_dict(mxjax.quantize(nnx.state(model, nnx.Param), "mxfp4"))
    del tree["lm_head"]["bias"]
    tree["extra"] = jnp.zeros(3)
    tree["layers"][0]["up"]["bias"] = jnp.zeros(7)
    with pytest.raises(ConfigError) as e:
        mxjax.nnx.from_params(nnx.eval_shape(lambda: Model(nnx.Rngs(0))), tree)
    assert all(part in str(e.value) for part in ("lm_head/bias", "extra", "layers/0/up/bias", "(7,)", "(128,)"))


def test_from_params_says_what_is_still_abstract():
    class WithState(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(32, 32, rngs=rngs)
            self.count = nnx.BatchStat(jnp.zeros(()))

    tree = mxjax.quantize(nnx.state(WithState(nnx.Rngs(0)), nnx.Param), "mxfp4")
    with pytest.raises(ConfigError, match="still abstract: count"):
        mxjax.nnx.from_params(nnx.eval_shape(lambda: WithState(nnx.Rngs(0))), tree)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
def test_result_dtypes_are_those_of_the_float_layers(dtype, param_dtype):
    def layers():
        options = dict(dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0))
        return (
            nnx.Linear(64, 32, **options),
            nnx.Linear(64, 32, preferred_element_type=jnp.float32, **options),
            nnx.LinearGeneral(64, (2, 32), **options),
            nnx.Einsum("bta,ac->btc", (64, 32), (32,), **options),
        )

    def run(x, quantize):
        return [(mxjax.nnx.quantize(layer, "mxfp8_e4m3") if quantize else layer)(x) for layer in layers()]

    for x_dtype in (jnp.float32, jnp.bfloat16):
        x = jax.ShapeDtypeStruct((2, 64, 64), x_dtype)
        assert nnx.eval_shape(lambda x: run(x, True), x) == nnx.eval_shape(lambda x: run(x, False), x)


def test_multi_axis_layers_equal_their_float_twins():
    x = jax.random.normal(jax.random.key(0), (5, 3, 2, 32))
    for layer in (
        nnx.LinearGeneral((2, 32), (4, 8), axis=(-2, -1), rngs=nnx.Rngs(0)),
        nnx.LinearGeneral((3, 32), 8, axis=(3, 1), rngs=nnx.Rngs(0)),
        nnx.LinearGeneral(32, 8, axis=-1, batch_axis={0: 5}, rngs=nnx.Rngs(0)),
        nnx.Einsum("...hd,hde->...e", (2, 32, 8), (8,), rngs=nnx.Rngs(0)),
        nnx.Einsum("abhd,hde->haeb", (2, 32, 8), (2, 8), rngs=nnx.Rngs(0)),
    ):
        if layer.bias is not None:
            layer.bias[...] = jax.random.normal(jax.random.key(1), layer.bias.shape)
        q = mxjax.nnx.quantize(layer, "mxfp4_a16")
        np.testing.assert_allclose(q(x), mxjax.nnx.dequantize(q)(x), atol=ATOL)
        assert q(x).shape == layer(x).shape


def test_quantizing_twice_changes_nothing(qmodel):
    with pytest.warns(MxjaxWarning, match="nothing was quantized"):
        again = mxjax.nnx.quantize(qmodel, "mxfp4")
    assert again.layers[0].up.kernel[...].qtensor.codes is qmodel.layers[0].up.kernel[...].qtensor.codes


def test_a_qweight_can_be_a_plain_attribute_of_a_module():
    class Holder(nnx.Module):
        def __init__(self, w):
            self.w = w

        def __call__(self, x):
            return mxjax.qdot(x, self.w)

    w = mxjax.quantize({"kernel": jnp.ones((64, 8))}, "mxfp4")["kernel"]
    assert nnx.jit(lambda m, x: m(x))(Holder(w), X).shape == (2, 5, 8)


def test_summary_of_a_model(qmodel):
    table = mxjax.summary(nnx.state(qmodel))
    assert table.bits_per_weight == 4.25 and sum(r.quantized for r in table.rows) == 12
