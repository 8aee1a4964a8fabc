"""What a route of :func:`block_scaled_matmul` is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from mxjax import backend
from mxjax.core.formats import BlockFormat
from pallas_kernels.block_scaled_matmul.epilogue import Epilogue, split
from pallas_kernels.block_scaled_matmul.layout import PackedWeight


@dataclass(frozen=True)
class Product:
    """``f(x @ W^T + down @ up^T + bias)`` that is asked for on a machine.

    Attributes:
      x: [M, K] floats, or uint8 codes of ``x_format`` with ``x_scales``.
      w: the weight.
      epilogue: what follows the sums.
      out_dtype: of the result.
      target: the machine.
      x_scale: float32 [M], a factor of each row, or None.
      x_scales: uint8 scale bytes of the codes, or None.
      x_format: format of the codes, or None.
      obstacle: why no kernel can run it, or None.
    """

    x: jax.Array
    w: PackedWeight
    epilogue: Epilogue
    out_dtype: Any
    target: backend.Target
    x_scale: jax.Array | None = None
    x_scales: jax.Array | None = None
    x_format: BlockFormat | None = None
    obstacle: str | None = None

    @property
    def m(self) -> int:
        return self.x.shape[0]

    def unless(self, obstacle: str | None) -> Product:
        """With this obstacle, if it has none yet."""
        return replace(self, obstacle=self.obstacle or obstacle)

    def split(self, run: Callable[[jax.Array | None, Any], jax.Array]) -> jax.Array:
        """The result of a kernel ``run(bias, dtype)`` that knows no more of the epilogue than the bias."""
        return split(self.epilogue, self.out_dtype, run)
