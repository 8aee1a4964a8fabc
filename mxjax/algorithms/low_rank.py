"""What SVDQuant and LoRaQ share: a weight as stacked rows, formats of a branch, and the QWeight at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from mxjax.algorithms.base import WeightSpec
from mxjax.algorithms.gptq import finite, gptq
from mxjax.algorithms.rtn import rtn
from mxjax.calibration.stats import LayerStats
from mxjax.core.formats import MXFP4, MXFP6_E2M3, MXFP8_E4M3, MXINT8, BlockFormat
from mxjax.core.quantize import quantize_array
from mxjax.errors import BlockShapeError, CalibrationError, ConfigError
from mxjax.ops.low_rank import LowRank
from mxjax.ops.qweight import ActivationFormat, QWeight
from mxjax.transforms.base import fit, needs_fit

RESIDUALS = ("rtn", "gptq")
REFERENCE_RANK = 32  # SVDQuant's, in 16 bits: what "equal bytes" is measured by
_TOLERANCE = 1.07  # 64 columns in MXFP8 are 3 % above 32 in 16 bits, 128 in MXFP4 6 %; published pairs take 64


@dataclass(frozen=True, kw_only=True)
class BranchFormat:
    """How a branch is stored and multiplied. None: bfloat16, and the layer's own input.

    Attributes:
      factors: block format of A (blocks along K) and B (blocks along the rank).
      activation: block format of x and of x A^T.
    """

    factors: BlockFormat | None = None
    activation: BlockFormat | None = None

    @property
    def bits(self) -> float:
        """Stored bits of one number of a factor."""
        return 16.0 if self.factors is None else self.factors.bits_per_value

    def equal_rank(self, rank: int = REFERENCE_RANK) -> int:
        """The rank, in whole blocks, that takes the bytes of ``rank`` columns in 16 bits, 7 % more at most.

        Example:
          >>> [BRANCHES[name].equal_rank() for name in ("w16a16", "w8a8", "int8", "w6a6", "w4a8")]
          [32, 64, 64, 64, 128]
        """
        if self.factors is None:
            return rank
        block = self.factors.block_size
        return max(math.floor(_TOLERANCE * 16 * rank / self.bits / block), 1) * block


BRANCHES: dict[str, BranchFormat] = {
    "w16a16": BranchFormat(),
    "w8a8": BranchFormat(factors=MXFP8_E4M3, activation=MXFP8_E4M3),
    # The same bytes, with a fourth of MXFP8's rounding error where a block has no outliers: four more bits of mantissa.
    "int8": BranchFormat(factors=MXINT8, activation=MXINT8),
    "w6a6": BranchFormat(factors=MXFP6_E2M3, activation=MXFP6_E2M3),
    "w4a8": BranchFormat(factors=MXFP4, activation=MXFP8_E4M3),
}


def parsed(name: str, spec: WeightSpec, defaults: Mapping[str, Any], choices: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the rule over the defaults; those named ``gptq_*`` are gptq's own.

    Raises:
      ConfigError: unknown options, or a value that is none of its choices.
    """
    unknown = {k for k in spec.options if k not in defaults and not k.startswith("gptq_")}
    if unknown:
        known = ", ".join([*defaults, "gptq_*"])
        raise ConfigError(f"{spec.path}: {name} knows no option {sorted(unknown)}; known: {known}")
    options = {**defaults, **spec.options}
    for key, allowed in {**choices, "residual": RESIDUALS}.items():
        if options[key] not in allowed:
            raise ConfigError(f"{spec.path}: {name} option {key} is one of {tuple(allowed)}, not {options[key]!r}")
    return options


@dataclass(frozen=True)
class Rows:
    """A weight as matrices [stack, N, K] in the space of its layer and in that of its transform.

    Attributes:
      original: float32 [*out, K], without NaN and Inf.
      bad: where these were, or None.
      turned: float32 [stack, N, K]: ``W T^-T``; one matrix for each tensor scale that rtn would give.
      transform: fitted, or None.
    """

    original: jax.Array
    bad: jax.Array | None
    turned: jax.Array
    transform: Any

    @property
    def stack(self) -> tuple[int, ...]:
        """The leading axes with a matrix, and a branch, for each index."""
        return self.original.shape[: max(self.original.ndim - 2, 0)] if self.turned.shape[0] > 1 else ()


def rows_of(w: jax.Array, spec: WeightSpec, stats: LayerStats | None) -> Rows:
    """The weight as matrices, its transform fitted.

    Raises:
      BlockShapeError, NonFiniteError: as ``quantize_array``.
    """
    moved = jnp.moveaxis(jnp.asarray(w), spec.axis, -1).astype(jnp.float32)
    size = moved.shape[-1]
    if size % spec.format.block_size and spec.on_uneven == "error":
        raise BlockShapeError(f"{spec.path}: axis {spec.axis} of {w.shape} is no multiple of the {spec.format} block")
    if spec.transform is not None:
        spec.transform.check(size, spec.path)
    moved, bad = finite(moved, spec)
    transform: Any = spec.transform
    if needs_fit(transform):
        known = None if stats is None else stats.transform
        transform = known if known is not None else fit(transform, stats, [moved], spec.path, spec.rounding)
    turned = moved if transform is None else transform.weight(moved)
    stacked = min(max(w.ndim - 2, 0), w.ndim + spec.axis % w.ndim - w.ndim)
    return Rows(moved, bad, turned.reshape(math.prod(moved.shape[:stacked]), -1, size), transform)


def stored(rows: Rows, a: jax.Array, b: jax.Array, form: BranchFormat) -> LowRank:
    """The branch as it is kept: factors [stack, r, K] and [stack, N, r] in their format."""
    one = not rows.stack
    factors: list[Any] = [a[0] if one else a.reshape(*rows.stack, *a.shape[1:])]
    factors.append(b.reshape(*rows.original.shape[:-1], b.shape[-1]))
    if form.factors is None:
        factors = [x.astype(jnp.bfloat16) for x in factors]
    else:
        factors = [quantize_array(x, form.factors, -1, on_nonfinite="nan", on_uneven="pad") for x in factors]
    activation = None if form.activation is None else ActivationFormat(format=form.activation)
    return LowRank(a=factors[0], b=factors[1], activation=activation)


def with_branch(
    w: jax.Array,
    rows: Rows,
    a: jax.Array,
    b: jax.Array,
    form: BranchFormat,
    spec: WeightSpec,
    stats: Any,
    **options: Any,
) -> QWeight:
    """``Q(W - B A)`` with its branch: round to nearest, or GPTQ with ``residual="gptq"`` and its options.

    Args:
      w: the weight.
      rows: of it.
      a: [stack, r, K], a factor on the untransformed input.
      b: [stack, N, r].
      form: how the branch is stored.
      spec: of the weight.
      stats: of its input, where the residual or a transform needs them.
      options: ``residual``, and gptq's with the prefix ``gptq_``.
    """
    branch = stored(rows, a, b, form)
    rest = rows.original - branch.product()
    if rows.bad is not None:
        rest = jnp.where(rows.bad, jnp.nan, rest)
    own = {k.removeprefix("gptq_"): v for k, v in options.items() if k.startswith("gptq_")}
    spec = replace(spec, transform=rows.transform, options=own)
    if options.get("residual") == "gptq" and stats is None:
        raise CalibrationError(f"{spec.path}: residual='gptq' needs calibration statistics for this weight")
    solver = gptq if options.get("residual") == "gptq" else rtn
    q = solver(jnp.moveaxis(rest, -1, spec.axis), spec, stats)
    qtensor = replace(q.qtensor, dtype_name=jnp.dtype(w.dtype).name)
    return replace(q, qtensor=qtensor, branch=branch)
