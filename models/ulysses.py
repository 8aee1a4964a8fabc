"""Sequence parallelism for FLUX.1: every device has a part of the tokens, and inside attention a part of the heads.

DeepSpeed-Ulysses (arXiv:2309.14509). Everything but attention treats tokens one by one and needs no other device:
projections, MLPs, norms and modulations run on S / P image and T / P text tokens with whole weights. Before attention
an all-to-all turns (S / P tokens, all heads) into (all tokens, H / P heads), and back after it:

    q, k, v (B, L / P, H, D)  --all-to-all-->  (B, L, H / P, D)  --attention-->  --all-to-all-->  (B, L / P, H * D)

Four tensors of B L E / P values travel per block and device, (P - 1) / P of each: unlike tensor parallelism, less with
every device more. The whole model is one ``shard_map``; the weights are replicated, 4-bit or not, and kernels run in it
as on one device.

    model = replicate(model, mesh)                        # once; else every call does it
    run = nnx.jit(sequence_parallel(mesh, axis="seq"))
    velocity = run(model, x, text, pooled, t, image_ids, text_ids, guidance)       # as model(x, text, ..)

Tokens that P does not divide are padded with tokens that nobody sees (a mask, which may cost the fastest attention).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mxjax_models import partition
from mxjax_models.dit_layers import attention


@dataclasses.dataclass(frozen=True)
class Ulysses:
    """Attention over tokens that are spread over devices; in the place of a model's attention ``implementation``.

    Attributes:
        axis: mesh axis of the tokens.
        devices: its size.
        implementation: of the attention on one device: None or "xla", or "cudnn".
        tokens: text and image tokens without padding.
    """

    axis: str
    devices: int
    implementation: str | None
    tokens: tuple[int, int]

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: Any = None) -> jax.Array:
        """q, k, v (B, L / P, H, D), text first on every device -> (B, L / P, H * D)."""
        q, k, v = (jax.lax.all_to_all(y, self.axis, 2, 1, tiled=True) for y in (q, k, v))  # (B, L, H / P, D)
        seen = self.seen()
        mask = None if seen.all() else jnp.broadcast_to(seen, (q.shape[0], len(seen)))
        y = attention(q, k, v, mask, self.implementation).reshape(q.shape)
        y = jax.lax.all_to_all(y, self.axis, 1, 2, tiled=True)
        return y.reshape(*y.shape[:2], -1)

    def seen(self) -> np.ndarray:
        """bool (L,): which tokens are no padding, in the all-to-all's order: device after device, text first."""
        parts = []
        for count in self.tokens:
            padded = count + -count % self.devices
            parts.append((np.arange(padded) < count).reshape(self.devices, -1))
        return np.concatenate(parts, axis=1).reshape(-1)


def replicate(model: Any, mesh: Mesh) -> Any:
    """A copy of the model with all its arrays on every device of the mesh."""
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.device_put(state, NamedSharding(mesh, P())))


def sequence_parallel(mesh: Mesh, axis: str = "seq", *, batch: str | None = None) -> Callable[..., jax.Array]:
    """A function that calls a FLUX.1 model with its tokens spread over ``mesh``.

    Args:
        mesh: the mesh.
        axis: mesh axis of the tokens; its size divides the number of heads.
        batch: mesh axis of the images, or None. (Guidance of two passes, say.)

    Returns:
        ``f(model, x, text, pooled, timestep, image_ids, text_ids, guidance=None)``: arguments and result as of
        ``Flux.__call__``. It changes nothing in the model. Call it under ``jit``.

    Raises:
        ConfigError: heads that ``axis`` does not divide.
    """

    def run(model, x, text, pooled, timestep, image_ids, text_ids, guidance=None):
        partition.check_heads(model.config, mesh, axis)
        size, (s, t) = mesh.shape[axis], (x.shape[1], text.shape[1])
        graph, state = nnx.split(model)
        tokens = [_padded(y, 1, size) for y in (x, text)]
        ids = [_padded(y, 0, size) for y in (image_ids, text_ids)]

        def one_device(state, x, text, pooled, timestep, image_ids, text_ids, guidance):
            model = nnx.merge(graph, state)
            for attn in model.attentions():
                attn.implementation = Ulysses(axis, size, attn.implementation, (t, s))
            return model(x, text, pooled, timestep, image_ids, text_ids, guidance)

        by_token, by_image = P(batch, axis), P(batch)
        f = jax.shard_map(
            one_device,
            mesh=mesh,
            in_specs=(P(), by_token, by_token, by_image, by_image, P(axis), P(axis), by_image),
            out_specs=by_token,
            check_vma=False,  # Pallas kernels do not say along which axes their results differ
        )
        return f(state, *tokens, pooled, timestep, *ids, guidance)[:, :s]

    return run


def _padded(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    sides = [(0, 0)] * x.ndim
    sides[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, sides)
