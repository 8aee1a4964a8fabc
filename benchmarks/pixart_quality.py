"""The diffusion table: PixArt-Mini in W4A4 under every recipe, at equal bytes, over three seeds and both formats.

    python benchmarks/pixart_quality.py --out benchmarks/results/pixart_quality.json --workers 8

Every row is written as it is done, and what the file holds is not done again. ``--formats``, ``--rows`` and ``--seeds``
choose. Most of the time compiles: rows that share programs run in one process, one seed after the other, and
``--workers`` of these processes side by side on the same device. With the environment variable
JAX_COMPILATION_CACHE_DIR what they compile is kept for the next run.

A seed is that of the algorithm and of its calibration (noise and steps of the calibration
prompts); rows without any randomness run once. Measured by the evaluation kit that ships with PixArt-Mini, against the
float model on prompts that calibration does not use: velocity error at fixed times and noise, and PSNR, SSIM and
feature distance of images from the same noise. ``claims`` says what the table shows.
"""

import argparse
import datetime
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from lowrank_quality import RECIPES
from side_by_side import side_by_side, write

import mxjax
from mxjax.data import calibration_prompts
from mxjax.nn.nnx import QParam

MEASURES = ("velocity_error", "psnr", "ssim", "feature_distance", "frechet")
FIXED = ("RTN", "Hadamard")  # neither data nor seed
GROUPS = (  # rows that share programs; those that take longest first
    ("KroQuant+LoRaQ", "KroQuant+GPTQ+LoRaQ"),
    ("SVDQuant", "SVDQuant+GPTQ"),
    ("KroQuant", "KroQuant+GPTQ", "LoRaQ"),
    ("RTN", "Hadamard", "SmoothQuant", "MR-GPTQ"),
)


def seeded(cfg: mxjax.QuantConfig, seed: int) -> mxjax.QuantConfig:
    """The config with the seed in its transform and its algorithm, where they have one."""
    (rule,) = cfg.rules
    if hasattr(rule.transform, "seed"):
        rule = replace(rule, transform=replace(rule.transform, seed=seed))
    if rule.algorithm in ("svdquant", "loraq"):
        rule = replace(rule, options={**rule.options, "seed": seed})
    return cfg.replace(rules=[rule])


def held(model: Any) -> dict[str, Any]:
    """Bytes and parameters of a quantized model. What weights with one input share is one array, and counts once."""
    weights = [v.get_value() for _, v in nnx.iter_graph(model) if isinstance(v, QParam)]
    arrays = {id(x): x for w in weights for x in jax.tree.leaves(w)}
    transforms = {id(jax.tree.leaves(w.transform)[0]): w for w in weights if jax.tree.leaves(w.transform)}
    nbytes = sum(x.size * x.dtype.itemsize for x in arrays.values())
    return {
        "bytes": nbytes,
        "bits_per_weight": round(8 * nbytes / sum(np.prod(w.shape) for w in weights), 3),
        "rank": max((w.branch.rank for w in weights if w.branch is not None), default=0),
        "transform_parameters": sum(x.size for w in transforms.values() for x in jax.tree.leaves(w.transform)),
        "channels": sum(w.qtensor.size for w in transforms.values()),  # what a scale for each would hold
    }


def table(
    source: Any,
    kit: Any,
    *,
    formats: Sequence[str] = ("mxfp4", "nvfp4"),
    rows: Sequence[str] = tuple(RECIPES),
    seeds: Sequence[int] = (0, 1, 2),
    out: Path | None = None,
    images: Path | None = None,
    calibration: dict[str, Any] | None = None,
    only: str | None = None,
    model: Any = None,
    prepare: Callable[[Any], Any] = lambda model: model,
    **options: Any,
) -> dict[str, Any]:
    """The report, with a row for each format, recipe and seed.

    Args:
      source: an object with the interface of PixArt-Mini.
      kit: ``samples(source, transformer, **options)`` and ``compare(source, transformer, reference=..., **options)``,
        a dict with MEASURES and ``images``.
      formats, rows, seeds: what to run.
      out: the report, read at the start and written after each row.
      images: folder for a strip of images of each row.
      calibration: ``prompts``, how many, and options of ``source.calibration_batches``.
      only: regular expression of the weights to quantize, the rest stays float; None: all that the recipe quantizes.
      model: the float transformer that is calibrated and quantized; default: ``source.transformer``.
      prepare: of a quantized transformer before the kit runs it.
      options: of the kit.
    """
    report = json.loads(out.read_text()) if out and out.exists() else {"rows": []}
    report |= {
        "command": shlex.join(["python", "benchmarks/pixart_quality.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind if jax.default_backend() != "cpu" else platform.processor() or "cpu",
        "versions": {"jax": jax.__version__, "mxjax": mxjax.__version__, "python": platform.python_version()},
        "options": {**options, "calibration": calibration or {}, "only": only},
    }
    model = source.transformer if model is None else model
    calibration = dict(calibration or {})
    prompts = list(getattr(source, "calibration_prompts", None) or calibration_prompts())
    prompts = prompts[: calibration.pop("prompts", None)]
    reference = kit.samples(source, source.transformer, **options)
    _strip(images, "float", reference)
    batches: dict[int, list] = {}
    done = {(r["format"], r["row"], r["seed"]) for r in report["rows"]}
    for seed in seeds:
        for fmt in formats:
            for name in rows:
                if (fmt, name, seed) in done or (name in FIXED and seed != seeds[0]):
                    continue
                if seed not in batches:
                    batches = {seed: source.calibration_batches(prompts, seed=1000 * seed, **calibration)}
                cfg = seeded(mxjax.recipes.get(RECIPES[name].format(fmt)), seed)
                if only is not None:
                    cfg = cfg.replace(rules=[replace(cfg.rules[0], path=only), mxjax.Rule(weight=None)])
                start = time.perf_counter()
                small = mxjax.nnx.calibrate_and_quantize(model, batches[seed], cfg)
                jax.block_until_ready(nnx.state(small, QParam))
                seconds = time.perf_counter() - start
                # Before the model runs: nnx.jit hands back a copy of each array, and no longer shared ones.
                row = {"format": fmt, "row": name, "seed": seed, "seconds": round(seconds, 1), **held(small)}
                found = kit.compare(source, prepare(small), reference=reference, **options)
                row["all_seconds"] = round(time.perf_counter() - start, 1)
                row |= {m: round(float(found[m]), 6) for m in MEASURES if m in found}
                _strip(images, f"{fmt}-{name}-{seed}", found["images"])
                report["rows"].append(row)
                report["claims"] = claims(report["rows"])
                print(" ".join(f"{k}={v}" for k, v in row.items()), flush=True)
                if out:
                    write(out, report)
    return report


def claims(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the table must show, by format: means, spreads, and whether one is better than another beyond the spread.

    "Beyond the spread": the difference of the means is larger than the two standard deviations together.
    """
    out: dict[str, Any] = {}
    for fmt in sorted({r["format"] for r in rows}):
        groups: dict[str, list] = {}
        for r in rows:
            if r["format"] == fmt:
                groups.setdefault(r["row"], []).append(r)

        def both(name: str, measure: str, groups: Any = groups) -> tuple[float, float]:
            values = [r[measure] for r in groups[name]]
            return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0

        means = {n: {m: [round(x, 6) for x in both(n, m)] for m in MEASURES if m in g[0]} for n, g in groups.items()}
        mine, found = "KroQuant+LoRaQ", {}
        if mine in groups:
            for other in {"SVDQuant", "LoRaQ"} & groups.keys():
                (e, se), (e0, se0) = both(mine, "velocity_error"), both(other, "velocity_error")
                (p, sp), (p0, sp0) = both(mine, "psnr"), both(other, "psnr")
                found[f"better than {other} in velocity error"] = bool(e0 - e > se + se0)
                found[f"better than {other} in PSNR"] = bool(p - p0 > sp + sp0)
            if "RTN" in groups:
                found["velocity error relative to RTN"] = round(
                    both(mine, "velocity_error")[0] / both("RTN", "velocity_error")[0], 4
                )
            first = groups[mine][0]
            found["transform parameters relative to a scale for each channel"] = round(
                first["transform_parameters"] / max(first["channels"], 1), 4
            )
        out[fmt] = {"mean and spread": means, "claims": found}
    return out


def _strip(folder: Path | None, name: str, images: np.ndarray, most: int = 16) -> None:
    """The first images side by side as a PNG."""
    if folder is None:
        return
    from mxjax.report.images import png

    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.png").write_bytes(png(np.concatenate(list(images[:most]), axis=1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pixart-mini", help="or a folder of other weights of it")
    parser.add_argument("--formats", nargs="+", default=["mxfp4", "nvfp4"])
    parser.add_argument("--rows", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--count", type=int, default=64, help="held-out prompts")
    parser.add_argument("--batch", type=int, default=32, help="of these at a time")
    parser.add_argument("--steps", type=int, help="of drawing, also for calibration; default: the model's own")
    parser.add_argument("--prompts", type=int, help="calibration prompts; default: all")
    parser.add_argument("--each", type=int, help="steps of each that calibration looks at; default: the model's own")
    parser.add_argument("--only", help="regular expression of the weights to quantize; default: all")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--images", type=Path, help="folder for a strip of images of each row")
    parser.add_argument("--workers", type=int, default=1, help="processes side by side; needs --out")
    parser.add_argument("--seconds", type=float, help="with --workers: stop after these; the same command goes on")
    args = parser.parse_args()
    if args.workers > 1:
        parts = [
            ["--formats", fmt, "--rows", *mine]
            for group in GROUPS
            for fmt in args.formats
            if (mine := [name for name in group if name in args.rows])
        ]
        key, seconds = ("format", "row", "seed"), args.seconds
        report = side_by_side(parts, args.out, key=key, workers=args.workers, summary=claims, seconds=seconds)
    else:
        report = _one_process(args)
    print(json.dumps(report["claims"], indent=1))


def _one_process(args: argparse.Namespace) -> dict[str, Any]:
    from mxjax_models import pixart_mini_eval
    from mxjax_models.image_models import open_image_model
    from mxjax_models.stacked import stack

    source: Any = open_image_model(args.model)
    steps = {} if args.steps is None else {"steps": args.steps}
    calibration = {k: v for k, v in (("prompts", args.prompts), ("each", args.each)) if v is not None} | steps
    # One block compiles in a seventh of the time that seven take.
    return table(
        replace(source, transformer=stack(source.transformer)), pixart_mini_eval.load(), model=source.transformer,
        prepare=stack, formats=args.formats, rows=args.rows, seeds=args.seeds, out=args.out, images=args.images,
        calibration=calibration, only=args.only, count=args.count, batch=args.batch, **steps,
    )  # fmt: skip


if __name__ == "__main__":
    main()
