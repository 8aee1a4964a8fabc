"""Products with quantized weights: ``qdot`` and ``qeinsum``."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.core.qtensor import QTensor
from mxjax.errors import BlockShapeError, ConfigError
from mxjax.ops.kernels import KernelWeight, kernel_dot, pack, reads_unpacked
from mxjax.ops.qweight import QWeight, dense


def qdot(
    x: jax.Array,
    w: QWeight | QTensor | KernelWeight | jax.Array,
    *,
    precision: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """``x @ kernel`` for a quantized kernel: contracts the last axis of ``x`` with the weight's contraction axis.

    With a QWeight: ``y = Q_act(x T) W_q^T + (x A^T) B^T``, each part only where the weight has it. Products are
    accumulated in float32. The gradient with respect to ``x`` is straight-through for the quantization of ``x``.

    Args:
      x: [..., K], float.
      w: a QWeight, a QTensor (x stays unquantized), a weight packed by ``prepare_kernels``, or a plain kernel [K, N].
      precision: as in ``jax.lax.dot_general``; where XLA multiplies.
      implementation: None takes a GPU kernel where there is a faster one, else XLA; "xla", "triton" and "mosaic_gpu"
        force one (:func:`mxjax.kernels_used` tells what a function contains). NVIDIA GPUs without FP4 units read packed
        weights only, see ``prepare_kernels``.

    Returns:
      [..., *out] in x's dtype; ``out`` are the axes of the weight other than its contraction axis, in order.

    Raises:
      BlockShapeError: the contraction axes differ in length.
      BackendUnsupported: a forced implementation that cannot run here; the message says why.

    Example:
      >>> w = mxjax.quantize({"kernel": jnp.ones((64, 8))}, "mxfp4")["kernel"]
      >>> qdot(jnp.ones((2, 64)), w).shape
      (2, 8)
    """
    x = jnp.asarray(x)
    if isinstance(w, KernelWeight):
        return kernel_dot(x, w, implementation)
    if isinstance(w, QTensor):
        w = QWeight(qtensor=w)
    size, shape = (w.qtensor.size, w.shape) if isinstance(w, QWeight) else (w.shape[-2], w.shape)
    if x.ndim == 0 or x.shape[-1] != size:
        raise BlockShapeError(f"qdot: x {x.shape} does not end in {size}, the contraction axis of the weight {shape}")
    if not isinstance(w, QWeight):
        return jnp.matmul(x, w, precision=precision, preferred_element_type=jnp.float32).astype(x.dtype)
    if implementation in (None, "xla") and not (implementation is None and reads_unpacked(w)):
        return _qdot(x, w, precision=precision)
    return kernel_dot(x, pack(w, "rows"), implementation)


@partial(jax.jit, static_argnames=("precision",))
def _qdot(x: jax.Array, w: QWeight, *, precision: Any) -> jax.Array:
    moved = jnp.moveaxis(w.qtensor.dequantize(x.dtype), w.qtensor.axis, -1)  # [*out, K]
    y = _contract(quantize_input(x, w), moved, precision)
    if w.a is not None:
        y += _contract(_contract(x, dense(w.a, x.dtype), precision).astype(x.dtype), dense(w.b, x.dtype), precision)
    return y.astype(x.dtype)


def quantize_input(x: jax.Array, w: QWeight, axis: int = -1) -> jax.Array:
    """What the main branch of ``w`` multiplies: x transformed and quantized along ``axis``."""
    x = jnp.moveaxis(x, axis, -1)
    if w.transform is not None:
        x = w.transform.activation(x)
    if w.activation is not None:
        x = w.activation.quantize(x, -1, w.input_scale)
    return jnp.moveaxis(x, -1, axis)


def _contract(x: jax.Array, w: jax.Array, precision: Any) -> jax.Array:
    """[..., K] x [*out, K] -> float32 [..., *out]."""
    dims = (((x.ndim - 1,), (w.ndim - 1,)), ((), ()))
    return lax.dot_general(x, w, dims, precision=precision, preferred_element_type=jnp.float32)


def qeinsum(spec: str, x: jax.Array, w: QWeight | QTensor | jax.Array, *, precision: Any = None) -> jax.Array:
    """``jnp.einsum(spec, x, w)`` for a quantized ``w`` with any leading axes (experts, layers, heads).

    ``x`` is transformed and quantized along the axis that ``spec`` pairs with the weight's contraction axis.

    Args:
      spec: two operands, an explicit output, no ellipsis: ``"ebk,ekn->ebn"`` for experts.
      x: float array.
      w: QWeight, QTensor or plain array.
      precision: as in ``jnp.einsum``.

    Raises:
      ConfigError: a spec that is not of this form, or that does not contract the quantized axis of ``w``.
      BlockShapeError: axes of different lengths.
    """
    x = jnp.asarray(x)
    if isinstance(w, QTensor):
        w = QWeight(qtensor=w)
    if not isinstance(w, QWeight):
        return jnp.einsum(spec, x, w, precision=precision, preferred_element_type=jnp.float32).astype(x.dtype)
    axis = _contracted_axis(spec, x, w)
    return _qeinsum(x, w, spec=spec, axis=axis, precision=precision)


@partial(jax.jit, static_argnames=("spec", "axis", "precision"))
def _qeinsum(x: jax.Array, w: QWeight, *, spec: str, axis: int, precision: Any) -> jax.Array:
    einsum = partial(jnp.einsum, spec, precision=precision, preferred_element_type=jnp.float32)
    y = einsum(quantize_input(x, w, axis), w.qtensor.dequantize(x.dtype))
    if w.a is not None:
        low_rank = jnp.matmul(dense(w.b, jnp.float32), dense(w.a, jnp.float32))
        y += einsum(x, jnp.moveaxis(low_rank, -1, w.qtensor.axis).astype(x.dtype))
    return y.astype(x.dtype)


def _contracted_axis(spec: str, x: jax.Array, w: QWeight) -> int:
    """The axis of x that ``spec`` contracts with the quantized axis of w, counted from the end."""
    try:
        operands, out = spec.replace(" ", "").split("->")
        x_labels, w_labels = operands.split(",")
    except ValueError:
        raise ConfigError(f"qeinsum takes 'x labels,w labels->out labels', not {spec!r}") from None
    if len(x_labels) != x.ndim or len(w_labels) != w.ndim:
        raise BlockShapeError(f"qeinsum {spec!r}: x {x.shape} and w {w.shape} do not have that many axes")
    label = w_labels[w.qtensor.axis]
    if label in out or label not in x_labels:
        raise ConfigError(
            f"qeinsum {spec!r}: the weight {w.shape} is quantized along axis {w.qtensor.axis} ({label!r}), which must "
            f"be summed over; quantize it along a contracted axis (Rule.axis)"
        )
    axis = x_labels.index(label) - x.ndim
    if x.shape[axis] != w.qtensor.size:
        raise BlockShapeError(f"qeinsum {spec!r}: axis {label!r} is {x.shape[axis]} in x and {w.qtensor.size} in w")
    return axis
