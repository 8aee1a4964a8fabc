"""Sensitivity: what quantizing one part of a model alone does to what the model says."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from mxjax.errors import ConfigError
from mxjax.eval.language import standard_error
from mxjax.eval.running import Head, batches, check_tokens, divergence_rows, embed, has_blocks, run_block
from mxjax.eval.trees import leaves_by_path
from mxjax.nn.calibrate import replace_leaves
from mxjax.nn.nnx import from_params
from mxjax.ops.qweight import is_quantized

PARTS = ("block", "weight")


@dataclass(frozen=True)
class Sensitivity:
    """One part quantized, all others float.

    Attributes:
      path: ``layers/3``, or a weight's.
      kl: mean ``KL(float || this)`` a token, in nats.
      kl_stderr: its standard error over sequences, or None with a single one.
      nll_increase: what the mean negative log-likelihood grows by; ``exp`` of it is the ratio of perplexities.
      top1_agreement: share of positions where both rank the same token first.
    """

    path: str
    kl: float
    kl_stderr: float | None
    nll_increase: float
    top1_agreement: float


def sensitivity(
    model: Any,
    qparams: Any,
    tokens: Any,
    *,
    by: str = "block",
    batch_size: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> list[Sensitivity]:
    """Quantize each block, or each weight, alone, and compare the model with the float model.

    The float model runs once and its hidden states between blocks wait on the host, so a part in block i costs the
    blocks from i on and the head: about half a model a block. A few hundred tokens are enough to rank parts.

    Args:
      model: the float model, an nnx module with ``embed``, ``layers`` and ``head``.
      qparams: quantized parameters under the model's paths (``layers/3/mlp/up_proj/kernel``), all inside the blocks.
      tokens: integers [sequences, length].
      by: "block" or "weight" (as many times slower as a block has weights).
      batch_size: sequences at a time.
      progress: called with (evaluations done, in all).

    Returns:
      One row a part, in the model's order.

    Raises:
      ConfigError: a model without blocks, nothing quantized in the blocks, quantized weights outside them, or an
        unknown ``by``.

    Example:
      >>> rows = sensitivity(model, mxjax.quantize(params, "mxfp4"), tokens[:, :128])  # doctest: +SKIP
      >>> max(rows, key=lambda row: row.kl).path  # doctest: +SKIP
      'layers/29'
    """
    tokens = check_tokens(tokens)
    if by not in PARTS:
        raise ConfigError(f"sensitivity is by {' or '.join(PARTS)}, not by {by!r}")
    if not has_blocks(model):
        raise ConfigError(f"{type(model).__name__} has no embed(), layers and head(): it has no blocks to quantize")
    variants = _variants(model, qparams, by)
    means: dict[str, list[np.ndarray]] = {path: [] for path, _, _ in variants}
    rounds = -(-len(tokens) // batch_size)
    head = Head(model)
    for n, (batch, real, _) in enumerate(batches(tokens, batch_size)):
        last, states = embed(model, batch), []  # states: before each block; on the host
        for block in model.layers:
            states.append(np.asarray(last))
            last = run_block(block, last)
        for m, (path, index, variant) in enumerate(variants):
            x = run_block(variant, jnp.asarray(states[index]))
            for block in model.layers[index + 1 :]:
                x = run_block(block, x)
            rows = divergence_rows(head, x, head, last, batch)
            means[path].append(np.stack([np.asarray(r[:real], np.float64).mean(axis=1) for r in rows]))
            if progress:
                progress(n * len(variants) + m + 1, rounds * len(variants))
    out = []
    for path, parts in means.items():
        nll, kl, same, reference_nll = np.concatenate(parts, axis=1)
        increase = float((nll - reference_nll).mean())
        out.append(Sensitivity(path, float(kl.mean()), standard_error(kl), increase, float(same.mean())))
    return out


def _variants(model: Any, qparams: Any, by: str) -> list[tuple[str, int, Any]]:
    """(path, index of its block, the block with only this part quantized)."""
    parts: dict[tuple[int, str], dict[str, Any]] = {}
    outside = []
    for path, leaf in leaves_by_path(qparams).items():
        if not is_quantized(leaf):
            continue
        match = re.fullmatch(r"layers/(\d+)/(.+)", path)
        if match is None or int(match[1]) >= len(model.layers):
            outside.append(path)
            continue
        part = f"layers/{match[1]}" if by == "block" else path
        parts.setdefault((int(match[1]), part), {})[match[2]] = leaf
    if outside:
        raise ConfigError(f"not in the model's blocks: {', '.join(outside)}")
    if not parts:
        raise ConfigError("nothing is quantized in the blocks of these parameters")
    states: dict[int, Any] = {i: nnx.to_pure_dict(nnx.state(model.layers[i], nnx.Param)) for i, _ in parts}
    return [
        (part, i, from_params(model.layers[i], replace_leaves(states[i], weights)))
        for (i, part), weights in sorted(parts.items(), key=lambda item: item[0][0])
    ]
