"""``plan``: which rule decides about which leaf."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.core import freeze

import mxjax
from mxjax.config import DEFAULT_EXCLUDE
from mxjax.errors import BlockShapeError, ConfigError, FormatError, MxjaxWarning


def leaf(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def decisions(tree, cfg="mxfp4_a16"):
    return {e.path: e.spec and e.spec.format.name for e in mxjax.plan(tree, cfg).entries}


def test_the_first_rule_that_matches_decides():
    tree = {"a": {"kernel": leaf(64, 8)}, "b": {"kernel": leaf(64, 8)}, "c": {"kernel": leaf(64, 8)}}
    rules = [
        mxjax.Rule(path="^a/", weight="nvfp4"),
        mxjax.Rule(path="^b/", weight=None),
        mxjax.Rule(path="^(a|b|c)/", weight="mxfp8_e4m3", activation="mxfp8_e4m3"),
    ]
    assert decisions(tree, mxjax.QuantConfig(rules=rules)) == {
        "a/kernel": "nvfp4",
        "b/kernel": None,
        "c/kernel": "mxfp8_e4m3",
    }
    assert set(decisions(tree, mxjax.QuantConfig(rules=rules[::-1])).values()) == {"mxfp8_e4m3"}


def test_unused_rules_are_reported_and_warned_about():
    cfg = mxjax.QuantConfig(rules=[mxjax.Rule(path="nothing_like_it"), mxjax.Rule()])
    tree = {"a": jnp.ones((64, 8))}
    assert mxjax.plan(tree, cfg).unused_rules == (cfg.rules[0],)
    assert "rule 'nothing_like_it' matches nothing" in str(mxjax.plan(tree, cfg))
    with pytest.warns(MxjaxWarning, match="nothing_like_it"):
        mxjax.quantize(tree, cfg)
    with pytest.warns(MxjaxWarning, match="nothing was quantized"):
        mxjax.quantize({"norm": jnp.ones((64, 8))}, "mxfp4")


EXCLUDED = [
    "model/embed_tokens/weight", "transformer/wte/embedding", "x_embedder/kernel", "wpe/w", "lm_head/kernel",
    "head/kernel", "output_layer/kernel", "final_norm/w", "ln_1/w", "ln/w", "router/kernel", "mlp/gate/kernel",
    "conv1/kernel", "conv_in/kernel", "down/lora/lora_a", "down/lora_b", "attn/query/bias", "Norm_0/scale",
]  # fmt: skip
QUANTIZED = [
    "layers/0/self_attn/q_proj/kernel", "mlp/gate_proj/kernel", "blocks/heads_proj/w", "experts/up", "attn/out/kernel",
    "mlp/linear/kernel", "rescale/w", "explorer/kernel", "kiln/kernel",
]  # fmt: skip


@pytest.mark.parametrize("path", EXCLUDED)
def test_excluded_by_default(path):
    (entry,) = mxjax.plan({path: leaf(64, 64)}, "mxfp4").entries
    assert entry.spec is None and entry.reason.startswith("excluded by")


@pytest.mark.parametrize("path", QUANTIZED)
def test_not_excluded_by_default(path):
    assert decisions({path: leaf(64, 64)}) == {path: "mxfp4"}


def test_exclude_can_be_extended_and_emptied():
    tree = {"embed": leaf(64, 64), "up": leaf(64, 64)}
    cfg = mxjax.QuantConfig(rules=[mxjax.Rule()])
    assert decisions(tree, cfg) == {"embed": None, "up": "mxfp4"}
    assert decisions(tree, cfg.replace(exclude=())) == {"embed": "mxfp4", "up": "mxfp4"}
    assert decisions(tree, cfg.replace(exclude=(*DEFAULT_EXCLUDE, "up"))) == {"embed": None, "up": None}


def test_leaves_that_are_no_float_matrices_stay():
    tree = {"i": leaf(64, 64, dtype=jnp.int32), "v": leaf(64), "s": leaf(), "text": "hello", "w": leaf(64, 8)}
    plan = mxjax.plan(tree, "mxfp4")
    assert [e.path for e in plan.quantized] == ["w"]
    reasons = {e.path: e.reason for e in plan.kept}
    assert reasons == {
        "i": "not a float array",
        "s": "not a matrix: it has 0 axes",
        "text": "not a float array",
        "v": "not a matrix: it has 1 axes",
    }


def test_uneven_axes_are_all_listed():
    tree = {"a": leaf(40, 8), "b": leaf(64, 8), "deep": {"c": leaf(3, 33, 8)}}
    with pytest.raises(BlockShapeError) as e:
        mxjax.plan(tree, "mxfp4")
    text = str(e.value)
    assert "2 contraction axes" in text and "a (40, 8)" in text and "deep/c (3, 33, 8)" in text and "b (" not in text
    assert "skip" in text and "pad" in text
    cfg = mxjax.recipes.get("mxfp4")
    assert decisions(tree, cfg.replace(on_uneven="skip")) == {"a": None, "b": "mxfp4", "deep/c": None}
    assert decisions(tree, cfg.replace(on_uneven="pad")) == {"a": "mxfp4", "b": "mxfp4", "deep/c": "mxfp4"}


@pytest.mark.parametrize(
    "path, shape, axis",
    [
        ("up/kernel", (64, 8), -2),
        ("experts", (4, 64, 8), -2),
        ("attn/query/kernel", (64, 4, 16), -3),
        ("query/kernel", (64, 64), -2),
        ("attn/out/kernel", (2, 32, 64), -2),
        ("layers/attn/value/kernel", (3, 64, 4, 16), -3),
    ],
)
def test_contraction_axes_follow_flax(path, shape, axis):
    (entry,) = mxjax.plan({path: leaf(*shape)}, "mxfp4").entries
    assert entry.spec.axis == axis


def test_axes_that_the_caller_knows_hold_where_the_rule_names_none():
    tree = {"a": leaf(64, 64), "b": leaf(64, 64)}
    cfg = mxjax.QuantConfig(rules=[mxjax.Rule(path="a", axis=-2), mxjax.Rule()])
    axes = {e.path: e.spec.axis for e in mxjax.plan(tree, cfg, axes={"a": -1, "b": -1}).entries}
    assert axes == {"a": -2, "b": -1}


def test_an_axis_that_the_array_lacks_is_an_error():
    with pytest.raises(BlockShapeError, match=r"^w: rule 'w' names axis -4"):
        mxjax.plan({"w": leaf(64, 8)}, mxjax.QuantConfig(rules=[mxjax.Rule(path="w", axis=-4)]))


def test_paths_of_every_kind_of_tree():
    state = nnx.state(nnx.Sequential(nnx.Linear(64, 8, rngs=nnx.Rngs(0))), nnx.Param)
    assert [e.path for e in mxjax.plan(state, "mxfp4").entries] == ["layers/0/bias", "layers/0/kernel"]
    assert [e.path for e in mxjax.plan(freeze({"params": {"a": leaf(64, 8)}}), "mxfp4").entries] == ["params/a"]
    assert [e.path for e in mxjax.plan([leaf(64, 8), (leaf(64, 8),)], "mxfp4").entries] == ["0", "1/0"]
    assert [e.path for e in mxjax.plan({"value": leaf(64, 8)}, "mxfp4").entries] == ["value"]


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda: mxjax.Rule(path="("), ConfigError, "no regular expression"),
        (lambda: mxjax.Rule(algorithm="magic"), ConfigError, "unknown algorithm 'magic'; known: "),
        (lambda: mxjax.Rule(axis=0), ConfigError, "counts from the end"),
        (lambda: mxjax.Rule(weight=None, activation="mxfp4"), ConfigError, "no weight"),
        (lambda: mxjax.Rule(weight="fp3"), FormatError, "unknown format 'fp3'; known: "),
        (lambda: mxjax.Rule(weight="nvfp4", weight_scale="third"), FormatError, "third"),
        (lambda: mxjax.Rule(activation="mxfp4", activation_scale="four_over_six"), FormatError, "four_over_six"),
        (lambda: mxjax.QuantConfig(rules=["mxfp4"]), ConfigError, "Rule objects"),
        (lambda: mxjax.QuantConfig(rules=[], on_uneven="round"), ConfigError, "on_uneven"),
        (lambda: mxjax.QuantConfig(rules=[], exclude=["("]), ConfigError, "no regular expression"),
        (lambda: mxjax.plan({}, "mxfp5"), ConfigError, "unknown recipe 'mxfp5'; known: .*mxfp4"),
    ],
)
def test_configs_that_mean_nothing_are_errors(make, error, text):
    with pytest.raises(error, match=text):
        make()
