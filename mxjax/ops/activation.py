"""How the input of a layer is quantized on the fly."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mxjax.core.formats import BlockFormat
from mxjax.core.quantize import fake_quantize
from mxjax.core.scales import DEFAULT_POLICY


@dataclass(frozen=True, kw_only=True)
class ActivationFormat:
    """How the input of a layer is quantized on the fly. Static.

    Attributes:
      format: block format; its blocks run along the contraction axis.
      scale: scale policy.
    """

    format: BlockFormat
    scale: str = DEFAULT_POLICY

    def quantize(self, x: jax.Array, axis: int = -1, input_scale: jax.Array | None = None) -> jax.Array:
        """The values of ``x`` after quantization, straight-through gradient.

        NVFP4's tensor scale is taken over each row of the contraction axis (each token), so that a result never
        depends on what else is in the batch, unless an ``input_scale`` is given: one number, or one for each token.
        """
        batch_axes = x.ndim - 1 if input_scale is None else jnp.ndim(input_scale)
        if axis not in (-1, x.ndim - 1):
            moved = jnp.moveaxis(x, axis, -1)
            return jnp.moveaxis(self.quantize(moved, -1, input_scale), -1, axis)
        return fake_quantize(x, self.format, -1, self.scale, batch_axes=batch_axes, global_scale=input_scale)
