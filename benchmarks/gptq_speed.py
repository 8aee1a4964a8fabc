"""The GPTQ solve of one layer: mxjax against the published loop written straightforwardly in PyTorch.

    python benchmarks/gptq_speed.py --sizes 4096x4096 1536x576 --out benchmarks/results/gptq_speed_DEVICE.json

Both sides get the same float32 weight and Hessian on the same device and do the same work: scales (min-max, or a search
by squared error), damping 0.01, the inverse factor, static activation reordering, 128-column blocks, codes and scales
out. Times are medians of ``--rounds`` calls, taken in turn, after one call of each that compiles. The PyTorch side is
the loop of GPTQ and FP-Quant: a Python loop over columns, one rank-1 update a column, one wide update a block.

``error`` is the squared error in the Hessian norm, relative to round to nearest on the same scales: it shows that both
solve the same problem.
"""

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch

import mxjax
from mxjax.algorithms.gptq_solver import SolverOptions, solve
from mxjax.algorithms.observers import decode_unit, observe, round_unit
from mxjax.core.formats import MXFP4

BLOCK, DAMPING = 128, 0.01


def torch_round(x, scale):
    """Nearest E2M1 value, ties to even, times its scale."""
    a = (x / scale).abs()
    step = torch.exp2(torch.floor(torch.log2(a.clamp(min=1.0))) - 1)
    return (torch.round(a / step) * step).clamp(max=6.0) * torch.sign(x) * scale


def torch_scales(w, observer):
    """MXFP4 scales [N, K / 32]; mse: a grid of 100 shrinking factors on each block, then the power of two."""
    blocks = w.reshape(w.shape[0], -1, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / 6
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    if observer == "mse":
        best, best_error = scale, torch.full_like(scale, torch.inf)
        for i in range(100):
            trial = scale * (1 - i * 0.8 / 100)
            error = (blocks - torch_round(blocks, trial)).abs().pow(2.4).sum(-1, keepdim=True)
            best = torch.where(error < best_error, trial, best)
            best_error = torch.minimum(error, best_error)
        scale = best
    return (torch.exp2(torch.floor(torch.log2(6 * scale)) - 2)).squeeze(-1)


def torch_gptq(w, h, observer):
    """The published loop. Returns the quantized weight."""
    scales = torch_scales(w, observer)
    perm = torch.argsort(torch.diag(h), descending=True)
    group = torch.arange(scales.shape[1], device=w.device).repeat_interleave(32)[perm]
    w, h = w[:, perm].clone(), h[perm][:, perm].clone()
    size = h.shape[0]
    h[range(size), range(size)] += DAMPING * torch.diag(h).mean()
    u = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True)
    q = torch.zeros_like(w)
    for start in range(0, size, BLOCK):
        end = min(start + BLOCK, size)
        block, u_block = w[:, start:end].clone(), u[start:end, start:end]
        errors = torch.zeros_like(block)
        for i in range(end - start):
            column = block[:, i]
            rounded = torch_round(column, scales[:, group[start + i]])
            error = (column - rounded) / u_block[i, i]
            block[:, i:] -= error[:, None] * u_block[i, i:][None, :]
            errors[:, i] = error
            q[:, start + i] = rounded
        w[:, end:] -= errors @ u[start:end, end:]
    return q[:, torch.argsort(perm)]


@partial(jax.jit, static_argnames="observer")
def jax_gptq(w, h, observer):
    blocks = w.reshape(w.shape[0], -1, 32)
    unit, byte, _ = observe(blocks, MXFP4, "floor", 0, observer)
    options = SolverOptions(damping=DAMPING, block_size=BLOCK, act_order="column", guard=False)
    return solve(unit.reshape(1, *w.shape), h[None], byte[None], fmt=MXFP4, options=options)


def seconds(run, finish) -> float:
    begin = time.perf_counter()
    finish(run())
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["4096x4096", "1536x576"], help="N x K")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--observers", nargs="+", default=["minmax", "mse"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    report = {
        "command": "python benchmarks/gptq_speed.py " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind if device == "cuda" else f"{torch.get_num_threads()} threads of a CPU",
        "versions": {"jax": jax.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "rows": [],
    }
    for size in args.sizes:
        n, k = map(int, size.split("x"))
        rng = np.random.default_rng(0)
        w = rng.standard_normal((n, k), np.float32)
        x = rng.standard_normal((2 * k, k), np.float32) * np.exp(rng.standard_normal(k)).astype(np.float32)
        h = x.T @ x / k
        wt, ht, wj, hj = torch.tensor(w, device=device), torch.tensor(h, device=device), jnp.asarray(w), jnp.asarray(h)

        def wait(_):
            if device == "cuda":
                torch.cuda.synchronize()

        for observer in args.observers:
            theirs, ours = partial(torch_gptq, wt, ht, observer), partial(jax_gptq, wj, hj, observer)
            begin = time.perf_counter()
            solution = jax.block_until_ready(ours())
            first = time.perf_counter() - begin
            quantized = theirs()
            wait(None)
            pairs = [(seconds(theirs, wait), seconds(ours, jax.block_until_ready)) for _ in range(args.rounds)]
            t, j = (statistics.median(side) for side in zip(*pairs, strict=True))
            repeated = jnp.repeat(solution.bytes[0], 32, axis=-1)
            mine = np.asarray(decode_unit(solution.codes[0], repeated, MXFP4), np.float64)
            byte = observe(wj.reshape(n, -1, 32), MXFP4, "floor", 0, observer)[1]
            plain = np.asarray(round_unit(wj, jnp.repeat(byte, 32, axis=-1), MXFP4)[1], np.float64)

            def error(q, w=w, h=h):
                d = q - w
                return float(((d @ h) * d).sum())

            row = {
                "shape": f"{n}x{k}",
                "observer": observer,
                "torch_seconds": round(t, 4),
                "mxjax_seconds": round(j, 4),
                "ratio": round(t / j, 2),
                "mxjax_first_call_seconds": round(first, 2),
                "torch_error": round(error(quantized.cpu().numpy().astype(np.float64)) / error(plain), 4),
                "mxjax_error": round(error(mine) / error(plain), 4),
            }
            report["rows"].append(row)
            print(row, flush=True)
            if args.out:
                args.out.write_text(json.dumps({**report, "mxjax": mxjax.__version__}, indent=1) + "\n")


if __name__ == "__main__":
    main()
