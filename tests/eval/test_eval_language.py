"""Perplexity, KL and agreement against float64 NumPy, and against counting by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mxjax_models.llama import Llama, LlamaConfig

import mxjax
from mxjax import eval as mx_eval
from mxjax.errors import ConfigError
from mxjax.eval import running

VOCABULARY = 50
# Each log-probability is float32 arithmetic on logits of magnitude m <= 8 and a logsumexp over V terms: an absolute
# error below (m + V / 8) * 2**-23 ~ 2e-6 for V = 50; the mean keeps it. 1e-5 leaves room for exp and log themselves.
ATOL = 1e-5


def table(key, shape=(VOCABULARY, VOCABULARY)):
    return 2 * jax.random.normal(jax.random.key(key), shape)


def bigram(weights):
    """A model whose logits depend on the last token only."""
    return lambda tokens: weights[tokens]


def tokens(shape, key=9):
    return np.asarray(jax.random.randint(jax.random.key(key), shape, 0, VOCABULARY))


def log_softmax64(logits):
    logits = np.asarray(logits, np.float64)
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def nll64(weights, t):
    return -np.take_along_axis(log_softmax64(weights)[t[:, :-1]], t[:, 1:, None], -1)[..., 0]


@pytest.mark.parametrize("shape", [(1, 2), (3, 17), (5, 300)])  # 5 * 299 rows: more than one chunk of the head
@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_perplexity_matches_float64(shape, batch_size):
    w, t = table(0), tokens(shape)
    expected = nll64(w, t)
    score = mx_eval.evaluate(bigram(w), t, batch_size=batch_size)
    assert score.tokens == expected.size and score.kl is None and score.top1_agreement is None
    np.testing.assert_allclose(score.nll, expected.mean(), atol=ATOL)
    np.testing.assert_allclose(score.perplexity, math.exp(expected.mean()), rtol=ATOL)
    np.testing.assert_allclose(mx_eval.token_nll(bigram(w), t, batch_size=batch_size), expected, atol=ATOL)


def test_kl_and_agreement_match_float64():
    w, r, t = table(0), table(1), tokens((3, 40))
    score = mx_eval.evaluate(bigram(w), t, reference=bigram(r), batch_size=2)
    p, q = log_softmax64(r)[t[:, :-1]], log_softmax64(w)[t[:, :-1]]
    np.testing.assert_allclose(score.kl, (np.exp(p) * (p - q)).sum(-1).mean(), atol=ATOL)
    same = np.asarray(w).argmax(-1)[t[:, :-1]] == np.asarray(r).argmax(-1)[t[:, :-1]]
    # Means of means of equally many zeros and ones, in float64.
    assert score.top1_agreement == pytest.approx(same.mean(), abs=1e-15) and 0 < same.mean() < 1
    np.testing.assert_allclose(score.nll, nll64(w, t).mean(), atol=ATOL)
    np.testing.assert_allclose(score.reference_nll, nll64(r, t).mean(), atol=ATOL)
    assert score.reference_perplexity == math.exp(score.reference_nll)
    alone = mx_eval.evaluate(bigram(r), t)
    np.testing.assert_allclose(score.reference_perplexity, alone.perplexity, rtol=ATOL)
    assert alone.reference_perplexity is None


def test_standard_errors_match_float64():
    w, r, t = table(0), table(1), tokens((5, 40))
    score = mx_eval.evaluate(bigram(w), t, reference=bigram(r), batch_size=2)
    p, q = log_softmax64(r)[t[:, :-1]], log_softmax64(w)[t[:, :-1]]
    same = np.asarray(w).argmax(-1)[t[:, :-1]] == np.asarray(r).argmax(-1)[t[:, :-1]]
    expected = {
        "nll_stderr": nll64(w, t),
        "kl_stderr": (np.exp(p) * (p - q)).sum(-1),
        "top1_stderr": same,
        "increase_stderr": nll64(w, t) - nll64(r, t),
    }
    for name, values in expected.items():  # a deviation of means is off by no more than the means themselves
        np.testing.assert_allclose(getattr(score, name), values.mean(1).std(ddof=1) / math.sqrt(5), atol=ATOL)
    assert mx_eval.evaluate(bigram(w), t[:1]).nll_stderr is None


def test_a_standard_error_covers_what_it_should():
    """Two halves of many sequences differ by about their standard errors: within 4 of them, and not by chance of 0."""
    w, t = table(0), tokens((64, 24))
    a, b = (mx_eval.evaluate(bigram(w), half, batch_size=32) for half in (t[:32], t[32:]))
    assert 0 < abs(a.nll - b.nll) < 4 * math.hypot(a.nll_stderr, b.nll_stderr)


def test_the_logits_of_a_batch_never_exist():
    """HEAD_ROWS rows of logits a model: the compiled pass needs less memory than one model's logits of the batch."""
    vocabulary, (b, s) = 4096, (8, 513)
    model = Llama(LlamaConfig.tiny(vocab_size=vocabulary, num_hidden_layers=1), rngs=nnx.Rngs(0))
    x = jax.ShapeDtypeStruct((b, s, model.config.hidden_size), jnp.float32)
    head, t = running.Head(model), jax.ShapeDtypeStruct((b, s), jnp.int32)
    used = running.divergence_rows.lower(head, x, head, x, t).compile().memory_analysis()
    assert used.temp_size_in_bytes < b * s * vocabulary * 4 / 2


def test_a_model_agrees_with_itself():
    score = mx_eval.evaluate(bigram(table(0)), tokens((2, 30)), reference=bigram(table(0)))
    assert score.kl == 0.0 and score.top1_agreement == 1.0


def test_uniform_and_certain_models():
    t = np.array([[0, 1, 2, 3]])
    assert mx_eval.perplexity(lambda t: jnp.zeros((*t.shape, 64)), t) == pytest.approx(64, rel=1e-6)
    certain = jnp.full((4, 4), -1e4).at[jnp.arange(3), jnp.arange(1, 4)].set(1e4)
    assert mx_eval.perplexity(bigram(certain), t) == 1.0
    assert mx_eval.perplexity(bigram(-certain), t) == math.inf


def test_large_logits_do_not_overflow():
    w = table(0) + 1e4
    # float32 holds 1e4 + x to 2**-11 only, so the table that is rounded to it is the reference.
    t = tokens((2, 20))
    np.testing.assert_allclose(mx_eval.evaluate(bigram(w), t).nll, nll64(w, t).mean(), atol=2e-3)


@pytest.fixture(scope="module")
def llama():
    return Llama(LlamaConfig.tiny(), rngs=nnx.Rngs(0))


def test_model_by_blocks_equals_its_logits(llama):
    t = np.asarray(jax.random.randint(jax.random.key(1), (3, 20), 0, 128))
    quantized = mxjax.nnx.quantize(llama, "mxfp4")
    by_blocks = mx_eval.evaluate(quantized, t, reference=llama, batch_size=2)
    run = jax.jit(lambda model, t: model(t))
    whole = mx_eval.evaluate(lambda t: run(quantized, t), t, reference=lambda t: run(llama, t), batch_size=3)
    # The same operations, compiled differently: float32 rounding of 64-wide sums through two blocks. A code of the
    # activations may flip where a value sits on a tie, so the agreement is not bit for bit.
    np.testing.assert_allclose(by_blocks.nll, whole.nll, rtol=1e-3)
    np.testing.assert_allclose(by_blocks.kl, whole.kl, rtol=0.05)
    assert by_blocks.kl > 0


def test_equal_blocks_are_compiled_once(llama):
    quantized = mxjax.nnx.quantize(llama, "nvfp4")
    running.run_block.clear_cache()
    mx_eval.evaluate(quantized, np.ones((4, 9), np.int32), batch_size=2)
    assert running.run_block._cache_size() == 1


def test_block_errors(llama):
    t = np.asarray(jax.random.randint(jax.random.key(2), (2, 16), 0, 128))
    same = mx_eval.block_errors(llama, llama, t)
    assert [r.sqnr_db for r in same] == [math.inf] * 2
    quantized = mx_eval.block_errors(llama, mxjax.nnx.quantize(llama, "mxfp4"), t)
    finer = mx_eval.block_errors(llama, mxjax.nnx.quantize(llama, "mxfp8_e4m3"), t)
    assert all(a.sqnr_db < b.sqnr_db for a, b in zip(quantized, finer, strict=True))
    with pytest.raises(ConfigError, match="no embed"):
        mx_eval.block_errors(bigram(table(0)), llama, t)
    other = Llama(LlamaConfig.tiny(num_hidden_layers=3), rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match="2 and 3 blocks"):
        mx_eval.block_errors(llama, other, t)


def test_progress_counts_sequences():
    seen = []
    mx_eval.evaluate(bigram(table(0)), tokens((5, 4)), batch_size=2, progress=lambda *at: seen.append(at))
    assert seen == [(2, 5), (4, 5), (5, 5)]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.zeros((3,), np.int32), r"\(3,\)"),
        (np.zeros((3, 1), np.int32), "at least"),
        (np.zeros((0, 5), np.int32), "at least"),
        (np.zeros((2, 5)), "float64"),
        (np.array([[1, -1]]), "-1"),
        (np.array([[1, VOCABULARY]]), "vocabulary of 50"),
    ],
)
def test_bad_tokens(bad, message):
    with pytest.raises(ConfigError, match=message):
        mx_eval.evaluate(bigram(table(0)), bad)


def test_bad_batch_size():
    with pytest.raises(ConfigError, match="batch_size"):
        mx_eval.evaluate(bigram(table(0)), tokens((2, 4)), batch_size=0)
