"""The low-rank branch beside a quantized weight: what SVDQuant, LoRaQ and the like keep of the quantization error.

``y = Q(x T) Q(W T^-T)^T + (x A^T) B^T``. With A and B in bfloat16 the branch is a small product of its own; in MXFP8
it costs half the bytes, and x and x A^T are quantized to MXFP8 on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.core.qtensor import QTensor
from mxjax.errors import BlockShapeError, ConfigError
from mxjax.ops import factors
from mxjax.ops.activation import ActivationFormat


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LowRank:
    """``x -> (x A^T) B^T``, a pytree; the field ``branch`` of a QWeight.

    Attributes:
      a: [r, K], or one for each leading index of the weight [*batch, r, K]; an array or a QTensor (contraction axis K).
      b: [*out, r], an array or a QTensor (contraction axis r).
      activation: how x and x A^T are quantized on the way, or None: not at all (static).

    Example:
      >>> branch = LowRank(a=jnp.ones((4, 64)), b=jnp.ones((8, 4)))
      >>> branch.apply(jnp.ones((2, 64))).shape
      (2, 8)

    Papers: SVDQuant, arXiv 2411.05007.
    """

    a: jax.Array | QTensor
    b: jax.Array | QTensor
    activation: ActivationFormat | None = field(default=None, metadata=dict(static=True))

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    def apply(self, x: jax.Array, precision: Any = None) -> jax.Array:
        """``(x A^T) B^T``: [.., K] to float32 [.., *out]. Operands are multiplied in x's dtype."""
        if len(self.a.shape) > 2:  # a factor for each leading index of the weight: no common x A^T
            a, b = dense(self.a, x.dtype), dense(self.b, x.dtype)
            product = jnp.matmul(b, a, preferred_element_type=jnp.float32).astype(x.dtype)
            return _contract(self.quantized(x), product, precision)
        return self.up(self.down(x, precision), precision)

    def down(self, x: jax.Array, precision: Any = None) -> jax.Array:
        """``x A^T`` in x's dtype, [.., r], quantized before and after if ``activation`` says so. For one A only."""
        return self.quantized(self.partial_down(x, precision).astype(x.dtype))

    def partial_down(self, x: jax.Array, precision: Any = None) -> jax.Array:
        """float32 ``x A^T`` before it is quantized: over devices that each have a part of K, it is a sum of these."""
        return _contract(self.quantized(x), dense(self.a, x.dtype), precision)

    def up(self, low: jax.Array, precision: Any = None) -> jax.Array:
        """``low B^T``, float32 [.., *out], where ``low`` is :meth:`down` of x."""
        return _contract(low, dense(self.b, low.dtype), precision)

    def quantized(self, x: jax.Array) -> jax.Array:
        return x if self.activation is None else self.activation.quantize(x)

    def product(self) -> jax.Array:
        """``B A``, float32 [*out, K]: what the branch adds to the weight."""
        return jnp.matmul(dense(self.b, jnp.float32), dense(self.a, jnp.float32))

    def check(self, out: tuple[int, ...], size: int, path: str = "LowRank") -> None:
        """Raise BlockShapeError if it is no branch of a weight with output axes ``out`` and ``size`` inputs."""
        a, b = self.a.shape, self.b.shape
        if len(a) < 2 or (a[-1], a[-2]) != (size, b[-1]) or b[:-1] != out or a[:-2] != out[: len(a) - 2]:
            raise BlockShapeError(
                f"{path}: low-rank factors {a} and {b} do not fit a weight of outputs {out} and {size} inputs: they "
                f"are [r, {size}] and {(*out, 'r')}"
            )
        for name, x in (("a", self.a), ("b", self.b)):
            if isinstance(x, QTensor) and x.axis != -1:
                raise BlockShapeError(f"{path}: {name} is quantized along axis {x.axis}, not along its last")


def _contract(x: jax.Array, w: jax.Array, precision: Any) -> jax.Array:
    """[..., K] x [*out, K] -> float32 [..., *out]."""
    dims = (((x.ndim - 1,), (w.ndim - 1,)), ((), ()))
    return lax.dot_general(x, w, dims, precision=precision, preferred_element_type=jnp.float32)


def dense(x: jax.Array | QTensor, dtype: Any) -> jax.Array:
    """An array or a QTensor as an array of ``dtype``."""
    return x.dequantize(dtype) if isinstance(x, QTensor) else x.astype(dtype)


def side_by_side(
    branches: Sequence[LowRank | None], sizes: Sequence[int], names: Sequence[str]
) -> tuple[LowRank | None, tuple[int, ...]]:
    """One branch that is every part's own on the part's outputs, and the ranks of the parts.

    Args:
      branches: of weights with one output axis each, or None.
      sizes: lengths of the output axes.
      names: for messages.

    Raises:
      ConfigError: branches of different formats, or ranks that blocks of a format would reach over.
    """
    present: list[tuple[Any, str]] = [(b, name) for b, name in zip(branches, names, strict=True) if b is not None]
    if not present:
        return None, ()
    first, head = present[0]
    for b, name in present:
        kinds = [(w.activation, factors.kind(w.a), factors.kind(w.b)) for w in (b, first)]
        if kinds[0] != kinds[1]:
            raise ConfigError(f"{name} and {head} differ in the formats of their low-rank branches")
        if any(isinstance(x, QTensor) and x.global_scale is not None for x in (b.a, b.b)):
            raise ConfigError(f"{name}: a low-rank branch with tensor scales ({b.a!r}, {b.b!r}) is not fused")
        for unit, what in ((1 if b.activation is None else b.activation.format.block_size, b.activation),
                           (factors.block(b.b), kinds[0][2])):  # fmt: skip
            if b.rank % unit:
                what = getattr(what, "format", what)
                raise ConfigError(f"{name}: blocks of {what} would reach over its rank of {b.rank}")
    ranks = tuple(0 if b is None else b.rank for b in branches)
    before, rows = 0, []
    each: Any = zip(branches, sizes, ranks, strict=True)
    for b, size, rank in each:
        own = b.b if b is not None else factors.no_columns(first.b, size)
        rows.append(factors.pad_columns(own, before, sum(ranks) - before - rank))
        before += rank
    a = factors.concatenate_rows([b.a for b, _ in present])
    return replace(first, a=a, b=factors.concatenate_rows(rows)), ranks
