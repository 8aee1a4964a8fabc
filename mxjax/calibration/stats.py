"""What calibration knows about the input of one layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mxjax.errors import CalibrationError
from mxjax.transforms.smooth import ChannelScale


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LayerStats:
    """Statistics of the inputs ``x [n, K]`` of one or more weights. A pytree; leading axes are stacks (experts).

    Attributes:
      hessian: float32 [*stack, K, K], ``2/n sum x^T x``: symmetric, positive semidefinite. Its scale does not matter
        to any algorithm here.
      n_tokens: [*stack], how many rows were seen.
      amax: float32 [*stack, K], largest magnitude of each channel.
      cross: float32 [*stack, K, K], ``2/n sum x_float^T x`` with the input that the float model has at this layer, or
        None: the same input (symmetric calibration).
      transform: the transform in whose space all of the above is, or None: the layer's own input. An algorithm that is
        told to use a transform applies it to the weight only, if it is this one.
      sample: float32 [rows, K], a uniform sample of the inputs themselves, for choices that are measured (AWQ, Choose),
        or None. Rows of zeros, where calibration saw fewer, change no such measurement.
    """

    hessian: jax.Array
    n_tokens: jax.Array
    amax: jax.Array
    cross: jax.Array | None = None
    transform: Any = None
    sample: jax.Array | None = None

    @property
    def size(self) -> int:
        """K, the length of the contraction axis."""
        return self.hessian.shape[-1]

    def through(self, transform: Any) -> LayerStats:
        """The statistics of ``x T``. Channel maxima survive a scaling of channels only; otherwise they are NaN."""
        diagonal = isinstance(transform, ChannelScale)
        return LayerStats(
            hessian=transform_gram(transform, self.hessian),
            n_tokens=self.n_tokens,
            amax=transform.activation(self.amax) if diagonal else jnp.full_like(self.amax, jnp.nan),
            cross=None if self.cross is None else transform_gram(transform, self.cross),
            sample=None if self.sample is None else transform.activation(self.sample),
        )

    def check(self, size: int, path: str = "") -> LayerStats:
        """Raise CalibrationError unless the statistics fit a contraction axis of ``size``; returns self."""
        if self.hessian.ndim < 2 or self.hessian.shape[-2:] != (size, size):
            raise CalibrationError(
                f"{path}: a Hessian {self.hessian.shape} does not fit a contraction axis of {size}; the statistics "
                f"belong to another layer, or Rule.axis differs from the one calibrated with"
            )
        return self

    def check_finite(self, path: str = "") -> LayerStats:
        """Raise CalibrationError if the Hessian has NaN, Inf or a negative diagonal (concrete arrays); returns self."""
        check_finite(self.hessian, path)
        return self


def check_finite(hessian: jax.Array, path: str = "") -> None:
    """Raise CalibrationError if a Hessian has NaN, Inf or a negative diagonal. Inside ``jit`` nothing can be said."""
    if isinstance(hessian, jax.core.Tracer):
        return
    diagonal = jnp.diagonal(hessian, axis1=-2, axis2=-1)
    # What K products may leave of a zero after a transform.
    rounding = hessian.shape[-1] * 2.0**-24 * jnp.max(jnp.abs(diagonal), initial=0.0)
    if bool((diagonal < -rounding).any()):
        raise CalibrationError(
            f"{path}: the Hessian {hessian.shape} has a negative diagonal, which no sum of squares has; the statistics "
            f"are damaged"
        )
    if not bool(jnp.isfinite(hessian).all()):
        raise CalibrationError(
            f"{path}: the Hessian {hessian.shape} has NaN or Inf; so had the calibration inputs (token numbers beyond "
            f"the vocabulary give NaN), or their squares are above 3e38"
        )


def transform_gram(transform: Any, gram: jax.Array) -> jax.Array:
    """``T^T G T``: the matrix ``sum x^T y`` after ``x T`` and ``y T``, for ``G [*stack, K, K]``."""
    right = transform.activation(gram)  # rows of G as inputs: G T
    return jnp.swapaxes(transform.activation(jnp.swapaxes(right, -1, -2)), -1, -2)
