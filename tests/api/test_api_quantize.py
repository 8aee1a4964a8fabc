"""``quantize``, ``dequantize``, ``summary`` on every kind of tree, and the recipes."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict, freeze

import mxjax
from mxjax.calibration import LayerStats
from mxjax.errors import CalibrationError, NonFiniteError
from mxjax.transforms.base import needs_fit


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


W = normal(0, 64, 8)


class Pair(NamedTuple):
    kernel: Any
    bias: Any


@jax.tree_util.register_dataclass
@dataclass
class Layer:
    kernel: Any
    bias: Any


def assert_trees_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


TREES = {
    "dict": {"layer": {"kernel": W, "bias": jnp.zeros(8)}},
    "list": [W, (W, None), None],
    "namedtuple": Pair(W, jnp.zeros(8)),
    "dataclass": {"a": Layer(W, jnp.zeros(8))},
    "frozen": freeze({"params": {"kernel": W}}),
    "nnx": nnx.state(nnx.Linear(64, 8, rngs=nnx.Rngs(0)), nnx.Param),
    "linen": nn.Dense(8).init(jax.random.key(0), jnp.ones((1, 64))),
    "array": W,
    "bfloat16": {"kernel": W.astype(jnp.bfloat16)},
}


@pytest.mark.parametrize("name", TREES)
def test_keeps_the_tree_and_replaces_matched_leaves(name):
    tree = TREES[name]
    q = mxjax.quantize(tree, "mxfp4")
    assert type(q) is type(tree) or name == "array"
    before, after = (jax.tree.leaves(t, is_leaf=mxjax.ops.is_quantized) for t in (tree, q))
    assert len(before) == len(after)
    for b, a in zip(before, after, strict=True):
        if b.ndim == 2:
            assert isinstance(a, mxjax.QWeight) and (a.shape, a.dtype) == (b.shape, b.dtype)
            a.validate()
            np.testing.assert_array_equal(a.dequantize(), mxjax.quantize_array(b, "mxfp4", -2).dequantize())
        else:
            assert a is b
    d = mxjax.dequantize(q)
    assert jax.tree.structure(d) == jax.tree.structure(tree)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), d) == jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def test_the_given_tree_is_untouched():
    tree = {"kernel": W}
    mxjax.quantize(tree, "mxfp4")
    assert tree["kernel"] is W


def test_frozen_dict_stays_frozen():
    assert isinstance(mxjax.quantize(TREES["frozen"], "mxfp4"), FrozenDict)


@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4", "hadamard_nvfp4"])
def test_expert_tensors_are_quantized_expert_by_expert(recipe):
    experts = normal(1, 4, 64, 8) * jnp.array([1.0, 10.0, 1e-3, 1e5])[:, None, None]
    q = mxjax.quantize({"w": experts}, recipe)["w"]
    one_by_one = [mxjax.quantize({"w": w}, recipe)["w"] for w in experts]
    assert_trees_equal(q, jax.tree.map(lambda *leaves: jnp.stack(leaves), *one_by_one))


def test_jit_and_eval_shape():
    tree = {"a": {"kernel": W, "bias": jnp.zeros(8)}, "experts": normal(1, 4, 64, 8)}
    eager = mxjax.quantize(tree, "nvfp4")
    assert_trees_equal(jax.jit(lambda t: mxjax.quantize(t, "nvfp4"))(tree), eager)
    shapes = jax.eval_shape(lambda t: mxjax.quantize(t, "nvfp4"), tree)
    assert jax.tree.structure(shapes) == jax.tree.structure(eager)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), eager)


def test_quantized_trees_pass_through_jit_vmap_and_tree_map():
    q = mxjax.quantize({"kernel": W}, "nvfp4")
    assert_trees_equal(jax.jit(lambda t: t)(q), q)
    assert_trees_equal(jax.tree.map(lambda x: x, q), q)
    stacked = jax.vmap(lambda w: mxjax.quantize({"kernel": w}, "nvfp4"))(jnp.stack([W, 2 * W]))
    assert stacked["kernel"].shape == (2, 64, 8) and stacked["kernel"].qtensor.global_scale.shape == (2,)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_non_finite_values_name_path_and_count(bad):
    tree = {"good": W, "block": [{"kernel": W.at[3, 4].set(bad).at[60, 4].set(bad)}]}
    with pytest.raises(NonFiniteError, match=r"^block/0/kernel: 2 of 512 values are NaN or Inf"):
        mxjax.quantize(tree, "mxfp4")
    cfg = mxjax.recipes.get("mxfp4")
    kept = mxjax.quantize(tree, cfg.replace(on_nonfinite="nan"))["block"][0]["kernel"].dequantize()
    # Rows 0..31 and 32..63 of column 4 are the two blocks that held them.
    assert np.isnan(kept[:, 4]).all() and np.isfinite(np.delete(np.asarray(kept), 4, axis=1)).all()
    saturated = mxjax.quantize(tree, cfg.replace(on_nonfinite="saturate"))
    assert np.isfinite(mxjax.dequantize(saturated)["block"][0]["kernel"]).all()


def test_quantized_leaves_are_left_alone():
    tree = {"a": W, "b": W}
    first = mxjax.quantize(tree, mxjax.QuantConfig(rules=[mxjax.Rule(path="a", weight="nvfp4")]))
    second = mxjax.quantize(first, "mxfp4")
    assert second["a"] is first["a"] and second["b"].format.name == "mxfp4"
    q = mxjax.quantize_array(W, "mxint8", 0)
    mixed = mxjax.quantize({"q": q, "w": W}, "mxfp4")
    assert mixed["q"] is q
    np.testing.assert_array_equal(mxjax.dequantize(mixed)["q"], q.dequantize())


def test_padding_keeps_the_shape():
    w = normal(1, 40, 8)
    q = mxjax.quantize({"w": w}, mxjax.recipes.get("mxfp4_a16").replace(on_uneven="pad"))["w"]
    assert q.shape == (40, 8) and q.qtensor.padded_size == 64
    padded = mxjax.quantize_array(jnp.pad(w, ((0, 24), (0, 0))), "mxfp4", 0).dequantize()
    np.testing.assert_array_equal(q.dequantize(), padded[:40])
    x = normal(2, 5, 40)
    # K * 2**-24 of sum |x||w| for each of the two float32 products.
    bound = 2 * 40 * 2.0**-24 * (np.abs(x) @ np.abs(q.dequantize()))
    assert np.all(np.abs(mxjax.qdot(x, q) - x @ q.dequantize()) <= bound)


def test_dequantize_to_a_dtype():
    q = mxjax.quantize({"w": W, "b": jnp.zeros(8)}, "mxfp4")
    d = mxjax.dequantize(q, jnp.bfloat16)
    assert d["w"].dtype == jnp.bfloat16 and d["b"].dtype == jnp.float32
    np.testing.assert_array_equal(d["w"].astype(jnp.float32), q["w"].dequantize())  # E2M1 fits bfloat16
    with pytest.raises(mxjax.errors.FormatError):
        mxjax.dequantize(q, jnp.int8)


def test_statistics_that_no_algorithm_needs_are_ignored():
    useless = LayerStats(hessian=jnp.full((3, 3), jnp.nan), n_tokens=jnp.array(0), amax=jnp.zeros(3))
    assert_trees_equal(mxjax.quantize({"w": W}, "mxfp4", stats={"w": useless}), mxjax.quantize({"w": W}, "mxfp4"))


def test_statistics_of_another_type_are_an_error():
    with pytest.raises(CalibrationError, match="w: its statistics are object, not LayerStats"):
        mxjax.quantize({"w": W}, "mxfp4", stats={"w": object()})


def test_activation_and_weight_formats_are_independent():
    rule = mxjax.Rule(weight="nvfp4", activation="mxfp8_e4m3", weight_scale="mse", activation_scale="ceil")
    w = mxjax.quantize({"w": W}, mxjax.QuantConfig(rules=[rule]))["w"]
    assert (w.format.name, w.activation.format.name, w.activation.scale) == ("nvfp4", "mxfp8_e4m3", "ceil")
    np.testing.assert_array_equal(w.qtensor.codes, mxjax.quantize_array(W, "nvfp4", 0, "mse").codes)


@pytest.mark.parametrize("recipe", sorted(mxjax.recipes.RECIPES))
def test_every_recipe_on_a_small_tree(recipe):
    cfg = mxjax.recipes.get(recipe)
    if any(rule.algorithm != "rtn" or needs_fit(rule.transform) for rule in cfg.rules):
        pytest.skip("needs calibration statistics; tested with its algorithm")
    (rule,) = cfg.rules
    q = mxjax.quantize({"up": {"kernel": W, "bias": jnp.ones(8)}, "embed": W}, recipe)
    kernel, x = q["up"]["kernel"].validate(), normal(1, 3, 64)
    assert q["embed"] is W and isinstance(kernel, mxjax.QWeight)
    # A block loses at most one unit of its coarsest step: half a step of E2M1 next to 6 is 1 of 6, and "even" clips 7
    # to 6. Relative to the largest value of a block, so over all |error| <= max |w| / 6 (half that for 6 and 8 bits).
    # A rotation spreads the error; its norm stays.
    error = jnp.linalg.norm(kernel.dequantize() - W)
    assert error <= jnp.abs(W).max() / 6 * W.size**0.5
    y = mxjax.qdot(x, kernel)
    assert y.shape == (3, 8) and bool(jnp.isfinite(y).all())
    assert (kernel.activation is None) == (rule.activation is None)


def test_summary_counts_bytes_and_bits():
    tree = {"up": {"kernel": W, "bias": jnp.ones(8)}, "experts": normal(1, 4, 64, 8), "none": None}
    table = mxjax.summary(mxjax.quantize(tree, "nvfp4"))
    rows = {r.path: r for r in table.rows}
    # 4 bits a value, one byte for each 16, 4 bytes a tensor scale
    assert rows["up/kernel"].nbytes == 64 * 8 // 2 + 64 * 8 // 16 + 4
    assert rows["experts"].nbytes == 4 * (64 * 8 // 2 + 64 * 8 // 16 + 4)
    assert rows["up/bias"].nbytes == 32 and not rows["up/bias"].quantized
    assert table.quantized_nbytes == 5 * 292 and table.nbytes == 5 * 292 + 32
    assert table.bits_per_weight == pytest.approx(292 * 8 / 512)
    text = str(table)
    assert "2 of 3 leaves quantized" in text and "nvfp4" in text and "4x64x8" in text


def test_summary_of_a_float_tree():
    table = mxjax.summary({"w": W})
    assert table.bits_per_weight == 0 and table.nbytes == 2048 and "0 of 1" in str(table)


def test_the_two_lines_of_the_readme():
    params = {"layer": {"kernel": W, "bias": jnp.zeros(8)}}
    x = normal(1, 2, 64)
    qparams = mxjax.quantize(params, "mxfp4")
    y = mxjax.qdot(x, qparams["layer"]["kernel"])
    reference = x @ W
    # W4A4: each factor is off by at most 1/6 of its block's largest value, independently from term to term.
    assert float(jnp.linalg.norm(y - reference) / jnp.linalg.norm(reference)) < 0.3
