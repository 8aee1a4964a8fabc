"""The state of a training run, its steps in one compiled loop, and how it goes to disk and back."""

import dataclasses
import os
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import objective
import optax
from flax import nnx
from mxjax_models.pixart_mini import SIZE, Network, config
from mxjax_models.pixart_mini_text import Frozen, TextConfig

from mxjax.io import safetensors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides the result; a run is resumed with the same."""

    width: int = 320
    heads: int = 5
    layers: int = 7
    patch: int = 4
    text: str = "wordpieces"  # or "bytes"
    batch: int = 512
    rate: float = 6e-4
    warmup: int = 500
    decay: float = 0.02
    ema: float = 0.9995
    shift: int = 2
    drop: float = 0.1
    mean: float = 0.0
    spread: float = 1.0
    seed: int = 0
    dtype: str = "bfloat16"
    attention: str | None = None  # "cudnn" on a GPU

    @property
    def augment(self) -> objective.Augment:
        return objective.Augment(self.shift, self.drop, self.mean, self.spread)

    def text_config(self, vocabulary: int, features: int) -> TextConfig:
        if self.text == "bytes":
            return TextConfig(kind="bytes", vocabulary=258, features=96, length=64)
        return TextConfig(kind="wordpieces", vocabulary=vocabulary, features=features)


class State(NamedTuple):
    step: jax.Array  # int32
    params: Any
    ema: Any
    moments: Any


def network(settings: Settings, table: np.ndarray) -> Network:
    """The initial network: every branch of a block, and the output, starts small or at zero, as DiT does it."""
    s = settings
    sizes = dict(num_attention_heads=s.heads, attention_head_dim=s.width // s.heads, cross_attention_dim=s.width)
    text = s.text_config(*table.shape)
    net = Network(
        config(num_layers=s.layers, patch_size=s.patch, **sizes), text, rngs=nnx.Rngs(s.seed), attention=s.attention
    )
    if text.kind == "wordpieces":
        net.text.table[...] = jnp.asarray(table)
    zero = [net.transformer.proj_out, net.transformer.adaln_single.linear]
    zero += [block.attn2.to_out[0] for block in net.transformer.transformer_blocks]
    for linear in zero:
        linear.kernel[...] = jnp.zeros_like(linear.kernel[...])
    return net


def optimizer(settings: Settings) -> optax.GradientTransformation:
    """AdamW without its learning rate, which depends on the length of the run; matrices alone decay."""
    matrices = lambda params: jax.tree.map(lambda p: p.ndim >= 2, params)  # noqa: E731
    return optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.99),
                       optax.add_decayed_weights(settings.decay, matrices))  # fmt: skip


def learning_rate(settings: Settings, step: jax.Array, total: jax.Array) -> jax.Array:
    """Linear to the peak over ``warmup`` steps, then half a cosine to zero at ``total``."""
    done = jnp.clip((step - settings.warmup) / jnp.maximum(total - settings.warmup, 1), 0, 1)
    return settings.rate * jnp.minimum((step + 1) / settings.warmup, 0.5 * (1 + jnp.cos(jnp.pi * done)))


class Trainer:
    """Holds the compiled loop.

    Args:
        settings: of the run.
        table: embeddings of the word pieces.
        chunk: steps of one call of ``run``.
    """

    def __init__(self, settings: Settings, table: np.ndarray, chunk: int):
        self.settings, self.chunk = settings, chunk
        self.graph, self.initial, self.frozen = nnx.split(network(settings, table), nnx.Param, Frozen)
        self.optimizer = optimizer(settings)
        self.run = jax.jit(self._run, donate_argnums=0)
        self.held_out = jax.jit(partial(objective.held_out_loss, self.graph, dtype=jnp.dtype(settings.dtype)))

    def start(self) -> State:
        copy = jax.tree.map(jnp.copy, self.initial)
        return State(jnp.int32(0), copy, jax.tree.map(jnp.copy, self.initial), self.optimizer.init(self.initial))

    def network(self, params: Any, dtype: Any = jnp.float32) -> Network:
        return nnx.merge(self.graph, *jax.tree.map(lambda x: x.astype(dtype), (params, self.frozen)))

    @property
    def parameters(self) -> int:
        return sum(x.size for x in jax.tree.leaves(self.initial))

    def flops(self) -> float:
        """Of one training step, forward and backward: 6 a parameter of the blocks and a token, and attention's."""
        s = self.settings
        tokens = (SIZE // s.patch) ** 2
        block = 6 * 16 * s.width**2 * tokens + 3 * 4 * tokens**2 * s.width
        return s.batch * s.layers * block

    def _run(self, state: State, frozen: Any, data: objective.Arrays, total: jax.Array) -> tuple[State, jax.Array]:
        """``chunk`` steps -> the state after them, and the losses (chunk,)."""
        s = self.settings
        base = jax.random.key(s.seed)

        def step(state: State, _):
            key = jax.random.fold_in(base, state.step)
            loss, gradient = jax.value_and_grad(partial(objective.loss, self.graph))(
                state.params, frozen, data, key, s.batch, s.augment, jnp.dtype(s.dtype)
            )
            updates, moments = self.optimizer.update(gradient, state.moments, state.params)
            rate = learning_rate(s, state.step, total)
            params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
            keep = jnp.minimum(s.ema, (1 + state.step) / (10 + state.step))
            ema = jax.tree.map(lambda e, p: e + (1 - keep) * (p - e), state.ema, params)
            return State(state.step + 1, params, ema, moments), loss

        return jax.lax.scan(step, state, length=self.chunk)


def save(path: Path, state: Any, metadata: dict[str, str]) -> None:
    """All leaves, by position in the tree; a reader sees the whole file or the one before it."""
    leaves = {f"{i:04d}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(state))}
    part = path.with_suffix(".part")
    safetensors.write(part, leaves, metadata)
    os.replace(part, path)


def restore(path: Path, like: Any) -> tuple[Any, dict[str, str]]:
    """The leaves of ``save`` in the place of those of ``like``, whose shapes and dtypes they must have."""
    entries = safetensors.read(path)
    leaves, tree = jax.tree.flatten(like)
    read = [entries[f"{i:04d}"].read() for i in range(len(leaves))]
    for i, (new, old) in enumerate(zip(read, leaves, strict=True)):
        if new.shape != old.shape or new.dtype != old.dtype:
            raise SystemExit(f"{path}: leaf {i} is {new.dtype}{new.shape}, the run has {old.dtype}{old.shape}")
    return jax.tree.unflatten(tree, [jnp.array(x) for x in read]), safetensors.read_metadata(path)
