"""Weights that multiply the same input (q, k and v; gate and up), packed as one: x is transformed and quantized once.

q, k, v = mxjax.qdot_shared(x, p["q"]["kernel"], p["k"]["kernel"], p["v"]["kernel"])    # fused or not

The output axes are put one after the other, so every code, scale and result stays what it was. NVFP4's tensor scales
stay one number where they are equal; otherwise each row carries its own. Low-rank branches go side by side: their A one
after the other, their B in the blocks of one matrix whose other blocks are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mxjax.core.qtensor import QTensor
from mxjax.errors import BlockShapeError, ConfigError
from mxjax.ops import factors
from mxjax.ops.kernels import KernelWeight, kernel_dot
from mxjax.ops.low_rank import side_by_side
from mxjax.ops.product import product, quantize_input
from mxjax.ops.qdot import operands, qdot
from mxjax.ops.qweight import QWeight


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class FusedWeight:
    """Several weights with one input as one weight; made by :func:`fuse`, taken apart by :meth:`parts`.

    Attributes:
      weight: all of them along the output axis: a QWeight, or what ``prepare_kernels`` makes of it.
      sizes: length of the output axis of each (static).
      expanded: for each part how many trailing axes its tensor scale gained when it became one a row; () where the
        tensor scales are equal and stayed as they were, or where there are none (static).
      ranks: rank of the low-rank branch of each part, 0 for none; () if none has one (static).
    """

    weight: QWeight | KernelWeight
    sizes: tuple[int, ...] = field(metadata=dict(static=True))
    expanded: tuple[int, ...] = field(default=(), metadata=dict(static=True))
    ranks: tuple[int, ...] = field(default=(), metadata=dict(static=True))

    def __repr__(self) -> str:
        return f"FusedWeight({'+'.join(map(str, self.sizes))}: {self.weight!r})"

    def parts(self) -> list[QWeight]:
        """The weights as they were, bit for bit.

        Raises:
          ConfigError: codes that are packed for a kernel.
        """
        if not isinstance(self.weight, QWeight):
            raise ConfigError(
                f"{self!r} is packed for the kernels of this machine and cannot be taken apart; keep the tree that "
                f"prepare_kernels was given"
            )
        q, out = self.weight.qtensor, []
        for i, (size, end) in enumerate(zip(self.sizes, accumulate(self.sizes), strict=True)):
            cut = partial(lax.slice_in_dim, start_index=end - size, limit_index=end, axis=-1)
            g = q.global_scale
            if g is not None and g.ndim == q.codes.ndim - 1:
                g = cut(g)
                if self.expanded:
                    g = g[(..., *(0,) * self.expanded[i])]
            rows = replace(q, codes=cut(q.codes, axis=-2), scales=cut(q.scales, axis=-2), global_scale=g)
            branch: Any = self.weight.branch
            if branch is not None:
                rank, last = self.ranks[i], sum(self.ranks[: i + 1])
                a = factors.cut_rows(branch.a, last - rank, last)
                b = factors.cut_columns(factors.cut_rows(branch.b, end - size, end), last - rank, last)
                branch = replace(branch, a=a, b=b) if rank else None
            out.append(replace(self.weight, qtensor=rows, branch=branch))
        return out


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FusedPart:
    """What stays in the place of a weight that went into a FusedWeight: no arrays, only where it went.

    Attributes:
      name: the name that the group has for this weight (static).
      head: the group's name for the weight that holds the FusedWeight now (static).
      index: which part of it this one is (static).
    """

    name: str = field(metadata=dict(static=True))
    head: str = field(metadata=dict(static=True))
    index: int = field(metadata=dict(static=True))


def fuse(weights: Sequence[QWeight], names: Sequence[str] | None = None) -> FusedWeight:
    """Weights that multiply the same input as one weight, exactly.

    Args:
      weights: QWeights with one output axis (``[*stack, K, N]`` or ``[*stack, N, K]``) that agree in everything but N.
      names: for messages.

    Raises:
      ConfigError: weights that differ in format, activation format, transform, input scale or dtype, or whose low-rank
        branches cannot be put side by side.
      BlockShapeError: contraction axes or stacks of different shapes.

    Example:
      >>> p = mxjax.quantize({"q": jnp.ones((64, 8)), "k": jnp.ones((64, 4))}, "mxfp4")
      >>> fuse([p["q"], p["k"]]).weight.shape
      (64, 12)
    """
    names = [f"weight {i}" for i in range(len(weights))] if names is None else list(names)
    first, q0 = weights[0], getattr(weights[0], "qtensor", None)
    for w, name in zip(weights, names, strict=True):
        if not isinstance(w, QWeight):
            raise ConfigError(f"{name}: only QWeights can be fused, not {type(w).__name__}")
        _check(w, name, first, names[0])
    assert isinstance(q0, QTensor)
    tensors = [w.qtensor for w in weights]
    lead = [q.codes.shape[:-1] for q in tensors]
    scale = q0.global_scale
    expanded: tuple[int, ...] = ()
    scales = [q.global_scale for q in tensors]
    if scale is not None and not (scale.ndim < len(lead[0]) and all(_same(g, scale) for g in scales)):
        rows = []
        for g, shape in zip(scales, lead, strict=True):
            assert g is not None
            rows.append(jnp.broadcast_to(g.reshape(g.shape + (1,) * (len(shape) - g.ndim)), shape))
        expanded = tuple(len(shape) - g.ndim for g, shape in zip(scales, lead, strict=True) if g is not None)
        scale = jnp.concatenate(rows, axis=-1)
    qtensor = replace(
        q0,
        codes=jnp.concatenate([q.codes for q in tensors], axis=-2),
        scales=jnp.concatenate([q.scales for q in tensors], axis=-2),
        global_scale=scale,
    )
    sizes = tuple(shape[-1] for shape in lead)
    branch, ranks = side_by_side([w.branch for w in weights], sizes, names)
    weight = replace(first, qtensor=qtensor, branch=branch)
    return FusedWeight(weight=weight, sizes=sizes, expanded=expanded, ranks=ranks)


def _check(w: QWeight, name: str, first: QWeight, head: str) -> None:
    q, q0 = w.qtensor, first.qtensor
    if q.axis not in (-1, -2) or q.codes.ndim < 2:
        raise BlockShapeError(f"{name}: a weight of one output axis can be fused, not {q.shape} along axis {q.axis}")
    if (q.codes.shape[:-2], q.size, q.axis) != (q0.codes.shape[:-2], q0.size, q0.axis):
        raise BlockShapeError(f"{name} {q.shape} and {head} {q0.shape} do not multiply the same input")
    fields: tuple[tuple[str, Any, Any], ...] = (
        ("format", q.format, q0.format),
        ("dtype", q.dtype_name, q0.dtype_name),
        ("activation", w.activation, first.activation),
        ("use of a tensor scale", q.global_scale is None, q0.global_scale is None),
    )
    for what, one, other in fields:
        if one != other:
            raise ConfigError(f"{name} and {head} differ in their {what}: {one} and {other}")
    maps: tuple[tuple[str, Any, Any], ...] = (
        ("transform", w.transform, first.transform),
        ("input scale", w.input_scale, first.input_scale),
    )
    for what, one, other in maps:
        if not _same(one, other):
            raise ConfigError(f"{name} and {head} differ in their {what}: x would be quantized twice")


def _same(a: Any, b: Any) -> bool:
    """Equal trees of equal arrays; arrays that are being traced are equal only if they are the same."""
    x, y = jax.tree.leaves(a), jax.tree.leaves(b)
    if jax.tree.structure(a) != jax.tree.structure(b):  # type: ignore[operator]
        return False
    return all(
        u is v
        or (
            not isinstance(u, jax.core.Tracer)
            and not isinstance(v, jax.core.Tracer)
            and np.array_equal(np.asarray(u), np.asarray(v))
        )
        for u, v in zip(x, y, strict=True)
    )


def qdot_shared(
    x: jax.Array,
    *weights: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    implementation: str | None = None,
) -> tuple[jax.Array, ...]:
    """``qdot(x, w)`` for every weight; weights that were fused share one quantization of x, and one GEMM when packed.

    Unpacked, each part is multiplied by itself after one quantization of x: bit for bit what ``qdot`` gives. Packed by
    ``prepare_kernels``, or with a kernel forced, all parts are one product: equal up to the order of its sums.

    Args:
      x: [..., K].
      weights: what ``qdot`` takes; or, where ``fuse_shared_inputs`` was here, a FusedWeight and all its parts.
      precision, preferred_element_type, implementation: as :func:`mxjax.qdot`.

    Returns:
      One result for each weight, in order.

    Raises:
      ConfigError: a FusedWeight without its own parts, in order, after it.
      Others as :func:`mxjax.qdot`.

    Example:
      >>> p = mxjax.quantize({"q": jnp.ones((64, 8)), "k": jnp.ones((64, 4))}, "mxfp4")
      >>> p = mxjax.fuse_shared_inputs(p, [("q", "k")])
      >>> [y.shape for y in qdot_shared(jnp.ones((2, 64)), p["q"], p["k"])]
      [(2, 8), (2, 4)]
    """
    dot: dict[str, Any] = dict(precision=precision, preferred_element_type=preferred_element_type)
    if not any(isinstance(w, (FusedWeight, FusedPart)) for w in weights):
        return tuple(qdot(x, w, implementation=implementation, **dot) for w in weights)
    fused, rest = weights[0], weights[1:]
    if not isinstance(fused, FusedWeight) or [getattr(w, "index", None) for w in rest] != [*range(1, len(fused.sizes))]:
        raise ConfigError(
            f"qdot_shared takes a fused weight and all its parts, in the order in which they were fused, not "
            f"{', '.join(map(repr, weights))}"
        )
    if isinstance(fused.weight, QWeight) and implementation in (None, "xla"):
        x, weight, dtype = operands("qdot_shared", x, fused.weight, preferred_element_type)
        assert isinstance(weight, QWeight)
        if x.ndim == 0 or x.shape[-1] != weight.qtensor.size:
            raise BlockShapeError(f"qdot_shared: x {x.shape} does not end in {weight.qtensor.size}, as {fused!r}")
        return _each(x, fused, precision=precision, dtype=dtype)
    ends = tuple(accumulate(fused.sizes))
    if isinstance(fused.weight, KernelWeight):
        x = jnp.asarray(x)
        parts = ends[:-1] if len(set(fused.ranks)) == 1 else ()
        y = kernel_dot(x, fused.weight, implementation, parts=parts).astype(preferred_element_type or x.dtype)
    else:
        y = qdot(x, fused.weight, implementation=implementation, **dot)
    return tuple(lax.slice_in_dim(y, e - n, e, axis=-1) for n, e in zip(fused.sizes, ends, strict=True))


@partial(jax.jit, static_argnames=("precision", "dtype"))
def _each(x: jax.Array, fused: FusedWeight, *, precision: Any, dtype: Any) -> tuple[jax.Array, ...]:
    parts = fused.parts()
    quantized = quantize_input(x, parts[0])
    return tuple(product(quantized, x, part, precision).astype(dtype) for part in parts)
