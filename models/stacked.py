"""The same model with its blocks stacked along a leading layer axis and run by one ``lax.scan``.

A Python loop over the blocks is compiled block by block; a scan is compiled once, whatever the depth. That matters for
``generate``, whose program holds every block twice (prompt and step), and most of all for quantized models. XLA copies
a block's weights out of the stack while the block before runs: a few percent of the time of a large model.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from mxjax_models.flux import Attention, DoubleBlock, Flux, SingleBlock
from mxjax_models.llama import Block, LayerCache, Llama
from mxjax_models.pixart import Block as PixArtBlock
from mxjax_models.pixart import PixArt


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


class StackedFlux(Flux):
    """A ``Flux`` with all double blocks in one and all single blocks in one. Shares everything else with the model."""

    def __init__(self, model: Flux, double: DoubleBlock, single: SingleBlock):
        self.config = model.config
        self.time_text_embed, self.context_embedder = model.time_text_embed, model.context_embedder
        self.x_embedder, self.norm_out, self.proj_out = model.x_embedder, model.norm_out, model.proj_out
        self.double, self.single = double, single

    def run_blocks(self, x, text, condition, angles):
        (x, text), _ = jax.lax.scan(lambda xs, block: (block(*xs, condition, angles), None), (x, text), self.double)
        x = jnp.concatenate([text, x], axis=1)
        return jax.lax.scan(lambda x, block: (block(x, condition, angles), None), x, self.single)[0]

    def attentions(self) -> list[Attention]:
        return [self.double.attn, self.single.attn]


class StackedPixArt(PixArt):
    """A ``PixArt`` with all blocks in one. Shares everything else with the model."""

    def __init__(self, model: PixArt, blocks: PixArtBlock):
        self.config = model.config
        self.pos_embed, self.adaln_single = model.pos_embed, model.adaln_single
        self.caption_projection, self.proj_out = model.caption_projection, model.proj_out
        self.scale_shift_table = model.scale_shift_table
        self.blocks = blocks

    def run_blocks(self, x, context, modulation, mask=None):
        return jax.lax.scan(lambda x, block: (block(x, context, modulation, mask), None), x, self.blocks)[0]


def stack(model: Llama | Flux | PixArt) -> Any:
    """The model with stacked blocks, quantized or not; the model itself if its blocks differ from one another.

    The blocks' parameters are copied, so both models together take twice their memory.

    Example::

        new = generate(stack(qmodel), tokenizer.encode("The capital of France is"), 16)
    """
    make: Any
    if isinstance(model, Flux):
        make, groups = StackedFlux, (model.transformer_blocks, model.single_transformer_blocks)
    elif isinstance(model, PixArt):
        make, groups = StackedPixArt, (model.transformer_blocks,)
    else:
        make, groups = Stacked, (model.layers,)
    stacks = []
    for blocks in map(list, groups):
        structure, *others = [(jax.tree.structure(b), [x.shape for x in jax.tree.leaves(b)]) for b in blocks]
        if any(other != structure for other in others):
            return model
        stacks.append(jax.tree.map(lambda *x: jnp.stack(x), *blocks))
    return make(model, *stacks)
