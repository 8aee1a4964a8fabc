"""MR-GPTQ of Llama-3.1-8B's shapes on one device: time and peak memory.

    python benchmarks/gptq_llama8b.py --out benchmarks/results/gptq_llama8b_h200.json

Random weights and 128 x 2048 random tokens: the work does not depend on their values. The vocabulary is cut to 1024,
since neither embedding nor head is quantized. Parameters are made on the host and come to the device a block at a time.
"""

import argparse
import datetime
import json
import platform
import sys
import time
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from mxjax_models import llama

import mxjax


def host_model(blocks: int, tiny: bool = False) -> llama.Llama:
    """The shapes of Llama-3.1-8B with float32 parameters as NumPy arrays; all blocks share one set of arrays.

    ``tiny`` is a small model, to try the command.
    """
    size = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    if not tiny:
        size = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = llama.LlamaConfig(
        vocab_size=1024, num_hidden_layers=1, head_dim=32 if tiny else 128, rms_norm_eps=1e-5, rope_theta=5e5, **size
    )
    model = llama.Llama(config, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    model = nnx.merge(graphdef, jax.tree.map(np.asarray, state))
    block = model.layers[0]
    graphdef, state = nnx.split(block)
    model.layers = nnx.List([nnx.merge(graphdef, state) for _ in range(blocks)])
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="mr_gptq_mxfp4")
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    model = host_model(args.blocks)
    tokens = np.random.default_rng(0).integers(0, 1024, (args.sequences, args.length), np.int32)
    lines: list[str] = []

    def progress(event) -> None:
        lines.append(str(event))
        print(event, flush=True)

    begin = time.perf_counter()
    weights = mxjax.quantize_sequential(model, [tokens], args.recipe, host=True, progress=progress)
    jax.block_until_ready(weights)
    seconds = time.perf_counter() - begin
    stats = jax.devices()[0].memory_stats() or {}
    report = {
        "command": "python benchmarks/gptq_llama8b.py " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__, "mxjax": mxjax.__version__, "python": platform.python_version()},
        "recipe": args.recipe,
        "blocks": args.blocks,
        "tokens": tokens.size,
        "seconds": round(seconds, 1),
        "device_peak_gb": round(stats.get("peak_bytes_in_use", 0) / 1e9, 2),
        "progress": lines,
    }
    print(json.dumps({k: v for k, v in report.items() if k != "progress"}, indent=1))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
