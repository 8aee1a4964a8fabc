"""Layers to try low-rank branches and transforms on: made up like those of a diffusion transformer, PixArt-Mini's own,
and SmolLM2's.

Each has inputs to calibrate with and others to measure with.
"""

import argparse
import datetime
import json
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import mxjax
from mxjax.algorithms import ALGORITHMS
from mxjax.calibration import GramSum, LayerStats, update
from mxjax.calibration.accumulate import SAMPLE_ROWS, stats_of

TIMESTEPS = 20


class Layer(NamedTuple):
    """One linear layer.

    Attributes:
      name: where it is from.
      w: float32 [K, N].
      stats: of its calibration inputs.
      held: float32 [n, K], inputs that calibration did not see.
    """

    name: str
    w: jax.Array
    stats: LayerStats
    held: jax.Array


def statistics(x: np.ndarray) -> LayerStats:
    """What mxjax.calibrate would gather of the rows of x."""
    return stats_of(update(GramSum.zeros(x.shape[-1], sample=SAMPLE_ROWS), jnp.asarray(x)))


def dit_layers(k: int = 384, seed: int = 0) -> list[Layer]:
    """Three layers of a block as they look in a DiT, at all timesteps: behind adaLN, behind GELU, and of the caption.

    What makes them hard, each after what published work on quantizing DiTs describes: scale and shift of adaLN differ
    from channel to channel and change with the timestep; a few channels (1.5 %) are 10 times as large as the rest, with
    the sign of their shift; hidden states lie near a low-dimensional space; behind GELU most values are small and some
    are large, all of these positive. Weights have a decaying spectrum and are smaller where inputs are larger.
    """
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape)  # noqa: E731
    tokens = 64

    def hidden(width: int) -> np.ndarray:  # [timesteps, tokens, width], each token normalized as LayerNorm does
        basis = normal(width // 6, width) * np.geomspace(1, 0.15, width // 6)[:, None]
        h = normal(TIMESTEPS, tokens, width // 6) @ basis + 0.3 * normal(TIMESTEPS, tokens, width)
        h = h - h.mean(-1, keepdims=True)
        return h / h.std(-1, keepdims=True)

    def weight(width: int, out: int, size: np.ndarray) -> np.ndarray:
        rank = min(width, out) // 4
        w = normal(width, rank) * np.geomspace(2, 0.2, rank) @ normal(rank, out) / rank**0.5 + normal(width, out)
        return w * (size**-0.4)[:, None] / width**0.5

    t = np.linspace(1, 0, TIMESTEPS)[:, None, None]
    outliers = np.where(rng.random(k) < 0.015, 10.0, 0.0) * np.sign(normal(k))
    scale = np.exp(0.4 * normal(k) + t * 0.5 * normal(k))
    adaln = hidden(k) * scale + (0.3 + 0.7 * t) * outliers + 0.5 * t * normal(k)
    up = adaln @ (weight(k, 4 * k, np.ones(k)) * (1 + 0.5 * t))
    gelu = np.asarray(jax.nn.gelu(jnp.asarray(up * np.exp(0.5 * normal(4 * k)), jnp.float32)))
    caption = np.broadcast_to(hidden(k)[:1] * np.exp(0.6 * normal(k)), adaln.shape)
    caption = caption[:, rng.permutation(tokens)] + 0.1 * normal(*adaln.shape)
    out = []
    for name, x, n in (("adaln -> qkv", adaln, k), ("gelu -> down", gelu, k), ("caption -> kv", caption, k)):
        x = x.astype(np.float32)
        size = np.sqrt(np.mean(np.square(x), axis=(0, 1))) + 1e-3
        w = weight(x.shape[-1], n, size)
        seen, held = x[:, : tokens // 2], x[:, tokens // 2 :]  # other tokens, all timesteps
        flat = [np.ascontiguousarray(part.reshape(-1, x.shape[-1])) for part in (seen, held)]
        out.append(Layer(f"dit {name}", jnp.asarray(w, jnp.float32), statistics(flat[0]), jnp.asarray(flat[1])))
    return out


SMOLLM2_LAYERS = (
    "layers/2/self_attn/q_proj/kernel",
    "layers/14/mlp/up_proj/kernel",
    "layers/25/mlp/down_proj/kernel",
)


def smollm2_layers(model_file: str, tokens_file: str, paths=SMOLLM2_LAYERS, sequences: int = 4) -> list[Layer]:
    """Layers of SmolLM2-135M (the float32 content of a GGUF file), calibrated on ``calibration`` and measured on
    ``eval_python_doc`` of the token file."""
    from mxjax_models import llama

    tokens, model = np.load(tokens_file), llama.load(model_file)
    rules = [mxjax.Rule(path="|".join(f"^{p}$" for p in paths), algorithm="gptq"), mxjax.Rule(weight=None)]
    cfg = mxjax.QuantConfig(rules=rules)
    seen, held = (
        mxjax.calibrate(model, None, [tokens[name][:sequences]], cfg) for name in ("calibration", "eval_python_doc")
    )
    flat = {mxjax.api.path_str(p): v for p, v in jax.tree_util.tree_flatten_with_path(nnx.state(model, nnx.Param))[0]}
    return [Layer(p, flat[p].astype(jnp.float32), seen[p], held[p].sample) for p in paths]


def pixart_layers(block: int = 3, prompts: int = 16, steps: int = 6) -> list[Layer]:
    """The layers of one block of PixArt-Mini as it draws, weights that share an input side by side (q, k and v).

    Calibrated at all steps of drawing the first calibration prompts, and measured at those of half as many others.
    """
    from mxjax_models import pixart_mini

    mini = pixart_mini.load()
    texts = mini.calibration_prompts
    rules = [mxjax.Rule(path=f"^transformer_blocks/{block}/", algorithm="gptq"), mxjax.Rule(weight=None)]
    seen, held = (
        mxjax.calibrate(
            mini.transformer, None, mini.calibration_batches(some, seed=seed, steps=steps, each=steps, batch=32),
            mxjax.QuantConfig(rules=rules, exclude=type(mini.transformer).quantization_exclude),
        )
        for some, seed in ((texts[:prompts], 0), (texts[prompts : prompts + prompts // 2], 5000))
    )  # fmt: skip
    kernels = {"/".join(map(str, p)): v for p, v in nnx.iter_graph(mini.transformer) if isinstance(v, nnx.Param)}
    inputs: dict[int, list[str]] = {}
    for path, stats in seen.items():
        inputs.setdefault(id(stats), []).append(path)
    return [
        Layer(
            f"pixart-mini {'/'.join(paths[0].split('/')[1:-1])}",
            jnp.concatenate([kernels[p].get_value().astype(jnp.float32) for p in paths], axis=-1),
            seen[paths[0]],
            held[paths[0]].sample,
        )
        for paths in inputs.values()
    ]


def measure(layer: Layer, rule: mxjax.Rule) -> dict:
    """Relative squared output error on the held inputs, bytes, numbers in the transform, seconds (first call)."""
    spec = rule.spec(layer.name, 2, on_nonfinite="raise", on_uneven="error")
    start = time.perf_counter()
    q = jax.block_until_ready(ALGORITHMS[rule.algorithm](layer.w, spec, layer.stats))
    seconds = time.perf_counter() - start
    y = layer.held @ layer.w
    error = float(jnp.sum(jnp.square(mxjax.qdot(layer.held, q) - y)) / jnp.sum(jnp.square(y)))
    return {
        "error": round(error, 6),
        "bytes": q.nbytes,
        "rank": 0 if q.branch is None else q.branch.rank,
        "transform": mxjax.transforms.describe(q.transform),
        "transform_parameters": sum(leaf.size for leaf in jax.tree.leaves(q.transform)),
        "seconds": round(seconds, 1),
    }


def arguments(description: str) -> argparse.ArgumentParser:
    """What both benchmarks of layers take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", nargs=2, metavar=("MODEL.gguf", "TOKENS.npz"), help="also SmolLM2's layers")
    parser.add_argument("--pixart-mini", action="store_true", help="also those of a block of PixArt-Mini")
    parser.add_argument("--layers", default="", help="only layers in whose name this regular expression is found")
    parser.add_argument("--rows", default="", help="only rows in whose name this regular expression is found")
    parser.add_argument("--formats", nargs="+", default=["mxfp4", "nvfp4"])
    parser.add_argument("--out", type=Path)
    return parser


def run(args: argparse.Namespace, rows: Callable[[str], dict[str, mxjax.Rule]], script: str) -> None:
    """Measure every row on every layer; the JSON file is written after each, and what it holds is not measured again.

    Args:
      args: of :func:`arguments`.
      rows: format -> name -> rule.
      script: for the command in the report.
    """
    layers = dit_layers() + (smollm2_layers(*args.smollm2) if args.smollm2 else [])
    layers += pixart_layers() if args.pixart_mini else []
    layers = [layer for layer in layers if re.search(args.layers, layer.name)]
    device = jax.devices()[0]
    report = {
        "command": shlex.join(["python", f"benchmarks/{script}", *("MODEL TOKENS" if a.endswith(".npz") else a
                             for a in sys.argv[1:] if not a.endswith(".gguf"))]),
        "date": datetime.date.today().isoformat(),
        "device": device.device_kind if device.platform != "cpu" else platform.processor() or "cpu",
        "versions": {"jax": jax.__version__, "mxjax": mxjax.__version__, "python": platform.python_version()},
        "rows": json.loads(args.out.read_text())["rows"] if args.out and args.out.exists() else [],
    }  # fmt: skip
    done = {(row["format"], row["layer"], row["row"]) for row in report["rows"]}
    for fmt in args.formats:
        for layer in layers:
            for name, rule in rows(fmt).items():
                if not re.search(args.rows, name) or (fmt, layer.name, name) in done:
                    continue
                row = {"format": fmt, "layer": layer.name, "row": name, **measure(layer, rule)}
                report["rows"].append(row)
                print(
                    f"{fmt} {layer.name:34} {name:44} {row['error']:.5f} {row['bytes']:8} {row['seconds']}", flush=True
                )
                if args.out:
                    args.out.write_text(json.dumps(report, indent=1) + "\n")
