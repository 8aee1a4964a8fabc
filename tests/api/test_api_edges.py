"""Inputs that once gave a wrong number, a wrong path or a raw error."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax import QuantConfig, Rule
from mxjax.errors import BlockShapeError, CheckpointError, ConfigError, FormatError, NonFiniteError

W = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)


def test_a_key_named_value_keeps_its_name():
    plan = mxjax.plan({"attn": {"query": W, "value": W}}, "mxfp4")
    assert [e.path for e in plan.entries] == ["attn/query", "attn/value"]


def test_weights_named_as_in_torch_run_along_their_last_axis(tmp_path):
    q = mxjax.quantize({"l": {"weight": W}}, "mxfp4_a16")
    assert q["l"]["weight"].qtensor.axis == -1
    mxjax.save(tmp_path / "q", q, "compressed-tensors")
    assert np.array_equal(
        mxjax.load(tmp_path / "q")["l"]["weight"].dequantize(jnp.float32), q["l"]["weight"].dequantize()
    )
    wrong = mxjax.quantize({"l": {"weight": W}}, QuantConfig(rules=[Rule(axis=-2)]))
    with pytest.raises(CheckpointError, match=r"named weight is \[out, in\]"):
        mxjax.save(tmp_path / "w", wrong, "compressed-tensors")


@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4_a16"])
def test_copied_trees_are_written_as_the_originals(recipe, tmp_path):
    q = mxjax.quantize({"l": {"kernel": W}}, recipe)
    mxjax.save(tmp_path / "a", q, "compressed-tensors")
    mxjax.save(tmp_path / "b", copy.deepcopy(q), "compressed-tensors")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    third = mxjax.quantize({"l": {"kernel": W}}, QuantConfig(rules=[Rule(weight_scale="third")]))
    with pytest.raises(CheckpointError, match="global factor"):
        mxjax.save(tmp_path / "c", copy.deepcopy(third), "compressed-tensors")


def test_nvfp4_codes_and_block_scales_come_back_from_compressed_tensors(tmp_path):
    """Forty tensors of random magnitude.

    The file holds the tensor scale's reciprocal, and one float32 in seven is nobody's reciprocal: it comes back one
    step off, and from then on unchanged (docs/format.md).
    """
    rng = np.random.default_rng(1)
    tree = {f"l{i}": {"kernel": (W * np.exp(rng.uniform(-20, 20))).astype(np.float32)} for i in range(40)}
    tree["l0"]["kernel"][:32] = 0
    tree["l1"]["kernel"][:16] = 1e-30
    q = mxjax.quantize(tree, "nvfp4_a16")
    mxjax.save(tmp_path / "q", q, "compressed-tensors")
    back = mxjax.load(tmp_path / "q")
    for name, leaf in q.items():
        a, b = leaf["kernel"].qtensor, back[name]["weight"].qtensor
        assert np.array_equal(a.codes, b.codes) and np.array_equal(a.scales, b.scales)
        np.testing.assert_array_max_ulp(np.asarray(a.global_scale), np.asarray(b.global_scale).reshape(()), maxulp=1)
    mxjax.save(tmp_path / "again", back, "compressed-tensors")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "q" / "model.safetensors"
    ).read_bytes()


def test_save_refuses_what_load_would(tmp_path):
    import dataclasses

    q = dataclasses.replace(mxjax.quantize_array(W, "mxfp4", 0), size=65)
    with pytest.raises(BlockShapeError, match="65"):
        mxjax.save(tmp_path / "q", {"a": q})
    assert not (tmp_path / "q").exists()


def test_overwrite_spares_what_is_no_quantized_checkpoint(tmp_path):
    tree = mxjax.quantize({"l": {"kernel": W}}, "mxfp4")
    for name, files in {
        "app": {"config.json": '{"name": "app"}'},
        "mixed": {"mxjax.json": "{}", "thesis.txt": "x"},
    }.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
        with pytest.raises(CheckpointError, match="replaces"):
            mxjax.save(tmp_path / name, tree, overwrite=True)
        assert {p.name for p in (tmp_path / name).iterdir()} == set(files)


def test_values_beyond_float32_are_counted():
    x = np.ones((2, 32))
    x[0, :3] = 1e300
    with pytest.raises(NonFiniteError, match=r"3 of 64 values are NaN or Inf .*as float32"):
        mxjax.quantize_array(x, "mxfp4")


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
def test_a_given_scale_is_positive_and_finite(scale):
    with pytest.raises(FormatError, match="positive and finite"):
        mxjax.quantize_array(W, "nvfp4", global_scale=scale)


def test_a_given_scale_may_be_a_float64():
    q = mxjax.quantize_array(W, "nvfp4", global_scale=np.float64(0.01))
    assert q.global_scale.dtype == jnp.float32
    q.validate()


def test_a_transform_that_does_not_fit_is_planned_like_an_uneven_axis():
    from mxjax.transforms import Hadamard

    tree = {"a": {"kernel": np.ones((96, 8), np.float32)}, "b": {"kernel": W}}
    cfg = QuantConfig(rules=[Rule(transform=Hadamard(64))])
    with pytest.raises(BlockShapeError, match=r"a/kernel \(96, 8\)"):
        mxjax.quantize(tree, cfg)
    q = mxjax.quantize(tree, cfg.replace(on_uneven="skip"))
    assert q["a"]["kernel"] is tree["a"]["kernel"] and q["b"]["kernel"].format.name == "mxfp4"


def test_configs_can_be_static_arguments():
    cfg = QuantConfig(rules=Rule(weight="mxfp4"))
    q = jax.jit(mxjax.quantize, static_argnums=1)({"kernel": W}, cfg)
    assert q["kernel"].format.name == "mxfp4"


def test_rules_that_match_only_vectors_are_used(recwarn):
    mxjax.quantize(
        {"kernel": W, "bias": np.ones(8, np.float32)}, QuantConfig(rules=[Rule(path="bias", weight=None), Rule()])
    )
    assert not recwarn.list


def test_bad_options_are_named():
    with pytest.raises(ConfigError, match="on_nonfinite"):
        QuantConfig(rules=[Rule()], on_nonfinite="foo")
    with pytest.raises(ConfigError, match="list"):
        mxjax.quantize({"kernel": W}, ["mxfp4"])


def test_names_that_only_look_excluded():
    plan = mxjax.plan({"gating_einsum": {"kernel": W}, "normal": {"kernel": W}, "gate": {"kernel": W}}, "mxfp4")
    assert [e.path for e in plan.quantized] == ["gating_einsum/kernel", "normal/kernel"]
