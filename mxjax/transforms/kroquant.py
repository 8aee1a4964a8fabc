"""KroQuant (arXiv 2607.21446): the Kronecker transform of a layer's input, learned on the layer's own output error.

Only the paper's abstract is public to us: a learned invertible Kronecker-structured map on each 32-element block of the
activations, with less than half the parameters of per-channel scaling, and LoRaQ for the weights. Everything else here
is inferred: factor sizes, what is private to a block, parametrization, start and loss; benchmarks/lowrank_ablation.py
compares them. Less than 16 parameters a block rule out a pair of 4 x 4 and 8 x 8 factors for each; factors shared by
several blocks cannot tell an outlier channel from its neighbours. So both factors are shared by the whole layer, and
each block has 4 + 8 scales of their rows (12 parameters), or 8, where 12 are too many.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.errors import BlockShapeError, CalibrationError, ConfigError
from mxjax.transforms.base import Rounding
from mxjax.transforms.hadamard import hadamard_matrix
from mxjax.transforms.kronecker import Kronecker
from mxjax.transforms.kronecker_start import nearest_kronecker, outer_scales, second_moment_metric
from mxjax.transforms.kronecker_train import LOSSES, PARAMETRIZATIONS, train, without_branch
from mxjax.transforms.measure import one_wide, output_error, sample_of

STARTS = ("identity", "hadamard", "wush")
SCALES = ("both", "right", "left", "none")  # by how much they hold
_matmul = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


@dataclass(frozen=True, kw_only=True)
class KroQuant:
    """Learns a :class:`Kronecker`: ``min |Q(x T) Q(W T^-T)^T - x W^T|^2``. Needs statistics.

    ``T = T_0 P`` with a start ``T_0`` and ``P`` from parameters that are zero at first, of determinant one, so T is
    invertible whatever the optimizer does; scales are exponentials. Rounding is differentiated with its error in
    proportion to the largest value of the block: a map that shrinks outliers shrinks the step that everything in their
    block is rounded with, which a plain straight-through gradient does not see. At the end the best of all starts and
    all trained transforms is taken, measured on the whole sample with real rounding, so training never makes a layer
    worse there.

    Attributes:
      size: channels of a block, p q; the block that is quantized or a multiple of it.
      left: p; the other factor has q = size / p.
      left_groups, right_groups: how many different factors (divisors of the number of blocks). None: one of each beside
        scales; without these as many as stay below half a parameter a channel, the left ones first.
      scales: which scales each block has of its own: "both" (p + q of them), "right" (q), "left" (p) or "none". None:
        the first of these with which everything stays below half a parameter a channel (16 for each 32).
      rank: of the low-rank branch that the layer will have, or 0. The branch takes what costs most once rounded
        (:func:`~mxjax.transforms.branch.channel_weights`); the transform is learned for what is left of W, and the
        branch made anew as it changes.
      starts: which T_0 to try: "identity", "hadamard" and "wush", the nearest Kronecker product of WUSH's closed form.
      exponents: of SmoothQuant, whose scales those of the starts are taken from; 0: ones.
      train: how many of the starts to train, best first.
      parametrization: "lu": ``P = L D U`` with unit triangles, the product of D one; "exp": ``P = exp(A)``, A
        traceless, its norm bounded by 1.5, which bounds the condition number but takes twice the time; "cayley": a
        rotation and a scaling.
      loss: "noise": the error that fake quantization of all sampled inputs and of W is expected to make; "output": the
        error that it makes on a random part of inputs and outputs at each step.
      steps, learning_rate: of Adam, with a cosine to zero; a multiple of 10.
      tokens, outputs: how many inputs and outputs a step of "output" sees.
      seed: of the choice of these, and of the branches.

    Example:
      >>> KroQuant(steps=100).describe()
      'kroquant 4x8'
    """

    size: int = 32
    left: int = 4
    left_groups: int | None = None
    right_groups: int | None = None
    scales: str | None = None
    rank: int = 0
    starts: tuple[str, ...] = STARTS
    exponents: tuple[float, ...] = (0.0, 0.6)
    train: int = 1
    parametrization: str = "lu"
    loss: str = "noise"
    steps: int = 100
    learning_rate: float = 0.02
    tokens: int = 256
    outputs: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "starts", tuple(self.starts))
        object.__setattr__(self, "exponents", tuple(self.exponents))
        if self.size < 1 or self.left < 1 or self.size % self.left:
            raise ConfigError(f"KroQuant: a left factor of {self.left} does not divide a block of {self.size}")
        for n in (self.left, self.size // self.left):
            hadamard_matrix(n)
        for name, value, known in (
            ("parametrization", self.parametrization, PARAMETRIZATIONS),
            ("loss", self.loss, LOSSES),
            ("scales", self.scales, (None, *SCALES)),
        ):
            if value not in known:
                raise ConfigError(f"KroQuant: {name} is one of {known}, not {value!r}")
        if not self.starts or not set(self.starts) <= set(STARTS) or not self.exponents:
            raise ConfigError(f"KroQuant: starts are of {STARTS}, with one exponent or more; not {self.starts}")
        if min(self.steps, self.train, self.rank) < 0 or min(self.tokens, self.outputs) < 1 or self.learning_rate <= 0:
            raise ConfigError(f"KroQuant: steps, tokens, outputs and learning_rate are positive, not {self}")
        if self.steps % 10:
            raise ConfigError(f"KroQuant: steps are a multiple of 10, not {self.steps}")

    def describe(self) -> str:
        return f"kroquant {self.left}x{self.size // self.left}"

    def check(self, size: int, path: str = "") -> None:
        blocks = size // self.size
        if size % self.size or any(g is not None and blocks % g for g in (self.left_groups, self.right_groups)):
            raise BlockShapeError(
                f"{path}: {blocks} KroQuant blocks of {self.size} in {self.left_groups} and {self.right_groups} groups "
                f"do not divide a contraction axis of {size}"
            )

    def layout(self, size: int) -> tuple[int, int, str]:
        """How many left and right factors an axis of ``size`` gets, and which scales each block.

        Example:
          >>> KroQuant().layout(1152), KroQuant().layout(384)
          ((1, 1, 'both'), (1, 1, 'right'))
        """
        blocks, p, q = size // self.size, self.left, self.size // self.left
        held = {"both": p + q, "right": q, "left": p, "none": 0}

        def fits(left: int, right: int, scales: str) -> bool:
            return 2 * (left * p * p + right * q * q + blocks * held[scales]) < size

        left, right, scales = self.left_groups, self.right_groups, self.scales
        if scales is None:
            scales = next((s for s in SCALES if fits(left or 1, right or 1, s)), "none")
        divisors = [d for d in range(1, blocks + 1) if blocks % d == 0] if scales == "none" else [1]
        if left is None:
            left = max(d for d in divisors if d == 1 or fits(d, right or 1, scales))
        if right is None:
            right = max(d for d in divisors if d == 1 or fits(left, d, scales))
        return left, right, scales

    def fit(self, stats: Any, weights: list[jax.Array], path: str = "", rounding: Rounding | None = None) -> Kronecker:
        """The transform of one input, for all weights ``[..., K]`` that share it.

        Raises:
          CalibrationError: stacked statistics, statistics without a sample, or no ``rounding``.
        """
        trained = self.search(stats, weights, path, rounding)
        return min(trained, key=lambda t: t.error).transform

    def search(
        self, stats: Any, weights: list[jax.Array], path: str = "", rounding: Rounding | None = None
    ) -> list[Trained]:
        """Every start, best first, then what training made of the first ``train`` of them.

        Raises:
          CalibrationError: as :meth:`fit`.
        """
        if stats.hessian.ndim != 2:
            raise CalibrationError(f"{path}: KroQuant takes one input, not a stack of Hessians {stats.hessian.shape}")
        if rounding is None:
            raise CalibrationError(f"{path}: KroQuant measures rounding errors; fit it with rounding=Rounding(...)")
        x, w = sample_of(stats, type(self).__name__, path), one_wide(weights)
        self.check(x.shape[-1], path)
        # Float inputs: the error that calibration knows exactly, over all tokens.
        data = x if rounding.activation is not None else stats.hessian.astype(jnp.float32)
        key, whole = jax.random.key(self.seed), float(_output_size(data, w, rounding))

        def measured(name: str, t: Kronecker, losses: jax.Array | None = None) -> Trained:
            left = without_branch(data, w, t, key, rounding=rounding, rank=self.rank)
            share = float(_output_size(data, left, rounding)) / whole
            return Trained(name, t, float(output_error(data, left, t, rounding)) * share, losses)

        scaled = self.layout(w.shape[-1])[2] != "none"
        starts = [
            measured(name if not exponent else f"{name}, scales {exponent:g}", self._start(name, exponent, stats, w))
            for name in self.starts
            for exponent in (self.exponents if scaled else (0.0,))
        ]
        starts.sort(key=lambda t: t.error)
        out = list(starts)
        same = replace(self, seed=0)  # the key has it; as a static option it would compile anew
        for i, start in enumerate(starts[: self.train] if self.steps else []):
            t, losses = train(x, w, start.transform, jax.random.fold_in(key, i), rounding=rounding, options=same)
            out.append(measured(f"{start.name}, trained", t, losses))
        return out

    def _start(self, name: str, exponent: float, stats: Any, w: jax.Array) -> Kronecker:
        p, q, size = self.left, self.size // self.left, w.shape[-1]
        left_groups, right_groups, scales = self.layout(size)
        # numpy: no programs of their own for what is small and fixed
        left_scale: Any = np.ones((size // self.size, p), np.float32)
        right_scale: Any = np.ones((size // self.size, q), np.float32)
        if exponent and scales != "none":
            left_scale, right_scale = outer_scales(stats.amax, w, exponent, p, q)
        if scales in ("left", "right"):  # it has to do the other's work, too
            left_scale, right_scale = jnp.square(left_scale), jnp.square(right_scale)
        left: Any = np.eye(p, dtype=np.float32)[None]
        right: Any = np.eye(q, dtype=np.float32)[None]
        if name != "identity":
            left, right = hadamard_matrix(p)[None], hadamard_matrix(q)[None]
        if name == "wush":
            metric = second_moment_metric(stats.hessian, w, self.size)
            roots = nearest_kronecker(metric, p, left_groups, right_groups)
            left, right = _matmul(roots[0], left), _matmul(roots[1], right)
        return Kronecker(
            jnp.asarray(np.broadcast_to(left, (left_groups, p, p)), jnp.float32),
            jnp.asarray(np.broadcast_to(right, (right_groups, q, q)), jnp.float32),
            jnp.asarray(left_scale) if scales in ("both", "left") else None,
            jnp.asarray(right_scale) if scales in ("both", "right") else None,
        )


@partial(jax.jit, static_argnames="rounding")
def _output_size(data: jax.Array, w: jax.Array, rounding: Rounding) -> jax.Array:
    """``|x W^T|^2``, from the data of :func:`~mxjax.transforms.measure.output_error`."""
    y = _matmul(w, data.T)
    return jnp.sum(jnp.square(y) if rounding.activation is not None else y * w)


class Trained(NamedTuple):
    """One candidate of :meth:`KroQuant.search`.

    Attributes:
      name: its start, and whether it was trained.
      transform: the candidate.
      error: relative squared output error on the sample (weight-only: in the Hessian norm).
      losses: float32 [steps], each on the part of the data that the step saw; None if it was not trained.
    """

    name: str
    transform: Kronecker
    error: float
    losses: jax.Array | None
