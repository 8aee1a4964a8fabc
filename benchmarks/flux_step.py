"""One denoising step of FLUX.1 and PixArt-Sigma on one device: BF16 beside MXFP4 W4A4 with transform and branch.

    python benchmarks/flux_step.py --out benchmarks/results/flux_step_h200.json
    python benchmarks/flux_step.py --model flux-schnell --batch 1
    python benchmarks/flux_step.py --model pixart-sigma --batch 1 4
    python benchmarks/flux_step.py --kernels          # no GPU needed: which kernels an H200 would run, layer by layer
    python benchmarks/flux_step.py --tiny --attention xla             # no GPU needed: every variant of a small model

Random weights of the published sizes; FLUX.1 makes 1024 x 768 pixels (3072 image and 512 text tokens), PixArt-Sigma
1024 x 1024 (4096 tokens, captions of 300). A step is the whole transformer and the sampler's update, one
jitted program; the blocks are stacked (one ``lax.scan``), ``--unrolled`` adds BF16 without a scan. Variants:

bf16          every matrix in bfloat16, XLA's products
mxfp4         what the recipe kroquant_loraq_mxfp4 makes of the blocks: W4A4, an online Kronecker transform with the
              factors and scales of KroQuant, a branch of rank 64 in MXINT8; adaLN's linear layers in W4A16 (a quarter
              of the weights, for one row an image), the rest bfloat16
mxfp4_mxfp8   the same with the branch in MXFP8, whose inputs a kernel quantizes and multiplies in one pass
mxfp4_shared  as mxfp4_mxfp8, without scales: one Kronecker product for all blocks of a layer's input
mxfp4_plain   W4A4 alone: what transform and branch cost

All variants of one batch run in one process, one after the other; the ratio is bf16's time over theirs. ``program_gb``
is what XLA reserves for a step (arguments, temporaries, results), ``held_gb`` the weights, ``layer_error`` the relative
difference of one layer on kernels from the same without.

Goals on one H200: FLUX.1-dev mxfp4 at least 1.3x (published on a chip with FP4 units: 1.41x) at 0.4x of the memory;
PixArt-Sigma 1.2x.
"""

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import random_models
from flax import nnx
from mxjax_models import flux, pixart
from mxjax_models.samplers import flow_schedule, flow_step, flux_shift
from mxjax_models.stacked import StackedFlux, StackedPixArt

import mxjax
from mxjax.core.formats import MXFP8_E4M3, MXINT8

BF16 = jnp.bfloat16
VARIANTS = ("mxfp4", "mxfp4_mxfp8", "mxfp4_shared", "mxfp4_plain", "bf16")
QUANTIZED = ((r"norm\w*/linear/", "w4a16"), (r"", "w4a4"))
ONLINE: dict[str, dict[str, Any]] = {
    "mxfp4": dict(transform="kroquant", rank=64, branch=MXINT8),
    "mxfp4_mxfp8": dict(transform="kroquant", rank=64, branch=MXFP8_E4M3),
    "mxfp4_shared": dict(transform="shared", rank=64, branch=MXFP8_E4M3),
    "mxfp4_plain": dict(transform="none", rank=0),
}
STEPS = {"flux-dev": 20, "flux-schnell": 4, "pixart-sigma": 20}
TOKENS = (48, 64)  # of 1024 x 768 pixels
TEXT = {"flux-dev": 512, "flux-schnell": 256, "pixart-sigma": 300}
# --tiny: two blocks of each kind, wide enough for all of KroQuant's scales
TINY: dict[str, Any] = dict(num_attention_heads=11, attention_head_dim=64)
TINY_FLUX = TINY | dict(axes_dims_rope=(16, 24, 24))


def shared_names(block: Any) -> list[tuple[str, ...]]:
    """The groups of one block: those of the model, without the names of its blocks."""
    qkv = ("attn/to_q", "attn/to_k", "attn/to_v")
    if isinstance(block, flux.SingleBlock):
        return [(*qkv, "proj_mlp")]
    if isinstance(block, flux.DoubleBlock):
        return [qkv, ("attn/add_q_proj", "attn/add_k_proj", "attn/add_v_proj")]
    return [tuple(group) for group in pixart.SHARED_INPUTS]


def maker(block: Any, variant: str, fuse: bool = True) -> Callable[[jax.Array], Any]:
    """From a key to a random block, packed for this machine's kernels if it is quantized."""
    if variant == "bf16":
        return lambda key: random_models.filled(block, key)
    groups = shared_names(block)

    def make(key: jax.Array) -> Any:
        new = random_models.filled(block, key, QUANTIZED, shared=groups, **ONLINE[variant])
        return mxjax.prepare_kernels(mxjax.nnx.fuse_shared_inputs(new, groups) if fuse else new)

    return make


def config_of(name: str, tiny: bool = False) -> Any:
    """The published sizes, or those of ``--tiny``."""
    if name == "pixart-sigma":
        small = TINY | dict(cross_attention_dim=704, in_channels=4, out_channels=8)
        return pixart.PixArtConfig.tiny(**small) if tiny else pixart.PixArtConfig.sigma(1024)
    if tiny:
        return flux.FluxConfig.tiny(**TINY_FLUX, guidance_embeds=name == "flux-dev")
    return flux.FluxConfig.dev() if name == "flux-dev" else flux.FluxConfig.schnell()


def abstract(name: str, attention: str | None, tiny: bool = False) -> Any:
    kind, config = pixart.PixArt if name == "pixart-sigma" else flux.Flux, config_of(name, tiny)
    return nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0), dtype=BF16, attention=attention))


def build(name: str, variant: str, attention: str | None, unrolled: bool = False, tiny: bool = False) -> Any:
    """The model on the device: its blocks stacked, or one by one if ``unrolled``."""
    model = abstract(name, attention, tiny)
    names = ["transformer_blocks", *(["single_transformer_blocks"] if name.startswith("flux") else [])]
    groups = [getattr(model, n) for n in names]
    filled = random_models.without_blocks(model)
    if unrolled:
        for n, blocks in zip(names, groups, strict=True):
            make = jax.jit(maker(blocks[0], variant))
            setattr(filled, n, nnx.List([make(jax.random.key(i)) for i in range(len(blocks))]))
        return filled
    stacks = [random_models.stacked(maker(blocks[0], variant), len(blocks), i) for i, blocks in enumerate(groups)]
    return (StackedFlux if name.startswith("flux") else StackedPixArt)(filled, *stacks)


def inputs(name: str, batch: int, tiny: bool = False) -> tuple:
    """Latents, and what stays the same over the steps."""
    config, (height, width), text = config_of(name, tiny), (2, 4) if tiny else TOKENS, 8 if tiny else TEXT[name]
    normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, BF16)  # noqa: E731
    if name == "pixart-sigma":
        size = config.sample_size
        return normal(0, batch, config.in_channels, size, size), (normal(1, batch, text, config.caption_channels),)
    captions = normal(1, batch, text, config.joint_attention_dim), normal(2, batch, config.pooled_projection_dim)
    x = normal(0, batch, height * width, config.in_channels)
    return x, (*captions, flux.image_ids(height, width), jnp.zeros((text, 3)))


def step_of(name: str, steps: int, run: Callable[..., jax.Array] | None = None) -> Callable[..., jax.Array]:
    """``step(model, i, x, rest) -> x`` of the next time. ``run(model, *args)`` calls the model; default: as it is."""
    call = run or (lambda model, *args: model(*args))
    if name == "pixart-sigma":
        return lambda model, i, x, rest: x - 0.05 * call(model, x, jnp.full(x.shape[:1], 999 - 50 * i), *rest)[:, :4]
    tokens = TOKENS[0] * TOKENS[1]
    schedule = flow_schedule(steps, mu=flux_shift(tokens)) if name == "flux-dev" else flow_schedule(steps)

    def step(model: Any, i: jax.Array, x: jax.Array, rest: tuple) -> jax.Array:
        text, pooled, image_ids, text_ids = rest
        t = jnp.full(x.shape[:1], schedule.sigmas[i])
        guidance = (jnp.full(x.shape[:1], 3.5),) if name == "flux-dev" else ()
        return flow_step(schedule, i, x, call(model, x, text, pooled, t, image_ids, text_ids, *guidance))[0]

    return step


def measure(
    name: str, model: Any, batch: int, reps: int, step: Callable, place: Callable = lambda x: x, tiny: bool = False
) -> dict:
    """Times of one step and of one image, memory, and the seconds to compile. ``place`` puts inputs on a mesh."""
    x, rest = place(inputs(name, batch, tiny))
    begin = time.perf_counter()
    compiled = jax.jit(step, out_shardings=x.sharding).lower(model, jnp.int32(0), x, rest).compile()
    compile_s = time.perf_counter() - begin
    memory, times = compiled.memory_analysis(), []
    for i in range(reps + 2):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(model, jnp.int32(i % 4), x, rest))
        times.append(time.perf_counter() - begin)
    begin, y = time.perf_counter(), x
    for i in range(STEPS[name]):
        y = compiled(model, jnp.int32(i), y, rest)
    y = jax.block_until_ready(y)
    image = time.perf_counter() - begin
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.Array))
    program = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    return {
        "step_ms": round(1e3 * statistics.median(times[2:]), 2),
        "image_s": round(image, 3),
        "images_per_s": round(batch / image, 3),
        "held_gb": round(held / 1e9, 2),
        "program_gb": round(program / 1e9, 2),
        "finite": bool(jnp.isfinite(y.astype(jnp.float32)).all()),
        "compile_s": round(compile_s, 1),
    }


def layer_error(variant: str, tiny: bool = False) -> float:
    """How far one layer on this machine's kernels is from the same layer without them, relative: that times are of what
    they should be. Sums in another order move a value across a rounding boundary now and then: below 0.01.
    """
    online, (rows, k, n) = dict(ONLINE[variant]), (64, 704, 64) if tiny else (512, 3072, 3072)
    key = jax.random.key(0)
    w = random_models.weight(key, k, n, "w4a4", random_models.kronecker(key, k, online.pop("transform")), **online)
    x = jax.random.normal(key, (rows, k), BF16)
    want = jax.jit(mxjax.qdot)(x.astype(jnp.float32), w)
    got = jax.jit(mxjax.qdot)(x, mxjax.prepare_kernels(w)).astype(jnp.float32)
    return round(float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want)), 6)


def ratios(rows: list[dict], base: str = "bf16") -> list[dict]:
    """Every row with its speed and memory beside those of ``base`` at the same batch."""
    for row in rows:
        other = next((r for r in rows if r["variant"] == base and r["batch"] == row["batch"]), None)
        if other is not None and other is not row:
            row["speed_vs_bf16"] = round(other["step_ms"] / row["step_ms"], 3)
            row["memory_vs_bf16"] = round(row["program_gb"] / other["program_gb"], 3)
    return rows


def report_of(rows: list[dict], **more: Any) -> dict:
    return {
        "command": "python benchmarks/" + Path(sys.argv[0]).name + " " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "versions": {"jax": jax.__version__, "mxjax": mxjax.__version__, "python": platform.python_version()},
        **more,
        "rows": rows,
    }


def print_kernels() -> None:
    """Pallas kernels of every kind of layer on an H200, by rows; "-" is XLA."""
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    layers = [(3072, 9216), (3072, 21504), (3072, 3072), (3072, 12288), (12288, 3072), (15360, 3072), (1152, 4608)]
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        for variant, online in ONLINE.items():
            for k, n in layers:

                def packed(k: int = k, n: int = n, online: dict = online) -> Any:
                    key = jax.random.key(0)
                    t = random_models.kronecker(key, k, online["transform"])
                    rest = {name: value for name, value in online.items() if name != "transform"}
                    return mxjax.prepare_kernels(random_models.weight(key, k, n, "w4a4", t, **rest))

                w = jax.eval_shape(packed)
                for m in (512, 3584, 14336):
                    x = jax.ShapeDtypeStruct((m, k), BF16)
                    used = mxjax.kernels_used(mxjax.qdot, x, w)
                    print(f"{variant:13} {k:5} -> {n:5}  {m:5} rows: {', '.join(used) or '-'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=STEPS, default="flux-dev")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["mxfp4", "mxfp4_mxfp8", "bf16"])
    parser.add_argument("--attention", default="cudnn", help="cudnn or xla, for all variants")
    parser.add_argument("--reps", type=int, default=8)
    parser.add_argument("--unrolled", action="store_true", help="also bfloat16 without a scan, at the first batch")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the command; its times say nothing")
    parser.add_argument("--kernels", action="store_true", help="print which kernels an H200 runs, and stop")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.kernels:
        print_kernels()
        return

    rows: list[dict] = []
    jobs = [(variant, False, args.batch) for variant in args.variants]
    jobs += [("bf16", True, args.batch[:1])] if args.unrolled else []
    for variant, unrolled, batches in jobs:
        begin = time.perf_counter()
        model = build(args.model, variant, args.attention, unrolled, args.tiny)
        made = time.perf_counter() - begin
        error = {} if variant == "bf16" else {"layer_error": layer_error(variant, args.tiny)}
        step = step_of(args.model, STEPS[args.model])
        for batch in batches:
            row = {
                "variant": variant + ("_unrolled" if unrolled else ""),
                "batch": batch,
                "make_s": round(made, 1),
                **error,
            }
            rows.append(row | measure(args.model, model, batch, args.reps, step, tiny=args.tiny))
            print(json.dumps(rows[-1]), flush=True)
            report = report_of(ratios(rows), model=args.model, steps=STEPS[args.model], attention=args.attention)
            if args.out:  # after each: a limit may end this
                args.out.write_text(json.dumps(report, indent=1) + "\n")
        del model
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
