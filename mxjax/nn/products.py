"""The products of Flax's linear layers, with a QWeight as the kernel. Shared by nnx and linen.

Flax layers promote inputs, kernel and bias to one dtype, multiply, and add the bias. A QWeight has no array to promote:
:func:`promote` shows the layer's own ``promote_dtype`` a scalar of the weight's dtype in its place.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mxjax.errors import BlockShapeError, ConfigError
from mxjax.ops.kernels import KernelWeight, kernel_dot
from mxjax.ops.qdot import qdot, qeinsum
from mxjax.ops.qweight import QWeight


def promote(
    promote_dtype: Callable[..., Any], x: Any, w: QWeight | KernelWeight, bias: Any
) -> tuple[jax.Array, jax.Array | None]:
    """Input and bias as the layer would promote them together with a kernel of w's dtype."""
    x, _, bias = promote_dtype(x, jnp.zeros((), w.dtype), bias)
    return x, bias


def linear(x: jax.Array, w: QWeight | KernelWeight, bias: jax.Array | None, **dot: Any) -> jax.Array:
    """``x @ W + b`` over the last axis: ``Linear`` and ``Dense``.

    Args:
      x: [..., K].
      w: weight of shape (K, N), quantized along axis -2, or packed by ``prepare_kernels``.
      bias: [N] or None.
      **dot: ``precision`` and ``preferred_element_type``, as in :func:`mxjax.qdot`.
    """
    axis = _axis(w)
    if w.ndim != 2 or axis != -2:
        raise BlockShapeError(
            f"a linear layer takes a kernel (in, out) quantized along axis -2, not {w.shape} along {axis}"
            + ("; run stacked layers under scan or vmap" if w.ndim > 2 else "")
        )
    return _with_bias(x, w, bias, **dot)


def _with_bias(x: jax.Array, w: QWeight | KernelWeight, bias: jax.Array | None, **dot: Any) -> jax.Array:
    if isinstance(w, KernelWeight) and dot.get("preferred_element_type") is None:
        return kernel_dot(x, w, bias=bias)
    y = qdot(x, w, **dot)
    return y if bias is None else y + bias


def _axis(w: QWeight | KernelWeight) -> int:
    return w.qtensor.axis if isinstance(w, QWeight) else w.axis


def linear_general(
    x: jax.Array,
    w: QWeight | KernelWeight,
    bias: jax.Array | None,
    axis: int | Sequence[int],
    batch_axis: Sequence[int],
    **dot: Any,
) -> jax.Array:
    """A contraction over the axes ``axis`` of x: ``LinearGeneral`` and ``DenseGeneral``.

    Args:
      x: any rank; its axes ``batch_axis`` are shared with the kernel, its axes ``axis`` are summed over.
      w: weight of shape ``(*batch, *in, *out)``, quantized along one of the ``in`` axes.
      bias: ``(*batch, *out)`` or None.
      axis, batch_axis: axes of x, in any order.
      **dot: ``precision`` and ``preferred_element_type``.

    Returns:
      ``(*batch, *rest of x, *out)``.
    """
    summed = sorted(a % x.ndim for a in ([axis] if isinstance(axis, int) else axis))
    batch = sorted(a % x.ndim for a in batch_axis)
    n_out = w.ndim - len(batch) - len(summed)
    if summed == [x.ndim - 1] and not batch and _axis(w) == -n_out - 1:
        return _with_bias(x, w, bias, **dot)
    letters = string.ascii_letters
    x_labels = letters[: x.ndim]
    out_labels = letters[x.ndim : x.ndim + n_out]
    batch_labels = "".join(x_labels[a] for a in batch)
    rest = "".join(x_labels[a] for a in range(x.ndim) if a not in summed and a not in batch)
    w_labels = batch_labels + "".join(x_labels[a] for a in summed) + out_labels
    y = qeinsum(f"{x_labels},{w_labels}->{batch_labels}{rest}{out_labels}", x, w, **dot)
    if bias is None:
        return y
    return y + bias.reshape(*bias.shape[: len(batch)], *(1,) * len(rest), *bias.shape[len(batch) :])


def einsum(spec: str, x: jax.Array, w: QWeight | KernelWeight, bias: jax.Array | None, **dot: Any) -> jax.Array:
    """``einsum(spec, x, W) + b``, the bias over the output axes that come from the kernel: ``Einsum`` of both."""
    y = qeinsum(spec, x, w, **dot)
    if bias is None:
        return y
    _, w_labels, out = einsum_labels(spec)
    # Axes that an ellipsis stands for come from x; they are at the front or between letters, so align from both ends.
    sizes = dict(zip(w_labels, w.shape, strict=True))
    head, _, tail = out.partition("...")
    hidden = y.ndim - len(head) - len(tail)
    shape = [sizes.get(c, 1) for c in head] + [1] * hidden + [sizes.get(c, 1) for c in tail]
    return y + bias.reshape(shape)


def einsum_labels(spec: str) -> tuple[str, str, str]:
    """The labels of input, kernel and output."""
    try:
        operands, out = spec.replace(" ", "").split("->")
        x_labels, w_labels = operands.split(",")
    except ValueError:
        raise ConfigError(f"an einsum layer takes 'input,kernel->output', not {spec!r}") from None
    return x_labels, w_labels, out


def summed_axes(spec: str) -> tuple[int, ...]:
    """The axes of the kernel, negative and ascending, that the spec sums over together with the input."""
    x_labels, w_labels, out = einsum_labels(spec)
    if "..." in w_labels:
        return ()
    return tuple(i - len(w_labels) for i, c in enumerate(w_labels) if c in x_labels and c not in out)
