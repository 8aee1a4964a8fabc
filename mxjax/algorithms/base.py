"""What an algorithm is: one array in, one QWeight out. It never sees a model or a tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import jax

from mxjax.core.formats import BlockFormat
from mxjax.core.scales import DEFAULT_POLICY
from mxjax.ops.qweight import ActivationFormat, QWeight
from mxjax.transforms.base import Rounding, Transform, TransformFitter


@dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """All that an algorithm needs to know about one weight besides its values.

    Attributes:
      path: parameter path, for messages.
      format: block format of the weight.
      scale: scale policy of the weight.
      axis: contraction axis (negative).
      activation: how the layer's input will be quantized, or None.
      transform: map on the contraction axis, or what will choose one from statistics, or None.
      on_nonfinite, on_uneven: as in ``quantize_array``.
      options: what else the rule says, by keyword.
      tensor_scale: a given tensor scale (NVFP4) in place of the weight's own, or None.
    """

    path: str
    format: BlockFormat
    scale: str = DEFAULT_POLICY
    axis: int = -2
    activation: ActivationFormat | None = None
    transform: Transform | TransformFitter | None = None
    on_nonfinite: str = "raise"
    on_uneven: str = "error"
    options: dict[str, Any] = field(default_factory=dict)
    tensor_scale: jax.Array | None = field(default=None, compare=False)

    @property
    def rounding(self) -> Rounding:
        """The formats and scale policies, for transforms that measure them."""
        act = self.activation
        return Rounding(
            weight=self.format,
            weight_scale=self.scale,
            activation=None if act is None else act.format,
            activation_scale=DEFAULT_POLICY if act is None else act.scale,
        )


class Algorithm(Protocol):
    """``algorithm(w, spec, stats)``: the quantized weight. ``stats`` is what calibration gathered for it, or None."""

    def __call__(self, w: jax.Array, spec: WeightSpec, stats: Any = None) -> QWeight: ...
