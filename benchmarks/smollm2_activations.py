"""Massive activations of SmolLM2-135M: what the hidden state and the layers' inputs look like, block by block.

    python benchmarks/smollm2_activations.py          # writes results/smollm2_activations_<platform>.json

Notebook 04 draws the file, so that it shows a real model where there is none. The float model reads two sequences of
256 tokens of the prose that ships with mxjax. For each block: the largest and the median magnitude of the hidden state
that comes in, where the largest is, and the largest magnitude over the root mean square of what each matrix sees. The
model is the one of ``mxjax demo`` (fetched once).
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

LENGTH, SEQUENCES = 256, 2


def hidden_states(model: Any, tokens: Any) -> Iterator[Any]:
    """What comes into each block, float32 [sequences, length, channels]."""
    x = model.embed(tokens)
    for layer in model.layers:
        yield x
        x = layer(x)


def measure(model: Any, tokens: Any) -> dict:
    import numpy as np
    from flax import nnx

    import mxjax

    hidden = []
    for x in hidden_states(model, tokens):
        size = np.abs(np.asarray(x, np.float32))
        sequence, token, channel = (int(i) for i in np.unravel_index(size.argmax(), size.shape))
        hidden.append(
            {"largest": float(size.max()), "median": float(np.median(size)), "sequence": sequence, "token": token,
             "channel": channel}
        )  # fmt: skip
    params = nnx.state(model, nnx.Param)
    stats = mxjax.calibrate(model, None, [tokens], "mxfp4")
    rows = mxjax.eval.layer_errors(params, mxjax.quantize(params, "mxfp4"), stats)
    return {"hidden": hidden, "input_peak_over_rms": {row.path: row.input_peak for row in rows}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a GGUF file in place of SmolLM2")
    arguments = parser.parse_args()

    import jax
    import jax.numpy as jnp
    from mxjax_models import llama, tokenizer

    from mxjax.cli.fetch import fetch
    from mxjax.data import demo_calibration_text

    path = arguments.model or str(fetch(note=print))
    ids = tokenizer.load_tokenizer(path).encode(demo_calibration_text())[: SEQUENCES * LENGTH]
    found = measure(llama.load(path), jnp.asarray(ids, jnp.int32).reshape(SEQUENCES, LENGTH))
    for block, row in enumerate(found["hidden"]):
        print(f"block {block:2}: largest {row['largest']:9.1f} at token {row['token']:3}, channel {row['channel']:3}; "
              f"median {row['median']:.3f}")  # fmt: skip
    device = jax.devices()[0]
    result = {
        "benchmark": "smollm2_activations",
        "command": "python benchmarks/smollm2_activations.py",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device.device_kind,
        "versions": {"python": platform.python_version()} | {n: version(n) for n in ("jax", "flax", "numpy")},
        "model": Path(path).name,
        "tokens": [SEQUENCES, LENGTH],
        **found,
    }
    out = Path(__file__).parent / "results" / f"smollm2_activations_{device.platform}.json"
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(out)


if __name__ == "__main__":
    main()
