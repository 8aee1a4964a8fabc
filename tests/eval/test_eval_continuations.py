"""Continuations scored in padded batches against one sequence at a time; the adapter behind a fake of lm_eval."""

import sys
import types
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.errors import ConfigError, MissingExtraError
from mxjax.eval import score_continuations, score_texts, token_nll
from mxjax.eval.continuations import cut_at, rolling_windows

VOCABULARY = 40
TABLE = 2 * jax.random.normal(jax.random.key(0), (VOCABULARY, VOCABULARY))
# Sums of up to 60 float32 log-probabilities, each off by at most 2e-6 (logits below 8 and a logsumexp of 40 terms).
ATOL = 1.2e-4


def model(tokens):
    """Logits that depend on the mean of all tokens so far: a wrong context or a missed shift changes them."""
    one_hot = jax.nn.one_hot(tokens, VOCABULARY)
    mean = jnp.cumsum(one_hot, axis=1) / jnp.arange(1, tokens.shape[1] + 1)[:, None]
    return 4 * mean @ TABLE + one_hot @ TABLE.T


def ids(n, key):
    return np.asarray(jax.random.randint(jax.random.key(key), (n,), 0, VOCABULARY)).tolist()


def direct(context, continuation):
    """One sequence, no padding, no batch."""
    tokens = np.array([[*context, *continuation]])
    nll = token_nll(model, tokens)[0, -len(continuation) :]
    greedy = np.asarray(model(jnp.asarray(tokens)))[0, len(context) - 1 : -1].argmax(-1)
    return -nll.astype(np.float64).sum(), greedy.tolist() == list(continuation)


PAIRS = [(ids(c, n), ids(t, 100 + n)) for n, (c, t) in enumerate([(1, 1), (5, 3), (40, 2), (33, 20), (2, 31), (7, 7)])]


@pytest.mark.parametrize("batch_size", [1, 4, 8])
def test_padded_batches_equal_single_sequences(batch_size):
    seen = []
    answers = score_continuations(
        model, PAIRS, max_length=64, batch_size=batch_size, progress=lambda *at: seen.append(at)
    )
    for pair, (score, greedy) in zip(PAIRS, answers, strict=True):
        expected, expected_greedy = direct(*pair)
        assert score == pytest.approx(expected, abs=ATOL) and greedy == expected_greedy
    assert seen[-1] == (6, 6)


def test_greedy_continuations_are_seen():
    context, greedy = ids(6, 1), []
    for _ in range(3):
        greedy.append(int(np.asarray(model(jnp.array([[*context, *greedy]])))[0, -1].argmax()))
    other = [*greedy[:2], (greedy[2] + 1) % VOCABULARY]
    answers = score_continuations(model, [(context, greedy), (context, other)], max_length=64)
    assert [g for _, g in answers] == [True, False] and answers[0][0] > answers[1][0]


def test_long_contexts_lose_their_left():
    context, continuation = ids(50, 2), ids(4, 3)
    ((score, _),) = score_continuations(model, [(context, continuation)], max_length=16)
    # 16 tokens are seen before the last is predicted: 17 in all, 4 of them the continuation.
    assert score == pytest.approx(direct(context[-13:], continuation)[0], abs=ATOL)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16, 21])
def test_windows_predict_every_token_once(length):
    text = list(range(1, length + 1))
    windows = rolling_windows(text, 0, 8)
    assert [t for _, continuation in windows for t in continuation] == text
    whole = [0, *text]
    for n, (context, continuation) in enumerate(windows):
        seen = [*context, *continuation]
        assert seen == whole[whole.index(seen[0]) :][: len(seen)]  # the tokens before it, as they stand
        # As much context as fits: every window but the first sees 8 tokens before its last one.
        assert len(seen) == (9 if n else min(length, 8) + 1)


def test_a_text_is_the_sum_of_its_windows():
    texts = [ids(30, 7), ids(5, 8), []]
    answers = score_texts(model, texts, prefix=3, max_length=12, batch_size=2)
    for text, answer in zip(texts, answers, strict=True):
        assert answer == pytest.approx(sum(direct(*w)[0] for w in rolling_windows(text, 3, 12)), abs=ATOL)


def test_cut_at():
    assert (
        cut_at("a\n\nb. c", ["\n\n", "b"]) == "a" and cut_at("abc", []) == "abc" and cut_at("abc", ["", "x"]) == "abc"
    )


@pytest.mark.parametrize("pair", [([], [1]), ([1], []), ([1], [2] * 17)])
def test_bad_pairs(pair):
    with pytest.raises(ConfigError, match="1 to 16 tokens"):
        score_continuations(model, [pair], max_length=16)


class FakeTemplateLM:
    """What the adapter needs of lm_eval.api.model.TemplateLM, written from its documentation."""

    def __init__(self):
        self.cache_hook = types.SimpleNamespace(add_partial=lambda *_: None)

    def loglikelihood(self, requests, disable_tqdm=False):
        encoded = []
        for context, continuation in (r.args for r in requests):
            tokens = self.tok_encode(continuation)
            if context == "":
                encoded.append(((context, continuation), [self.prefix_token_id], tokens))
            else:
                whole, start = self.tok_encode(context + continuation), self.tok_encode(context)
                encoded.append(((context, continuation), start, whole[len(start) :]))
        return self._loglikelihood_tokens(encoded)


class Letters:
    """A token a letter; 0 is the end."""

    bos_id, eos_id = None, 0

    def encode(self, text):
        return [ord(c) - 64 for c in text]

    def decode(self, tokens):
        return "".join(chr(t + 64) for t in tokens)


@dataclass
class Request:
    args: tuple


@pytest.fixture
def adapter(monkeypatch):
    """The adapter, imported with a fake lm_eval in place; real imports come back afterwards."""
    fake = types.ModuleType("lm_eval.api.model")
    fake.TemplateLM = FakeTemplateLM
    for name in ("lm_eval", "lm_eval.api"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", fake)
    monkeypatch.delitem(sys.modules, "mxjax.eval.lm_eval_adapter", raising=False)
    from mxjax.eval import lm_eval_adapter

    yield lm_eval_adapter
    sys.modules.pop("mxjax.eval.lm_eval_adapter", None)


def test_requests_and_answers(adapter):
    calls = []

    def generate(prompts, limit, *, eos_id, **sampling):
        calls.append((prompts, limit, sampling))
        return [np.array([1, 2, 3, 0, 4]) for _ in prompts]  # ABC, the end, and what nobody should see

    lm = adapter.MxjaxLM(model, Letters(), generate, max_length=16, batch_size=2, max_gen_toks=5)
    answers = lm.loglikelihood([Request(("AB", "CD")), Request(("", "Q"))])
    for (score, greedy), pair in zip(answers, [([1, 2], [3, 4]), ([0], [17])], strict=True):
        assert score == pytest.approx(direct(*pair)[0], abs=ATOL) and greedy == direct(*pair)[1]
    (rolled,) = lm.loglikelihood_rolling([Request(("ABC",))])
    assert rolled == pytest.approx(direct([0], [1, 2, 3])[0], abs=ATOL)

    plain, short = {"until": ["X"]}, {"until": "C", "max_gen_toks": 3, "do_sample": False, "temperature": 1.0}
    requests = [Request((text, options)) for text, options in (("A", plain), ("B", short), ("C", plain), ("D", plain))]
    requests.append(Request(("", {"until": [], "temperature": 0.5, "top_k": 4})))
    assert lm.generate_until(requests) == ["ABC", "AB", "ABC", "ABC", "ABC"]
    assert [(p, n) for p, n, _ in calls] == [([[1], [3]], 5), ([[4]], 5), ([[2]], 3), ([[0]], 5)]
    assert [set(s) for _, _, s in calls] == [set(), set(), set(), {"temperature", "top_k", "key"}]
    lm.generate_until([Request(("A" * 30, plain))])
    assert calls[-1][0] == [[1] * 11]  # the last that leave room for 5 more within 16
    with pytest.raises(ConfigError, match="top_p"):
        lm.generate_until([Request(("A", {"top_p": 0.9}))])
    with pytest.raises(ConfigError, match="no room"):
        lm.generate_until([Request(("A", {"max_gen_toks": 16}))])


def test_a_tokenizer_without_an_end_is_refused(adapter):
    tokenizer = Letters()
    tokenizer.eos_id = None
    with pytest.raises(ConfigError, match="no BOS and no EOS"):
        adapter.MxjaxLM(model, tokenizer, None, max_length=16)


def test_a_missing_lm_eval_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    monkeypatch.delitem(sys.modules, "mxjax.eval.lm_eval_adapter", raising=False)
    with pytest.raises(MissingExtraError, match=r"mxjax\[lm-eval\]"):
        import mxjax.eval.lm_eval_adapter  # noqa: F401
