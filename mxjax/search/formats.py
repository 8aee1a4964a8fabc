"""Mixed precision: a format for each weight under a budget of bits."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from mxjax import recipes
from mxjax.calibration.stats import LayerStats
from mxjax.config import QuantConfig, Rule
from mxjax.core.formats import BlockFormat, get_format
from mxjax.core.quantize import fake_quantize
from mxjax.core.scales import DEFAULT_POLICY, check_policy
from mxjax.errors import BlockShapeError, ConfigError, FormatError
from mxjax.search.budget import allocate
from mxjax.search.groups import Member, groups_of
from mxjax.transforms.base import fit

CANDIDATES = ("mxfp4", "mxfp6_e2m3", "mxfp8_e4m3")


def search_formats(
    params: Any,
    stats: Mapping[str, LayerStats],
    candidates: Sequence[str] = CANDIDATES,
    average_bits: float = 5.0,
    *,
    base: str | QuantConfig = "mxfp4_a16",
    relative: bool = False,
    fuse: bool = True,
) -> QuantConfig:
    """The config with the least total Hessian-weighted error among those that store ``average_bits`` a weight.

    The error of a weight in a format is ``tr((W - Q) H (W - Q)^T)``, with ``Q`` rounded to nearest under the transform
    and the scale policy of the base rule: the squared error of the layer's output, averaged over the calibration tokens
    (times 2, as H is). The choice is exact (:func:`~mxjax.search.allocate`).

    Args:
      params: any pytree of float arrays.
      stats: of ``mxjax.calibrate``.
      candidates: format names.
      average_bits: mean stored bits of a value, block scales included (MXFP4 has 4.25), over the weights that ``base``
        quantizes.
      base: recipe or config that says which weights are quantized, and with what algorithm, transform and scale
        policies. Where its rule rounds activations to the weight's own format, they follow the weight; other activation
        formats stay.
      relative: divide each error by ``tr(W H W^T)``, so that layers count alike however large their output is.
      fuse: weights that share an input (q, k, v; gate, up) get one format, as engines that fuse them need it.

    Returns:
      A QuantConfig with a rule for each path; ``mxjax.save_config`` stores it.

    Raises:
      ConfigError: a budget that cannot be met; the message has the reachable range.
      CalibrationError: weights without statistics.
      BlockShapeError: candidates whose block does not divide a contraction axis, unless the base pads.

    Example:
      >>> params = {"a": {"kernel": jnp.ones((64, 8))}, "b": {"kernel": jnp.linspace(-1, 1, 512).reshape(64, 8)}}
      >>> f = lambda p, x: mxjax.qdot(x, p["a"]["kernel"]) + mxjax.qdot(2 * x, p["b"]["kernel"])
      >>> stats = mxjax.calibrate(f, params, [jnp.ones((10, 64))], "mxfp4")
      >>> cfg = search_formats(params, stats, average_bits=6.25)
      >>> [(rule.path, rule.weight) for rule in cfg.rules]
      [('^a/kernel$', 'mxfp4'), ('^b/kernel$', 'mxfp8_e4m3')]
    """
    cfg = recipes.get(base)
    formats = [get_format(name) for name in candidates]
    if not formats:
        raise ConfigError("search_formats got no candidate formats")
    groups = [members for members, _ in groups_of(params, stats, cfg, fuse=fuse)]
    for m in (m for members in groups for m in members):
        size = m.value.shape[m.spec.axis]
        if uneven := [f.name for f in formats if size % f.block_size and cfg.on_uneven != "pad"]:
            raise BlockShapeError(
                f"{m.path}: blocks of {', '.join(uneven)} do not divide an axis of {size}; leave them out of the "
                f"candidates, exclude the weight, or use a base with on_uneven='pad'"
            )
    found = sensitivities(params, stats, candidates, base=cfg, relative=relative)
    costs = [[sum(_bits(m, f) for m in members) for f in formats] for members in groups]
    errors = [[sum(found[m.path][f.name] for m in members) for f in formats] for members in groups]
    values = sum(m.value.size for members in groups for m in members)
    lowest, highest = (sum(pick(c) for c in costs) / values for pick in (min, max))
    if not average_bits >= lowest:  # NaN too
        raise ConfigError(
            f"average_bits={average_bits:g} cannot be met: with {', '.join(candidates)} these weights store from "
            f"{lowest:.4g} to {highest:.4g} bits a value"
        )
    choice = allocate(costs, errors, math.floor(min(average_bits, highest) * values + 1e-6))
    format_of = {m.path: formats[c] for members, c in zip(groups, choice, strict=True) for m in members}
    rules = [_rule(m, format_of[m.path]) for members in groups for m in members]
    return cfg.replace(rules=rules, name=f"{cfg.name}_{average_bits:g}_bits")


def sensitivities(
    params: Any,
    stats: Mapping[str, LayerStats],
    candidates: Sequence[str] = CANDIDATES,
    *,
    base: str | QuantConfig = "mxfp4_a16",
    relative: bool = False,
) -> dict[str, dict[str, float]]:
    """``tr((W - Q) H (W - Q)^T)`` by path and format; arguments as in :func:`search_formats`."""
    out: dict[str, dict[str, float]] = {}
    for (member,), layer in groups_of(params, stats, recipes.get(base), fuse=False):
        w = jnp.moveaxis(jnp.asarray(member.value), member.spec.axis, -1).astype(jnp.float32)
        out[member.path] = {}
        for fmt in map(get_format, candidates):
            spec = replace(member.spec, format=fmt, scale=_policy(member.spec.scale, fmt))
            transform = fit(spec.transform, layer, [w], member.path, spec.rounding)
            error, signal = _errors(w, layer.hessian, transform, fmt=fmt, policy=spec.scale)
            out[member.path][fmt.name] = float(error) / (max(float(signal), 1e-30) if relative else 1.0)
    return out


@partial(jax.jit, static_argnames=("fmt", "policy"))
def _errors(w: jax.Array, h: jax.Array, transform: Any, *, fmt: BlockFormat, policy: str) -> jax.Array:
    """``tr(D H D^T)`` for the rounding error and for the weight itself; ``H`` may be a stack, as the weight is."""
    turned = w if transform is None else transform.weight(w)
    q = fake_quantize(turned, fmt, -1, policy, batch_axes=h.ndim - 2)
    q = q if transform is None else transform.undo_weight(q)
    rows = jnp.stack([q - w, w]).reshape(2, *h.shape[:-2], -1, h.shape[-1])
    product = jnp.matmul(rows, h, precision=jax.lax.Precision.HIGHEST)
    return jnp.sum((product * rows).reshape(2, -1), axis=-1)


def _policy(policy: str, fmt: BlockFormat) -> str:
    """The policy, or the default where it means nothing for ``fmt`` (``third`` is made for MXFP4)."""
    try:
        check_policy(policy, fmt)
    except FormatError:
        return DEFAULT_POLICY
    return policy


def _bits(member: Member, fmt: BlockFormat) -> int:
    return math.ceil(member.value.size * fmt.bits_per_value)


def _rule(member: Member, fmt: BlockFormat) -> Rule:
    rule = member.rule
    assert rule.weight is not None  # such weights are no members
    follows = rule.activation is not None and get_format(rule.activation) == get_format(rule.weight)
    return replace(
        rule,
        path=f"^{re.escape(member.path)}$",
        weight=fmt.name,
        weight_scale=_policy(rule.weight_scale, fmt),
        activation=fmt.name if follows else rule.activation,
        activation_scale=_policy(rule.activation_scale, fmt) if follows else rule.activation_scale,
    )
