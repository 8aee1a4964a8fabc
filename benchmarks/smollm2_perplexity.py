"""Perplexity of SmolLM2-135M-Instruct under round-to-nearest, beside what other tools reach on the same tokens.

    python benchmarks/smollm2_perplexity.py TOKENS.npz:eval_python_doc [--limit N]

Float32 weights dequantized from the GGUF of the demo; 512-token sequences, no BOS; exp of the mean negative
log-likelihood of every predicted token inside each sequence. All 210 linear layers of the blocks are quantized;
embeddings, head, norms and attention products are float32. ``PEER`` holds FP-Quant's figures for the same tokens and
scale rule (its NVFP4 activation tensor scale is static, ours is per token).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import time
from pathlib import Path

import jax
from mxjax_models import llama

import mxjax
from mxjax.cli.fetch import fetch
from mxjax.cli.tokens import read_tokens

OUT = Path(__file__).parent / "results" / "smollm2_perplexity_cpu.json"
ROWS = {
    "float32": None,
    "mxfp4 W4A4, scale third": mxjax.recipes.rtn("mxfp4", "mxfp4", scale="third"),
    "mxfp4 W4A4, scale even": mxjax.recipes.rtn("mxfp4", "mxfp4"),
    "mxfp4 W4A4, scale third, Hadamard 32": mxjax.QuantConfig(
        rules=[
            mxjax.Rule(
                weight="mxfp4",
                activation="mxfp4",
                weight_scale="third",
                activation_scale="third",
                transform=mxjax.transforms.Hadamard(32),
            )
        ]
    ),
    "nvfp4 W4A4, scale even": mxjax.recipes.rtn("nvfp4", "nvfp4"),
    "nvfp4 W4A4, scale four_over_six": mxjax.recipes.rtn("nvfp4", "nvfp4", scale="four_over_six"),
    "mxfp4 W4A16, scale third": mxjax.recipes.rtn("mxfp4", None, scale="third"),
    "nvfp4 W4A16, scale even": mxjax.recipes.rtn("nvfp4", None),
}
PEER = {
    "float32": 13.119,
    "mxfp4 W4A4, scale third": 53.95,
    "mxfp4 W4A4, scale third, Hadamard 32": 40.19,
    "nvfp4 W4A4, scale even": 20.09,
    "mxfp4 W4A16, scale third": 20.01,
    "nvfp4 W4A16, scale even": 16.49,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", help="FILE.npz:KEY, int32 [sequences, length]")
    parser.add_argument("--limit", type=int, help="the first N sequences only (peers' figures are for all)")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    args = parser.parse_args()
    tokens = read_tokens(args.tokens)[: args.limit]
    model = llama.load(fetch())
    rows = []
    for name in args.rows:
        start = time.perf_counter()
        quantized = model if ROWS[name] is None else mxjax.nnx.quantize(model, ROWS[name])
        perplexity = mxjax.eval.perplexity(quantized, tokens)
        row = {"row": name, "perplexity": perplexity, "seconds": time.perf_counter() - start}
        if name in PEER and args.limit is None:
            row |= {"peer": PEER[name], "against_peer": perplexity / PEER[name] - 1}
        print(json.dumps(row), flush=True)
        rows.append(row)
    result = {
        "benchmark": "smollm2_perplexity",
        "command": f"python benchmarks/smollm2_perplexity.py TOKENS.npz:{args.tokens.split(':')[-1]}"
        + (f" --limit {args.limit}" if args.limit else ""),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": f"{jax.devices()[0].platform}, {platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "mxjax": mxjax.__version__},
        "sequences": len(tokens),
        "rows": rows,
    }
    if args.limit is None:
        OUT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
