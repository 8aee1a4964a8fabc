"""Weights that engines fuse share one tensor scale where the config says so; writers notice where they do not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from io_cases import SOURCE, config_of

import mxjax
from mxjax.calibration.stats import LayerStats
from mxjax.config import FUSED, scale_group
from mxjax.errors import ConfigError, MxjaxWarning


def weight(seed, size=1.0, shape=(64, 32)):
    return size * jax.random.normal(jax.random.key(seed), shape)


def block(**names):
    return {"attn": {name: {"kernel": w} for name, w in names.items()}}


def scales(tree):
    leaf = lambda x: isinstance(x, mxjax.QWeight)  # noqa: E731
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=leaf)[0]
    return {path[1].key: np.asarray(w.qtensor.global_scale) for path, w in flat if leaf(w)}


@pytest.mark.parametrize(
    "path, group",
    [
        ("model/layers/0/self_attn/q_proj/weight", "model/layers/0/self_attn/*/weight"),
        ("model/layers/0/self_attn/v_proj/weight", "model/layers/0/self_attn/*/weight"),
        ("model/layers/0/self_attn/o_proj/weight", None),
        ("layers/1/mlp/gate_proj/kernel", "layers/1/mlp/*/kernel"),
        ("layers/1/mlp/experts/3/up_proj/kernel", "layers/1/mlp/experts/3/*/kernel"),
        ("layers/1/block_sparse_moe/experts/3/w3/weight", "layers/1/block_sparse_moe/experts/3/*/weight"),
        ("layers/1/block_sparse_moe/experts/3/w2/weight", None),
        ("blocks/0/attn/to_k/kernel", "blocks/0/attn/*/kernel"),
        ("blocks/0/attn/add_k_proj/kernel", "blocks/0/attn/*/kernel"),
        ("blocks/0/attn/to_out/kernel", None),
    ],
)
def test_groups(path, group):
    assert scale_group(path) == group


def test_the_largest_scale_of_a_group_is_everybodys():
    params = block(q_proj=weight(0), k_proj=weight(1, 3.0), v_proj=weight(2, 0.5), o_proj=weight(3, 7.0))
    cfg = mxjax.QuantConfig(rules=[mxjax.Rule(weight="nvfp4")])
    own = scales(mxjax.quantize(params, cfg))
    q = mxjax.quantize(params, cfg.replace(share_scales=FUSED))
    shared = scales(q)
    assert len(set(map(float, own.values()))) == 4  # the default shares nothing
    assert shared["q_proj"] == shared["k_proj"] == shared["v_proj"] == own["k_proj"]
    assert shared["o_proj"] == own["o_proj"]
    # Each weight is the one that quantize_array makes under that scale: nothing is rescaled afterwards.
    for name in ("q_proj", "v_proj"):
        w = params["attn"][name]["kernel"]
        alone = mxjax.quantize_array(w, "nvfp4", axis=-2, global_scale=jnp.asarray(own["k_proj"]))
        assert np.array_equal(q["attn"][name]["kernel"].qtensor.codes, alone.codes)
        assert np.array_equal(q["attn"][name]["kernel"].qtensor.scales, alone.scales)


def test_only_equals_share():
    """Another format, another policy and another stacking have scales of their own; so has MXFP4 none at all."""
    params = block(q_proj=weight(0), k_proj=weight(1, 3.0), v_proj=weight(2, 9.0, (2, 64, 32)))
    rules = [mxjax.Rule(path="k_proj", weight="nvfp4", weight_scale="mse"), mxjax.Rule(weight="nvfp4")]
    got = scales(mxjax.quantize(params, mxjax.QuantConfig(rules=rules, share_scales=FUSED)))
    assert got["q_proj"] != got["k_proj"] and got["v_proj"].shape == (2,)
    mx = mxjax.quantize(params, mxjax.QuantConfig(rules=[mxjax.Rule(weight="mxfp4")], share_scales=FUSED))
    assert mx["attn"]["q_proj"]["kernel"].qtensor.global_scale is None


def test_stacked_experts_share_expert_by_expert():
    gate, up = weight(0, shape=(3, 64, 32)), weight(1, shape=(3, 64, 32)) * jnp.array([0.5, 2.0, 1.0])[:, None, None]
    cfg = mxjax.QuantConfig(rules=[mxjax.Rule(weight="nvfp4")], share_scales=FUSED)
    got = scales(mxjax.quantize(block(gate_proj=gate, up_proj=up), cfg))
    amax = np.maximum(np.abs(gate).max((1, 2)), np.abs(up).max((1, 2)))
    assert np.allclose(got["gate_proj"], amax / 2688, rtol=2.0**-23) and np.array_equal(
        got["gate_proj"], got["up_proj"]
    )


@pytest.mark.parametrize("observer", ["minmax", "mse", "alternating"])
def test_gptq_and_rotations_share_too(observer):
    x = jax.random.normal(jax.random.key(9), (256, 64))
    stats = LayerStats(hessian=x.T @ x, n_tokens=jnp.array(256), amax=jnp.abs(x).max(0))
    params = block(gate_proj=weight(0), up_proj=weight(1, 2.0))
    rule = mxjax.Rule(
        weight="nvfp4", algorithm="gptq", transform=mxjax.transforms.Hadamard(16), options={"observer": observer}
    )
    cfg = mxjax.QuantConfig(rules=[rule])
    by_path = {f"attn/{name}/kernel": stats for name in params["attn"]}
    own = scales(mxjax.quantize(params, cfg, by_path))
    q = mxjax.quantize(params, cfg.replace(share_scales=FUSED), by_path)
    shared = scales(q)
    assert own["gate_proj"] < own["up_proj"] == shared["gate_proj"] == shared["up_proj"]
    for name, w in params["attn"].items():
        error = np.linalg.norm(q["attn"][name]["kernel"].dequantize() - w["kernel"]) / np.linalg.norm(w["kernel"])
        assert error < 0.25  # of NVFP4: about 0.1; a scale that was swapped afterwards would give about 0.5


def test_sharing_under_jit():
    params = block(q_proj=weight(0), k_proj=weight(1, 3.0))
    cfg = mxjax.QuantConfig(rules=[mxjax.Rule(weight="nvfp4")], share_scales=FUSED, on_nonfinite="nan")
    inside = jax.jit(lambda p: mxjax.quantize(p, cfg))(params)
    for a, b in zip(jax.tree.leaves(inside), jax.tree.leaves(mxjax.quantize(params, cfg)), strict=True):
        assert np.array_equal(a, b)


def test_a_bad_pattern():
    with pytest.raises(ConfigError, match=r"share_scales: '\(' is no regular expression"):
        mxjax.QuantConfig(rules=[mxjax.Rule()], share_scales=["("])


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt", "quark"])
def test_writers_warn_of_groups_that_do_not_share(tmp_path, layout):
    cfg = mxjax.QuantConfig(rules=[mxjax.Rule(weight="nvfp4", axis=-1)])
    tree = mxjax.load(SOURCE)
    with pytest.warns(MxjaxWarning, match=r"4 groups of NVFP4.*vLLM takes.*first: model\.layers\.0\.mlp\.\*\)"):
        mxjax.save(tmp_path / "own", mxjax.quantize(tree, cfg), layout, config=config_of(SOURCE))
    shared = mxjax.quantize(tree, cfg.replace(share_scales=FUSED))
    mxjax.save(tmp_path / "shared", shared, layout, config=config_of(SOURCE))  # warnings of mxjax are errors here
