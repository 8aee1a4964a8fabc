"""SVDQuant's smoothing (arXiv 2411.05007): channel scales chosen with the low-rank branch in place."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.core.svd import truncated_svd
from mxjax.errors import ConfigError
from mxjax.transforms.base import Rounding
from mxjax.transforms.measure import branch_error, measured_on, one_wide, rounded_weight
from mxjax.transforms.smooth import ChannelScale


@dataclass(frozen=True, kw_only=True)
class BranchSmooth:
    """``s_j = max|x_j|^alpha / max|w_j|^beta``, (alpha, beta) from a grid. Needs statistics.

    The grid is deepcompressor's: (0, 0), (i / g, 0) and (i / g, 1 - i / g) for i = 1, ..., g - 1. Each point is
    measured as the layer will run: the branch is the SVD of the smoothed weight, the rest of it and the inputs are
      rounded.

    Attributes:
      rank: of the branch.
      grid: g.
      seed: of the randomised SVD.
    """

    rank: int = 32
    grid: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        if self.grid < 1 or self.rank < 1:
            raise ConfigError(f"BranchSmooth has one grid point and rank 1 or more, not {self}")

    def describe(self) -> str:
        return f"smoothing search {self.grid}, rank {self.rank}"

    def check(self, size: int, path: str = "") -> None:
        """Any length will do."""

    def fit(
        self, stats: Any, weights: list[jax.Array], path: str = "", rounding: Rounding | None = None
    ) -> ChannelScale:
        """The scales of one input, for all weights ``[..., K]`` that share it.

        Raises:
          CalibrationError: stacked statistics, no ``rounding``, or no sample where inputs are rounded.
        """
        data = measured_on(stats, rounding, type(self).__name__, path)
        key = jax.random.key(self.seed)
        return ChannelScale(
            _search(data, stats.amax, one_wide(weights), key, rounding=rounding, grid=self.grid, rank=self.rank)
        )


@partial(jax.jit, static_argnames=("rounding", "grid", "rank"))
def _search(
    data: jax.Array, amax: jax.Array, w: jax.Array, key: jax.Array, *, rounding: Rounding, grid: int, rank: int
) -> jax.Array:
    x_span, w_span = jnp.maximum(amax, 1e-5), jnp.maximum(jnp.max(jnp.abs(w), axis=0), 1e-5)
    i = jnp.arange(1, grid) / grid
    alpha = jnp.concatenate([jnp.zeros(1), i, i])
    beta = jnp.concatenate([jnp.zeros(1), jnp.zeros(grid - 1), 1 - i])

    def scale_of(point: tuple[jax.Array, jax.Array]) -> jax.Array:
        return (x_span ** point[0] / w_span ** point[1]).astype(jnp.float32)

    def error(point: tuple[jax.Array, jax.Array]) -> jax.Array:
        s = scale_of(point)
        turned = w * s
        inputs = data / s if rounding.activation is not None else data / s / s[:, None]
        b, a = truncated_svd(turned, rank, key)
        return branch_error(inputs, turned, rounded_weight(turned - b @ a, rounding), a, b, rounding)

    best = jnp.argmin(lax.map(error, (alpha, beta)))
    return scale_of((alpha[best], beta[best]))
