"""Round to nearest: every block on its own, no data."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from mxjax.algorithms.base import WeightSpec
from mxjax.core.quantize import quantize_array
from mxjax.ops.qweight import QWeight
from mxjax.transforms.base import fit, needs_fit


def rtn(w: jax.Array, spec: WeightSpec, stats: Any = None) -> QWeight:
    """``Q(W T^-T)``: transform, then the nearest code of each element.

    Axes before the last two (stacked layers, experts) get NVFP4 tensor scales of their own.

    Args:
      w: the weight, float, any rank of 2 and more.
      spec: formats, axis and transform.
      stats: calibration statistics, for a transform that is fitted to them; otherwise unused.
    """
    transform: Any = spec.transform
    if transform is not None:
        transform.check(w.shape[spec.axis], spec.path)
        if needs_fit(transform):
            if stats is not None and stats.transform is not None:
                transform = stats.transform
            moved = jnp.moveaxis(w, spec.axis, -1).astype(jnp.float32)
            transform = fit(transform, stats, [moved], spec.path, spec.rounding)
    if transform is not None:
        w = transformed(w, transform, axis=spec.axis)
    q = quantize_array(
        w,
        spec.format,
        spec.axis,
        spec.scale,
        spec.on_nonfinite,
        on_uneven=spec.on_uneven,
        batch_axes=min(max(w.ndim - 2, 0), w.ndim + spec.axis),
        global_scale=spec.tensor_scale,
        path=spec.path,
    )
    return QWeight(qtensor=q, transform=transform, activation=spec.activation)


@partial(jax.jit, static_argnames="axis")
def transformed(w: jax.Array, transform: Any, *, axis: int) -> jax.Array:
    """``W T^-T``; one compilation a shape."""
    turned = transform.weight(jnp.moveaxis(w, axis, -1).astype(jnp.float32))
    return jnp.moveaxis(turned, -1, axis).astype(w.dtype)
