"""Quantized weights as the kernels of this machine read them, and products with them.

qparams = mxjax.prepare_kernels(mxjax.quantize(params, "mxfp4"))     # once, after loading
y = mxjax.qdot(x, qparams["layer"]["kernel"])                        # now on the fastest kernel there is
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mxjax.core.qtensor import QTensor
from mxjax.errors import BlockShapeError
from mxjax.ops.qweight import ActivationFormat, QWeight, dense, is_quantized
from mxjax.transforms import Hadamard
from mxjax.transforms.base import Transform
from pallas_kernels._dispatch import kernels_used as kernels_used
from pallas_kernels.block_scaled_matmul import PackedWeight, prepare
from pallas_kernels.block_scaled_matmul.reference import weight_values
from pallas_kernels.linear import quantized_linear
from pallas_kernels.transform_quantize import Transform as KernelTransform
from pallas_kernels.transform_quantize.reference import HADAMARD_SIZES, apply_transform


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KernelWeight:
    """A QWeight whose codes are packed for a kernel: what :func:`prepare_kernels` puts in its place.

    It belongs to the machine that made it: save and load the QWeight.

    Attributes:
      packed: the codes, scales and tensor scale.
      transform, a, b, input_scale, activation: as in QWeight.
      out_shape: the weight's axes other than the contraction axis (static).
      size: length of the contraction axis, padding not counted (static).
    """

    packed: PackedWeight
    transform: Transform | None = None
    a: jax.Array | QTensor | None = None
    b: jax.Array | QTensor | None = None
    input_scale: jax.Array | None = None
    activation: ActivationFormat | None = field(default=None, metadata=dict(static=True))
    out_shape: tuple[int, ...] = field(metadata=dict(static=True))
    size: int = field(metadata=dict(static=True))

    def __repr__(self) -> str:
        return f"KernelWeight({self.packed.format} in {self.packed.layout}, {self.size} -> {self.out_shape})"


def pack(w: QWeight | QTensor, layout: str | None = None) -> KernelWeight:
    """One weight for the kernels; ``layout`` as in :func:`pallas_kernels.block_scaled_matmul.prepare`."""
    if isinstance(w, QTensor):
        w = QWeight(qtensor=w)
    q = w.qtensor
    out = q.codes.shape[:-1]
    factor = q.global_scale
    if factor is not None:
        factor = jnp.broadcast_to(factor.reshape(factor.shape + (1,) * (len(out) - factor.ndim)), out).reshape(-1)
    packed = prepare(
        q.codes.reshape(-1, q.codes.shape[-1]),
        q.scales.reshape(-1, q.scales.shape[-1]),
        q.format,
        factor,
        layout=layout,
    )
    return KernelWeight(
        packed=packed, transform=w.transform, a=w.a, b=w.b, input_scale=w.input_scale, activation=w.activation,
        out_shape=out, size=q.size,
    )  # fmt: skip


def prepare_kernels(tree: Any, layout: str | None = None) -> Any:
    """The tree with every quantized matrix packed for this machine's kernels. Once, after loading; for :func:`qdot`.

    Weights of three or more axes whose leading axes are layers or experts cannot be told from split output axes: pack
    the matrices after they have been taken apart, or leave those to :func:`qeinsum` unpacked.

    Args:
      tree: a quantized tree; other leaves stay, and so do quantized leaves with other than two axes.
      layout: "rows" or "tiles" to force one; default: what the kernels of this device read.

    Example:
      >>> qparams = prepare_kernels(mxjax.quantize({"kernel": jnp.ones((64, 8))}, "mxfp4"))
      >>> mxjax.qdot(jnp.ones((2, 64)), qparams["kernel"]).shape
      (2, 8)
    """

    def one(leaf: Any) -> Any:
        return pack(leaf, layout) if is_quantized(leaf) and leaf.ndim == 2 else leaf

    return jax.tree.map(one, tree, is_leaf=is_quantized)


def kernel_dot(x: jax.Array, w: KernelWeight, implementation: str | None = None) -> jax.Array:
    """:func:`mxjax.qdot` for a packed weight: [..., size] -> [..., *out_shape] in x's dtype.

    The gradient is straight-through for the quantization of x, as in ``qdot``; it reaches x, the transform and the
    low-rank branch, and not the packed codes.
    """
    if x.ndim == 0 or x.shape[-1] != w.size:
        raise BlockShapeError(f"qdot: x {x.shape} does not end in {w.size}, the contraction axis of {w!r}")
    hadamard, y = 0, x
    if isinstance(w.transform, Hadamard) and w.transform.size in HADAMARD_SIZES and w.activation is not None:
        hadamard = w.transform.size  # inside the quantization kernel
    elif w.transform is not None:
        y = w.transform.activation(x.astype(jnp.float32)).astype(x.dtype)  # as qdot: 1/sqrt(32) is no bfloat16
    y = jnp.pad(y, [(0, 0)] * (x.ndim - 1) + [(0, w.packed.k - w.size)])
    out = _main_branch((w.activation, hadamard, implementation), y, w.packed, w.input_scale)
    if w.a is not None:
        contract = partial(lax.dot_general, preferred_element_type=jnp.float32)
        dims = (((x.ndim - 1,), (1,)), ((), ()))
        low = contract(x, dense(w.a, x.dtype), dims).astype(x.dtype)
        b = dense(w.b, x.dtype)
        out = out.astype(jnp.float32) + contract(low, b.reshape(-1, b.shape[-1]), dims)
    return out.astype(x.dtype).reshape(*x.shape[:-1], *w.out_shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _main_branch(static: tuple, x: jax.Array, packed: PackedWeight, input_scale: jax.Array | None) -> jax.Array:
    activation, hadamard, implementation = static
    if activation is None:
        return quantized_linear(x, packed, implementation=implementation)
    return quantized_linear(
        x,
        packed,
        activation=activation.format,
        policy=activation.scale,
        transform=KernelTransform(hadamard=hadamard),
        input_scale=input_scale,
        implementation=implementation,
    )


def _forward(static: tuple, x: jax.Array, packed: PackedWeight, input_scale: jax.Array | None) -> tuple:
    return _main_branch(static, x, packed, input_scale), (packed, input_scale, np.zeros((), x.dtype))


def _backward(static: tuple, residuals: tuple, g: jax.Array) -> tuple:
    packed, input_scale, like = residuals
    w = weight_values(packed, jnp.bfloat16 if like.dtype == jnp.bfloat16 else jnp.float32)
    if packed.row_scale is not None:
        g = (g.astype(jnp.float32) * packed.row_scale[: packed.n]).astype(g.dtype)
    dx = lax.dot_general(g.astype(w.dtype), w, (((g.ndim - 1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    if static[1]:
        dx = apply_transform(dx, KernelTransform(hadamard=static[1]))  # symmetric: its own transpose
    return dx.astype(like.dtype), None, None if input_scale is None else jnp.zeros_like(input_scale)


_main_branch.defvjp(_forward, _backward)
