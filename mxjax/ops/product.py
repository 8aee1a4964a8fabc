"""The product of a QWeight in plain JAX: what XLA runs, and what kernels are compared with."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.ops.qweight import QWeight


def product(quantized: jax.Array, x: jax.Array, w: QWeight, precision: Any) -> jax.Array:
    """float32 ``quantized W_q^T + branch(x)``, where ``quantized`` is :func:`quantize_input` of x and w."""
    moved = jnp.moveaxis(w.qtensor.dequantize(x.dtype), w.qtensor.axis, -1)  # [*out, K]
    y = contract(quantized, moved, precision)
    return y if w.branch is None else y + w.branch.apply(x, precision)


def quantize_input(x: jax.Array, w: QWeight, axis: int = -1) -> jax.Array:
    """What the main branch of ``w`` multiplies: x transformed and quantized along ``axis``, in x's dtype.

    The transform runs in float32: in bfloat16 its entries would round (1/sqrt(32) by 1e-4) and scale every output.
    """
    dtype = x.dtype
    x = jnp.moveaxis(x, axis, -1)
    if w.transform is not None:
        x = w.transform.activation(x.astype(jnp.float32))
    if w.activation is not None:
        x = w.activation.quantize(x, -1, w.input_scale)
    return jnp.moveaxis(x, -1, axis).astype(dtype)


def contract(x: jax.Array, w: jax.Array, precision: Any) -> jax.Array:
    """[..., K] x [*out, K] -> float32 [..., *out]."""
    dims = (((x.ndim - 1,), (w.ndim - 1,)), ((), ()))
    return lax.dot_general(x, w, dims, precision=precision, preferred_element_type=jnp.float32)
