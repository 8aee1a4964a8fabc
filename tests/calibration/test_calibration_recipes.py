"""The calibrated recipes: what they hold, and that each runs on a second model family."""

import dataclasses

import numpy as np
import pytest
from flax import nnx
from mxjax_models.llama import Llama, LlamaConfig

import mxjax
from mxjax import recipes
from mxjax.errors import ConfigError
from mxjax.transforms import BranchSmooth, Choose, Hadamard, KroQuant, Wush

CALIBRATED = sorted(n for n in recipes.RECIPES if recipes.get(n).needs_data)


def test_names_and_parts():
    assert len(CALIBRATED) == 52
    rule = recipes.get("mr_gptq_mxfp4").rules[0]
    assert (rule.transform, rule.weight_scale, rule.activation_scale) == (Hadamard(32), "third", "third")
    assert dict(rule.options) == {"observer": "mse", "act_order": "column"}
    rule = recipes.get("mr_gptq_nvfp4").rules[0]
    assert rule.transform == Hadamard(16) and rule.options["observer"] == "alternating"
    assert recipes.get("mr_gptq_mxfp4_a16").rules[0].activation is None
    assert recipes.get("wush_nvfp4").rules[0].transform == Wush(size=16)
    assert recipes.get("best_nvfp4").rules[0].transform is None
    assert recipes.get("best_nvfp4").calibration.inputs == "quantized"
    assert recipes.get("best_mxfp4").rules[0].activation_scale == "mse"
    kbbq = recipes.get("kbbq_mxfp4").rules[0].transform
    assert kbbq == Choose([Wush(strength=s) for s in (0.25, 0.5, 0.75, 1.0)]) and kbbq.candidates[0] is None
    assert recipes.get("auto_nvfp4").rules[0].transform.candidates[0] is None
    online, plain = recipes.get("quarot_mxfp4").rules
    assert online.matches("layers/0/mlp/down_proj/kernel") and not online.matches("layers/0/mlp/up_proj/kernel")
    assert (online.transform, plain.transform) == (Hadamard(32), None)
    assert not recipes.get("loraq_nvfp4").needs_data and recipes.get("svdquant_mxfp4").needs_data
    assert recipes.loraq().replace(rules=[mxjax.Rule(algorithm="loraq", options={"residual": "gptq"})]).needs_data
    kroquant = recipes.get("kroquant_loraq_nvfp4").rules[0]
    assert (kroquant.algorithm, kroquant.transform) == ("loraq", KroQuant(rank=64))
    assert recipes.get("kroquant_gptq_loraq_mxfp4").rules[0].options["residual"] == "gptq"
    assert recipes.get("kroquant_mxfp4").rules[0].algorithm == "gptq" and kroquant.options["objective"] == "output"
    output = mxjax.Rule(algorithm="loraq", options={"objective": "output"})
    assert recipes.loraq().replace(rules=[output]).needs_data
    assert recipes.get("wush_gptq_nvfp4_a16").rules[0].algorithm == "wush_gptq"


def test_every_recipe_says_when_to_use_it():
    for name in recipes.RECIPES:
        line = recipes.when_to_use(name)
        assert 10 < len(line) < 120 and "\n" not in line
    with pytest.raises(ConfigError, match="unknown recipe"):
        recipes.when_to_use("nothing")


# Compositions of what other recipes run; one of them is enough.
COMPOSED = {f"{n}_{f}" for n in ("svdquant_gptq", "kroquant_rtn", "kroquant_gptq_loraq") for f in ("mxfp4", "nvfp4")}
RUN = [n for n in CALIBRATED if n not in COMPOSED or n == "kroquant_gptq_loraq_mxfp4"]

# The driver knows nothing of the model; one recipe of each kind shows it on the other family.
CASES = [("qwen3", n) for n in RUN] + [("llama", n) for n in ("auto_mxfp4", "best_nvfp4", "wush_gptq_mxfp4")]


def shortened(cfg):
    """With few steps of what iterates."""
    (*others, rule) = cfg.rules
    options = dict(rule.options)
    if rule.algorithm in ("svdquant", "loraq"):
        options |= {"iterations": 2} | ({"steps": 2} if rule.algorithm == "loraq" else {})
    fewer = {KroQuant: {"steps": 10, "starts": ("hadamard",), "exponents": (0.6,)}, BranchSmooth: {"grid": 2}}.get(
        type(rule.transform), {}
    )
    transform = dataclasses.replace(rule.transform, **fewer) if fewer else rule.transform
    return cfg.replace(rules=[*others, dataclasses.replace(rule, options=options, transform=transform)])


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_every_recipe_runs(kind, name):
    # All weights 64 x 64 and none fused: one compilation of each part instead of three.
    sizes = dict(vocab_size=64, intermediate_size=64, num_key_value_heads=4)
    model = Llama(LlamaConfig.tiny(model_type=kind, **sizes), rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, 64, (2, 16))
    options = dataclasses.replace(recipes.get(name).calibration, fuse=False)
    weights = mxjax.quantize_sequential(model, [tokens], shortened(recipes.get(name)), options=options)
    assert len(weights) == 14
    for path, w in weights.items():
        w.validate(path)
        assert np.isfinite(w.dequantize()).all()
