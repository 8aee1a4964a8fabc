"""``mxjax eval``: perplexity of a model on tokens, and how far quantization moved it from the float model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from mxjax.cli.console import Console, json_text
from mxjax.cli.models import OpenModel, open_model, require
from mxjax.errors import ConfigError

SENSITIVITY_TOKENS = 256  # enough to rank blocks; each block costs about half a model


def run(
    *,
    model: str,
    recipe: str | None,
    calib: str | None,
    tokens: str,
    reference: str | None,
    limit: int | None,
    batch_size: int,
    json_file: str | None,
    report_file: str | None,
    console: Console,
) -> None:
    from mxjax.cli.recipes import recipe_config
    from mxjax.cli.tokens import check_calibration, read_tokens

    found = read_tokens(tokens)[:limit]  # before the model: a wrong path should fail at once
    check_calibration(calib)
    cfg = None if recipe is None else recipe_config(recipe)
    if recipe is not None and reference is not None:
        raise ConfigError("with --recipe the float MODEL is the reference; --reference is for a quantized MODEL")
    for file in (json_file, report_file):
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise ConfigError(f"the folder of {file} does not exist")
    if report_file is not None:
        require("matplotlib", purpose="--report", extra="plot")
        if recipe is None:
            raise ConfigError("--report shows what a recipe does to the float MODEL: give --recipe too")

    import jax

    import mxjax
    from mxjax.cli.calibrate import quantized_params

    opened = open_model(model, console)
    runnable, compared, qparams, quantize_seconds = opened.model, None, None, None
    if recipe is not None and cfg is not None:
        start = time.perf_counter()
        qparams = jax.block_until_ready(quantized_params(opened, recipe, cfg, calib, console))
        quantize_seconds = time.perf_counter() - start
        runnable, compared = mxjax.nnx.from_params(opened.model, qparams), opened.model
    elif calib is not None:
        console.note("--calib is for --recipe: it is not used")
    if reference is not None:
        compared = open_model(reference, console).model
    start = time.perf_counter()
    with console.progress(f"evaluating {found.size} tokens") as update:
        score = mxjax.eval.evaluate(runnable, found, reference=compared, batch_size=batch_size, progress=update)
    data = {
        "model": model,
        "recipe": recipe,
        "reference": model if recipe is not None else reference,
        "perplexity": score.perplexity,
        "perplexity_float": score.reference_perplexity,
        "nll": score.nll,
        "nll_stderr": score.nll_stderr,
        "nll_increase_stderr": score.increase_stderr,
        "kl": score.kl,
        "kl_stderr": score.kl_stderr,
        "top1_agreement": score.top1_agreement,
        "top1_stderr": score.top1_stderr,
        "tokens": score.tokens,
        "sequences": len(found),
        "seconds": time.perf_counter() - start,
        "quantize_seconds": quantize_seconds,
        "report": report_file,
    }
    if report_file is not None:
        _write_report(report_file, opened, runnable, qparams, cfg, found, data, console)
    if json_file is not None:
        Path(json_file).write_text(json_text(data) + "\n", encoding="utf-8")
    console.result(data, _shown(data))


def _write_report(
    file: str,
    opened: OpenModel,
    qmodel: Any,
    qparams: Any,
    cfg: Any,
    tokens: Any,
    data: dict[str, Any],
    console: Console,
) -> None:
    """The page, with the sensitivity of every block and the statistics of every input on the first tokens."""
    import mxjax
    from mxjax.report import Result, report

    few = tokens[:1, :SENSITIVITY_TOKENS]
    with console.progress(f"sensitivity of each block on {few.size} tokens") as update:
        sensitivity = mxjax.eval.sensitivity(opened.model, qparams, few, progress=update)
    with console.progress(f"speed on {few.size} tokens"):
        speeds = [_tokens_per_second(model, few) for model in (opened.model, qmodel)]
    speed_of = f"one pass over a sequence of {few.size} tokens"
    before, after = mxjax.summary(opened.params), mxjax.summary(qparams)
    results = [
        Result(label="float32", bits_per_weight=32.0, nbytes=before.nbytes, perplexity=data["perplexity_float"],
               tokens_per_second=speeds[0], speed_of=speed_of),
        Result(label=data["recipe"], bits_per_weight=after.bits_per_weight, nbytes=after.nbytes,
               perplexity=data["perplexity"], kl=data["kl"], top1_agreement=data["top1_agreement"],
               quantize_seconds=data["quantize_seconds"], tokens_per_second=speeds[1], speed_of=speed_of),
    ]  # fmt: skip
    report(
        opened.params,
        qparams,
        _statistics(opened, qparams, cfg, few, console),
        path=file,
        cfg=cfg,
        label=data["recipe"],
        title=f"{opened.path.stem}: {data['recipe']}",
        results=results,
        drift={data["recipe"]: mxjax.eval.block_errors(opened.model, qmodel, few)},
        sensitivity=sensitivity,
    )


def _tokens_per_second(model: Any, tokens: Any) -> float:
    """Of a second pass: the first compiles."""
    from mxjax.eval import perplexity

    perplexity(model, tokens)
    start = time.perf_counter()
    perplexity(model, tokens)
    return tokens.size / (time.perf_counter() - start)


def _statistics(opened: OpenModel, qparams: Any, cfg: Any, tokens: Any, console: Console) -> Any:
    """What the float model's layers see, or None where the Hessians would take more memory than a report is worth."""
    import mxjax

    if not mxjax.eval.worth_measuring(qparams):
        console.note("the report leaves out the inputs of layers: their statistics would take too much memory")
        return None
    console.note(f"inputs of every layer on {tokens.size} tokens")
    return mxjax.calibrate(opened.model, None, [tokens], cfg)


def _shown(data: dict[str, Any]) -> Any:
    """The result for people; +- is one standard error."""
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    perplexity = data["perplexity"]
    if (base := data["perplexity_float"]) is None:
        error = _error(data["nll_stderr"], perplexity)
        table.add_row("perplexity", f"{perplexity:.4f}{error}")
    else:
        table.add_row("perplexity, float", f"{base:.4f}")
        ratio = perplexity / base
        error = _error(data["nll_increase_stderr"], ratio)
        table.add_row("perplexity, quantized", f"{perplexity:.4f}, x {ratio:.4f}{error} of float")
        table.add_row("KL(float || quantized)", f"{data['kl']:.4f}{_error(data['kl_stderr'])} nats a token")
        agreement, error = 100 * data["top1_agreement"], _error(data["top1_stderr"], 100, digits=2)
        table.add_row("same top token", f"{agreement:.2f}{error} %")
    table.add_row("measured on", f"{data['tokens']} tokens of {data['sequences']} sequences")
    spent = "" if data["quantize_seconds"] is None else f"quantized in {data['quantize_seconds']:.1f} s, "
    if data["report"]:
        table.add_row("report", data["report"])
    table.add_row("time", f"{spent}evaluated in {data['seconds']:.1f} s")
    return table


def _error(stderr: float | None, scale: float = 1.0, digits: int = 4) -> str:
    """`` +- 0.0123``; the error of ``exp(x)`` is ``exp(x)`` times that of ``x``."""
    return "" if stderr is None else f" +- {scale * stderr:.{digits}f}"
