"""Quantized weights as the kernels of this machine read them, and products with them.

qparams = mxjax.prepare_kernels(mxjax.quantize(params, "mxfp4"))     # once, after loading
y = mxjax.qdot(x, qparams["layer"]["kernel"])                        # now on the fastest kernel there is
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mxjax import backend
from mxjax.core.formats import MXFP4
from mxjax.core.qtensor import QTensor
from mxjax.errors import BlockShapeError, MxjaxWarning
from mxjax.ops.kernel_transform import kernel_transform
from mxjax.ops.low_rank import LowRank, dense
from mxjax.ops.qweight import ActivationFormat, QWeight, is_quantized
from mxjax.transforms.base import Transform
from pallas_kernels._dispatch import kernels_used as kernels_used
from pallas_kernels.block_scaled_matmul import PackedWeight, inexact_blocks, prepare
from pallas_kernels.block_scaled_matmul.reference import weight_values
from pallas_kernels.linear import quantized_linear
from pallas_kernels.transform_quantize import Transform as KernelTransform
from pallas_kernels.transform_quantize import down_projection_rounded
from pallas_kernels.transform_quantize.reference import apply_transform


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KernelWeight:
    """A QWeight whose codes are packed for a kernel: what :func:`prepare_kernels` puts in its place.

    It belongs to the machine that made it: save and load the QWeight.

    Attributes:
      packed: the codes, scales and tensor scale.
      transform, branch, input_scale, activation: as in QWeight.
      out_shape: the weight's axes other than the contraction axis (static).
      size: length of the contraction axis, padding not counted (static).
      axis: where the contraction axis sits among the weight's axes, from the end (static).
      dtype_name: the weight's logical dtype (static).
    """

    packed: PackedWeight
    transform: Transform | None = None
    branch: LowRank | None = None
    input_scale: jax.Array | None = None
    activation: ActivationFormat | None = field(default=None, metadata=dict(static=True))
    out_shape: tuple[int, ...] = field(metadata=dict(static=True))
    size: int = field(metadata=dict(static=True))
    axis: int = field(default=-2, metadata=dict(static=True))
    dtype_name: str = field(default="float32", metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, as of the array that was quantized."""
        lead = list(self.out_shape)
        lead.insert(len(lead) + 1 + self.axis, self.size)
        return tuple(lead)

    @property
    def ndim(self) -> int:
        return len(self.out_shape) + 1

    @property
    def dtype(self) -> np.dtype:
        return jnp.dtype(self.dtype_name)

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
        activation=None if w.activation is None else w.activation.format,
    )
    return KernelWeight(
        packed=packed, transform=w.transform, branch=w.branch, input_scale=w.input_scale, activation=w.activation,
        out_shape=out, size=q.size, axis=q.axis, dtype_name=q.dtype_name,
    )  # fmt: skip


def prepare_kernels(tree: Any, layout: str | None = None) -> Any:
    """The tree with every quantized matrix packed for this machine's kernels. Once, after loading; for :func:`qdot`.

    Weights of three or more axes whose leading axes are layers or experts cannot be told from split output axes: pack
    the matrices after they have been taken apart, or leave those to :func:`qeinsum` unpacked.

    Args:
      tree: a quantized tree; other leaves stay, and so do quantized leaves with other than two axes.
      layout: one that :func:`pallas_kernels.block_scaled_matmul.prepare` knows, to force it; default: what the kernels
        of this device read, for the activation format that each weight names.

    Warns:
      MxjaxWarning: W4A4 weights with blocks so far below their row's largest that the FP8 units of this device cannot
        hold them exactly, with their number.

    Example:
      >>> qparams = prepare_kernels(mxjax.quantize({"kernel": jnp.ones((64, 8))}, "mxfp4"))
      >>> mxjax.qdot(jnp.ones((2, 64)), qparams["kernel"]).shape
      (2, 8)
    """

    def one(leaf: Any) -> Any:
        return pack(leaf, layout) if is_quantized(leaf) and leaf.ndim == 2 else leaf

    _report_inexact([leaf for leaf in jax.tree.leaves(tree, is_leaf=is_quantized) if isinstance(leaf, QWeight)])
    return jax.tree.map(one, tree, is_leaf=is_quantized)


def _report_inexact(weights: list[QWeight]) -> None:
    """Warn of blocks that the exact-FP8 route would round, where this device takes that route."""
    if backend.has("fp4_matmul") or not (backend.has("fp8_matmul") or backend.has("fp8_fnuz_matmul")):
        return
    scales = [w.qtensor.scales for w in weights if w.activation and w.activation.format == w.format == MXFP4]
    scales = [s for s in scales if not isinstance(s, jax.core.Tracer)]
    count = sum(int(inexact_blocks(jnp.asarray(s))) for s in scales)
    if count:
        warnings.warn(
            f"{count} of {sum(s.size for s in scales)} blocks of W4A4 weights lie more than 14 binades below their "
            f"row's largest: products in FP8 round them to 2**-15 of it",
            MxjaxWarning,
            stacklevel=3,
        )


def kernel_dot(
    x: jax.Array,
    w: KernelWeight,
    implementation: str | None = None,
    bias: jax.Array | None = None,
    out_dtype: Any = None,
    parts: tuple[int, ...] = (),
) -> jax.Array:
    """:func:`mxjax.qdot` for a packed weight: [..., size] -> [..., *out_shape].

    The gradient is straight-through for the quantization of x, as in ``qdot``; it reaches x, the transform, the
    low-rank branch and the bias, and not the packed codes.

    Args:
      bias: of shape ``out_shape``, added in float32 before the result is rounded, or None.
      out_dtype: of the result; None: x's.
      parts: outputs at which a fused weight's second part begins, the third, ..: its branch is zero elsewhere.
    """
    if x.ndim == 0 or x.shape[-1] != w.size:
        raise BlockShapeError(f"qdot: x {x.shape} does not end in {w.size}, the contraction axis of {w!r}")
    t, y = None, x
    if w.activation is not None and w.packed.k == w.size:
        t = kernel_transform(w.transform, w.size)
    if t is None:
        t = KernelTransform()
        if w.transform is not None:
            y = w.transform.activation(x.astype(jnp.float32)).astype(x.dtype)  # as qdot: 1/sqrt(32) is no bfloat16
    a = down = up = None
    if w.branch is not None:
        up = dense(w.branch.b, x.dtype)
        up = up.reshape(-1, up.shape[-1])
        if y is x and w.packed.k == w.size and w.branch.activation is None:
            a = dense(w.branch.a, x.dtype)  # x A^T in the pass over x that quantizes it
        elif w.branch.activation is None or len(w.branch.a.shape) > 2:
            down = w.branch.down(x)
        else:
            rounded = _down((w.branch.activation, implementation), x, dense(w.branch.a, x.dtype))
            down = w.branch.quantized(rounded)
    y = jnp.pad(y, [(0, 0)] * (x.ndim - 1) + [(0, w.packed.k - w.size)])
    bias = None if bias is None else bias.reshape(-1)
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    out = _main_branch(
        (w.activation, implementation, out_dtype, parts), y, w.packed, w.input_scale, t, a, down, up, bias
    )
    return out.reshape(*x.shape[:-1], *w.out_shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _main_branch(
    static: tuple,
    x: jax.Array,
    packed: PackedWeight,
    input_scale: jax.Array | None,
    t: KernelTransform,
    a: jax.Array | None,
    down: jax.Array | None,
    up: jax.Array | None,
    bias: jax.Array | None,
) -> jax.Array:
    """The layer with its low-rank branch: ``(x a^T) up^T`` or ``down up^T``, in the epilogue of the product."""
    activation, implementation, out_dtype, parts = static
    rest: dict[str, Any] = dict(
        low_rank_a=a,
        low_rank_down=down,
        low_rank_up=up,
        bias=bias,
        implementation=implementation,
        out_dtype=out_dtype,
        low_rank_parts=parts,
    )
    if activation is not None:
        rest |= dict(activation=activation.format, policy=activation.scale, input_scale=input_scale)
        rest |= dict(transform=t)
    return quantized_linear(x, packed, **rest)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _down(static: tuple, x: jax.Array, a: jax.Array) -> jax.Array:
    """``Q(x) A^T`` in x's dtype; its gradient is straight-through for the quantization, as in ``LowRank.down``."""
    activation, implementation = static
    # A forced kernel is the product's; this pass takes one where there is one for x's dtype.
    forced = "xla" if implementation == "xla" else None
    return down_projection_rounded(x, a, activation.format, policy=activation.scale, implementation=forced)


def _down_forward(static: tuple, x: jax.Array, a: jax.Array) -> tuple:
    return _down(static, x, a), (x, a)


def _down_backward(static: tuple, residuals: tuple, g: jax.Array) -> tuple:
    return jax.vjp(lambda x, a: _contract(static[0].quantize(x), a).astype(x.dtype), *residuals)[1](g)


_down.defvjp(_down_forward, _down_backward)


def _forward(
    static: tuple, x: Any, packed: Any, input_scale: Any, t: Any, a: Any, down: Any, up: Any, bias: Any
) -> tuple:
    out = _main_branch(static, x, packed, input_scale, t, a, down, up, bias)
    # x itself only where a factor that is multiplied with it may be trained
    kept = x if a is not None or jax.tree.leaves(t) else None
    return out, (packed, input_scale, np.zeros((), x.dtype), kept, t, a, down, up, bias)


def _backward(static: tuple, residuals: tuple, g: jax.Array) -> tuple:
    packed, input_scale, like, x, t, a, down, up, bias = residuals
    w = weight_values(packed, jnp.bfloat16 if like.dtype == jnp.bfloat16 else jnp.float32)
    scaled = g
    if packed.row_scale is not None:
        scaled = (g.astype(jnp.float32) * packed.row_scale[: packed.n]).astype(g.dtype)
    dims = (((g.ndim - 1,), (0,)), ((), ()))
    dy = lax.dot_general(scaled.astype(w.dtype), w, dims, preferred_element_type=jnp.float32)
    # linear in x, so without parameters any x will do
    dx, d_t = jax.vjp(apply_transform, jnp.zeros(dy.shape) if x is None else x.astype(jnp.float32), t)[1](dy)
    d_a = d_down = d_up = None
    if down is not None:
        d_down, d_up = jax.vjp(_contract, down, up)[1](g.astype(jnp.float32))
    elif a is not None:
        through = jax.vjp(lambda x, a, up: _contract(_contract(x, a).astype(x.dtype), up), x, a, up)[1]
        branch_dx, d_a, d_up = through(g.astype(jnp.float32))
        dx = dx + branch_dx.astype(jnp.float32)
    zero = None if input_scale is None else jnp.zeros_like(input_scale)
    d_bias = None if bias is None else jnp.sum(g.reshape(-1, bias.size).astype(jnp.float32), 0).astype(bias.dtype)
    return dx.astype(like.dtype), None, zero, d_t, d_a, d_down, d_up, d_bias


def _contract(x: jax.Array, w: jax.Array) -> jax.Array:
    """[.., K] x [N, K] -> float32 [.., N]."""
    return lax.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


_main_branch.defvjp(_forward, _backward)
