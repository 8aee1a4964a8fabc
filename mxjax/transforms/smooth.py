"""A scale for each channel, and SmoothQuant (arXiv 2211.10438), which chooses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mxjax.errors import BlockShapeError, CalibrationError, ConfigError
from mxjax.transforms.base import NO_STACK, Rounding, read_scalar


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChannelScale:
    """``T = diag(1 / s)``: activations are divided by ``s`` and weights multiplied.

    Attributes:
      scale: float32 [K], positive.
      exponent: float32 [], the ``r`` of AWQ that chose it, or None. A remark for reports; no product uses it.
    """

    scale: jax.Array
    exponent: jax.Array | None = None

    def activation(self, x: jax.Array) -> jax.Array:
        return x / self.scale.astype(x.dtype)

    def weight(self, w: jax.Array) -> jax.Array:
        return w * self.scale.astype(w.dtype)

    def undo_weight(self, w: jax.Array) -> jax.Array:
        return w / self.scale.astype(w.dtype)

    def describe(self) -> str:
        return "channel scale" if self.exponent is None else f"awq {read_scalar(self.exponent)}"

    def check(self, size: int, path: str = "") -> None:
        if self.scale.shape[-1] != size:
            raise BlockShapeError(f"{path}: {self.scale.shape[-1]} channel scales for a contraction axis of {size}")


@dataclass(frozen=True, kw_only=True)
class SmoothQuant:
    """``s_j = max|x_j|^alpha / max|w_j|^(1 - alpha)``. Needs statistics.

    Attributes:
      alpha: how much of the activations' range moves into the weights.
    """

    alpha: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"SmoothQuant's alpha is within 0 and 1, not {self.alpha}")

    def check(self, size: int, path: str = "") -> None:
        """Any length will do."""

    def describe(self) -> str:
        return f"smoothquant {self.alpha:g}"

    def fit(
        self, stats: Any, weights: list[jax.Array], path: str = "", rounding: Rounding | None = None
    ) -> ChannelScale:
        """The scales of one input, for all weights ``[..., K]`` that share it.

        Raises:
          CalibrationError: stacked statistics.
        """
        if stats.amax.ndim != 1:
            raise CalibrationError(f"{path}: SmoothQuant takes one input, not a stack {stats.amax.shape}{NO_STACK}")
        w_max = jnp.max(jnp.stack([jnp.abs(w).reshape(-1, w.shape[-1]).max(0) for w in weights]), axis=0)
        s = jnp.maximum(stats.amax, 1e-5) ** self.alpha / jnp.maximum(w_max, 1e-5) ** (1 - self.alpha)
        return ChannelScale(s.astype(jnp.float32))
