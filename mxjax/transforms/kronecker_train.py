"""Training of a Kronecker transform: parameters that cannot become singular, and the two losses."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.lax import stop_gradient

from mxjax.core.formats import BlockFormat
from mxjax.core.quantize import fake_quantize
from mxjax.transforms.base import Rounding
from mxjax.transforms.branch import channel_weights, weighted_svd
from mxjax.transforms.kronecker import Kronecker

PARAMETRIZATIONS = ("lu", "exp", "cayley")
LOSSES = ("noise", "output")
_CAP = 1.5  # on the Frobenius norm of what is exponentiated: a factor's condition number grows by e^3 at most
_REFRESH = 10  # steps between two branches
_matmul = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def invertible(theta: jax.Array, parametrization: str) -> jax.Array:
    """Matrices of determinant one from any parameters [groups, n, n]; the identity for zeros.

    "exp": ``exp(A)``, A traceless with a Frobenius norm of at most 1.5 (soft): the condition number is at most e^3.
    "lu": ``L D U``; L and U have unit diagonals, D is positive with product one.
    "cayley": ``(I - S)^-1 (I + S) D``, S the skew part of the parameters and D as for "lu": a rotation after a scaling.
    """
    n = theta.shape[-1]
    trace = jnp.trace(theta, axis1=-2, axis2=-1)[..., None, None]
    if parametrization == "exp":
        a = theta - trace / n * jnp.eye(n)
        square = jnp.sum(jnp.square(a), axis=(-2, -1), keepdims=True)
        return jax.scipy.linalg.expm(a / jnp.sqrt(1 + square / _CAP**2), max_squarings=4)
    diagonal = jnp.exp(jnp.diagonal(theta, axis1=-2, axis2=-1) - trace[..., 0] / n)
    if parametrization == "cayley":
        skew = theta - jnp.swapaxes(theta, -1, -2)
        return jnp.linalg.solve(jnp.eye(n) - skew, jnp.eye(n) + skew) * diagonal[..., None, :]
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


def without_branch(
    data: jax.Array, w: jax.Array, t: Kronecker, key: jax.Array, *, rounding: Rounding, rank: int
) -> jax.Array:
    """What is left of the weight [N, K] beside a branch, in the weight's own space; the weight itself for rank 0.

    The branch is :func:`~mxjax.transforms.branch.weighted_svd` of the transformed weight.
    """
    if not rank:
        return w
    turned, weights = _turned(data, w, t, rounding)
    return _left_beside(turned, *weighted_svd(turned, weights, rank, key), t)


@partial(jax.jit, static_argnames="rounding")
def _turned(data: jax.Array, w: jax.Array, t: Kronecker, rounding: Rounding) -> tuple[jax.Array, jax.Array]:
    """The transformed weight, and what its channels cost."""
    turned = t.weight(w)
    moved = t.activation(data)
    if rounding.activation is None:  # second moments have two sides
        moved = t.activation(moved.T)
    return turned, channel_weights(moved, turned, rounding)


@jax.jit
def _left_beside(turned: jax.Array, b: jax.Array, a: jax.Array, t: Kronecker) -> jax.Array:
    return t.undo_weight(turned - _matmul(b, a))


def noise_loss(t: Kronecker, x: jax.Array, w: jax.Array, rounding: Rounding) -> jax.Array:
    """``sum_j E e_j^2 |W_j|^2 + E x_j^2 |f_j|^2`` with the rounding errors e of ``x T`` and f of ``W T^-T``.

    What fake quantization is expected to do to the output, if the errors of different channels are independent: the
    cross terms of :func:`output_loss` average to zero, and leaving them out leaves out their noise. Differentiated as
    :func:`rounded_with_scale_gradient` does: errors are in proportion to the largest value of their block.
    """

    def errors(z: jax.Array, fmt: BlockFormat, scale: str, batch_axes: int) -> jax.Array:  # [blocks], a channel
        blocks = z.reshape(z.shape[0], -1, fmt.block_size)
        amax = jnp.max(jnp.abs(blocks), axis=-1)
        square = jnp.mean(
            jnp.square(fake_quantize(z, fmt, -1, scale, batch_axes=batch_axes) - z).reshape(blocks.shape), -1
        )
        held = stop_gradient(square / jnp.maximum(jnp.square(amax), 1e-30))
        return jnp.sum(held * jnp.square(amax), axis=0)

    def power(z: jax.Array, block: int) -> jax.Array:  # [blocks]
        return jnp.sum(jnp.square(z).reshape(z.shape[0], -1, block), axis=(0, 2))

    x_t, w_t = t.activation(x), t.weight(w)
    f = errors(w_t, rounding.weight, rounding.weight_scale, 0)
    loss = jnp.sum(f * power(x_t, rounding.weight.block_size))
    if rounding.activation is not None:
        e = errors(x_t, rounding.activation, rounding.activation_scale, 1)
        loss += jnp.sum(e * power(w_t, rounding.activation.block_size))
    return loss


def output_loss(t: Kronecker, x: jax.Array, w: jax.Array, rounding: Rounding) -> jax.Array:
    """``|Q(x T) Q(W T^-T)^T - x W^T|^2``, Q with :func:`rounded_with_scale_gradient`."""
    w_q = rounded_with_scale_gradient(t.weight(w), rounding.weight, rounding.weight_scale)
    x_q = t.activation(x)
    if rounding.activation is not None:
        x_q = rounded_with_scale_gradient(x_q, rounding.activation, rounding.activation_scale, 1)
    return jnp.sum(jnp.square(_matmul(x_q, w_q.T) - _matmul(x, w.T)))


def train(
    x: jax.Array, w: jax.Array, start: Kronecker, key: jax.Array, *, rounding: Rounding, options: Any
) -> tuple[Kronecker, jax.Array]:
    """The start after ``options.steps`` steps of Adam, and the loss of each, relative to ``|x W^T|^2``.

    With a rank, the branch is made anew for the transform at hand every 10 steps, and held fixed in between. One
    program makes all stretches of 10 steps, whatever the transform, its start and the weight's name.

    Args:
      x: inputs [n, K].
      w: [N, K].
      start: the transform to start from.
      key: of the branches, and of what each step of the loss "output" sees.
      rounding: formats and scale policies.
      options: a KroQuant.
    """
    theta = {k: np.zeros(v.shape, np.float32) for k, v in vars(start).items() if v is not None}
    state, t, losses = (theta, _optimizer(options).init(theta)), start, []
    data = x if rounding.activation is not None else _matmul(x.T, x) / x.shape[0]
    for keys in jax.random.split(key, (-(-options.steps // _REFRESH), _REFRESH)):
        rest = without_branch(data, w, t, keys[0], rounding=rounding, rank=options.rank)
        state, t, values = _stretch(state, x, w, rest, start, keys, rounding=rounding, options=options)
        losses.append(values)
    return t, jnp.concatenate(losses)


def _optimizer(options: Any) -> optax.GradientTransformation:
    return optax.adam(optax.cosine_decay_schedule(options.learning_rate, max(options.steps, 1)))


@partial(jax.jit, static_argnames=("rounding", "options"))
def _stretch(
    state: Any, x: jax.Array, w: jax.Array, rest: jax.Array, start: Kronecker, keys: jax.Array, *, rounding: Rounding,
    options: Any,
) -> tuple[Any, Kronecker, jax.Array]:  # fmt: skip
    """The state after a step for each key, the transform that it makes, and the losses; ``rest`` is held fixed."""
    optimizer = _optimizer(options)
    loss = noise_loss if options.loss == "noise" else output_loss

    def built(theta: dict[str, jax.Array]) -> Kronecker:
        scales = {k: getattr(start, k) * jnp.exp(v) for k, v in theta.items() if k.endswith("scale")}
        left, right = (invertible(theta[k], options.parametrization) for k in ("left", "right"))
        return Kronecker(_matmul(start.left, left), _matmul(start.right, right), **scales)

    def relative(theta: dict[str, jax.Array], x: jax.Array, w: jax.Array, size: jax.Array) -> jax.Array:
        return loss(built(theta), x, w, rounding) / jnp.maximum(size, 1e-30)

    def seen(key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What a step looks at, and the size of the whole weight's output on it."""
        if options.loss == "noise":
            return x, rest, jnp.sum(jnp.square(_matmul(x, w.T)))
        for_x, for_w = jax.random.split(key)
        rows = jax.random.permutation(for_x, x.shape[0])[: options.tokens]
        outputs = jax.random.permutation(for_w, w.shape[0])[: options.outputs]
        return x[rows], rest[outputs], jnp.sum(jnp.square(_matmul(x[rows], w[outputs].T)))

    def step(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        theta, moments = state
        value, gradient = jax.value_and_grad(relative)(theta, *seen(key))
        updates, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(theta, updates), moments), value

    state, losses = jax.lax.scan(step, state, keys)
    return state, built(state[0]), losses
