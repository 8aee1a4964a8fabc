"""``mxjax quantize --calib`` on a folder: weights stay in its files until their block's turn comes."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from cli_models import tiny, write_folder, write_tokens
from click.testing import CliRunner
from mxjax_models import llama, params

import mxjax
from mxjax.cli import main
from mxjax.cli.console import Console
from mxjax.cli.models import open_model
from mxjax.ops.qweight import is_quantized


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A bfloat16 model, and tokens."""
    root = tmp_path_factory.mktemp("lazy")
    model = tiny(3, tie_word_embeddings=False, num_hidden_layers=1)
    folder = write_folder(root / "model", model)
    stored = {name: x.astype(ml_dtypes.bfloat16) for name, x in params.to_hf(model).items()}
    safetensors.numpy.save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokens(root / "tokens.npz")
    return root


def quantize(place, out, *options):
    arguments = ["quantize", place / "model", out, "--calib", f"{place}/tokens.npz:text", "--json", *options]
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == 0, (result.stderr, result.exception)
    return json.loads(result.stdout)


def test_a_folder_is_opened_and_not_read(place):
    for x in jax.tree.leaves(open_model(str(place / "model"), Console(quiet=True), lazy=True).params):
        assert type(x) is np.ndarray and x.dtype == ml_dtypes.bfloat16 and not x.flags.writeable


def test_same_bits_as_in_float32(place, tmp_path):
    """Quantized weights are those of the model in memory in float32; the others keep the source's values and dtype."""
    data = quantize(place, tmp_path / "q", "--recipe", "gptq_mxfp4_a16")
    tokens = np.load(place / "tokens.npz")["text"]
    want = mxjax.quantize_sequential(llama.load(place / "model"), [tokens], "gptq_mxfp4_a16")
    source = {name: x for name, x in mxjax.load(place / "model", names=params.path_of).items()}
    source = {path_of(path): x for path, x in jax.tree_util.tree_flatten_with_path(source)[0]}
    got = mxjax.load(tmp_path / "q")
    seen = 0
    for key_path, leaf in jax.tree_util.tree_flatten_with_path(got, is_leaf=is_quantized)[0]:
        path = path_of(key_path)
        if path not in want:
            assert leaf.dtype == ml_dtypes.bfloat16 and np.array_equal(leaf, source[path]), path
            continue
        seen += 1
        assert jax.tree.structure(leaf) == jax.tree.structure(want[path]), path
        for x, y in zip(jax.tree.leaves(leaf), jax.tree.leaves(want[path]), strict=True):
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), path
    assert seen == len(want) == data["quantized"] == 7


def path_of(key_path):
    return "/".join(str(getattr(key, "key", key)) for key in key_path)


@pytest.mark.parametrize("file_format", ["mxjax", "compressed-tensors"])
def test_shards(place, tmp_path, file_format):
    options = ("--recipe", "gptq_mxfp4_a16", "--format", file_format)
    quantize(place, tmp_path / "one", *options)
    quantize(place, tmp_path / "many", *options, "--shard-size", "20kB")
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2 and len(list((tmp_path / "many").glob("*.index.json"))) == 1
    one, many = mxjax.load(tmp_path / "one"), mxjax.load(tmp_path / "many")
    assert jax.tree.structure(one) == jax.tree.structure(many)
    assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True))
    converted = tmp_path / "converted"
    arguments = ["convert", tmp_path / "many", converted, "--to", "compressed-tensors", "--shard-size", "20kB"]
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert len(list(converted.glob("*.safetensors"))) > 2
