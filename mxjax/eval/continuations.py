"""Log-likelihoods of continuations, as benchmarks of language models ask for them: tokens in, numbers out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mxjax.errors import ConfigError
from mxjax.eval.running import prepared, scored_rows

Pair = tuple[Sequence[int], Sequence[int]]
SHORTEST = 32  # sequences are padded to powers of two from here on, so that few lengths are compiled


def score_continuations(
    model: Any,
    pairs: Sequence[Pair],
    *,
    max_length: int,
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> list[tuple[float, bool]]:
    """``sum_i log p(t_i | context, t_<i)`` over the tokens of each continuation, and whether greedy decoding gives it.

    A context that is too long loses tokens on its left. Sequences are padded on the right, which a causal model does
    not see, and sorted by length, longest first: what is too large for the memory fails at once.

    Args:
      model: see :mod:`mxjax.eval.language`.
      pairs: (context, continuation), token ids, neither empty.
      max_length: how many tokens the model may see.
      batch_size: sequences at a time; does not change the result.
      progress: called with (pairs done, pairs in all).

    Raises:
      ConfigError: an empty part, a continuation longer than ``max_length``, or ids outside the vocabulary.

    Example:
      >>> uniform = lambda tokens: jnp.zeros((*tokens.shape, 8))
      >>> score, greedy = score_continuations(uniform, [([1], [2, 3])], max_length=16)[0]
      >>> bool(abs(score + 2 * np.log(8)) < 1e-5), greedy
      (True, False)
    """
    for context, continuation in pairs:
        if not len(context) or not 0 < len(continuation) <= max_length:
            raise ConfigError(
                f"a continuation of 1 to {max_length} tokens (max_length) follows a context of at least one, not "
                f"{len(continuation)} after {len(context)}"
            )
    whole = [[*context, *continuation][-(max_length + 1) :] for context, continuation in pairs]
    order = sorted(range(len(pairs)), key=lambda i: -len(whole[i]))
    out: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
    for start in range(0, len(order), batch_size):
        members = order[start : start + batch_size]
        length = max(SHORTEST, 1 << (len(whole[members[0]]) - 1).bit_length())
        batch = np.zeros((min(batch_size, len(order)), length), np.int32)
        for row, i in zip(batch, members, strict=False):
            row[: len(whole[i])] = whole[i]
        nll, greedy = (np.asarray(r) for r in scored_rows(*prepared(model, batch), batch))
        for n, i in enumerate(members):
            end = len(whole[i]) - 1  # column c of the scores predicts token c + 1
            tail = slice(end - len(pairs[i][1]), end)
            out[i] = (-float(nll[n, tail].astype(np.float64).sum()), bool(greedy[n, tail].all()))
        if progress:
            progress(start + len(members), len(order))
    return out


def rolling_windows(tokens: Sequence[int], prefix: int, max_length: int) -> list[Pair]:
    """(context, continuation) pairs that predict every token once, each window as long as the model may see.

    Example:
      >>> rolling_windows([1, 2, 3, 4, 5], 0, 3)
      [([0], [1, 2, 3]), ([2, 3], [4, 5])]
    """
    tokens = list(tokens)
    windows: list[Pair] = [([prefix], tokens[:max_length])] if tokens else []
    for start in range(max_length, len(tokens), max_length):
        end = min(start + max_length, len(tokens))
        windows.append((tokens[max(end - max_length - 1, 0) : start], tokens[start:end]))
    return windows


def score_texts(
    model: Any,
    texts: Sequence[Sequence[int]],
    *,
    prefix: int,
    max_length: int,
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> list[float]:
    """The log-likelihood of each text as a whole, in windows where it is longer than the model may see.

    Args:
      model, max_length, batch_size, progress: as in :func:`score_continuations`.
      texts: token ids each.
      prefix: what the first token follows (BOS).
    """
    windows = [rolling_windows(text, prefix, max_length) for text in texts]
    pairs = [pair for group in windows for pair in group]
    scores = iter(score_continuations(model, pairs, max_length=max_length, batch_size=batch_size, progress=progress))
    return [sum(next(scores)[0] for _ in group) for group in windows]


def cut_at(text: str, stops: Sequence[str]) -> str:
    """``text`` up to the first of the stop strings.

    Example:
      >>> cut_at("one. Two", [". ", "T"])
      'one'
    """
    ends = [at for stop in stops if stop and (at := text.find(stop)) >= 0]
    return text[: min(ends, default=len(text))]
