"""The commands on tiny models, through click's runner."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli_models import VOCABULARY
from click.testing import CliRunner
from flax import nnx
from mxjax_models import llama

import mxjax
from mxjax.cli import app, main
from mxjax.cli.console import Console
from mxjax.cli.models import open_model
from mxjax.nn.calibrate import replace_leaves
from mxjax.ops.qweight import is_quantized


def run(*arguments, code=0):
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


def run_json(*arguments):
    """The one JSON object on stdout."""
    result = run(*arguments, "--json")
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def quantized(workplace):
    """The tiny model as ``mxjax quantize`` writes it, a folder a format."""
    out = {}
    for file_format in ("mxjax", "compressed-tensors", "orbax"):
        out[file_format] = workplace / f"q-{file_format}"
        data = run_json("quantize", workplace / "model", out[file_format], "--recipe=mxfp4", "--format", file_format)
        assert data["format"] == file_format and data["recipe"] == "mxfp4"
        assert (data["quantized"], data["kept"], data["bits_per_weight"]) == (14, 7, 4.25)
        assert data["bytes"] < data["float_bytes"] / 2 and data["seconds"] > 0
    return out


def test_eval(workplace):
    tokens = np.load(workplace / "tokens.npz")["text"]
    model = llama.load(workplace / "model")
    data = run_json("eval", workplace / "model", "--tokens", f"{workplace}/tokens.npz:text")
    assert data["tokens"] == 3 * 15 and data["sequences"] == 3 and data["recipe"] is None and data["seconds"] > 0
    assert data["perplexity"] == pytest.approx(mxjax.eval.perplexity(model, tokens), rel=1e-6)
    limited = run_json("eval", workplace / "model", "--tokens", f"{workplace}/tokens.npz:text", "--limit", 2)
    assert limited["tokens"] == 2 * 15
    assert limited["perplexity"] == pytest.approx(mxjax.eval.perplexity(model, tokens[:2]), rel=1e-6)
    text = run("eval", workplace / "model", "--tokens", f"{workplace}/tokens.npz:text").stdout
    assert f"{data['perplexity']:.4f}" in text and "45 tokens" in text


def test_eval_compares_with_the_float_model(workplace, quantized, tmp_path):
    """One pass gives what two would, whether the quantized model is made on the fly or comes from a folder."""
    source, tokens = workplace / "model", f"--tokens={workplace}/tokens.npz:text"
    data = run_json("eval", source, "--recipe", "mxfp4", tokens, "--json-file", tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == data
    model = llama.load(source)
    ids = np.load(workplace / "tokens.npz")["text"]
    expected = mxjax.eval.evaluate(mxjax.nnx.quantize(model, "mxfp4"), ids, reference=model)
    names = {"perplexity": "perplexity", "perplexity_float": "reference_perplexity", "nll_increase_stderr":
             "increase_stderr", "kl": "kl", "kl_stderr": "kl_stderr", "top1_agreement": "top1_agreement"}  # fmt: skip
    assert {n: data[n] for n in names} == {n: getattr(expected, m) for n, m in names.items()}
    assert data["kl"] > 0 and data["quantize_seconds"] > 0 and data["reference"] == str(source)
    folder = run_json("eval", quantized["mxjax"], "--reference", source, tokens)
    assert {n: folder[n] for n in names} == {n: data[n] for n in names} and folder["quantize_seconds"] is None
    text = run("eval", source, "--recipe", "mxfp4", tokens).stdout
    for part in ("perplexity, float", f"{data['perplexity']:.4f}", f"{data['kl']:.4f} +- ", "same top token", " %"):
        assert part in text
    plain = run_json("eval", source, tokens)
    assert plain["kl"] is None and plain["perplexity_float"] is None and plain["nll_stderr"] > 0
    # The same arithmetic in another program: float32 rounding of a mean of 45 numbers.
    assert data["perplexity_float"] == pytest.approx(plain["perplexity"], rel=1e-5)


def test_eval_writes_a_report(workplace, tmp_path):
    pytest.importorskip("matplotlib", reason="pip install 'mxjax[plot]'")
    arguments = ["eval", workplace / "model", "--recipe", "nvfp4", "--tokens", f"{workplace}/tokens.npz:text"]
    data = run_json(*arguments, "--report", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert data["report"] == str(tmp_path / "page.html")
    assert f"{data['perplexity']:,.2f}" in page and "model: nvfp4" in page and "KL of each part quantized alone" in page
    alone = mxjax.eval.sensitivity(
        llama.load(workplace / "model"),
        mxjax.quantize(nnx.state(llama.load(workplace / "model"), nnx.Param), "nvfp4"),
        np.load(workplace / "tokens.npz")["text"][:1],
    )
    assert all(f"{row.kl:.5f}" in page for row in alone)


def test_lm_eval_that_is_not_there_is_named(monkeypatch, workplace):
    for name in ("lm_eval", "lm_eval.api.model", "lm_eval.api.registry"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("mxjax.cli.lm_eval", "mxjax.eval.lm_eval_adapter"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    result = run("lm-eval", workplace / "model", "--tasks", "arc_easy", "--limit", 3, code=1)
    assert result.stderr.startswith("error: ") and "pip install 'mxjax[lm-eval]'" in result.stderr


def test_eval_with_a_recipe_equals_the_quantized_folder(workplace, quantized):
    tokens = f"--tokens={workplace}/tokens.npz:text"
    on_the_fly = run_json("eval", workplace / "model", "--recipe", "mxfp4", tokens)["perplexity"]
    plain = run_json("eval", workplace / "model", tokens)["perplexity"]
    assert on_the_fly != plain
    for file_format in ("mxjax", "orbax"):
        folder = run_json("eval", quantized[file_format], "--reference", workplace / "model", tokens)
        assert folder["perplexity"] == on_the_fly


def test_a_saved_config_is_a_recipe(workplace, tmp_path):
    """The rules of the file, not of a recipe: only the first block is quantized."""
    cfg = mxjax.recipes.get("mxfp4")
    (rule,) = cfg.rules
    mxjax.save_config(tmp_path / "own.json", cfg.replace(rules=[dataclasses.replace(rule, path="layers/0/")]))
    data = run_json("quantize", workplace / "model", tmp_path / "q", "--recipe", tmp_path / "own.json")
    assert data["quantized"] == 7 and data["recipe"].endswith("own.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    refused = run("quantize", workplace / "model", tmp_path / "no", "--recipe", broken, code=1)
    assert "no readable config" in refused.stderr and not (tmp_path / "no").exists()


def test_compressed_tensors_rounds_only_what_is_not_quantized(workplace, quantized):
    """Embeddings, norms and head go through bfloat16 there, and nothing else changes."""
    model = llama.load(workplace / "model")
    qparams = mxjax.quantize(nnx.state(model, nnx.Param), "mxfp4")
    rounded = jax.tree.map(
        lambda x: x if is_quantized(x) else x.astype(jnp.bfloat16).astype(jnp.float32), qparams, is_leaf=is_quantized
    )
    expected = mxjax.eval.perplexity(mxjax.nnx.from_params(model, rounded), np.load(workplace / "tokens.npz")["text"])
    data = run_json("eval", quantized["compressed-tensors"], "--tokens", f"{workplace}/tokens.npz:text")
    assert data["perplexity"] == expected


def test_quantized_folder_has_what_a_loader_needs(workplace, quantized):
    for folder in quantized.values():
        config = json.loads((folder / "config.json").read_text())
        assert config["hidden_size"] == 64 and config["unknown_key"] == [1]
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (folder / name).read_bytes() == (workplace / "model" / name).read_bytes()


def test_transformers_loads_compressed_tensors(workplace, tmp_path):
    torch = pytest.importorskip("torch", reason="pip install 'mxjax[test]'")
    transformers = pytest.importorskip("transformers", reason="pip install 'mxjax[test]'")
    pytest.importorskip("compressed_tensors", reason="pip install 'mxjax[test]'")
    folder, tokens = tmp_path / "q", np.load(workplace / "tokens.npz")["text"]
    run("quantize", workplace / "model", folder, "--recipe", "mxfp4_a16", "--format", "compressed-tensors")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens, dtype=torch.long)).logits.float().numpy()
    ours = np.asarray(open_model(str(folder), Console(quiet=True)).model(tokens))
    # They compute in bfloat16: some ten roundings of relative size 2**-9 in a row leave an error below 3 % of the
    # logits' norm, while a weight in the wrong place leaves one of order 1.
    assert theirs.dtype == torch.bfloat16
    assert np.linalg.norm(ours - expected) < 0.03 * np.linalg.norm(ours)


def test_inspect(workplace, quantized):
    data = run_json("inspect", quantized["mxjax"])
    assert (data["quantized"], data["arrays"], data["formats"], data["bits_per_weight"]) == (14, 21, ["mxfp4"], 4.25)
    rows = {row["path"]: row for row in data["rows"]}
    row = rows["layers/1/mlp/down_proj/kernel"]
    assert row["shape"] == [128, 64] and row["weight"] == "mxfp4" and row["activation"] == "mxfp4"
    assert not rows["embed_tokens/embedding"]["quantized"]
    assert run_json("inspect", quantized["compressed-tensors"])["quantized"] == 14
    assert run_json("inspect", workplace / "model")["quantized"] == 0
    text = run("inspect", quantized["mxjax"]).stdout
    assert "layers/1/mlp/down_proj/kernel" in text and "14 of 21 arrays quantized" in text


def test_gguf(workplace, tmp_path):
    out = tmp_path / "q"
    assert run_json("quantize", workplace / "model.gguf", out, "--recipe", "nvfp4")["quantized"] == 14
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "qwen3" and config["vocab_size"] == len(VOCABULARY)
    tokens = f"--tokens={workplace}/tokens.npz:text"
    expected = run_json("eval", workplace / "model.gguf", "--recipe", "nvfp4", tokens)["perplexity"]
    assert run_json("eval", out, "--reference", workplace / "model.gguf", tokens)["perplexity"] == expected
    from mxjax_models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(out)
    assert tokenizer.decode(tokenizer.encode("<|im_start|>héllo")) == "<|im_start|>héllo" and tokenizer.eos_id == 2


def test_recipes():
    rows = {row["recipe"]: row for row in run_json("recipes")["recipes"]}
    assert set(rows) == set(mxjax.recipes.RECIPES)
    assert rows["mxfp4_a16"]["activation"] is None and rows["hadamard_mxfp4"]["transform"] == "hadamard"
    assert rows["best_nvfp4"]["use"] == mxjax.recipes.when_to_use("best_nvfp4")
    assert "hadamard_mxfp4" in run("recipes").stdout


def test_overwrite(workplace, tmp_path):
    out = tmp_path / "q"
    run("quantize", workplace / "model", out, "--recipe", "mxfp4")
    refused = run("quantize", workplace / "model", out, "--recipe", "nvfp4", code=1)
    assert "--overwrite" in refused.stderr and run_json("inspect", out)["formats"] == ["mxfp4"]
    run("quantize", workplace / "model", out, "--recipe", "nvfp4", "--overwrite")
    assert run_json("inspect", out)["formats"] == ["nvfp4"]
    other = tmp_path / "papers"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    refused = run("quantize", workplace / "model", other, "--recipe", "mxfp4", "--overwrite", code=1)
    assert "no checkpoint" in refused.stderr and (other / "thesis.txt").read_text() == "mine"


def test_failed_quantize_leaves_nothing(workplace, tmp_path):
    out = tmp_path / "q"
    recipe = ["--recipe", "hadamard_mxfp4", "--format", "quark"]
    refused = run("quantize", workplace / "model", out, *recipe, code=1)
    assert "transform" in refused.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "{w}/model", "--tokens", "tokens.npz"], "FILE.npz:KEY"),
        (["eval", "{w}/model", "--tokens", "{w}/none.npz:text"], "does not exist"),
        (["eval", "{w}/model", "--tokens", "{w}/tokens.npz:nothing"], "it has: text, wrong"),
        (["eval", "{w}/model", "--tokens", "{w}/tokens.npz:wrong"], "float64 (4,)"),
        (["eval", "{w}/model", "--tokens", "{w}/tokens.npz:text", "--recipe", "mxfp5"], "unknown recipe 'mxfp5'"),
        (["eval", "{w}/nothing", "--tokens", "{w}/tokens.npz:text"], "nothing does not exist"),
        (["eval", "{w}/tokens.npz", "--tokens", "{w}/tokens.npz:text"], "neither a folder nor a .gguf file"),
        (["eval", "{w}/model", "--tokens", "{w}/tokens.npz:text", "--json-file", "{w}/no/a.json"], "folder of"),
        (["eval", "a", "--tokens", "{w}/tokens.npz:text", "--recipe=mxfp4", "--reference=b"], "float MODEL is the ref"),
        (["eval", "{w}/model", "--tokens", "{w}/tokens.npz:text", "--report", "{w}/a.html"], "give --recipe too"),
        (["inspect", "{w}"], "no config.json"),
        (["quantize", "{w}/model", "{w}/tokens.npz", "--recipe", "mxfp4"], "is a file"),
        (["quantize", "{w}/model", "{w}/new", "--recipe", "mxfp5"], "unknown recipe"),
    ],
)
def test_errors_are_one_line(workplace, arguments, message):
    result = run(*(a.format(w=workplace) for a in arguments), code=1)
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and message in last
    assert "Traceback" not in result.stderr and not result.stdout


@pytest.mark.parametrize("kind", ["empty", "npy", "cut", "noise"])
def test_bad_token_files_are_named(workplace, tmp_path, kind):
    file = tmp_path / "tokens.npz"
    whole = (workplace / "tokens.npz").read_bytes()
    with open(tmp_path / "a.npy", "wb") as f:
        np.save(f, np.zeros((2, 8), np.int32))
    content = {"empty": b"", "npy": (tmp_path / "a.npy").read_bytes(), "cut": whole[:100], "noise": b"no archive"}
    file.write_bytes(content[kind])
    result = run("eval", workplace / "model", "--tokens", f"{file}:text", code=1)
    assert result.stderr.startswith(f"error: {file}: it is ") and result.stderr.count("\n") == 1


def test_a_quantized_model_is_not_quantized_again(workplace, quantized, tmp_path):
    result = run("quantize", quantized["mxjax"], tmp_path / "q", "--recipe", "nvfp4", code=1)
    assert "quantized already" in result.stderr
    for folder in quantized.values():
        result = run("demo", "--model", folder, "--out", tmp_path / "demo", code=1)
        assert "quantized already" in result.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [[], ["quantize", "a", "b"], ["eval", "a"], ["eval", "a", "--tokens=t.npz:k", "--limit=0"], ["frobnicate"]],
)
def test_wrong_usage_is_exit_code_2(arguments):
    assert "Usage:" in run(*arguments, code=2).stderr


def test_debug_shows_the_traceback(workplace):
    for arguments in (["inspect", workplace, "--debug"], ["--debug", "inspect", workplace]):
        result = run(*arguments, code=1)
        assert "Traceback" in result.stderr and "CheckpointError" in result.stderr


def test_long_errors_are_cut():
    text = app._one_line(ValueError("first\n" + "\n".join(f"  layer {i}" for i in range(500))))
    assert text.startswith("first; layer 0; layer 1;") and "\n" not in text
    assert len(text) < 640 and text.endswith("(--debug shows all)")
    assert app._one_line(TypeError("a bug")) == "TypeError: a bug"


def test_calibration_data_is_not_used_by_data_free_recipes(workplace):
    tokens = f"{workplace}/tokens.npz:text"
    result = run("eval", workplace / "model", "--recipe", "mxfp4", "--calib", tokens, "--tokens", tokens)
    assert "data-free" in result.stderr


@pytest.mark.parametrize("spec", ["none.txt", "none.npz:text"])
def test_calibration_files_must_exist_even_if_unused(workplace, tmp_path, spec):
    calib = ["--calib", tmp_path / spec]
    name = spec.partition(":")[0]
    for arguments in (
        ["quantize", workplace / "model", tmp_path / "q", "--recipe=mxfp4", *calib],
        ["eval", workplace / "model", f"--tokens={workplace}/tokens.npz:text", "--recipe=mxfp4", *calib],
        ["eval", workplace / "model", f"--tokens={workplace}/tokens.npz:text", *calib],
    ):
        assert run(*arguments, code=1).stderr.endswith(f"{name} does not exist\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("recipe", ["gptq_nvfp4_a16", "smoothquant_mxfp4"])
def test_recipes_that_need_data(workplace, tmp_path, recipe):
    tokens = f"{workplace}/tokens.npz:text"
    refused = run("eval", workplace / "model", "--recipe", recipe, "--tokens", tokens, code=1)
    assert "needs calibration data: --calib" in refused.stderr
    arguments = ["--recipe", recipe, "--calib", tokens]
    on_the_fly = run_json("eval", workplace / "model", "--tokens", tokens, *arguments)["perplexity"]
    run("quantize", workplace / "model", tmp_path / "q", *arguments)
    reference = ["--reference", workplace / "model"]
    assert run_json("eval", tmp_path / "q", "--tokens", tokens, *reference)["perplexity"] == on_the_fly
    opened = open_model(str(workplace / "model"), Console(quiet=True))
    data = np.load(workplace / "tokens.npz")["text"]
    weights = mxjax.quantize_sequential(opened.model, [data], recipe)
    model = mxjax.nnx.from_params(opened.model, replace_leaves(opened.params, weights))
    assert on_the_fly == mxjax.eval.evaluate(model, data, reference=opened.model).perplexity


def test_calibration_text_is_cut_into_sequences(workplace, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(mxjax, "quantize_sequential", lambda model, batches, cfg, **_: seen.append(batches) or {})
    (tmp_path / "text.txt").write_text("numbers " * 200)
    tokens = f"{workplace}/tokens.npz:text"
    run("eval", workplace / "model", "--recipe=gptq_mxfp4", "--tokens", tokens, "--calib", tmp_path / "text.txt")
    run("eval", workplace / "model", "--recipe=gptq_mxfp4", "--tokens", tokens, "--calib", tokens)
    text, npz = seen
    assert text[0].shape == (1600 // 512, 512)
    assert np.array_equal(npz[0], np.load(workplace / "tokens.npz")["text"])


def test_which_recipes_need_data():
    rows = {row["recipe"]: row["needs_calibration"] for row in run_json("recipes")["recipes"]}
    assert rows["mr_gptq_mxfp4"] and rows["smoothquant_nvfp4"] and rows["wush_mxfp4"]
    assert not rows["mxfp4"] and not rows["hadamard_mxfp4"]
