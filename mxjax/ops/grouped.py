"""``qdot_grouped``: rows sorted by expert times a stack of quantized weights (mixture of experts)."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mxjax.core.qtensor import QTensor
from mxjax.errors import BlockShapeError, ConfigError
from mxjax.ops.low_rank import dense
from mxjax.ops.qdot import operands
from mxjax.ops.qweight import ActivationFormat, QWeight
from pallas_kernels.block_scaled_matmul import PackedWeight
from pallas_kernels.block_scaled_matmul.reference import dequantize
from pallas_kernels.grouped_matmul import expert_stack
from pallas_kernels.grouped_matmul.reference import by_expert, expert_of_row
from pallas_kernels.linear import grouped_linear


def qdot_grouped(
    x: jax.Array,
    w: QWeight | QTensor | jax.Array,
    group_sizes: jax.Array,
    *,
    bias: jax.Array | None = None,
    preferred_element_type: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """``y[r] = qdot(x[r], w[e])`` for every row r of expert e: ``jax.lax.ragged_dot`` for quantized weights.

    Rows are sorted by expert: the first ``group_sizes[0]`` belong to expert 0, and so on. Rows beyond the sum of the
    sizes give zero. One expert is held dequantized at a time where XLA multiplies; a kernel decodes in registers. The
    gradient is straight-through for the quantization of x, and reaches x, bias and the low-rank branch.

    Args:
      x: [M, K], float, sorted by expert.
      w: a QWeight or QTensor of [E, K, N] (quantized along -2) or [E, N, K] (along -1), or an array [E, K, N].
      group_sizes: integers [E]; zeros are allowed.
      bias: [E, N], or None.
      preferred_element_type: dtype of the result; default: x's.
      implementation: None takes a GPU kernel where there is a faster one, else XLA; "xla", "triton".

    Returns:
      [M, N].

    Raises:
      BlockShapeError: shapes that do not fit.
      BackendUnsupported: a forced implementation that cannot run.

    Example:
      >>> w = mxjax.quantize({"experts": jnp.ones((4, 64, 8))}, "mxfp4")["experts"]
      >>> qdot_grouped(jnp.ones((5, 64)), w, jnp.array([2, 0, 3, 0])).shape
      (5, 8)
    """
    x, kernel, dtype = operands("qdot_grouped", x, w, preferred_element_type)
    group_sizes = jnp.asarray(group_sizes)
    if kernel.ndim != 3 or (isinstance(kernel, QWeight) and kernel.qtensor.axis not in (-1, -2)):
        raise BlockShapeError(f"qdot_grouped: experts are [E, K, N] or [E, N, K], not {kernel.shape}")
    experts, axis = kernel.shape[0], kernel.qtensor.axis if isinstance(kernel, QWeight) else -2
    if x.ndim != 2 or x.shape[1] != kernel.shape[axis]:
        raise BlockShapeError(f"qdot_grouped: x {x.shape} is not [M, {kernel.shape[axis]}], as {kernel.shape} takes it")
    if group_sizes.shape != (experts,) or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise BlockShapeError(
            f"qdot_grouped: group_sizes {group_sizes.dtype} {group_sizes.shape} is not one integer for each of "
            f"{experts} experts"
        )
    out = kernel.shape[-1] if axis == -2 else kernel.shape[-2]
    if bias is not None and jnp.shape(bias) != (experts, out):
        raise BlockShapeError(f"qdot_grouped: bias {jnp.shape(bias)} is not [{experts}, {out}]")
    if not isinstance(kernel, QWeight):
        y = lax.ragged_dot(x, kernel.astype(x.dtype), group_sizes.astype(jnp.int32),
                           preferred_element_type=jnp.float32)  # fmt: skip
    else:
        y = _quantized(x, kernel, group_sizes, implementation)
    if bias is not None:
        y = y + _of_row(bias.astype(jnp.float32), group_sizes, x.shape[0])
    return y.astype(dtype)


def _quantized(x: jax.Array, w: QWeight, group_sizes: jax.Array, implementation: str | None) -> jax.Array:
    """float32 [M, N]."""
    z = x
    if w.transform is not None:
        z = w.transform.activation(x.astype(jnp.float32)).astype(x.dtype)
    q = w.qtensor
    z = jnp.pad(z, ((0, 0), (0, q.padded_size - q.size)))
    stack = expert_stack(q.codes, q.scales, q.format, q.global_scale)
    y = _main((w.activation, implementation), z, stack, group_sizes, w.input_scale)
    if w.branch is not None:
        a, b = dense(w.branch.a, x.dtype), dense(w.branch.b, x.dtype)
        if a.ndim != 3:
            raise ConfigError(f"qdot_grouped: a low-rank branch of experts is [E, r, K] and [E, N, r], not {a.shape}")
        ragged = partial(lax.ragged_dot, group_sizes=group_sizes.astype(jnp.int32), preferred_element_type=jnp.float32)
        quantize = w.branch.quantized
        low = ragged(quantize(x), jnp.swapaxes(a, 1, 2)).astype(x.dtype)
        y = y + ragged(quantize(low), jnp.swapaxes(b, 1, 2))
    return y


def _of_row(values: jax.Array, group_sizes: jax.Array, rows: int) -> jax.Array:
    """[rows, N]: the row of ``values`` [E, N] of each row's expert, zero where it has none."""
    group = expert_of_row(group_sizes, rows)
    return jnp.where((group < values.shape[0])[:, None], values[jnp.minimum(group, values.shape[0] - 1)], 0.0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _main(
    static: tuple[ActivationFormat | None, str | None],
    x: jax.Array,
    w: PackedWeight,
    group_sizes: jax.Array,
    input_scale: jax.Array | None,
) -> jax.Array:
    activation, implementation = static
    options: dict[str, Any] = {}
    if activation is not None:
        options = dict(activation=activation.format, policy=activation.scale, input_scale=input_scale)
    return grouped_linear(x, w, group_sizes, out_dtype=jnp.float32, implementation=implementation, **options)


def _forward(static: tuple, x: jax.Array, w: PackedWeight, group_sizes: jax.Array, input_scale: Any) -> tuple:
    return _main(static, x, w, group_sizes, input_scale), (w, group_sizes, input_scale, np.zeros((), x.dtype))


def _backward(static: tuple, residuals: tuple, g: jax.Array) -> tuple:
    """dx[r] = g[r] @ W[e], through the same loop over experts."""
    w, group_sizes, input_scale, like = residuals
    if w.row_scale is not None:
        g = g * _of_row(w.row_scale, group_sizes, g.shape[0])

    def transposed(e: jax.Array) -> jax.Array:
        return jnp.swapaxes(dequantize(w.codes[e], w.scales[e], w.format, like.dtype), 0, 1)

    dx = by_expert(g.astype(like.dtype), group_sizes, w.k, transposed)
    zero = None if input_scale is None else jnp.zeros_like(input_scale)
    return dx.astype(like.dtype), None, None, zero


_main.defvjp(_forward, _backward)
