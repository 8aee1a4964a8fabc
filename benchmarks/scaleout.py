"""More than one GPU: FLUX.1 by tokens, Llama-3.1-70B by heads, GPTQ by batches and layers; and bytes, without a GPU.

    python benchmarks/scaleout.py --flux --out benchmarks/results/scaleout_flux_2xh200.json
    python benchmarks/scaleout.py --llama --out benchmarks/results/scaleout_llama70b_2xh200.json
    python benchmarks/scaleout.py --gptq --out benchmarks/results/scaleout_gptq_2xh200.json
    python benchmarks/scaleout.py --bytes --out benchmarks/results/scaleout_bytes_cpu.json

Random weights of the published sizes, made on the devices in 4 bits.

--flux    FLUX.1-dev, 1024 x 768, 20 steps: BF16 and MXFP4 (as in flux_step.py) on one GPU, and on all of them with
          Ulysses sequence parallelism. Goals: MXFP4 at least 1.23x BF16 on two GPUs (batch 16), and two GPUs at
          least 1.6x one.
--llama   Llama-3.1-70B, tensor parallelism over all GPUs: decoding speed and memory, BF16 beside MXFP4 weights.
--gptq    Calibration and GPTQ of Llama-3.1-8B's blocks: all GPUs beside one. Goal on two: 1.7x.
--bytes   Weak scaling on 1, 2, 4 and 8 simulated CPU devices: bytes that a device receives, read from the compiled
          program. Work a device stays the same: tokens grow with the devices for Ulysses, the batch for gathered
          weights and calibration, nothing for tensor parallelism's sums.
"""

import argparse
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

if "--bytes" in sys.argv:  # before JAX starts
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import flux_step
import jax
import jax.numpy as jnp
import numpy as np
import random_models
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mxjax_models import flux, llama, partition, ulysses
from mxjax_models.stacked import Stacked, StackedCache

import mxjax
from mxjax.calibration import GramSum
from mxjax.ops.shard_weight import shard_weight
from mxjax.ops.sharded import ShardedWeight
from mxjax.report.collectives import collective_bytes

BF16 = jnp.bfloat16


def mesh_of(devices: int, name: str) -> Mesh:
    return jax.make_mesh((devices,), (name,), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


# --- FLUX.1 by tokens ------------------------------------------------------------------------------------------------


def run_flux(args: argparse.Namespace) -> list[dict]:
    rows = []
    count, name = jax.device_count(), "flux-dev"
    for variant in ("mxfp4", "bf16"):
        model = flux_step.build(name, variant, args.attention, tiny=args.tiny)
        for devices in (1, count) if count > 1 else (1,):
            step, place = flux_step.step_of(name, args.steps), lambda x: x
            if devices > 1:
                mesh = mesh_of(devices, "seq")
                model = ulysses.replicate(model, mesh)
                step = flux_step.step_of(name, args.steps, ulysses.sequence_parallel(mesh))
                place = partial(jax.device_put, device=NamedSharding(mesh, P()))
            for batch in args.batch:
                row = {"variant": variant, "devices": devices, "batch": batch}
                rows.append(row | flux_step.measure(name, model, batch, args.reps, step, place, args.tiny))
                print(json.dumps(rows[-1]), flush=True)
        del model
    for row in rows:
        same = [r for r in rows if r["batch"] == row["batch"]]
        one = next(r for r in same if r["variant"] == row["variant"] and r["devices"] == 1)
        bf16 = next(r for r in same if r["variant"] == "bf16" and r["devices"] == row["devices"])
        row["speed_vs_one_device"] = round(one["image_s"] / row["image_s"], 3)
        row["speed_vs_bf16"] = round(bf16["image_s"] / row["image_s"], 3)
    return rows


# --- Llama by heads --------------------------------------------------------------------------------------------------


def llama_config(size: str) -> llama.LlamaConfig:
    common: dict[str, Any] = dict(rms_norm_eps=1e-5, rope_theta=5e5, head_dim=128, num_key_value_heads=8)
    sizes = {
        "70b": dict(vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
                    num_attention_heads=64),
        "8b": dict(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                   num_attention_heads=32),
    }  # fmt: skip
    return llama.LlamaConfig(**common, **sizes[size])


def shardings_of(tree: Any, mesh: Mesh, rules: Any, stack: tuple = ()) -> Any:
    """A NamedSharding for each array of a module with ShardedWeights; ``stack``: entries for leading axes."""

    def one(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, ShardedWeight):
            specs = [NamedSharding(mesh, P(*stack, *spec)) for spec in leaf.specs]
            return jax.tree.unflatten(jax.tree.structure(leaf), specs)
        name = "/".join(str(getattr(k, "key", getattr(k, "name", k))) for k in path).removesuffix("/value")
        return NamedSharding(mesh, P(*stack, *rules(name)))

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=lambda x: isinstance(x, ShardedWeight))


def build_llama(config: llama.LlamaConfig, bits: str | None, mesh: Mesh) -> Any:
    """Stacked, on the mesh; the head and the embedding stay in bfloat16."""
    model = nnx.eval_shape(lambda: llama.Llama(config, rngs=nnx.Rngs(0), dtype=BF16))
    block, layers, rules = model.layers[0], config.num_hidden_layers, partition.rules()
    model.layers = nnx.List([])
    model = partition.shard(random_models.without_blocks(model), mesh)

    def make(key: jax.Array) -> Any:
        new = random_models.filled(block, key, [("", bits)] if bits else [], transform="none", rank=0)
        return mxjax.nnx.shard(new, mesh, rules, kernels=True) if bits else new

    shape = jax.eval_shape(make, jax.random.key(0))
    return Stacked(model, random_models.stacked(make, layers, 0, shardings_of(shape, mesh, rules, (None,))))


def run_llama(args: argparse.Namespace) -> list[dict]:
    config, mesh, rows = llama_config(args.size), mesh_of(jax.device_count(), "model"), []
    length = 1024
    for variant, bits in (("mxfp4_a16", "w4a16"), ("mxfp4_a4", "w4a4"), ("bf16", None)):
        if variant not in args.llama_variants:
            continue
        begin = time.perf_counter()
        model = build_llama(config, bits, mesh)
        made = time.perf_counter() - begin
        for batch in args.batch:
            shape = (config.num_hidden_layers, batch, config.num_key_value_heads, length, config.head_dim)
            place = NamedSharding(mesh, P(None, None, "model", None, None))
            zeros = jax.jit(lambda shape=shape: jnp.zeros(shape, BF16), out_shardings=place)
            layers = llama.LayerCache(zeros(), zeros(), jnp.zeros(config.num_hidden_layers, jnp.int32))
            cache = StackedCache(layers, jnp.zeros((batch,), jnp.int32))

            def step(model: Any, tokens: jax.Array, cache: Any) -> tuple:
                logits, cache = model(tokens, cache)
                return jnp.argmax(logits[:, -1:], axis=-1).astype(jnp.int32), cache

            tokens = jnp.ones((batch, 1), jnp.int32)
            begin = time.perf_counter()
            compiled = jax.jit(step, donate_argnums=2).lower(model, tokens, cache).compile()
            compile_s = time.perf_counter() - begin
            kinds = (compiled.input_shardings[0][1], compiled.input_shardings[0][2])
            tokens, cache = jax.device_put((tokens, cache), kinds)
            for _ in range(4):
                tokens, cache = compiled(model, jax.device_put(tokens, kinds[0]), cache)
            jax.block_until_ready(tokens)
            begin = time.perf_counter()
            for _ in range(args.reps * 8):
                tokens, cache = compiled(model, jax.device_put(tokens, kinds[0]), cache)
            jax.block_until_ready(tokens)
            seconds = (time.perf_counter() - begin) / (args.reps * 8)
            memory = compiled.memory_analysis()
            rows.append({
                "variant": variant, "devices": jax.device_count(), "batch": batch, "ms_a_step": round(1e3 * seconds, 3),
                "tokens_a_second": round(batch / seconds, 1),
                "gb_a_device": round((memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 1e9, 6),
                "received_mb_a_layer": round(sum(collective_bytes(compiled).values()) / 1e6, 3),
                "make_s": round(made, 1), "compile_s": round(compile_s, 1),
            })  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
            del cache
        del model
    for row in rows:
        bf16 = next((r for r in rows if r["variant"] == "bf16" and r["batch"] == row["batch"]), None)
        if bf16 is not None:
            row["speed_vs_bf16"] = round(row["tokens_a_second"] / bf16["tokens_a_second"], 3)
            row["memory_vs_bf16"] = round(row["gb_a_device"] / bf16["gb_a_device"], 3)
    return rows


# --- calibration and GPTQ --------------------------------------------------------------------------------------------


def run_gptq(args: argparse.Namespace) -> list[dict]:
    from gptq_llama8b import host_model

    model = host_model(args.blocks, args.tiny)
    tokens = np.random.default_rng(0).integers(0, 1024, (args.sequences, 64 if args.tiny else 2048), np.int32)
    rows = []
    for devices in (1, jax.device_count()):
        sharding = None if devices == 1 else NamedSharding(mesh_of(devices, "data"), P("data"))
        ends: list[float] = []

        def progress(event: Any, ends: list[float] = ends) -> None:
            ends.append(time.perf_counter())
            print(event, flush=True)

        begin = time.perf_counter()
        weights = mxjax.quantize_sequential(
            model, [tokens], "mr_gptq_mxfp4", host=True, progress=progress, sharding=sharding
        )
        jax.block_until_ready(weights)
        seconds = time.perf_counter() - begin
        # progress is called before the first block, which compiles, and after each
        steady = (ends[-1] - ends[1]) / (len(ends) - 2) if len(ends) > 2 else seconds
        rows.append({"devices": devices, "blocks": args.blocks, "seconds": round(seconds, 2),
                     "seconds_a_block": round(steady, 3)})  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    for row in rows:
        row["speed_vs_one_device"] = round(rows[0]["seconds_a_block"] / row["seconds_a_block"], 3)
    return rows


# --- bytes, weak scaling ---------------------------------------------------------------------------------------------


def run_bytes(args: argparse.Namespace) -> list[dict]:
    rows = []

    def add(what: str, devices: int, unit: str, compiled: Any) -> None:
        moved = collective_bytes(compiled)
        rows.append({"what": what, "devices": devices, "per": unit, "received_bytes": sum(moved.values()),
                     "by_collective": moved})  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)

    for devices in (1, 2, 4, 8):
        mesh = mesh_of(devices, "model")
        for what, program in _programs(mesh, devices):
            add(what, devices, "step", program)
    for row in rows:  # gathered codes beside gathered bfloat16
        if row["what"].startswith("gathered weights") and "mxfp4" in row["what"] and row["devices"] > 1:
            plain = next(r for r in rows if r["what"] == "gathered weights, bf16" and r["devices"] == row["devices"])
            row["of_bf16"] = round(row["received_bytes"] / plain["received_bytes"], 4)
    return rows


def _programs(mesh: Mesh, devices: int) -> Any:
    k, n, m = 1024, 4096, 256
    whole, by_rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("model"))
    x = jax.ShapeDtypeStruct((m, k), BF16, sharding=whole)
    many = jax.ShapeDtypeStruct((m * devices, k), BF16, sharding=by_rows)
    w = random_models.weight(jax.random.key(0), k, n, "w4a4")
    wide = random_models.weight(jax.random.key(1), n, k, "w4a4")

    # an MLP by columns, then by rows
    up, down = shard_weight(w, mesh, P(None, "model")), shard_weight(wide, mesh, P("model", None))
    mlp = jax.jit(lambda x, up, down: mxjax.qdot(jax.nn.relu(mxjax.qdot(x, up)), down))
    yield "tensor parallelism, an MLP of 1024-4096-1024, 256 tokens", mlp.lower(x, up, down).compile()

    # FSDP: the batch grows with the devices, the weight is gathered
    gathered = shard_weight(w, mesh, P(None, "model"), gather=("model",), batch=("model",))
    yield "gathered weights, mxfp4", jax.jit(mxjax.qdot).lower(many, gathered).compile()
    kernel = jax.ShapeDtypeStruct((k, n), jnp.uint16, sharding=NamedSharding(mesh, P(None, "model")))

    def plain(x: jax.Array, kernel: jax.Array) -> jax.Array:  # as bits: the CPU would widen bfloat16 on the way
        whole = jax.lax.all_gather(kernel, "model", axis=1, tiled=True)
        return x @ jax.lax.bitcast_convert_type(whole, BF16)

    f = jax.shard_map(plain, mesh=mesh, in_specs=(P("model"), P(None, "model")), out_specs=P("model"), check_vma=False)
    yield "gathered weights, bf16", jax.jit(f).lower(many, kernel).compile()

    # calibration: a Hessian of each device's tokens, summed
    def hessian(x: jax.Array) -> Any:
        return GramSum.zeros(k).add(x).psum("model")

    rows = jax.ShapeDtypeStruct((m * devices, k), jnp.float32, sharding=by_rows)
    f = jax.shard_map(hessian, mesh=mesh, in_specs=P("model"), out_specs=P())
    yield "calibration, one Hessian of 1024 channels", jax.jit(f).lower(rows).compile()

    # Ulysses: a double and a single block, the tokens grow with the devices
    config = flux.FluxConfig(num_layers=1, num_single_layers=1, num_attention_heads=8, attention_head_dim=64,
                             in_channels=32, joint_attention_dim=32, pooled_projection_dim=32,
                             axes_dims_rope=(8, 28, 28))  # fmt: skip
    model = nnx.eval_shape(lambda: flux.Flux(config, rngs=nnx.Rngs(0)))
    s, t = 96 * devices, 32 * devices
    shapes = [(1, s, 32), (1, t, 32), (1, 32), (1,), (s, 3), (t, 3)]
    inputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    run = jax.jit(ulysses.sequence_parallel(mesh, axis="model"))
    yield "Ulysses, two attentions of 512 channels, 128 tokens a device, float32", run.lower(model, *inputs).compile()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"flux": run_flux, "llama": run_llama, "gptq": run_gptq, "bytes": run_bytes}
    for name in parts:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--reps", type=int, default=6)
    parser.add_argument("--attention", default="cudnn", help="of FLUX.1: cudnn or xla")
    parser.add_argument("--size", choices=("70b", "8b"), default="70b")
    parser.add_argument("--llama-variants", nargs="+", default=["mxfp4_a16", "bf16"])
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--tiny", action="store_true", help="of FLUX.1 and GPTQ: a small model, to try it")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    chosen = [name for name in parts if getattr(args, name)]
    if len(chosen) != 1:
        parser.error(f"choose one of {', '.join('--' + name for name in parts)}")
    report = flux_step.report_of(parts[chosen[0]](args), part=chosen[0])
    print(json.dumps(report, indent=1))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
