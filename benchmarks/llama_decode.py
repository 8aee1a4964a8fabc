"""Whole jitted steps of a model of Llama-3.1-8B's shapes, random weights: 4 bits against bfloat16, tokens a second.

    python benchmarks/llama_decode.py [--out FILE] [--only NAME ...] [--layers N] [--tiny]

``decode`` is one token for each of 1 and 16 sequences with 256 tokens behind them, one compiled program from token to
token, every step fed with the last one's; ``prefill`` is 8 x 1024 tokens up to the logits of the last one. Weights are
made on the device as the kernels hold them. W4A16: bfloat16 activations; W4A4: MXFP4 activations with an online
Hadamard transform. The head is quantized too; embeddings and norms are not. The bfloat16 model is the same code with
its float layers. Times are the host's, over chains of dependent steps, gaps included.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from mxjax_models.llama import Cache, LayerCache, Llama, LlamaConfig

import mxjax
from mxjax.core.formats import MXFP4
from mxjax.nn.nnx_layers import QLinear, QParam
from mxjax.ops.activation import ActivationFormat
from mxjax.ops.fused import FusedPart, FusedWeight
from mxjax.ops.kernels import KernelWeight
from mxjax.transforms import Hadamard
from pallas_kernels.bench import jobs, table

LLAMA = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, rope_theta=500000.0,
)  # fmt: skip
# kind, batch, tokens of a call; in order of worth
PROGRAMS = {
    "w4a16 decode 1": ("w4a16", 1, 1),
    "bf16 decode 1": ("bf16", 1, 1),
    "w4a16 decode 16": ("w4a16", 16, 1),
    "bf16 decode 16": ("bf16", 16, 1),
    "w4a4 prefill": ("w4a4", 8, 1024),
    "bf16 prefill": ("bf16", 8, 1024),
    "w4a4 decode 16": ("w4a4", 16, 1),
    "w4a4 decode 1": ("w4a4", 1, 1),
}
CONTEXT, SLOTS = 256, 512


def abstract_model(config: LlamaConfig, kind: str) -> Llama:
    """The model without numbers: bfloat16 layers, or quantized ones whose weights are packed and share inputs."""
    model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    if kind == "bf16":
        return model
    for layer in model.layers:
        for owner, names in ((layer.self_attn, ("q_proj", "k_proj", "v_proj")), (layer.self_attn, ("o_proj",)),
                             (layer.mlp, ("gate_proj", "up_proj")), (layer.mlp, ("down_proj",))):  # fmt: skip
            sizes = tuple(getattr(owner, name).kernel.shape[1] for name in names)
            weight: Any = weight_shape(sum(sizes), getattr(owner, names[0]).kernel.shape[0], kind)
            if len(names) > 1:
                weight = FusedWeight(weight=weight, sizes=sizes)
            for i, name in enumerate(names):
                held = weight if i == 0 else FusedPart(name, names[0], i)
                setattr(owner, name, QLinear(QParam(held), None))
    head = model.lm_head.kernel.shape
    model.lm_head = QLinear(QParam(weight_shape(head[1], head[0], kind)), None)
    return model


def make_weight(seed: jax.Array, n: int, k: int, kind: str) -> KernelWeight:
    activation = None if kind == "w4a16" else ActivationFormat(format=MXFP4)
    return KernelWeight(
        packed=jobs.packed(n, k, seed, activation=activation and MXFP4), activation=activation,
        transform=None if activation is None else Hadamard(32), out_shape=(n,), size=k, dtype_name="bfloat16",
    )  # fmt: skip


def weight_shape(n: int, k: int, kind: str) -> KernelWeight:
    return jax.eval_shape(lambda: make_weight(jnp.int32(0), n, k, kind))


def filled(state: Any, kind: str) -> Any:
    """The state with random numbers, made on the device: one compiled program for each shape."""
    programs: dict[Any, Any] = {}

    def leaf(seed: int, x: Any) -> Any:
        if isinstance(x, KernelWeight):
            key = (x.packed.n, x.packed.k)
            if key not in programs:
                programs[key] = jax.jit(lambda seed: make_weight(seed, *key, kind))
            return programs[key](jnp.int32(seed))
        key = (x.shape, x.dtype)
        if key not in programs:
            scale = x.shape[0] ** -0.5 if len(x.shape) == 2 else 1.0
            ones = len(x.shape) == 1  # a norm's scale
            programs[key] = jax.jit(
                lambda seed: jnp.ones(*key) if ones else jobs.normal(key[0], seed, key[1]) * jnp.bfloat16(scale)
            )
        return programs[key](jnp.int32(seed))

    leaves, tree = jax.tree.flatten(state, is_leaf=lambda x: isinstance(x, KernelWeight))
    return jax.tree.unflatten(tree, [leaf(i, x) for i, x in enumerate(leaves)])


def program(config: LlamaConfig, kind: str, batch: int, tokens: int) -> tuple[Any, tuple]:
    """A step ``(state, tokens, cache) -> (next tokens, cache)``, and the shapes of its arguments."""
    model = abstract_model(config, kind)
    graph, state = nnx.split(model)
    shape = (batch, config.num_key_value_heads, SLOTS if tokens == 1 else tokens, config.head_dim)
    keys = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    layer = LayerCache(keys, keys, jax.ShapeDtypeStruct((), jnp.int32))
    cache = Cache((layer,) * config.num_hidden_layers, jax.ShapeDtypeStruct((batch,), jnp.int32))

    def step(state: Any, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        model = nnx.merge(graph, state)
        if tokens.shape[1] > 1:  # a prefill starts over in the same cache
            cache = cache._replace(layers=tuple(c._replace(length=jnp.int32(0)) for c in cache.layers))
        x, cache = model.hidden(tokens, cache)
        return jnp.argmax(model.head(x[:, -1:]), axis=-1).astype(jnp.int32), cache

    return step, (state, jax.ShapeDtypeStruct((batch, tokens), jnp.int32), cache)


def time_steps(compiled: Any, state: Any, shapes: tuple, steps: int) -> tuple[float, float]:
    """Median seconds of a step and its spread. A decode step takes the tokens of the one before."""
    _, tokens_shape, cache_shape = shapes
    decode = tokens_shape.shape[1] == 1
    start = CONTEXT if decode else 0

    def fresh() -> Cache:
        cache = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), cache_shape)
        layers = tuple(layer._replace(length=jnp.int32(start)) for layer in cache.layers)
        return cache._replace(layers=layers)

    first = jax.random.randint(jax.random.key(0), tokens_shape.shape, 0, 100, jnp.int32)
    times = []
    for _ in range(6):
        tokens, cache = first, fresh()
        jax.block_until_ready(cache)
        begin = time.perf_counter()
        for _ in range(steps):
            out, cache = compiled(state, tokens, cache)
            tokens = out if decode else first
        jax.block_until_ready(out)
        times.append((time.perf_counter() - begin) / steps)
    rounds = np.asarray(times[1:])
    return float(np.median(rounds)), float((rounds.max() - rounds.min()) / np.median(rounds))


def run(args: argparse.Namespace, save: Any) -> None:
    tiny = dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=256, head_dim=64, intermediate_size=512)
    config = LlamaConfig.tiny(**tiny, vocab_size=256) if args.tiny else LLAMA
    if args.layers:
        config = LlamaConfig(**{**vars(config), "num_hidden_layers": args.layers})
    held: dict[str, Any] = {}
    results: dict[str, dict[str, Any]] = {}
    for name in args.only:
        kind, batch, tokens = PROGRAMS[name]
        tokens = min(tokens, 64) if args.tiny else tokens
        step, shapes = program(config, kind, batch, tokens)
        begin = time.perf_counter()
        compiled = jax.jit(step, donate_argnums=2).lower(*shapes).compile()
        memory = compiled.memory_analysis()
        row = {"compile_s": round(time.perf_counter() - begin, 1)}
        row["kernels"] = list(mxjax.kernels_used(step, *shapes))
        row["weight_bytes"] = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes[0]))
        if memory is not None:
            row["peak_bytes"] = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        if kind not in held:
            held[kind] = filled(shapes[0], kind)
        seconds, spread = time_steps(compiled, held[kind], shapes, 24 if tokens == 1 else 2)
        row |= {"step_us": round(seconds * 1e6, 1), "spread": round(spread, 3)}
        row["tokens_per_s"] = round(batch * tokens / seconds, 1)
        results[name] = row
        base = results.get(name.replace(kind, "bf16", 1))
        for other, r in results.items():
            if base and other.split()[1:] == name.split()[1:] and r is not base:
                r["ratio"] = round(base["step_us"] / r["step_us"], 3)
        print(name, row, flush=True)
        save(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "llama_decode.json")
    parser.add_argument("--only", nargs="*", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--layers", type=int, help="how many layers, for a quick look")
    parser.add_argument("--tiny", action="store_true", help="a model of 2 small layers, to try the program anywhere")
    args = parser.parse_args()

    def save(results: dict[str, Any]) -> None:
        """After every program, so that what is measured is kept when the time runs out."""
        record = {**table.environment("python " + " ".join(sys.argv)), "context": CONTEXT, "programs": results}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")

    run(args, save)


if __name__ == "__main__":
    main()
