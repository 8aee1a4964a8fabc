"""Round to nearest: every block on its own, no data."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from mxjax.algorithms.base import WeightSpec
from mxjax.core.quantize import quantize_array
from mxjax.ops.qweight import QWeight
from mxjax.transforms.base import Transform


def rtn(w: jax.Array, spec: WeightSpec, stats: Any = None) -> QWeight:
    """``Q(W T^-T)``: transform, then the nearest code of each element.

    Axes before the last two (stacked layers, experts) get NVFP4 tensor scales of their own.

    Args:
      w: the weight, float, any rank of 2 and more.
      spec: formats, axis and transform.
      stats: unused.
    """
    if spec.transform is not None:
        spec.transform.check(w.shape[spec.axis], spec.path)
        w = _transformed(w, spec.transform, axis=spec.axis)
    q = quantize_array(
        w,
        spec.format,
        spec.axis,
        spec.scale,
        spec.on_nonfinite,
        on_uneven=spec.on_uneven,
        batch_axes=min(max(w.ndim - 2, 0), w.ndim + spec.axis),
        path=spec.path,
    )
    return QWeight(qtensor=q, transform=spec.transform, activation=spec.activation)


@partial(jax.jit, static_argnames="axis")
def _transformed(w: jax.Array, transform: Transform, *, axis: int) -> jax.Array:
    """``W T^-T``; one compilation a shape."""
    turned = transform.weight(jnp.moveaxis(w, axis, -1).astype(jnp.float32))
    return jnp.moveaxis(turned, -1, axis).astype(w.dtype)
