"""`mxjax convert`, `mxjax quantize --format` and `mxjax inspect` on every layout."""

import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from cli_models import tiny, write_folder
from test_cli_commands import run, run_json

import mxjax
from mxjax.io import layout_of

sys.path.append(str(Path(__file__).parents[1] / "io"))
from test_io_fp_quant import folder_of as folder_of_fp_quant
from test_io_gpt_oss import folder_of as folder_of_gpt_oss

HOLDS = {"mxfp4": ("compressed-tensors", "quark"), "nvfp4": ("compressed-tensors", "modelopt", "quark")}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("convert")
    write_folder(folder / "model", tiny())
    np.savez(folder / "tokens.npz", text=np.arange(32, dtype=np.int32).reshape(2, 16))
    return folder


@pytest.mark.parametrize("recipe", HOLDS)
def test_quantize_to_every_layout_and_evaluate(model, tmp_path, recipe):
    """Perplexity of the folder is that of the recipe; q/k/v and gate/up share one tensor scale without being asked."""
    tokens = f"--tokens={model}/tokens.npz:text"
    found = set()
    for layout in HOLDS[recipe]:
        out = tmp_path / layout
        result = run("quantize", model / "model", out, "--recipe", f"{recipe}_a16", "--format", layout)
        assert "different tensor scales" not in result.stderr
        assert layout_of(out) == layout
        found.add(run_json("eval", out, tokens)["perplexity"])
        data = run_json("inspect", out)
        assert (data["layout"], data["quantized"], data["formats"]) == (layout, 14, [recipe])
    assert len(found) == 1


def test_convert_keeps_the_model(model, tmp_path):
    """ModelOpt -> ours -> Quark -> compressed-tensors: it stays a model that can be evaluated, with its tokenizer."""
    tokens = f"--tokens={model}/tokens.npz:text"
    run("quantize", model / "model", tmp_path / "a", "--recipe", "nvfp4_a16", "--format", "modelopt")
    expected = run_json("eval", tmp_path / "a", tokens)["perplexity"]
    steps = ["mxjax", "quark", "orbax", "compressed-tensors", "modelopt"]
    source = tmp_path / "a"
    for i, to in enumerate(steps):
        target = tmp_path / f"{i}"
        data = run_json("convert", source, target, "--to", to)
        assert (data["format"], data["quantized"], data["formats"]) == (to, 14, ["nvfp4"])
        assert run_json("inspect", target)["layout"] == to
        assert run_json("eval", target, tokens)["perplexity"] == expected
        assert (target / "tokenizer.json").read_bytes() == (model / "model" / "tokenizer.json").read_bytes()
        source = target
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_a_family_that_is_not_known_keeps_its_names(model, tmp_path):
    run("quantize", model / "model", tmp_path / "a", "--recipe", "mxfp4", "--format", "quark")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    (tmp_path / "a" / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))
    run("convert", tmp_path / "a", tmp_path / "b", "--to", "mxjax")
    paths = {row["path"] for row in run_json("inspect", tmp_path / "b")["rows"]}
    assert "model/layers/0/mlp/up_proj/weight" in paths
    run("convert", tmp_path / "b", tmp_path / "c", "--to", "quark")
    assert (tmp_path / "c" / "model.safetensors").read_bytes() == (tmp_path / "a" / "model.safetensors").read_bytes()


def test_refusals_are_one_line(model, tmp_path):
    run("quantize", model / "model", tmp_path / "a", "--recipe", "mxfp4", "--format", "quark")
    refused = run("convert", tmp_path / "a", tmp_path / "b", "--to", "modelopt", code=1)
    assert refused.stderr.strip().splitlines()[-1].startswith("error: modelopt cannot carry 14")
    assert not (tmp_path / "b").exists()
    refused = run("convert", model / "model", tmp_path / "b", "--to", "quark", code=1)
    assert "is not quantized; `mxjax quantize --format quark` quantizes it" in refused.stderr
    refused = run("convert", tmp_path / "a", tmp_path / "a", "--to", "compressed-tensors", "--overwrite", code=1)
    assert "must not contain each other" in refused.stderr
    assert run("convert", tmp_path / "a", tmp_path / "b", "--to", "gguf", code=2).stderr


def test_inspect_needs_no_model(tmp_path):
    """gpt-oss, FP-Quant, and a tree of ours without any config."""
    folder_of_gpt_oss(tmp_path / "gpt_oss")
    data = run_json("inspect", tmp_path / "gpt_oss")
    assert (data["layout"], data["quantized"], data["bits_per_weight"]) == ("gpt-oss", 2, 4.25)
    folder_of_fp_quant(tmp_path / "fp_quant", matrix="other")
    data = run_json("inspect", tmp_path / "fp_quant")
    assert (data["layout"], data["formats"], data["rows"][0]["extras"]) == ("fp-quant", ["mxfp4"], "block matrix 32")
    mxjax.save(tmp_path / "ours", mxjax.quantize({"a": {"kernel": jnp.ones((64, 8))}}, "nvfp4"))
    assert run_json("inspect", tmp_path / "ours")["layout"] == "mxjax"
    run("convert", tmp_path / "ours", tmp_path / "orbax", "--to", "orbax")
    assert run_json("inspect", tmp_path / "orbax")["layout"] == "orbax"
    assert run("inspect", tmp_path / "gpt_oss").stdout.rstrip().splitlines()[-1].startswith("gpt-oss: 2 of 5")
