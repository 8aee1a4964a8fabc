"""Scores of language models: perplexity, KL divergence from a reference, top-1 agreement.

A model here is anything of one of two kinds:

* a pytree with ``embed(tokens)``, ``layers`` and ``head(x)``, such as ``mxjax_models.llama.Llama``. It runs block by
  block, so that equal blocks are compiled once, and through the head a few rows at a time, so that the logits of a
  whole batch (``batch * length * vocabulary`` floats) never exist;
* any function ``logits = f(tokens)``, ``[B, S] -> [B, S, V]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from mxjax.errors import ConfigError
from mxjax.eval.arrays import ArrayError, compare_arrays
from mxjax.eval.running import batches, check_tokens, divergence_rows, embed, has_blocks, nll_rows, prepared, run_block

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class LanguageScore:
    """What :func:`evaluate` found; whatever needs a reference is None without one.

    Attributes:
      perplexity: ``exp(nll)``.
      nll: mean negative log-likelihood of the predicted tokens, in nats.
      tokens: how many tokens were predicted.
      kl: mean ``KL(reference || model)`` a token, in nats.
      top1_agreement: share of positions where both rank the same token first.
      reference_nll: the ``nll`` of the reference on the same tokens.
      nll_stderr, kl_stderr, top1_stderr: standard errors of these means, or None with a single sequence.
      increase_stderr: standard error of ``nll - reference_nll``. Both models read the same tokens, so it is far smaller
        than that of either.
    """

    perplexity: float
    nll: float
    tokens: int
    kl: float | None = None
    top1_agreement: float | None = None
    reference_nll: float | None = None
    nll_stderr: float | None = None
    kl_stderr: float | None = None
    top1_stderr: float | None = None
    increase_stderr: float | None = None

    @property
    def reference_perplexity(self) -> float | None:
        """``exp(reference_nll)``."""
        return None if self.reference_nll is None else exp_(self.reference_nll)


def evaluate(
    model: Any,
    tokens: Any,
    *,
    reference: Any = None,
    batch_size: int = 4,
    progress: Progress | None = None,
) -> LanguageScore:
    """Score a model on token sequences, beside a reference in the same pass over the tokens.

    With ``p(t | ...)`` the softmax of the logits in float32, over every token but the first of each sequence::

        nll = mean_i -log p(t_i | t_<i)      KL = mean_i sum_v p_ref(v) (log p_ref(v) - log p(v))

    No BOS is added; sequences do not see one another. Tokens of one sequence are not independent, sequences are: a
    standard error is ``s / sqrt(n)`` with the standard deviation ``s`` of the means of the n sequences.

    Memory: the weights, one batch's hidden states of each model, and 256 rows of logits of each.

    Args:
      model: see the module's text.
      tokens: integers [sequences, length], length at least 2.
      reference: a model of either kind to compare with, or None.
      batch_size: sequences at a time; does not change the result.
      progress: called with (sequences done, sequences in all).

    Raises:
      ConfigError: tokens of another shape or dtype, or outside the vocabulary.

    Example:
      >>> round(evaluate(lambda t: jnp.zeros((*t.shape, 50)), np.zeros((2, 8), np.int32)).perplexity, 3)
      50.0
    """
    tokens = check_tokens(tokens)
    if batch_size < 1:
        raise ConfigError(f"batch_size is at least 1, not {batch_size}")
    means: list[np.ndarray] = []  # for each batch, [measures, sequences]: the mean over each sequence, float64
    for batch, real, done in batches(tokens, batch_size):
        ran = prepared(model, batch)
        if reference is None:
            measures: tuple[jax.Array, ...] = (nll_rows(*ran, batch),)
        else:
            measures = divergence_rows(*ran, *prepared(reference, batch), batch)
        means.append(np.stack([np.asarray(m[:real], np.float64).mean(axis=1) for m in measures]))
        if progress:
            progress(done, len(tokens))
    nll, *compared = np.concatenate(means, axis=1)
    count = tokens.shape[0] * (tokens.shape[1] - 1)
    score = LanguageScore(exp_(nll.mean()), float(nll.mean()), count, nll_stderr=standard_error(nll))
    if reference is None:
        return score
    kl, same, reference_nll = compared
    return replace(
        score,
        kl=float(kl.mean()),
        top1_agreement=float(same.mean()),
        reference_nll=float(reference_nll.mean()),
        kl_stderr=standard_error(kl),
        top1_stderr=standard_error(same),
        increase_stderr=standard_error(nll - reference_nll),
    )


def exp_(nll: float) -> float:
    return math.exp(nll) if nll < 700 else math.inf


def standard_error(means: np.ndarray) -> float | None:
    """The standard error of the mean of independent values; one value says nothing about it."""
    return float(means.std(ddof=1) / math.sqrt(means.size)) if means.size > 1 else None


def perplexity(model: Any, tokens: Any, *, batch_size: int = 4) -> float:
    """``exp`` of the mean negative log-likelihood of every predicted token; see :func:`evaluate`."""
    return evaluate(model, tokens, batch_size=batch_size).perplexity


def token_nll(model: Any, tokens: Any, *, batch_size: int = 4) -> np.ndarray:
    """``-log p(token | tokens before it)``: float32 [sequences, length - 1]. See :func:`evaluate`."""
    tokens = check_tokens(tokens)
    rows = [np.asarray(nll_rows(*prepared(model, b), b))[:real] for b, real, _ in batches(tokens, batch_size)]
    return np.concatenate(rows)


def block_errors(reference: Any, model: Any, tokens: Any) -> list[ArrayError]:
    """How far the hidden states have drifted after each block: one :class:`ArrayError` a block.

    Args:
      reference, model: models with ``embed`` and ``layers`` of one depth.
      tokens: integers [sequences, length]; a few hundred are enough.

    Raises:
      ConfigError: a model without blocks, or of another depth.
    """
    tokens = check_tokens(tokens)
    for m in (reference, model):
        if not has_blocks(m):
            raise ConfigError(f"{type(m).__name__} has no embed(), layers and head(): its blocks cannot be compared")
    if len(reference.layers) != len(model.layers):
        raise ConfigError(f"the models have {len(reference.layers)} and {len(model.layers)} blocks")
    r, x = embed(reference, tokens), embed(model, tokens)
    errors = []
    for reference_block, block in zip(reference.layers, model.layers, strict=True):
        r, x = run_block(reference_block, r), run_block(block, x)
        errors.append(compare_arrays(r, x))
    return errors
