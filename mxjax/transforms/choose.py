"""The transform with the smallest measured error, input by input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from mxjax.errors import ConfigError
from mxjax.transforms.base import Rounding, Transform, TransformFitter, describe, fit, need_values
from mxjax.transforms.measure import measured_on, one_wide, output_error


@dataclass(frozen=True)
class Choose:
    """Tries every candidate, and none at all, and takes the one whose rounded layer is closest to the float one.

    A rotation helps one layer and hurts the next, so each input gets what measures best on it: round to nearest with
    the formats and scale policies of the rule, and ``|Q(x T) Q(W T^-T)^T - x W^T|^2`` on sampled calibration inputs
    (weight-only: the same error in the Hessian norm, over all tokens). Needs statistics. ``mxjax.summary`` says
    what each layer got.

    Attributes:
      candidates: transforms and fitters. The identity is always among them and wins ties.

    Example:
      >>> mxjax.transforms.Choose([mxjax.transforms.Hadamard(32), mxjax.transforms.Wush(strength=0.5)]).describe()
      'choice of none, hadamard 32, wush 0.5, 32'
    """

    candidates: tuple[Transform | TransformFitter | None, ...]

    def __init__(self, candidates: Any):
        candidates = tuple(c for c in candidates if c is not None)
        for c in candidates:
            if not isinstance(c, (Transform, TransformFitter)):
                raise ConfigError(f"Choose takes transforms and fitters of transforms, not {c!r}")
        object.__setattr__(self, "candidates", (None, *candidates))

    def describe(self) -> str:
        return "choice of " + ", ".join(map(describe, self.candidates))

    def check(self, size: int, path: str = "") -> None:
        for c in self.candidates:
            if c is not None:
                c.check(size, path)

    def errors(
        self, stats: Any, weights: list[jax.Array], path: str = "", rounding: Rounding | None = None
    ) -> list[tuple[Transform | None, float]]:
        """Each candidate as fitted to this input, and its relative squared output error, in order.

        Raises:
          CalibrationError: stacked statistics, statistics without a sample, or no ``rounding``.
        """
        need_values("Choose", stats, weights, path)
        data, wide = measured_on(stats, rounding, type(self).__name__, path), one_wide(weights)
        assert rounding is not None  # measured_on has looked
        fitted = [fit(c, stats, weights, path, rounding) for c in self.candidates]
        return [(t, float(output_error(data, wide, t, rounding))) for t in fitted]

    def fit(
        self, stats: Any, weights: list[jax.Array], path: str = "", rounding: Rounding | None = None
    ) -> Transform | None:
        """The candidate with the smallest error; None where that is the identity."""
        return min(self.errors(stats, weights, path, rounding), key=lambda pair: pair[1])[0]
