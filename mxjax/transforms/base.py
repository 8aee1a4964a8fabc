"""What a transform is: an invertible linear map on the contraction axis, as a pytree.

For a weight ``W [.., K]`` and activations ``x [.., K]`` a transform ``T`` keeps the product::

    (x T) (W T^-T)^T = x W^T

so that both factors can be made easier to quantize.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from mxjax.core.formats import BlockFormat
from mxjax.core.scales import DEFAULT_POLICY
from mxjax.errors import CalibrationError


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


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """What happens after a transform: how both factors are rounded. Static, hashable.

    Attributes:
      weight: block format of the weight.
      weight_scale: its scale policy.
      activation: block format of the layer's input, or None: it stays float.
      activation_scale: its scale policy.
    """

    weight: BlockFormat
    weight_scale: str = DEFAULT_POLICY
    activation: BlockFormat | None = None
    activation_scale: str = DEFAULT_POLICY


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

    def describe(self) -> str:
        return " + ".join(describe(part) for part in self.parts)

    def fit(
        self, stats: Any, weights: list[jax.Array], path: str = "", rounding: Rounding | None = None
    ) -> Transform | None:
        """The chain, every part fitted to what the parts before it leave; parts that choose nothing are left out."""
        parts = []
        for part in self.parts:
            part = fit(part, stats, weights, path, rounding)
            if part is None:
                continue
            stats, weights = stats.through(part), [part.weight(w) for w in weights]
            parts.append(part)
        return Chain(tuple(parts)) if parts else None


# The end of a message about experts: their inputs differ, and a transform belongs to one input.
NO_STACK = "; give stacked experts a rule of their own, such as gptq with Hadamard or without transform"


@runtime_checkable
class TransformFitter(Protocol):
    """Chooses a transform from statistics: what a rule holds where the transform depends on the data."""

    def fit(
        self, stats: Any, weights: list[jax.Array], path: str = "", rounding: Rounding | None = None
    ) -> Transform | None:
        """The transform for one input and all weights ``[..., K]`` that multiply it; None is the identity.

        ``rounding`` says what will be done to the transformed factors, for fitters that measure its error.
        """
        ...

    def check(self, size: int, path: str = "") -> None:
        """Raise BlockShapeError if no such transform acts on an axis of ``size``."""
        ...


def needs_fit(transform: Any) -> bool:
    """Whether ``transform`` must be fitted to statistics before it can be applied."""
    if isinstance(transform, Chain):
        return any(needs_fit(part) for part in transform.parts)
    return isinstance(transform, TransformFitter)


def fit(transform: Any, stats: Any, weights: list[jax.Array], path: str = "", rounding: Rounding | None = None) -> Any:
    """``transform`` itself, or what it chooses for these statistics and weights.

    Args:
      transform: a Transform, a TransformFitter, or None.
      stats: LayerStats of the input, or None.
      weights: float [..., K] each, all that multiply this input.
      path: for messages.
      rounding: formats and scale policies that the rule will apply, or None if unknown.

    Raises:
      CalibrationError: a fitter without statistics, or with a NaN or Inf in them.
    """
    if not needs_fit(transform):
        return transform
    if stats is None:
        raise CalibrationError(
            f"{path}: the transform {transform} is chosen from calibration statistics; pass "
            f"stats=mxjax.calibrate(...) with the same config"
        )
    return transform.fit(stats.check_finite(path), weights, path, rounding)


def need_values(fitter: str, stats: Any, weights: list[jax.Array], path: str) -> None:
    """For fitters that compute or decide on the host.

    Raises:
      CalibrationError: statistics or weights that are traced.
    """
    if any(isinstance(x, jax.core.Tracer) for x in (stats.hessian, *weights)):
        raise CalibrationError(
            f"{path}: {fitter} looks at the values of statistics and weights, so it cannot be fitted inside jit or "
            f"eval_shape; call mxjax.quantize outside"
        )


def describe(transform: Any) -> str:
    """A few words for tables: "hadamard 32", "wush 0.5", "none".

    Example:
      >>> describe(mxjax.transforms.Hadamard(32)), describe(None)
      ('hadamard 32', 'none')
    """
    if transform is None:
        return "none"
    return transform.describe() if hasattr(transform, "describe") else type(transform).__name__.lower()


def read_scalar(x: jax.Array) -> str:
    """A remark of a transform as text, also where it has no value (``eval_shape``) or one for each stacked layer."""
    if isinstance(x, (jax.ShapeDtypeStruct, jax.core.Tracer)):
        return "?"
    values = sorted({f"{v:.2g}" for v in np.asarray(x, np.float64).reshape(-1)})
    return "/".join(values)
