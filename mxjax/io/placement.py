"""Where loaded arrays go: one device, or the shards of a sharding, straight from the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from mxjax.errors import CheckpointError

Key = str | int


class _Host:
    """What ``HOST`` is: one object, compared by identity."""

    def __repr__(self) -> str:
        return "HOST"


HOST = _Host()  # in the place of a sharding: leave arrays in the file, as read-only NumPy memory maps


def sharding_of(shardings: Any, keys: Sequence[Key], name: str, shape: tuple[int, ...]) -> Sharding | _Host | None:
    """The sharding of one array.

    Args:
      shardings: None; a Sharding or HOST for everything; a callable from the array's name to one of these; or a tree
        like the loaded one (dicts, sequences, QWeights), where any of the above may stand for a whole branch.
      keys: keys, indices and attributes that lead to the array.
      name: its name in the file, ``layers/0/up_proj/kernel.qtensor.codes``.
      shape: its shape.

    Returns:
      A sharding that fits. An array of fewer axes than the spec names (a scale of one number, a norm) is replicated.

    Raises:
      CheckpointError: a tree without this branch, or a sharding that does not divide the array.
    """
    node: Any = shardings
    for key in keys:
        if node is None or isinstance(node, (Sharding, _Host)) or callable(node):
            break
        try:
            inside: Any = node
            node = inside[key] if isinstance(node, (Mapping, list, tuple)) else getattr(node, str(key))
        except (KeyError, IndexError, TypeError, AttributeError):
            raise CheckpointError(f"{name}: shardings has nothing at {key!r}; use None to leave a branch") from None
    sharding = node(name) if callable(node) else node
    if sharding is None or isinstance(sharding, _Host):
        return sharding
    if not isinstance(sharding, Sharding):
        raise CheckpointError(f"{name}: {sharding!r} is no Sharding")
    if isinstance(sharding, NamedSharding) and len(sharding.spec) > len(shape):
        return NamedSharding(sharding.mesh, PartitionSpec())
    try:
        sharding.shard_shape(shape)
    except ValueError as e:
        raise CheckpointError(f"{name}: {sharding} does not divide the shape {shape}: {e}") from None
    return sharding


def stays_numpy(dtype: np.dtype) -> bool:
    """64-bit values stay NumPy arrays unless ``jax_enable_x64`` is on: JAX would cut them in half."""
    return dtype.kind in "iuf" and dtype.itemsize == 8 and not jax.config.read("jax_enable_x64")


def place(view: np.ndarray, sharding: Sharding | _Host | None) -> jax.Array | np.ndarray:
    """A memory-mapped array on the device, or each of its shards on its own: no device ever holds all of it."""
    if isinstance(sharding, _Host):
        return view
    if stays_numpy(view.dtype):
        return np.array(view)
    if sharding is None:
        return jnp.array(view)  # a copy: the array must not change with the file
    return jax.make_array_from_callback(view.shape, sharding, lambda index: np.array(view[index]))
