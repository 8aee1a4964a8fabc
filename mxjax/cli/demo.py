"""``mxjax demo``: a real language model in MXFP4 and NVFP4, from download to report, in a few minutes on a CPU."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mxjax.cli.calibrate import calibrated_params
from mxjax.cli.console import Console
from mxjax.cli.demo_table import shown
from mxjax.cli.models import OpenModel, is_gguf, is_quantized_folder, open_model, require
from mxjax.errors import ConfigError
from mxjax.recipes import get as get_recipe

RECIPES = ("mxfp4", "nvfp4", "mxfp4_a16", "mr_gptq_mxfp4", "best_mxfp4")  # the first one is written as a checkpoint
PROMPT = "Explain in one sentence why the sky is blue."
NEW_TOKENS = 32
SPEED_OF = "writing one sequence, token by token"
SEQUENCE = 512
CALIBRATION_SEQUENCES = 4  # of the built-in text: a few are most of the win, and the demo should not take long
SENSITIVITY_TOKENS = 128
TITLES = {"smollm2": "SmolLM2-135M-Instruct"}


def run(
    *,
    out: str,
    model: str,
    recipes: tuple[str, ...],
    calib: str | None,
    prompt: str | None,
    offline: bool,
    console: Console,
) -> None:
    from mxjax.cli.tokens import check_calibration

    start = time.perf_counter()
    recipes = recipes or RECIPES
    for recipe in recipes:
        get_recipe(recipe)  # a typing error should fail before a model is loaded
    check_calibration(calib)
    packages = ("gguf", "tokenizers", "matplotlib") if is_gguf(model) else ("tokenizers", "matplotlib")
    require(*packages, purpose="mxjax demo", extra="demo")
    if is_quantized_folder(Path(model)):
        raise ConfigError(f"{model} is quantized already; the demo compares a float model with what it makes of it")
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)  # before the work: an unwritable place should fail at once
    opened = open_model(model, console, offline=offline)
    demo = _Demo(opened, recipes, calib, prompt or PROMPT, console)
    demo.measure_float()
    for recipe in recipes:
        demo.measure(recipe)
    checkpoint, page = demo.write(folder)
    seconds = time.perf_counter() - start
    data = {
        "model": model,
        "results": [asdict(r) for r in demo.results],
        "samples": demo.samples,
        "calibration_sequences": len(demo.calibration),
        "calibration_tokens": int(demo.calibration.size),
        "checkpoint": str(checkpoint),
        "report": str(page),
        "seconds": seconds,
    }
    (folder / "results.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    console.result(data, shown(demo, checkpoint, page, seconds))


class _Demo:
    """Measures one model variant after the other; only the parameters of earlier ones stay in memory."""

    def __init__(self, opened: OpenModel, recipes: tuple[str, ...], calib: str | None, prompt: str, console: Console):
        from mxjax.cli.tokens import read_calibration, text_tokens
        from mxjax.data import demo_calibration_text, demo_text

        self.opened, self.prompt, self.console = opened, prompt, console
        self.title = TITLES.get(opened.name, opened.path.stem)
        self.tokenizer = opened.tokenizer()
        self.tokens = text_tokens(demo_text(), self.tokenizer, SEQUENCE)
        if calib is None:
            built_in = text_tokens(demo_calibration_text(), self.tokenizer, SEQUENCE)
            self.calibration = built_in[:CALIBRATION_SEQUENCES]
        else:
            self.calibration = read_calibration(calib, lambda: self.tokenizer)
        self.results: list[Any] = []
        self.samples: dict[str, str] = {}
        self.trees: dict[str, Any] = {}
        self.drift: dict[str, Any] = {}
        calibrated = sum(get_recipe(recipe).needs_data for recipe in recipes)
        self.steps = 2 + 2 * (1 + len(recipes)) + calibrated
        self._step_numbers: Iterator[int] = iter(range(1, 1 + self.steps))

    def measure_float(self) -> None:
        import mxjax
        from mxjax.report import Result

        score = self._score("float32", self.opened.model, None)
        speed = self._generate("float32", self.opened.model)
        nbytes = mxjax.summary(self.opened.params).nbytes
        self.results.append(
            Result(label="float32", algorithm="none", bits_per_weight=32.0, nbytes=nbytes,
                   perplexity=score.perplexity, tokens_per_second=speed, speed_of=SPEED_OF)
        )  # fmt: skip

    def measure(self, recipe: str) -> None:
        import jax

        import mxjax
        from mxjax.report import Result

        cfg = get_recipe(recipe)
        rule = cfg.rules[0]
        start = time.perf_counter()
        if cfg.needs_data:
            self.console.note(self._title(f"{recipe}: {len(self.calibration)} calibration sequences; more give better"))
            qparams = calibrated_params(self.opened, cfg, self.calibration, self.console)
        else:
            qparams = mxjax.quantize(self.opened.params, cfg)
        jax.block_until_ready(qparams)
        seconds = time.perf_counter() - start
        model = mxjax.nnx.from_params(self.opened.model, qparams)
        score = self._score(recipe, model, self.opened.model)
        speed = self._generate(recipe, model)
        self.trees[recipe] = qparams
        self.drift[recipe] = mxjax.eval.block_errors(self.opened.model, model, self.tokens[:1])
        activation = "" if rule.activation else ", float activations"
        transform = "" if rule.transform is None else f" + {type(rule.transform).__name__}"
        summary = mxjax.summary(qparams)
        self.results.append(
            Result(label=recipe, algorithm=f"{rule.algorithm}{transform}{activation}", nbytes=summary.nbytes,
                   bits_per_weight=summary.bits_per_weight, perplexity=score.perplexity, kl=score.kl,
                   gap_closed=self._gap_closed(recipe, score.perplexity), top1_agreement=score.top1_agreement,
                   tokens_per_second=speed, quantize_seconds=seconds, speed_of=SPEED_OF)
        )  # fmt: skip

    def _gap_closed(self, recipe: str, perplexity: float) -> float | None:
        """``(P - p) / (P - f)`` with the perplexities f of the float model and P of plain rounding to the same formats.

        None for plain rounding itself, or where it was not measured before, or lost nothing.
        """
        rule = get_recipe(recipe).rules[0]
        plain = str(rule.weight) if rule.activation else f"{rule.weight}_a16"
        measured = {r.label: r.perplexity for r in self.results}
        rounded = measured.get(plain)
        if recipe == plain or rounded is None or rounded <= measured["float32"]:
            return None
        return (rounded - perplexity) / (rounded - measured["float32"])

    def sensitivity(self) -> Any:
        """Of the first recipe's blocks."""
        from mxjax.eval import sensitivity

        label, tree = next(iter(self.trees.items()))
        few = self.tokens[:1, :SENSITIVITY_TOKENS]
        with self._step(f"{label}: sensitivity of each block on {few.size} tokens") as update:
            return sensitivity(self.opened.model, tree, few, progress=update)

    def write(self, folder: Path) -> tuple[Path, Path]:
        from mxjax.cli.export import write_model
        from mxjax.report import report

        first, *others = self.trees
        sensitivity = self.sensitivity()
        checkpoint = folder / f"{self.title}-{first}"
        with self._step(f"writing checkpoint and report to {folder}"):
            tree, layout = self.trees[first], "mxjax"  # bit for bit the model that was measured
            write_model(checkpoint, self.opened, tree, layout, self.console, overwrite=True)
            page = report(
                self.opened.params,
                tree,
                path=folder / "report.html",
                cfg=get_recipe(first),
                label=first,
                also={name: self.trees[name] for name in others},
                title=f"{self.title} in four bits",
                results=self.results,
                drift=self.drift,
                sensitivity=sensitivity,
                prompt=self.prompt,
                samples=self.samples,
            )
        return checkpoint, page

    def _title(self, text: str) -> str:
        return f"[{next(self._step_numbers)}/{self.steps}] {text}"

    def _step(self, text: str) -> Any:
        return self.console.progress(self._title(text))

    def _score(self, label: str, model: Any, reference: Any) -> Any:
        from mxjax.eval import evaluate

        with self._step(f"{label}: perplexity of {self.tokens.size} tokens") as update:
            return evaluate(model, self.tokens, reference=reference, batch_size=1, progress=update)

    def _generate(self, label: str, model: Any) -> float:
        """Text from the prompt, and the tokens a second of a second run (the first one compiles)."""
        from mxjax_models.generate import generate
        from mxjax_models.stacked import stack

        ids = self.tokenizer.encode(_chat(self.prompt, self.tokenizer))
        with self._step(f"{label}: generating {NEW_TOKENS} tokens"):
            stacked = stack(model)
            new = np.asarray(generate(stacked, ids, NEW_TOKENS))
            start = time.perf_counter()
            np.asarray(generate(stacked, ids, NEW_TOKENS))
            seconds = time.perf_counter() - start
        ends = np.flatnonzero(new == (-1 if self.tokenizer.eos_id is None else self.tokenizer.eos_id))
        self.samples[label] = self.tokenizer.decode(new[: ends[0]] if ends.size else new).strip()
        return NEW_TOKENS / seconds


def _chat(prompt: str, tokenizer: Any) -> str:
    """The prompt as a ChatML turn, where the vocabulary has ChatML's marks (SmolLM2's has)."""
    if tokenizer.backend.token_to_id("<|im_start|>") is None:
        return prompt
    return f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
