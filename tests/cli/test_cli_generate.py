"""``mxjax generate``: a tiny diffusers folder with text encoder and tokenizer, and the interface of PixArt-Mini."""

import json
import sys
import types
import zlib
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import mxjax
from mxjax.cli import main

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))  # what the tests of the models share

from image_cases import TinyImages


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """PixArt-Sigma as diffusers saves it, a few thousand random weights in each part."""
    transformers = pytest.importorskip("transformers", reason="pip install 'mxjax[diffusers]'")
    import diffusers
    from test_diffusers_pipeline import pixart_pipeline

    letters = [(c, -2.0) for c in "abcdefghijklmnopqrstuvwxyz"]
    tokenizer = transformers.T5Tokenizer(vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0), *letters])
    config = transformers.T5Config(vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    pipe, _ = pixart_pipeline()
    encoder = transformers.T5EncoderModel(config).eval()
    pipe = diffusers.PixArtSigmaPipeline(tokenizer, encoder, pipe.vae, pipe.transformer, pipe.scheduler)
    path = tmp_path_factory.mktemp("pipeline")
    pipe.save_pretrained(path)
    return path


@pytest.fixture
def mini(monkeypatch):
    """ "pixart-mini" is a tiny random model here."""
    source = TinyImages()
    module = types.SimpleNamespace(DATA="what ships", load=lambda folder, dtype: {"what ships": source}[folder])
    import mxjax_models

    monkeypatch.setitem(sys.modules, "mxjax_models.pixart_mini", module)
    monkeypatch.setattr(mxjax_models, "pixart_mini", module, raising=False)
    return source


def run(*arguments, code=0):
    done = CliRunner().invoke(main, ["generate", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done


def pixels(file):
    """A PNG of our own, whose rows have filter 0."""
    data = Path(file).read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = (int.from_bytes(data[16 + i : 20 + i], "big") for i in (0, 4))
    start = data.index(b"IDAT") + 4
    rows = np.frombuffer(zlib.decompress(data[start : data.index(b"IEND") - 8]), np.uint8).reshape(height, -1)
    return rows[:, 1:].reshape(height, width, 3)


def test_a_diffusers_folder(folder, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a dog\n\nblue sky\n")
    done = run(
        "--model", folder, "--recipe", "smoothquant_mxfp4", "--prompt", "a red cat", "--prompt", "x & <y>",
        "--size", "16x24", "--steps", 2, "--calib-prompts", prompts, "--calib-steps", 1, "--out", tmp_path / "o",
        "--json",
    )  # fmt: skip
    data = json.loads(done.stdout)
    assert data["seeds"] == [0, 1] and len(data["psnr"]) == len(data["ssim"]) == 2
    assert sorted(p.name for p in (tmp_path / "o").iterdir()) == [
        "0-float.png", "0-smoothquant_mxfp4.png", "1-float.png", "1-smoothquant_mxfp4.png", "report.html",
    ]  # fmt: skip
    images = [pixels(file) for file in data["images"]]
    assert images[0].shape == (16, 24, 3) and data["psnr"][0] == mxjax.eval.psnr(images[2], images[0])
    page = (tmp_path / "o" / "report.html").read_text()
    assert "x &amp; &lt;y&gt;" in page and "<y>" not in page and "text embedder" in page
    assert {"path": "proj_out/kernel", "shape": [64, 32], "reason": "final projection"} in data["kept"]


def test_what_is_kept_can_be_overridden(mini, tmp_path):
    config = tmp_path / "own.json"
    rules = [mxjax.Rule(path="attn1", weight=None), mxjax.Rule(weight="mxfp4", activation="mxfp4")]
    mxjax.save_config(config, mxjax.QuantConfig(rules=rules, on_uneven="skip"))
    one = ["--model", "pixart-mini", "--prompt", "a", "--no-float", "--json", "--out", tmp_path / "o"]

    def kept(*arguments):
        return {k["path"]: k["reason"] for k in json.loads(run(*one, *arguments).stdout)["kept"]}

    by_rule = kept("--recipe", config)
    assert by_rule["transformer_blocks/0/attn1/to_q/kernel"] == "rule 'attn1' leaves it"
    assert by_rule["proj_out/kernel"] == "final projection"
    more = kept("--recipe", "mxfp4", "--keep", "ff/net")
    assert "excluded by 'ff/net'" in more["transformer_blocks/0/ff/net/2/kernel"] and "proj_out/kernel" in more
    less = kept("--recipe", config, "--no-default-keep", "--keep", "table$")
    assert "proj_out/kernel" not in less and "adaln_single/linear/kernel" not in less
    assert mini.calls[-1] == (("a",), (0,), 3, 1.0)


def test_options_reach_the_model(mini, tmp_path):
    done = run(
        "--model", "pixart-mini", "--recipe", "mxfp4", "--prompt", "a", "--prompt", "b", "--steps", 2,
        "--guidance", 1.5, "--seed", 5, "--out", tmp_path / "o", "--report", tmp_path / "deep" / "page.html",
    )  # fmt: skip
    assert mini.calls[0] == (("a",), (5,), 2, 1.5) and mini.calls[1][1] == (6,)
    assert (tmp_path / "deep" / "page.html").is_file() and "PSNR" in done.output and "final projection" in done.output


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--recipe", "mxfp5"], "unknown recipe"),
        (["--recipe", "nowhere.json"], "nowhere.json"),
        (["--recipe", "mxfp4", "--size", "12x"], "HEIGHTxWIDTH"),
        (["--recipe", "mxfp4", "--size", "64"], "takes no height, width"),
        (["--recipe", "mxfp4", "--calib-prompts", "nowhere.txt"], "nowhere.txt does not exist"),
        (["--recipe", "mxfp4", "--keep", "("], "no regular expression"),
    ],
)
def test_errors_are_one_line(mini, tmp_path, arguments, message):
    done = run("--model", "pixart-mini", "--prompt", "a", "--out", tmp_path / "o", *arguments, code=1)
    assert message in done.output and done.output.strip().splitlines()[-1].startswith("error: ")


def test_ctrl_c_leaves_no_report(mini, tmp_path, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(mini, "images", stopped)
    done = run("--model", "pixart-mini", "--recipe", "mxfp4", "--prompt", "a", "--out", tmp_path / "o", code=130)
    assert "interrupted" in done.output and not list((tmp_path / "o").iterdir())
