"""The error that rounding leaves in a layer's output, relative to the output itself: what choices are made by."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from mxjax.core.quantize import fake_quantize
from mxjax.errors import CalibrationError
from mxjax.transforms.base import Rounding

_matmul = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def round_factor(x: jax.Array, rounding: Rounding, *, weight: bool) -> jax.Array:
    """The weight ``[N, K]`` (one tensor scale) or activations ``[n, K]`` (a tensor scale each) after rounding."""
    if weight:
        return fake_quantize(x, rounding.weight, -1, rounding.weight_scale)
    if rounding.activation is None:
        return x
    return fake_quantize(x, rounding.activation, -1, rounding.activation_scale, batch_axes=1)


def output_error(data: jax.Array, w: jax.Array, transform: Any, rounding: Rounding) -> jax.Array:
    """``|Q(x T) Q(W T^-T)^T - x W^T|^2 / |x W^T|^2`` where inputs are rounded; otherwise the same by the Hessian.

    With float inputs the transform cancels, and the sum over all calibration tokens is
    ``tr(D H D^T) / tr(W H W^T)`` with ``D = Q(W T^-T) T^T - W``. For use inside ``jit``.

    Args:
      data: what :func:`measured_on` returns: sampled inputs [n, K], or the Hessian [K, K].
      w: float32 [N, K], all weights that share the input.
      transform: a Transform, or None.
      rounding: formats and scale policies; by ``activation`` it says what ``data`` is.
    """
    turned = w if transform is None else transform.weight(w)
    w_q = round_factor(turned, rounding, weight=True)
    if rounding.activation is None:
        d = (w_q if transform is None else transform.undo_weight(w_q)) - w
        return _quadratic(d, data) / jnp.maximum(_quadratic(w, data), 1e-30)
    exact = _matmul(data, w.T)
    x_q = round_factor(data if transform is None else transform.activation(data), rounding, weight=False)
    return jnp.sum(jnp.square(_matmul(x_q, w_q.T) - exact)) / jnp.maximum(jnp.sum(jnp.square(exact)), 1e-30)


def _quadratic(d: jax.Array, h: jax.Array) -> jax.Array:
    return jnp.sum(_matmul(d, h) * d)


measure = jax.jit(output_error, static_argnames="rounding")


def measured_on(stats: Any, rounding: Rounding | None, fitter: Any, path: str) -> jax.Array:
    """The data that :func:`output_error` wants from LayerStats.

    Raises:
      CalibrationError: stacked statistics, no formats, or no sampled inputs where these are to be rounded.
    """
    if stats.hessian.ndim != 2:
        raise CalibrationError(f"{path}: {fitter} takes one input, not a stack of Hessians {stats.hessian.shape}")
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
