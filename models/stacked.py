"""The same model with its blocks stacked along a leading layer axis and run by one ``lax.scan``.

A Python loop over the blocks is compiled block by block; a scan is compiled once, whatever the depth. That matters for
``generate``, whose program holds every block twice (prompt and step), and most of all for quantized models.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from mxjax_models.llama import Block, LayerCache, Llama


class StackedCache(NamedTuple):
    """As ``llama.Cache``, with the layers' caches stacked: k and v (L, B, K, T, D), length (L,)."""

    layers: LayerCache
    start: jax.Array  # (B,) int32

    @property
    def length(self) -> jax.Array:
        return self.layers.length[0]

    @property
    def max_length(self) -> int:
        return self.layers.max_length


class Stacked(Llama):
    """A ``Llama`` with all blocks in one; made by ``stack``. Shares embedding, norm and head with the model."""

    def __init__(self, model: Llama, blocks: Block):
        self.config = model.config
        self.embed_tokens = model.embed_tokens
        self.norm = model.norm
        if not model.config.tie_word_embeddings:
            self.lm_head = model.lm_head
        self.blocks = blocks

    def hidden(self, tokens: jax.Array, cache: StackedCache | None = None, positions: jax.Array | None = None):
        """As ``Llama.hidden``."""
        if cache is None:
            return jax.lax.scan(lambda x, block: (block(x, positions), None), self.embed(tokens), self.blocks)[0]
        positions, mask = self._window(tokens, cache, positions)
        x, layers = jax.lax.scan(
            lambda x, layer: layer[0](x, positions, mask, layer[1]), self.embed(tokens), (self.blocks, cache.layers)
        )
        return x, StackedCache(layers, cache.start)

    def init_cache(self, batch: int, max_length: int, *, start: jax.Array | None = None) -> StackedCache:
        cache = super().init_cache(batch, max_length, start=start)
        return StackedCache(jax.tree.map(lambda *x: jnp.stack(x), *cache.layers), cache.start)


def stack(model: Llama) -> Llama:
    """The model with stacked blocks, quantized or not; the model itself if its blocks differ from one another.

    The blocks' parameters are copied, so both models together take twice their memory.

    Example::

        new = generate(stack(qmodel), tokenizer.encode("The capital of France is"), 16)
    """
    blocks = list(model.layers)
    structure, *others = [(jax.tree.structure(b), [x.shape for x in jax.tree.leaves(b)]) for b in blocks]
    if any(other != structure for other in others):
        return model
    return Stacked(model, jax.tree.map(lambda *x: jnp.stack(x), *blocks))
