"""Sensitivity against the model with only that part quantized, run as a whole."""

import jax
import numpy as np
import pytest
from flax import nnx
from mxjax_models.llama import Llama, LlamaConfig

import mxjax
from mxjax.errors import ConfigError
from mxjax.eval import evaluate, running, sensitivity
from mxjax.ops.qweight import is_quantized


@pytest.fixture(scope="module")
def llama():
    return Llama(LlamaConfig.tiny(num_hidden_layers=3), rngs=nnx.Rngs(0))


def tokens(shape=(3, 12)):
    return np.asarray(jax.random.randint(jax.random.key(1), shape, 0, 128))


def quantized(model, recipe="mxfp4", path=""):
    """The parameters with the weights quantized whose paths hold ``path``."""
    cfg = mxjax.recipes.get(recipe)
    kept = mxjax.Rule(path=f"^(?!.*{path})", weight=None)
    return mxjax.quantize(nnx.state(model, nnx.Param), cfg.replace(rules=[kept, *cfg.rules]) if path else cfg)


@pytest.mark.parametrize(("by", "path"), [("block", "layers/1/"), ("weight", "layers/1/mlp/up_proj/kernel")])
def test_it_is_the_model_with_this_part_quantized(llama, by, path):
    seen = []
    rows = sensitivity(llama, quantized(llama), tokens(), by=by, batch_size=2, progress=lambda *at: seen.append(at))
    assert len(rows) == (3 if by == "block" else 21)
    assert seen[-1] == (2 * len(rows), 2 * len(rows)) and len(seen) == 2 * len(rows)
    (row,) = (r for r in rows if r.path == path.removesuffix("/"))
    model = mxjax.nnx.from_params(llama, quantized(llama, path=path))
    whole = evaluate(model, tokens(), reference=llama, batch_size=2)
    # The same functions, compiled once each, on the same batches: bit for bit.
    assert (row.kl, row.kl_stderr, row.top1_agreement) == (whole.kl, whole.kl_stderr, whole.top1_agreement)
    assert row.nll_increase == pytest.approx(whole.nll - whole.reference_nll, abs=1e-12)
    assert row.kl > 0


def test_finer_formats_are_less_sensitive(llama):
    coarse, fine = (sensitivity(llama, quantized(llama, r), tokens()) for r in ("mxfp4", "mxfp8_e4m3"))
    assert [r.path for r in coarse] == ["layers/0", "layers/1", "layers/2"]
    assert all(a.kl > b.kl for a, b in zip(coarse, fine, strict=True))


def test_blocks_are_compiled_once(llama):
    running.run_block.clear_cache()
    sensitivity(llama, quantized(llama), tokens())
    assert running.run_block._cache_size() == 2  # a float block and a quantized one


def test_errors(llama):
    qparams = quantized(llama)
    with pytest.raises(ConfigError, match="by block or weight"):
        sensitivity(llama, qparams, tokens(), by="head")
    with pytest.raises(ConfigError, match="no blocks"):
        sensitivity(lambda t: t, qparams, tokens())
    with pytest.raises(ConfigError, match="nothing is quantized"):
        sensitivity(llama, nnx.state(llama, nnx.Param), tokens())
    everything = mxjax.quantize(nnx.state(llama, nnx.Param), mxjax.recipes.get("mxfp4").replace(exclude=["norm"]))
    assert is_quantized(everything["embed_tokens"]["embedding"].get_value())
    with pytest.raises(ConfigError, match="not in the model's blocks: embed_tokens/embedding"):
        sensitivity(llama, everything, tokens())
