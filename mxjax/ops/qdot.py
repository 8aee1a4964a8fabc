"""Products with quantized weights: ``qdot`` and ``qeinsum``."""

from __future__ import annotations

import string
from functools import partial
from itertools import takewhile
from typing import Any

import jax
import jax.numpy as jnp

from mxjax.core.qtensor import QTensor
from mxjax.errors import BlockShapeError, ConfigError
from mxjax.ops.kernels import KernelWeight, kernel_dot, pack
from mxjax.ops.product import contract, product, quantize_input
from mxjax.ops.qweight import QWeight
from mxjax.ops.sharded import ShardedWeight, sharded_dot
from mxjax.ops.tap import TappedWeight, tap


def qdot(
    x: jax.Array,
    w: QWeight | QTensor | KernelWeight | ShardedWeight | jax.Array,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """``x @ kernel`` for a quantized kernel: contracts the last axis of ``x`` with the weight's contraction axis.

    With a QWeight: ``y = Q_act(x T) W_q^T + (x A^T) B^T``, each part only where the weight has it. Products are
    accumulated in float32. The gradient with respect to ``x`` is straight-through for the quantization of ``x``.

    Args:
      x: [..., K], float.
      w: a QWeight, a QTensor (x stays unquantized), a weight packed by ``prepare_kernels`` or spread over a mesh by
        ``shard_weight``, or a plain kernel [K, N].
      precision: as in ``jax.lax.dot_general``; where XLA multiplies. A GPU's default for float32 is TF32: operands are
        rounded to 11 bits, and those next to the largest float32 to infinity; "highest" multiplies in float32.
      preferred_element_type: dtype of the result; default: x's.
      implementation: None takes a GPU kernel for packed weights where there is a faster one, else XLA; "xla", "triton"
        and "mosaic_gpu" force one (:func:`mxjax.kernels_used` tells what a function contains).

    Returns:
      [..., *out]; ``out`` are the axes of the weight other than its contraction axis, in order.

    Raises:
      BlockShapeError: the contraction axes differ in length.
      BackendUnsupported: a forced implementation that cannot run here; the message says why.

    Example:
      >>> w = mxjax.quantize({"kernel": jnp.ones((64, 8))}, "mxfp4")["kernel"]
      >>> qdot(jnp.ones((2, 64)), w).shape
      (2, 8)
    """
    if isinstance(w, TappedWeight):
        x, dtype = tap(w.path, jnp.asarray(x)), preferred_element_type
        return contract(x, jnp.moveaxis(w.value, w.axis, -1), precision).astype(dtype or x.dtype)
    if isinstance(w, ShardedWeight):
        return sharded_dot(jnp.asarray(x), w, implementation, preferred_element_type)
    if isinstance(w, KernelWeight):
        x = jnp.asarray(x)
        return kernel_dot(x, w, implementation).astype(preferred_element_type or x.dtype)
    x, kernel, dtype = operands("qdot", x, w, preferred_element_type)
    if not isinstance(kernel, QWeight) and kernel.ndim < 2:
        raise BlockShapeError(f"qdot: a plain kernel is [K, N], not {kernel.shape}")
    size = kernel.qtensor.size if isinstance(kernel, QWeight) else kernel.shape[-2]
    if x.ndim == 0 or x.shape[-1] != size:
        raise BlockShapeError(f"qdot: x {x.shape} does not end in {size}, the contraction axis of {kernel.shape}")
    if not isinstance(kernel, QWeight):
        return jnp.matmul(x, kernel, precision=precision, preferred_element_type=jnp.float32).astype(dtype)
    if implementation in (None, "xla"):
        return _qdot(x, kernel, precision=precision, dtype=dtype)
    return kernel_dot(x, pack(kernel, "rows"), implementation).astype(dtype)


def operands(name: str, x: Any, w: Any, dtype: Any) -> tuple[jax.Array, QWeight | jax.Array, Any]:
    """x as a float array, w as a QWeight or an array, and the dtype of the result."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ConfigError(f"{name}: x is a float array, not {x.dtype} {x.shape}")
    if isinstance(w, QTensor):
        w = QWeight(qtensor=w)
    elif not isinstance(w, QWeight):
        w = jnp.asarray(w)
    return x, w, x.dtype if dtype is None else jnp.dtype(dtype)


@partial(jax.jit, static_argnames=("precision", "dtype"))
def _qdot(x: jax.Array, w: QWeight, *, precision: Any, dtype: Any) -> jax.Array:
    return product(quantize_input(x, w), x, w, precision).astype(dtype)


def qeinsum(
    spec: str,
    x: jax.Array,
    w: QWeight | QTensor | KernelWeight | jax.Array,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> jax.Array:
    """``jnp.einsum(spec, x, w)`` for a quantized ``w`` with any leading axes (experts, layers, heads).

    ``x`` is transformed and quantized along the axis that ``spec`` pairs with the weight's contraction axis.

    Args:
      spec: two operands and an explicit output: ``"ebk,ekn->ebn"`` for experts. An ellipsis may stand for axes of x.
      x: float array.
      w: QWeight, QTensor, plain array, or a matrix packed by ``prepare_kernels``.
      precision: as in ``jnp.einsum``.
      preferred_element_type: dtype of the result; default: x's.

    Raises:
      ConfigError: a spec that is not of this form, or that does not contract the quantized axis of ``w``.
      BlockShapeError: axes of different lengths.

    Example:
      >>> w = mxjax.quantize({"experts": jnp.ones((4, 64, 8))}, "mxfp4")["experts"]
      >>> qeinsum("ebk,ekn->ebn", jnp.ones((4, 2, 64)), w).shape
      (4, 2, 8)
    """
    if isinstance(w, TappedWeight):
        _tap_einsum(spec, jnp.asarray(x), w)
        w = w.value
    if isinstance(w, KernelWeight):
        return _packed_einsum(spec, jnp.asarray(x), w).astype(preferred_element_type or x.dtype)
    x, kernel, dtype = operands("qeinsum", x, w, preferred_element_type)
    if not isinstance(kernel, QWeight):
        return jnp.einsum(spec, x, kernel, precision=precision, preferred_element_type=jnp.float32).astype(dtype)
    spec, axis = _resolve(spec, x, kernel.shape, kernel.qtensor.axis)
    return _qeinsum(x, kernel, spec=spec, axis=axis, precision=precision, dtype=dtype)


@partial(jax.jit, static_argnames=("spec", "axis", "precision", "dtype"))
def _qeinsum(x: jax.Array, w: QWeight, *, spec: str, axis: int, precision: Any, dtype: Any) -> jax.Array:
    einsum = partial(jnp.einsum, spec, precision=precision, preferred_element_type=jnp.float32)
    y = einsum(quantize_input(x, w, axis), w.qtensor.dequantize(x.dtype))
    if w.branch is not None:
        b = w.branch
        low_rank = jnp.moveaxis(b.product(), -1, w.qtensor.axis).astype(x.dtype)
        y += einsum(x if b.activation is None else b.activation.quantize(x, axis), low_rank)
    return y.astype(dtype)


def _packed_einsum(spec: str, x: jax.Array, w: KernelWeight) -> jax.Array:
    """A packed weight has no axes but its own: qdot along x's paired axis, then the axes in their order."""
    spec, axis = _resolve(spec, x, w.shape, w.axis)
    operands, out = spec.split("->")
    x_labels, w_labels = operands.split(",")
    summed = x_labels[axis]
    rest = x_labels.replace(summed, "") + w_labels.replace(summed, "")
    if sorted(rest) != sorted(out):
        raise ConfigError(f"qeinsum {spec!r}: a weight packed for kernels is summed along {summed!r} alone")
    y = kernel_dot(jnp.moveaxis(x, axis, -1), w)
    return jnp.transpose(y, [rest.index(c) for c in out])


def _tap_einsum(spec: str, x: jax.Array, w: TappedWeight) -> None:
    """Record x as [*stack, ..., K]: the leading axes of w that x has too number separate weights (experts, heads).

    Also where the output sums over them: what the experts add up to is compensated in each of them on its own.
    """
    spec, axis = _resolve(spec, x, w.shape, w.axis)
    x_labels, w_labels = spec.split("->")[0].split(",")
    leading = w_labels.replace(x_labels[axis], "")
    stack = [x_labels.index(label) for label in takewhile(x_labels.__contains__, leading)]
    rest = [i for i in range(x.ndim) if i not in stack and i != x.ndim + axis]
    order = [*stack, *rest, x.ndim + axis]
    tap(w.path, x if order == list(range(x.ndim)) else jnp.transpose(x, order), len(stack))


def _resolve(spec: str, x: jax.Array, w_shape: tuple[int, ...], w_axis: int) -> tuple[str, int]:
    """The spec without an ellipsis, and the axis of x, from the end, that it pairs with the quantized axis of w."""
    try:
        operands, out = spec.replace(" ", "").split("->")
        x_labels, w_labels = operands.split(",")
    except ValueError:
        raise ConfigError(f"qeinsum takes 'x labels,w labels->out labels', not {spec!r}") from None
    if "..." in x_labels:
        free = [c for c in string.ascii_letters if c not in spec]
        letters = "".join(free[: x.ndim - len(x_labels) + 3])
        x_labels, out = x_labels.replace("...", letters), out.replace("...", letters)
    if not (x_labels + w_labels + out).isalpha():
        raise ConfigError(f"qeinsum {spec!r}: an ellipsis may stand for axes of x that are in the output, nothing else")
    if len(x_labels) != x.ndim or len(w_labels) != len(w_shape):
        raise BlockShapeError(f"qeinsum {spec!r}: x {x.shape} and w {w_shape} do not have that many axes")
    label = w_labels[w_axis]
    if label in out or label not in x_labels:
        raise ConfigError(
            f"qeinsum {spec!r}: the weight {w_shape} is quantized along axis {w_axis} ({label!r}), which must "
            f"be summed over; quantize it along a contracted axis (Rule.axis)"
        )
    sizes = dict(zip(w_labels, w_shape, strict=True))
    for c, size in zip(x_labels, x.shape, strict=True):
        if sizes.get(c, size) != size:
            raise BlockShapeError(
                f"qeinsum {spec!r}: axis {c!r} is {size} in x {x.shape} and {sizes[c]} in w {w_shape}"
            )
    return f"{x_labels},{w_labels}->{out}", x_labels.index(label) - x.ndim
