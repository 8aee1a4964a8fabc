"""The models of random weights that speed benchmarks run: every variant is built, and holds what the recipe makes."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from mxjax_models.llama import LlamaConfig

import mxjax
from mxjax.algorithms.low_rank import BRANCHES
from mxjax.calibration.accumulate import SAMPLE_ROWS, stats_of
from mxjax.core.formats import MXFP4
from mxjax.transforms import Kronecker
from mxjax.transforms.base import Rounding

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import flux_step
import llama_decode
import random_models
import scaleout


def shapes(tree):
    return jax.tree.map(jnp.shape, tree)


@pytest.mark.parametrize("variant", flux_step.VARIANTS)
@pytest.mark.parametrize("name", flux_step.STEPS)
def test_every_variant_of_a_step(name, variant):
    """Traced, which is what a mistake shows in; nothing is compiled."""
    model = jax.eval_shape(lambda: flux_step.build(name, variant, None, tiny=True))
    x, rest = flux_step.inputs(name, 2, tiny=True)
    y = jax.eval_shape(flux_step.step_of(name, 4), model, jnp.int32(0), x, rest)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    transforms = jax.tree.leaves(model, is_leaf=lambda leaf: isinstance(leaf, Kronecker))
    scaled = {t.left_scale is not None for t in transforms if isinstance(t, Kronecker)}
    assert scaled == {"mxfp4": {True}, "mxfp4_mxfp8": {True}, "mxfp4_shared": {False}}.get(variant, set())


@pytest.mark.parametrize("variant", ["mxfp4", "mxfp4_shared"])
def test_a_layer_is_compared_with_itself_without_kernels(variant):
    """The same products in another order, rounded to bfloat16 at the end: 2**-9, and quantized inputs that flip."""
    assert 0 < flux_step.layer_error(variant, tiny=True) < 0.01


@pytest.mark.parametrize("size", [384, 704])  # scales of columns alone, and of rows and columns
def test_the_transform_is_the_one_that_the_recipe_learns(size):
    (rule,) = mxjax.recipes.get("kroquant_loraq_mxfp4").rules
    x = jax.random.normal(jax.random.key(0), (64, size))
    stats = stats_of(mxjax.calibration.update(mxjax.calibration.GramSum.zeros(size, sample=SAMPLE_ROWS), x))
    rounding = Rounding(weight=MXFP4, activation=MXFP4)
    learned = mxjax.transforms.KroQuant(steps=0, starts=("identity",)).fit(stats, [x[:8]], rounding=rounding)
    assert shapes(random_models.kronecker(jax.random.key(0), size, "kroquant")) == shapes(learned)
    assert rule.transform.layout(size) == mxjax.transforms.KroQuant().layout(size)


def test_the_branch_is_that_of_the_recipe():
    (rule,) = mxjax.recipes.get("kroquant_loraq_mxfp4").rules
    form, built = BRANCHES[rule.options["branch"]], flux_step.ONLINE["mxfp4"]
    assert (built["branch"], built["rank"]) == (form.factors, form.equal_rank())
    w = random_models.weight(jax.random.key(0), 64, 32, "w4a4", None, built["rank"], built["branch"])
    assert (w.branch.a.format, w.branch.b.format, w.branch.activation.format) == (form.factors,) * 3
    assert jnp.isfinite(mxjax.qdot(jnp.ones((1, 64)), w)).all()


@pytest.mark.parametrize("bits", ["w4a16", "w4a4", None])
def test_llama_of_scaleout(bits):
    config = LlamaConfig.tiny()
    model = scaleout.build_llama(config, bits, scaleout.mesh_of(1, "model"))
    tokens = jnp.zeros((1, 4), jnp.int32)
    assert jax.eval_shape(lambda m, t: m(t)[0], model, tokens).shape[-1] == config.vocab_size


@pytest.mark.parametrize("kind", ["w4a16", "w4a4", "bf16"])
def test_llama_of_llama_decode(kind):
    model = llama_decode.abstract_model(LlamaConfig.tiny(), kind)
    assert nnx.state(model)
