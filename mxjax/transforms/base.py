"""What a transform is: an invertible linear map on the contraction axis, as a pytree.

For a weight ``W [.., K]`` and activations ``x [.., K]`` a transform ``T`` keeps the product::

    (x T) (W T^-T)^T = x W^T

so that both factors can be made easier to quantize.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax


@runtime_checkable
class Transform(Protocol):
    """An invertible map on the last axis. Implementations are registered dataclasses (arrays as data, sizes static)."""

    def activation(self, x: jax.Array) -> jax.Array:
        """``x T``; runs online, inside ``qdot``."""
        ...

    def weight(self, w: jax.Array) -> jax.Array:
        """``W T^-T``, contraction axis last; runs once, when the weight is quantized."""
        ...

    def undo_weight(self, w: jax.Array) -> jax.Array:
        """The inverse of :meth:`weight`: back to the space of the unquantized weight."""
        ...

    def check(self, size: int, path: str = "") -> None:
        """Raise BlockShapeError if the map cannot act on an axis of ``size``."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chain:
    """Transforms one after the other: ``x T1 T2 ...``."""

    parts: tuple[Transform, ...]

    def activation(self, x: jax.Array) -> jax.Array:
        for part in self.parts:
            x = part.activation(x)
        return x

    def weight(self, w: jax.Array) -> jax.Array:
        for part in self.parts:
            w = part.weight(w)
        return w

    def undo_weight(self, w: jax.Array) -> jax.Array:
        for part in reversed(self.parts):
            w = part.undo_weight(w)
        return w

    def check(self, size: int, path: str = "") -> None:
        for part in self.parts:
            part.check(size, path)
