"""KroQuant (arXiv 2607.21446): the Kronecker transform of a layer's input, learned on the layer's own output error.

Only the paper's abstract is public to us: a learned invertible Kronecker-structured map on each 32-element block of the
activations, with less than half the parameters of per-channel scaling, and LoRaQ for the weights. Everything else here
is inferred: factor sizes, sharing, parametrization, start and loss; benchmarks/lowrank_quality.py compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.lax import stop_gradient

from mxjax.core.formats import BlockFormat
from mxjax.core.quantize import fake_quantize
from mxjax.core.svd import truncated_svd
from mxjax.errors import BlockShapeError, CalibrationError, ConfigError
from mxjax.transforms.base import Rounding
from mxjax.transforms.hadamard import hadamard_matrix
from mxjax.transforms.kronecker import Kronecker
from mxjax.transforms.kronecker_start import nearest_kronecker, second_moment_metric
from mxjax.transforms.measure import one_wide, output_error, sample_of

STARTS = ("identity", "hadamard", "wush")
PARAMETRIZATIONS = ("exp", "lu")
_CAP = 1.5  # on the Frobenius norm of what is exponentiated: a factor's condition number grows by e^3 at most
_matmul = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


@dataclass(frozen=True, kw_only=True)
class KroQuant:
    """Learns ``L`` and ``R`` of a :class:`Kronecker`: ``min |Q(x T) Q(W T^-T)^T - x W^T|^2``. Needs statistics.

    ``T = T_0 P`` with a start ``T_0`` and ``P`` from parameters that are zero at first, of determinant one, so T is
    invertible whatever the optimizer does. Each step of Adam sees a random part of the sampled inputs and of the
    outputs. Rounding is differentiated straight-through, with its error in proportion to the largest value of the
    block: a map that shrinks outliers shrinks the step that everything in their block is rounded with, which a plain
    straight-through gradient does not see. At the end the best of all starts and all trained transforms is taken,
    measured on the whole sample with real rounding, so training never makes a layer worse there.

    Attributes:
      size: channels of a block, p q; the block that is quantized or a multiple of it.
      left: p; the other factor has q = size / p.
      left_groups, right_groups: how many different factors (divisors of the number of blocks). None: as many as stay
        below half a parameter a channel (16 for each 32), the left ones, which are smaller, first; at least one of
        each.
      rank: of the low-rank branch that the layer will have, or 0. The branch takes the truncated SVD of ``W T_0^-T``,
        so the transform is learned for what is left of W.
      starts: which T_0 to try: "identity", "hadamard" and "wush", the nearest Kronecker product of WUSH's closed form.
      train: how many of them to train, best first.
      parametrization: "lu": ``P = L D U`` with unit triangles, the product of D one; "exp": ``P = exp(A)``, A
        traceless, its norm bounded by 1.5, which bounds the condition number but takes twice the time.
      steps, learning_rate: of Adam, with a cosine to zero.
      tokens, outputs: how many inputs and outputs a step sees.
      seed: of the choice of these.

    Example:
      >>> KroQuant(steps=100).describe()
      'kroquant 4x8'
    """

    size: int = 32
    left: int = 4
    left_groups: int | None = None
    right_groups: int | None = None
    rank: int = 0
    starts: tuple[str, ...] = STARTS
    train: int = 1
    parametrization: str = "lu"
    steps: int = 150
    learning_rate: float = 0.01
    tokens: int = 256
    outputs: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "starts", tuple(self.starts))
        if self.size < 1 or self.left < 1 or self.size % self.left:
            raise ConfigError(f"KroQuant: a left factor of {self.left} does not divide a block of {self.size}")
        for n in (self.left, self.size // self.left):
            hadamard_matrix(n)
        if not self.starts or not set(self.starts) <= set(STARTS) or self.parametrization not in PARAMETRIZATIONS:
            raise ConfigError(
                f"KroQuant: starts are of {STARTS}, parametrization is one of {PARAMETRIZATIONS}; not "
                f"{self.starts} and {self.parametrization!r}"
            )
        if min(self.steps, self.train, self.rank) < 0 or min(self.tokens, self.outputs) < 1 or self.learning_rate <= 0:
            raise ConfigError(f"KroQuant: steps, tokens, outputs and learning_rate are positive, not {self}")

    def describe(self) -> str:
        return f"kroquant {self.left}x{self.size // self.left}"

    def check(self, size: int, path: str = "") -> None:
        blocks = size // self.size
        if size % self.size or any(g is not None and blocks % g for g in (self.left_groups, self.right_groups)):
            raise BlockShapeError(
                f"{path}: {blocks} KroQuant blocks of {self.size} in {self.left_groups} and {self.right_groups} groups "
                f"do not divide a contraction axis of {size}"
            )

    def groups(self, size: int) -> tuple[int, int]:
        """How many left and right factors an axis of ``size`` gets."""
        blocks, p, q = size // self.size, self.left, self.size // self.left
        divisors = [d for d in range(1, blocks + 1) if blocks % d == 0]
        left, right = self.left_groups, self.right_groups
        if left is None:
            left = max(d for d in divisors if d == 1 or 2 * (d * p * p + (right or 1) * q * q) < size)
        if right is None:
            right = max(d for d in divisors if d == 1 or 2 * (left * p * p + d * q * q) < size)
        return left, right

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

        def rest(t: Kronecker) -> jax.Array:
            return w if not self.rank else _without_branch(w, t, jax.random.key(self.seed), rank=self.rank)

        def measured(name: str, t: Kronecker, losses: jax.Array | None = None) -> Trained:
            left = rest(t)
            share = _output_size(data, left, rounding) / _output_size(data, w, rounding)
            return Trained(name, t, float(output_error(data, left, t, rounding) * share), losses)

        starts = [measured(name, self._start(name, stats, w)) for name in self.starts]
        starts.sort(key=lambda t: t.error)
        out = list(starts)
        for i, start in enumerate(starts[: self.train] if self.steps else []):
            key = jax.random.fold_in(jax.random.key(self.seed), i)
            t, losses = train(x, rest(start.transform), start.transform, key, rounding=rounding, options=self)
            out.append(measured(f"{start.name}, trained", t, losses))
        return out

    def _start(self, name: str, stats: Any, w: jax.Array) -> Kronecker:
        p, q = self.left, self.size // self.left
        left_groups, right_groups = self.groups(w.shape[-1])
        left, right = jnp.eye(p)[None], jnp.eye(q)[None]
        if name != "identity":
            left, right = jnp.asarray(hadamard_matrix(p))[None], jnp.asarray(hadamard_matrix(q))[None]
        if name == "wush":
            metric = second_moment_metric(stats.hessian, w, self.size)
            roots = nearest_kronecker(metric, p, left_groups, right_groups)
            left, right = _matmul(roots[0], left), _matmul(roots[1], right)
        return Kronecker(
            jnp.broadcast_to(left, (left_groups, p, p)).astype(jnp.float32),
            jnp.broadcast_to(right, (right_groups, q, q)).astype(jnp.float32),
        )


@partial(jax.jit, static_argnames="rank")
def _without_branch(w: jax.Array, t: Kronecker, key: jax.Array, *, rank: int) -> jax.Array:
    turned = t.weight(w)
    b, a = truncated_svd(turned, rank, key)
    return t.undo_weight(turned - _matmul(b, a))


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


def invertible(theta: jax.Array, parametrization: str) -> jax.Array:
    """Matrices of determinant one from any parameters [groups, n, n]; the identity for zeros.

    "exp": ``exp(A)``, A traceless with a Frobenius norm of at most 1.5 (soft): the condition number is at most e^3.
    "lu": ``L D U``; L and U have unit diagonals, D is positive with product one.
    """
    n = theta.shape[-1]
    trace = jnp.trace(theta, axis1=-2, axis2=-1)[..., None, None]
    if parametrization == "exp":
        a = theta - trace / n * jnp.eye(n)
        square = jnp.sum(jnp.square(a), axis=(-2, -1), keepdims=True)
        return jax.scipy.linalg.expm(a / jnp.sqrt(1 + square / _CAP**2), max_squarings=4)
    diagonal = jnp.exp(jnp.diagonal(theta, axis1=-2, axis2=-1) - trace[..., 0] / n)
    lower, upper = jnp.tril(theta, -1) + jnp.eye(n), jnp.triu(theta, 1) + jnp.eye(n)
    return _matmul(lower * diagonal[..., None, :], upper)


def rounded_with_scale_gradient(x: jax.Array, fmt: BlockFormat, scale: str, batch_axes: int = 0) -> jax.Array:
    """``fake_quantize(x)``, with a gradient that knows that the error of a block is in proportion to its largest value.

    ``Q(x) = x + e``, differentiated as ``x + c amax(x)`` with the ``c = e / amax`` of the block held fixed.
    """
    error = stop_gradient(fake_quantize(x, fmt, -1, scale, batch_axes=batch_axes) - x)
    block = fmt.block_size
    amax = jnp.max(jnp.abs(x.reshape(*x.shape[:-1], -1, block)), axis=-1, keepdims=True)
    growth = amax / jnp.maximum(stop_gradient(amax), 1e-30)
    growth = jnp.where(stop_gradient(amax) > 0, growth, 1.0)
    return x + (error.reshape(*x.shape[:-1], -1, block) * growth).reshape(x.shape)


@partial(jax.jit, static_argnames=("rounding", "options"))
def train(
    x: jax.Array, w: jax.Array, start: Kronecker, key: jax.Array, *, rounding: Rounding, options: KroQuant
) -> tuple[Kronecker, jax.Array]:
    """The start after ``options.steps`` steps, and the loss of each."""
    optimizer = optax.adam(optax.cosine_decay_schedule(options.learning_rate, max(options.steps, 1)))

    def built(theta: tuple[jax.Array, jax.Array]) -> Kronecker:
        left, right = (invertible(t, options.parametrization) for t in theta)
        return Kronecker(_matmul(start.left, left), _matmul(start.right, right))

    def loss(theta: tuple[jax.Array, jax.Array], x: jax.Array, w: jax.Array) -> jax.Array:
        t = built(theta)
        w_q = rounded_with_scale_gradient(t.weight(w), rounding.weight, rounding.weight_scale)
        x_q = t.activation(x)
        if rounding.activation is not None:
            x_q = rounded_with_scale_gradient(x_q, rounding.activation, rounding.activation_scale, 1)
        exact = _matmul(x, w.T)
        error = jnp.sum(jnp.square(_matmul(x_q, w_q.T) - exact))
        return error / jnp.maximum(jnp.sum(jnp.square(exact)), 1e-30)

    def step(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        theta, moments = state
        for_x, for_w = jax.random.split(key)
        some_x = x[jax.random.permutation(for_x, x.shape[0])[: options.tokens]]
        some_w = w[jax.random.permutation(for_w, w.shape[0])[: options.outputs]]
        value, gradient = jax.value_and_grad(loss)(theta, some_x, some_w)
        updates, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(theta, updates), moments), value

    theta = (jnp.zeros_like(start.left), jnp.zeros_like(start.right))
    (theta, _), losses = jax.lax.scan(step, (theta, optimizer.init(theta)), jax.random.split(key, options.steps))
    return built(theta), losses
