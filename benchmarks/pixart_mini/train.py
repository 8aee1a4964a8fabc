"""Trains PixArt-Mini on one GPU.

    python benchmarks/pixart_mini/train.py --data data/pixart_mini.npz --words data/words.npz --out out --minutes 12

Runs until the learning rate is zero. The first minute measures steps per second and fixes the number of steps that
``--minutes`` allow (``--steps`` gives it instead). ``out/state.safetensors`` is written every minute and at the end:
the same command goes on from there after a kill, and step for step does what an uninterrupted run does.
``--stop-after S`` ends this process after S seconds, to go on in the next. ``--measure`` only times the step.

``out/log.jsonl`` has a line for every chunk of steps: loss, learning rate, images per second, share of the GPU's peak,
and now and then the loss of the averaged weights on held-out pictures at fixed times and noise; ``out/sheet_*.png`` are
samples. ``export.py`` makes the shipped files of it.
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import data as dataset
import jax
import jax.numpy as jnp
import numpy as np
import objective
import vocabulary
from mxjax_models.pixart_mini import PixArtMini
from mxjax_models.pixart_mini_file import tokenizer
from prompts import PROMPTS
from trainer import Settings, State, Trainer, learning_rate, restore, save

PEAK = 790e12  # bfloat16 products on an H200, measured
CHECKPOINT = "state.safetensors"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--words", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=12.0, help="of training, compilation not counted")
    parser.add_argument("--steps", type=int, help="instead of --minutes")
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="seconds of this process")
    parser.add_argument("--chunk", type=int, default=50, help="steps between two looks at the clock")
    parser.add_argument("--sheets", type=int, default=8, help="how often samples are drawn, and held-out loss taken")
    parser.add_argument("--save-every", type=float, default=60.0, help="seconds")
    parser.add_argument("--measure", action="store_true")
    for field in dataclasses.fields(Settings):
        kind = str if field.name in ("text", "attention", "dtype") else type(field.default)
        parser.add_argument(f"--{field.name}", type=kind, default=field.default)
    return parser.parse_args()


class Run:
    """One process of a run."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.begun = args, time.perf_counter()
        self.settings = Settings(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Settings)})
        self.pieces, table = vocabulary.load(args.words)
        self.trainer = Trainer(self.settings, table, args.chunk)
        everything = dataset.load(args.data)
        self.text = self.trainer.network(self.trainer.initial).text.config
        self.tokenizer = tokenizer(self.text, self.pieces if self.text.kind == "wordpieces" else None)
        parts = (everything.where(~everything.held_out), everything.where(everything.held_out))
        self.train, self.held = (objective.arrays(p, self.tokenizer, self.text.length) for p in parts)
        args.out.mkdir(parents=True, exist_ok=True)

    def log(self, **values) -> None:
        line = json.dumps({k: round(v, 6) if isinstance(v, float) else v for k, v in values.items()})
        print(line, flush=True)
        with open(self.args.out / "log.jsonl", "a") as f:
            f.write(line + "\n")

    def go(self) -> None:
        args, trainer = self.args, self.trainer
        state, total, spent = trainer.start(), args.steps, 0.0
        checkpoint = args.out / CHECKPOINT
        if checkpoint.exists() and not args.measure:
            state, metadata = restore(checkpoint, state)
            if json.loads(metadata["settings"]) != dataclasses.asdict(self.settings):
                raise SystemExit(f"{checkpoint} is of other settings: {metadata['settings']}")
            total, spent = json.loads(metadata["total"]), float(metadata["spent"])
        compiled = trainer.run.lower(state, trainer.frozen, self.train, jnp.float32(1)).compile()
        self.log(event="start", step=int(state.step), devices=str(jax.devices()[0].device_kind), jax=jax.__version__,
                 parameters=trainer.parameters, train=len(self.train.mirror), held_out=len(self.held.mirror),
                 tflop_a_step=trainer.flops() / 1e12, compile_s=time.perf_counter() - self.begun,
                 **dataclasses.asdict(self.settings))  # fmt: skip
        step, saved, timed = int(state.step), time.perf_counter(), []
        while total is None or step < total:
            start = time.perf_counter()
            # Until the number of steps is known the rate is that of an endless run: all of it is warm-up.
            state, losses = compiled(state, trainer.frozen, self.train, jnp.float32(total or 1e9))
            losses = np.asarray(losses)
            seconds = time.perf_counter() - start
            spent, step = spent + seconds, step + args.chunk
            timed.append(seconds)
            images = args.chunk * self.settings.batch / seconds
            self.log(step=step, total=total, loss=float(losses.mean()), seconds=spent, images_per_s=images,
                     rate=float(learning_rate(self.settings, jnp.int32(step), jnp.float32(total or 1e9))),
                     peak_share=trainer.flops() * args.chunk / seconds / PEAK)  # fmt: skip
            if not np.isfinite(losses).all():
                raise SystemExit(f"the loss is not finite at step {step}")
            if args.measure and len(timed) == 4:
                return
            if total is None and (len(timed) == 4 or spent > 10 * args.minutes):
                per_chunk = float(np.median(timed[1:] or timed))
                total = step + args.chunk * int(max(60 * args.minutes - spent, 0) / per_chunk)
                self.log(event="length", steps=total, seconds_a_step=per_chunk / args.chunk)
            if total and step * args.sheets // total != (step - args.chunk) * args.sheets // total:
                self.show(state, step)
            over = time.perf_counter() - self.begun > args.stop_after
            if over or time.perf_counter() - saved > args.save_every or (total and step >= total):
                self.write(checkpoint, state, total, spent)
                saved = time.perf_counter()
            if over and total and step < total:
                self.log(event="stopped", step=step)
                sys.exit(0)
        self.log(event="done", step=step, seconds=spent)

    def write(self, path: Path, state: State, total: int | None, spent: float) -> None:
        settings = json.dumps(dataclasses.asdict(self.settings))
        save(path, state, {"settings": settings, "total": json.dumps(total), "spent": str(spent)})

    def show(self, state: State, step: int) -> None:
        losses = np.asarray(self.trainer.held_out(state.ema, self.trainer.frozen, self.held))
        rows = np.linspace(0, len(self.train.mirror) - 1, len(self.held.mirror)).astype(int)
        seen = objective.Arrays(*(x[rows] for x in self.train[:-1]), self.train.nothing)
        trained = np.asarray(self.trainer.held_out(state.ema, self.trainer.frozen, seen))
        self.log(event="held_out", step=step, held_out=float(losses.mean()), seen=float(trained.mean()),
                 by_time=[round(float(x), 5) for x in losses])  # fmt: skip
        net = self.trainer.network(state.ema, jnp.dtype(self.settings.dtype))  # cuDNN's attention is for 16 bits
        mini = PixArtMini(net.transformer, net.text, self.tokenizer)
        images = mini.images(net.transformer, PROMPTS, seeds=range(len(PROMPTS)))
        dataset.sheet(images, self.args.out / f"sheet_{step:06d}.png", columns=12, labels=PROMPTS)


if __name__ == "__main__":
    Run(arguments()).go()
