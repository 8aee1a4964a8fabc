"""What PixArt-Mini is trained on: flow matching on augmented pictures, in one function of arrays.

x_t = t noise + (1 - t) image; the loss is the mean square of model(x_t, 1000 t, caption) - (noise - image), with t from
a logit-normal distribution (arXiv:2403.03206) and, for classifier-free guidance, no caption now and then.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from mxjax_models.pixart_mini import from_pixels

WAYS = 4  # captions of one picture


class Arrays(NamedTuple):
    """The data set where the model is: a step draws from it without a word to the host."""

    pixels: jax.Array  # uint8 (N, 64, 64, 3)
    ids: jax.Array  # int32 (N, WAYS, T)
    mask: jax.Array  # bool (N, WAYS, T)
    mirror: jax.Array  # bool (N,)
    cumulative: jax.Array  # float32 (N,), of the weights, up to 1
    nothing: tuple[jax.Array, jax.Array]  # ids and mask (T,) of the empty prompt


class Augment(NamedTuple):
    shift: int = 2  # pixels, each way
    drop: float = 0.1  # of captions
    mean: float = 0.0  # of logit t
    spread: float = 1.0


def arrays(data: Any, tokenizer: Any, length: int) -> Arrays:
    """``data.Data`` on the device, captions as ids."""
    ids, mask = tokenizer([c for ways in data.captions for c in ways], length)
    shape = (len(data.names), WAYS, length)
    free = tokenizer([""], length)
    cumulative = np.cumsum(data.weight, dtype=np.float64)
    return Arrays(jnp.asarray(data.pixels), jnp.asarray(ids.reshape(shape)), jnp.asarray(mask.reshape(shape)),
                  jnp.asarray(data.mirror), jnp.asarray(cumulative / cumulative[-1], jnp.float32),
                  (jnp.asarray(free[0][0]), jnp.asarray(free[1][0])))  # fmt: skip


def moved(pixels: jax.Array, by: jax.Array, most: int) -> jax.Array:
    """(B, H, W, 3) moved by (B, 2) pixels, each in -most to most; white comes in."""
    padded = jnp.pad(pixels, ((0, 0), (most, most), (most, most), (0, 0)), constant_values=255)

    def window(image, by):
        return jax.lax.dynamic_slice(image, (most + by[0], most + by[1], 0), pixels.shape[1:])

    return jax.vmap(window)(padded, by)


def batch(data: Arrays, key: jax.Array, size: int, augment: Augment):
    """(image float32 (B, 3, H, W), ids (B, T), mask (B, T))."""
    pick, flip, move, way, drop = jax.random.split(key, 5)
    rows = jnp.minimum(jnp.searchsorted(data.cumulative, jax.random.uniform(pick, (size,))), len(data.mirror) - 1)
    pixels = data.pixels[rows]
    mirrored = data.mirror[rows] & jax.random.bernoulli(flip, shape=(size,))
    pixels = jnp.where(mirrored[:, None, None, None], pixels[:, :, ::-1], pixels)
    if augment.shift:
        pixels = moved(pixels, jax.random.randint(move, (size, 2), -augment.shift, augment.shift + 1), augment.shift)
    ways = jax.random.randint(way, (size,), 0, WAYS)
    dropped = jax.random.bernoulli(drop, augment.drop, (size, 1))
    ids = jnp.where(dropped, data.nothing[0], data.ids[rows, ways])
    return from_pixels(pixels), ids, jnp.where(dropped, data.nothing[1], data.mask[rows, ways])


def velocity_loss(network: Any, image, ids, mask, noise, t, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Mean square (B,) of the error in the velocity at times t (B,)."""
    at = t[:, None, None, None]
    x = (at * noise + (1 - at) * image).astype(dtype)
    predicted = network.transformer(x, 1000 * t, network.text(ids, mask), mask)
    return jnp.mean(jnp.square(predicted.astype(jnp.float32) - (noise - image)), axis=(1, 2, 3))


def loss(graph: Any, params: Any, frozen: Any, data: Arrays, key: jax.Array, size: int, augment: Augment, dtype: Any):
    """The training loss of one batch; parameters stay float32, the arithmetic is in ``dtype``."""
    draw, when, what = jax.random.split(key, 3)
    image, ids, mask = batch(data, draw, size, augment)
    t = jax.nn.sigmoid(augment.mean + augment.spread * jax.random.normal(when, (size,)))
    noise = jax.random.normal(what, image.shape)
    low = jax.tree.map(lambda p: p.astype(dtype), (params, frozen))
    return jnp.mean(velocity_loss(nnx.merge(graph, *low), image, ids, mask, noise, t, dtype))


def held_out_loss(graph: Any, params: Any, frozen: Any, data: Arrays, dtype: Any, times: int = 8) -> jax.Array:
    """(times,) mean losses on every picture of ``data``, first caption, at the middles of as many stretches of t.

    Noise depends on picture and time alone: the number is the same whenever the parameters are.
    """
    network = nnx.merge(graph, *jax.tree.map(lambda p: p.astype(dtype), (params, frozen)))
    image = from_pixels(data.pixels)

    def at(i):
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(7), i), image.shape)
        t = jnp.full(len(image), (i + 0.5) / times)
        return jnp.mean(velocity_loss(network, image, data.ids[:, 0], data.mask[:, 0], noise, t, dtype))

    return jax.lax.map(at, jnp.arange(times))
