"""The benchmark that fills the diffusion table, on a tiny random model: rows, resuming, what it claims."""

import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from image_cases import TinyImages
from mxjax_models.stacked import stack

import mxjax

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import pixart_quality


class TinyKit:
    """The interface of PixArt-Mini's evaluation kit."""

    prompts = ("green hat", "a fish")

    def samples(self, source, transformer, *, steps):
        return source.images(transformer, self.prompts, seeds=[0, 1], steps=steps)

    def compare(self, source, transformer, *, reference, steps):
        images = self.samples(source, transformer, steps=steps)
        x, caption = jnp.ones((1, 3, 16, 16)), source.encode(["x"])
        a, b = (m(x, jnp.full(1, 500.0), caption) for m in (source.transformer, transformer))
        error = jnp.sum(jnp.square(a - b)) / jnp.sum(jnp.square(a))
        psnr = np.mean([mxjax.eval.psnr(r, i) for r, i in zip(reference, images, strict=True)])
        return {"velocity_error": float(error), "psnr": float(psnr), "images": images}


def test_rows_are_resumed_and_say_what_they_hold(tmp_path):
    source, out = TinyImages(), tmp_path / "report.json"
    options = dict(formats=["mxfp4"], out=out, images=tmp_path / "strips", steps=2)
    first = pixart_quality.table(source, TinyKit(), rows=["RTN"], seeds=[0, 1], **options)
    assert [(r["row"], r["seed"]) for r in first["rows"]] == [("RTN", 0)]  # nothing random in it
    out.write_text(json.dumps({**first, "rows": [{**first["rows"][0], "mark": 1}]}))
    report = pixart_quality.table(
        source, TinyKit(), rows=["RTN", "SmoothQuant"], seeds=[0], prepare=stack, calibration={"prompts": 2}, **options
    )
    assert [(r["row"], r["seed"]) for r in report["rows"]] == [("RTN", 0), ("SmoothQuant", 0)]
    assert report["rows"][0]["mark"] == 1 and json.loads(out.read_text()) == report
    rtn, smooth = report["rows"]
    assert rtn["transform_parameters"] == rtn["channels"] == 0 and rtn["bits_per_weight"] == 4.25
    # Seven inputs: six of 64 channels, one of 256. Weights with one input hold one scale for each channel together.
    assert smooth["transform_parameters"] == smooth["channels"] == 6 * 64 + 256
    assert sorted(p.name for p in (tmp_path / "strips").iterdir()) == [
        "float.png", "mxfp4-RTN-0.png", "mxfp4-SmoothQuant-0.png",
    ]  # fmt: skip


def test_a_part_of_the_weights():
    source = TinyImages()
    options = dict(rows=["RTN"], formats=["mxfp4"], seeds=[0], steps=2)
    whole, part = (pixart_quality.table(source, TinyKit(), only=o, **options)["rows"][0] for o in (None, "ff/"))
    assert whole["bytes"] > part["bytes"] > 0
    assert whole["velocity_error"] > part["velocity_error"] > 0


def test_claims():
    def row(name, seed, error, psnr, parameters=0):
        return dict(format="mxfp4", row=name, seed=seed, velocity_error=error, psnr=psnr,
                    transform_parameters=parameters, channels=100)  # fmt: skip

    rows = [row("RTN", 0, 0.2, 20)]
    rows += [row("KroQuant+LoRaQ", s, 0.10 + 0.01 * s, 30, 40) for s in range(3)]  # 0.11 +- 0.01
    rows += [row("SVDQuant", s, 0.115 + 0.01 * s, 28) for s in range(3)]  # 0.125 +- 0.01: not beyond 0.02
    rows += [row("LoRaQ", s, 0.15, 32) for s in range(3)]
    found = pixart_quality.claims(rows)["mxfp4"]["claims"]
    assert found["better than SVDQuant in velocity error"] is False and found["better than SVDQuant in PSNR"] is True
    assert found["better than LoRaQ in velocity error"] is True and found["better than LoRaQ in PSNR"] is False
    assert found["velocity error relative to RTN"] == 0.55
    assert found["transform parameters relative to a scale for each channel"] == 0.4


def test_every_row_has_a_recipe_and_takes_seeds():
    for fmt in ("mxfp4", "nvfp4"):
        for name, recipe in pixart_quality.RECIPES.items():
            cfg = mxjax.recipes.get(recipe.format(fmt))
            (rule,) = pixart_quality.seeded(cfg, 7).rules
            random = name not in ("RTN", "Hadamard", "SmoothQuant", "MR-GPTQ")
            seeds = {rule.options.get("seed"), getattr(rule.transform, "seed", None)} - {None}
            assert seeds == ({7} if random else set()), name
            assert str(rule.weight) == rule.activation == fmt
