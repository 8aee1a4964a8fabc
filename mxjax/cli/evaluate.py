"""``mxjax eval``: perplexity of a model on tokens."""

from __future__ import annotations

import time

from mxjax.cli.console import Console


def run(
    *,
    model: str,
    recipe: str | None,
    calib: str | None,
    tokens: str,
    limit: int | None,
    batch_size: int,
    console: Console,
) -> None:
    from mxjax.cli.tokens import check_calibration, read_tokens

    found = read_tokens(tokens)[:limit]  # before the model: a wrong path should fail at once
    check_calibration(calib)

    import mxjax
    from mxjax.cli.calibrate import quantized_params
    from mxjax.cli.models import open_model

    opened = open_model(model, console)
    runnable = opened.model
    if recipe is not None:
        runnable = mxjax.nnx.from_params(opened.model, quantized_params(opened, recipe, calib, console))
    elif calib is not None:
        console.note("--calib is for --recipe: it is not used")
    start = time.perf_counter()
    with console.progress(f"evaluating {found.size} tokens") as update:
        score = mxjax.eval.evaluate(runnable, found, batch_size=batch_size, progress=update)
    seconds = time.perf_counter() - start
    data = {
        "model": model,
        "recipe": recipe,
        "perplexity": score.perplexity,
        "nll": score.nll,
        "tokens": score.tokens,
        "sequences": len(found),
        "seconds": seconds,
    }
    console.result(data, f"perplexity {score.perplexity:.4f} over {score.tokens} tokens ({seconds:.1f} s)")
