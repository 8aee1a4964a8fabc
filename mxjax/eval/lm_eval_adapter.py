"""A model for ``lm_eval`` (EleutherAI's lm-evaluation-harness). Needs ``pip install 'mxjax[lm-eval]'``.

``mxjax lm-eval MODEL --tasks ...`` and ``mxjax.cli.lm_eval.FolderLM`` open a model folder for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from mxjax.errors import ConfigError, MissingExtraError
from mxjax.eval.continuations import cut_at, score_continuations, score_texts

try:
    from lm_eval.api.model import TemplateLM
except ImportError as e:
    raise MissingExtraError("the adapter needs lm_eval, which is not installed: pip install 'mxjax[lm-eval]'") from e

# Names that tasks use for one thing.
_MOST_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_KNOWN = {*_MOST_TOKENS, "until", "do_sample", "temperature", "top_k"}


class MxjaxLM(TemplateLM):
    """Answers the three kinds of requests of ``lm_eval`` with a model in memory.

    Args:
      model: as in :func:`mxjax.eval.evaluate`.
      tokenizer: ``encode(text)``, ``decode(ids)``, ``bos_id``, ``eos_id``.
      generate: ``generate(prompts, max_new_tokens, **options)`` with lists of ids in and ids out, such as
        ``functools.partial(mxjax_models.generate.generate, model)``.
      max_length: how many tokens the model may see.
      batch_size: sequences at a time.
      max_gen_toks: how many tokens are generated where a task does not say.
      progress: called with (done, in all).

    Raises:
      ConfigError: a tokenizer without BOS and EOS.

    Example:
      >>> lm = MxjaxLM(model, tokenizer, partial(generate, model), max_length=2048)  # doctest: +SKIP
      >>> lm_eval.simple_evaluate(lm, tasks=["arc_easy"])["results"]  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        generate: Callable[..., Any],
        *,
        max_length: int,
        batch_size: int = 8,
        max_gen_toks: int = 256,
        progress: Callable[[int, int], None] | None = None,
    ):
        super().__init__()
        if tokenizer.eos_id is None and tokenizer.bos_id is None:
            raise ConfigError("the tokenizer has no BOS and no EOS token: a text without context has nothing to follow")
        self.model, self._text, self._generate = model, tokenizer, generate
        self.max_length, self.batch_size, self.max_gen_toks = max_length, batch_size, max_gen_toks
        self._options: dict[str, Any] = {"max_length": max_length, "batch_size": batch_size, "progress": progress}

    @property
    def eot_token_id(self) -> int:
        return self._text.bos_id if self._text.eos_id is None else self._text.eos_id

    @property
    def prefix_token_id(self) -> int:
        """What a text without context follows: BOS, or EOS where there is none."""
        return self._text.eos_id if self._text.bos_id is None else self._text.bos_id

    @property
    def tokenizer_name(self) -> str:
        return type(self._text).__name__

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """No BOS is added, as in mxjax's perplexities; special tokens written in the text become their ids."""
        return self._text.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        answers = score_continuations(self.model, pairs, **self._options)
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", request[0], answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        texts = [self.tok_encode(request.args[0]) for request in requests]
        answers = score_texts(self.model, texts, prefix=self.prefix_token_id, **self._options)
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
        return answers

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy, unless a task asks for sampling; a text ends at EOS or before the first stop string."""
        answers = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(i)
        for members in groups.values():  # one compilation for requests with equal options
            for start in range(0, len(members), self.batch_size):
                batch = members[start : start + self.batch_size]
                texts = self._generated([requests[i].args[0] for i in batch], requests[batch[0]].args[1])
                for i, text in zip(batch, texts, strict=True):
                    answers[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return answers

    def _generated(self, contexts: list[str], options: dict[str, Any]) -> list[str]:
        if unknown := set(options) - _KNOWN:
            raise ConfigError(f"generation options {sorted(unknown)} are not supported; supported: {sorted(_KNOWN)}")
        limit = int(next((options[name] for name in _MOST_TOKENS if options.get(name) is not None), self.max_gen_toks))
        room = self.max_length - limit
        if room < 1:
            raise ConfigError(f"{limit} tokens to generate leave no room for a prompt within {self.max_length}")
        prompts = [(self.tok_encode(text) or [self.prefix_token_id])[-room:] for text in contexts]
        sampling: dict[str, Any] = {}
        if options.get("do_sample", True) and (temperature := float(options.get("temperature") or 0)) > 0:
            sampling = {"temperature": temperature, "top_k": options.get("top_k"), "key": jax.random.key(0)}
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        new = self._generate(prompts, limit, eos_id=self._text.eos_id, **sampling)
        return [cut_at(self._decoded(ids), stops) for ids in new]

    def _decoded(self, ids: Any) -> str:
        ids = [int(i) for i in ids]
        return self._text.decode(ids[: ids.index(self._text.eos_id)] if self._text.eos_id in ids else ids)
