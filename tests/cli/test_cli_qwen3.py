"""A second model family through the commands: a tiny Qwen3 folder with random weights.

One recipe of each way through the commands: data-free, calibrated, with a transform that is chosen, with two streams of
activations. tests/calibration runs every recipe on Qwen3.
"""

import json

import numpy as np
import pytest
from cli_models import tiny, write_folder, write_tokens
from click.testing import CliRunner

from mxjax.cli import main

NAMES = ["mxfp4", "mr_gptq_mxfp4", "best_mxfp4", "best_nvfp4"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("qwen3")
    write_folder(root / "model", tiny(4, model_type="qwen3", num_hidden_layers=1))
    write_tokens(root / "tokens.npz", (2, 16))
    return root


def run_json(*arguments):
    result = CliRunner().invoke(main, [*map(str, arguments), "--json"])
    assert result.exit_code == 0, (result.stderr, result.exception)
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_eval_runs_every_recipe(place, name):
    tokens = f"{place}/tokens.npz:text"
    data = run_json("eval", place / "model", "--recipe", name, "--calib", tokens, "--tokens", tokens)
    # Random weights predict nothing: perplexity is near the vocabulary's size, and FP4 moves it by little.
    assert np.isfinite([data["perplexity"], data["kl"]]).all() and data["kl"] > 0
    assert data["perplexity"] == pytest.approx(data["perplexity_float"], rel=0.5)


def test_a_calibrated_folder_is_qwen3_still(place, tmp_path):
    tokens = f"{place}/tokens.npz:text"
    data = run_json("quantize", place / "model", tmp_path / "q", "--recipe", "mr_gptq_mxfp4", "--calib", tokens)
    assert data["quantized"] == 7
    assert json.loads((tmp_path / "q" / "config.json").read_text())["model_type"] == "qwen3"
    score = run_json("eval", tmp_path / "q", "--tokens", tokens, "--reference", place / "model")
    assert 0 < score["kl"] < 0.5 and 0 < score["top1_agreement"] <= 1
