"""The error that rounding leaves in a layer's output, relative to the output itself: what choices are made by."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from mxjax.core.formats import BlockFormat
from mxjax.core.quantize import fake_quantize
from mxjax.errors import CalibrationError
from mxjax.transforms.base import NO_STACK, Rounding

_matmul = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def output_error(data: jax.Array, w: jax.Array, transform: Any, rounding: Rounding) -> jax.Array:
    """``|Q(x T) Q(W T^-T)^T - x W^T|^2 / |x W^T|^2`` where inputs are rounded; otherwise the same by the Hessian.

    With float inputs the transform cancels, and the sum over all calibration tokens is
    ``tr(D H D^T) / tr(W H W^T)`` with ``D = Q(W T^-T) T^T - W``.

    What costs time is compiled once a shape, whatever the transform. Works inside ``jit`` as well.

    Args:
      data: what :func:`measured_on` returns: sampled inputs [n, K], or the Hessian [K, K].
      w: float32 [N, K], all weights that share the input.
      transform: a Transform, or None.
      rounding: formats and scale policies; by ``activation`` it says what ``data`` is.
    """
    w_q = _rounded(w if transform is None else transform.weight(w), rounding.weight, rounding.weight_scale, 0)
    if rounding.activation is None:
        return _hessian_error(w_q if transform is None else transform.undo_weight(w_q), w, data)
    x_q = data if transform is None else transform.activation(data)
    return _product_error(_rounded(x_q, rounding.activation, rounding.activation_scale, 1), w_q, data, w)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _rounded(x: jax.Array, fmt: BlockFormat, scale: str, batch_axes: int) -> jax.Array:
    """The weight (one tensor scale: batch_axes 0) or activations (one each: 1) after rounding along the last axis."""
    return fake_quantize(x, fmt, -1, scale, batch_axes=batch_axes)


@jax.jit
def _hessian_error(w_q: jax.Array, w: jax.Array, h: jax.Array) -> jax.Array:
    both = jnp.stack([w_q - w, w])
    error, signal = jnp.sum(_matmul(both, h) * both, axis=(1, 2))
    return error / jnp.maximum(signal, 1e-30)


@jax.jit
def _product_error(x_q: jax.Array, w_q: jax.Array, x: jax.Array, w: jax.Array, branch: Any = 0.0) -> jax.Array:
    exact = _matmul(x, w.T)
    error = jnp.sum(jnp.square(_matmul(x_q, w_q.T) + branch - exact))
    return error / jnp.maximum(jnp.sum(jnp.square(exact)), 1e-30)


def rounded_weight(w: jax.Array, rounding: Rounding) -> jax.Array:
    """The weight after rounding, one tensor scale. Straight-through gradient."""
    return _rounded(w, rounding.weight, rounding.weight_scale, 0)


def rounded_input(x: jax.Array, rounding: Rounding) -> jax.Array:
    """Inputs [n, K] after rounding, a tensor scale for each row; x itself where inputs stay float."""
    return x if rounding.activation is None else _rounded(x, rounding.activation, rounding.activation_scale, 1)


def branch_error(
    data: jax.Array, w: jax.Array, w_q: jax.Array, a: jax.Array, b: jax.Array, rounding: Rounding
) -> jax.Array:
    """:func:`output_error` of ``Q(x) w_q^T + (x a^T) b^T`` against ``x w^T``, the branch in float.

    Args:
      data: as for :func:`output_error`, in the space of ``w``.
      w, w_q: the weight [N, K] and what is left of it beside the branch, rounded.
      a, b: [r, K] and [N, r].
      rounding: by ``activation`` it says what ``data`` is.
    """
    low = _matmul(b, a)
    if rounding.activation is None:
        return _hessian_error(w_q + low, w, data)
    x_q = _rounded(data, rounding.activation, rounding.activation_scale, 1)
    return _product_error(x_q, w_q, data, w, _matmul(data, low.T))


def measured_on(stats: Any, rounding: Rounding | None, fitter: Any, path: str) -> jax.Array:
    """The data that :func:`output_error` wants from LayerStats.

    Raises:
      CalibrationError: stacked statistics, no formats, or no sampled inputs where these are to be rounded.
    """
    if stats.hessian.ndim != 2:
        raise CalibrationError(
            f"{path}: {fitter} takes one input, not a stack of Hessians {stats.hessian.shape}{NO_STACK}"
        )
    if rounding is None:
        raise CalibrationError(f"{path}: {fitter} measures rounding errors; fit it with rounding=Rounding(...)")
    return stats.hessian.astype(jnp.float32) if rounding.activation is None else sample_of(stats, fitter, path)


def sample_of(stats: Any, fitter: Any, path: str) -> jax.Array:
    """The sampled inputs of LayerStats."""
    if stats.sample is None:
        raise CalibrationError(
            f"{path}: {fitter} looks at inputs themselves, and these statistics hold none; mxjax.calibrate keeps a "
            f"sample, or pass LayerStats(sample=x[:512])"
        )
    return stats.sample.astype(jnp.float32)


def one_wide(weights: list[jax.Array]) -> jax.Array:
    """All weights [..., K] of one input as float32 [N, K]."""
    return jnp.concatenate([w.reshape(-1, w.shape[-1]).astype(jnp.float32) for w in weights])
