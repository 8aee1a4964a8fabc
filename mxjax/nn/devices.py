"""The device side of a run by block: where its arrays go, and how many bytes they take."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mxjax.errors import ConfigError
from mxjax.text import size_text


class Devices:
    """Puts arrays on the device, or on all devices of a mesh, and keeps the most bytes seen on one of them.

    Args:
      sharding: of a batch of activations [B, ...], such as ``NamedSharding(mesh, PartitionSpec("data"))``; None for one
        device.
      dtype: of float parameters on the device; None: their own.

    Raises:
      ConfigError: devices of other processes.

    Attributes:
      all: the devices.
      device: the first of them, where weights wait.
      peak: the most bytes of live arrays on one device that :meth:`look` has seen. XLA's temporaries are not in it.
    """

    def __init__(self, sharding: NamedSharding | None = None, dtype: Any = None):
        self.sharding, self.dtype = sharding, dtype
        self.all = [jax.local_devices()[0]] if sharding is None else list(sharding.mesh.devices.flat)
        if others := [d for d in self.all if d.process_index != jax.process_index()]:
            raise ConfigError(
                f"a run by block takes the devices of one process; {len(others)} of the {len(self.all)} in the mesh "
                f"are of others. Over several processes use mxjax.calibrate and mxjax.quantize"
            )
        self.device = self.all[0]
        self.peak = 0

    def batch(self, x: Any) -> jax.Array:
        """A batch, cut along the mesh; a smaller rest that the mesh does not divide is on every device."""
        if self.sharding is None:
            return jnp.asarray(x)
        try:
            self.sharding.shard_shape(x.shape)
        except ValueError:
            return self.whole(x)
        return jax.device_put(x, self.sharding)

    def whole(self, tree: Any) -> Any:
        """The same arrays on every device."""
        target: Any = None if self.sharding is None else NamedSharding(self.sharding.mesh, PartitionSpec())
        return jax.device_put(tree, target)

    def parameters(self, tree: Any) -> Any:
        """Parameters on every device, float ones in ``dtype``: cast there, so that the host keeps what is stored."""
        return jax.tree.map(self._cast, self.whole(tree))

    def _cast(self, x: jax.Array) -> jax.Array:
        return x if self.dtype is None or not jnp.issubdtype(x.dtype, jnp.floating) else x.astype(self.dtype)

    def one(self, tree: Any) -> Any:
        """The arrays on one device."""
        return tree if self.sharding is None else jax.device_put(tree, self.device)

    def look(self) -> None:
        """Count the live arrays now."""
        self.peak = max(self.peak, live_bytes(self.device))

    def report(self) -> str:
        """The peak, for people: the allocator's where there is one."""
        text = f"arrays took at most {size_text(self.peak)}"
        allocated = (self.device.memory_stats() or {}).get("peak_bytes_in_use")
        return (
            text if allocated is None else f"{text}, this process at most {size_text(allocated)} with all temporaries"
        )


def to_host(tree: Any) -> Any:
    """The tree with NumPy arrays. Copies: on a CPU, NumPy's own view of a JAX array would keep that array alive."""
    return jax.tree.map(np.array, tree)


def live_bytes(device: jax.Device) -> int:
    """Bytes of all live JAX arrays on one device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.live_arrays()
        if device in x.sharding.device_set
    )
