"""AWQ's search for a scale of each channel (arXiv 2306.00978, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.errors import ConfigError
from mxjax.transforms.base import Rounding
from mxjax.transforms.measure import measured_on, one_wide, output_error, sample_of
from mxjax.transforms.smooth import ChannelScale


@dataclass(frozen=True, kw_only=True)
class Awq:
    """``s_j = mean|x_j|^r``, divided by ``sqrt(max s min s)``; weights take ``s``, inputs ``1 / s``. Needs statistics.

    ``r`` is the point of the grid 0, 1/grid, ..., (grid-1)/grid whose layer has the smallest error in its own output,
    with the formats and scale policies of the rule. Weight-only: the error in the Hessian norm, over all calibration
    tokens. With rounded inputs: the error on the sampled ones. ``r = 0`` is no scaling, so the measured error is never
    above that without AWQ.

    Attributes:
      grid: number of candidates.
    """

    grid: int = 20

    def __post_init__(self) -> None:
        if self.grid < 1:
            raise ConfigError(f"Awq's grid has one point or more, not {self.grid}")

    def describe(self) -> str:
        return f"awq search {self.grid}"

    def check(self, size: int, path: str = "") -> None:
        """Any length will do."""

    def fit(
        self, stats: Any, weights: list[jax.Array], path: str = "", rounding: Rounding | None = None
    ) -> ChannelScale:
        """The scales of one input, for all weights ``[..., K]`` that share it.

        Raises:
          CalibrationError: stacked statistics, statistics without a sample, or no ``rounding``.
        """
        data = measured_on(stats, rounding, self, path)
        scale, r = _search(data, sample_of(stats, self, path), one_wide(weights), rounding=rounding, grid=self.grid)
        return ChannelScale(scale, r)


@partial(jax.jit, static_argnames=("rounding", "grid"))
def _search(
    data: jax.Array, sample: jax.Array, w: jax.Array, *, rounding: Rounding, grid: int
) -> tuple[jax.Array, jax.Array]:
    """The scale with the least error and its exponent; one compilation a shape."""
    magnitude = jnp.mean(jnp.abs(sample), axis=0)

    def scale_of(r: jax.Array) -> jax.Array:
        s = jnp.maximum(magnitude**r, 1e-4)
        return s / jnp.sqrt(jnp.max(s) * jnp.min(s))

    exponents = jnp.arange(grid, dtype=jnp.float32) / grid
    errors = lax.map(lambda r: output_error(data, w, ChannelScale(scale_of(r)), rounding), exponents)
    r = exponents[jnp.argmin(errors)]
    return scale_of(r), r
