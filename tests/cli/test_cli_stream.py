"""``mxjax quantize`` on folders that are streamed, and ``mxjax inspect --verify``."""

import json
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli_models import tiny, write_folder
from click.testing import CliRunner
from mxjax_models import params

import mxjax
from mxjax.cli import main
from mxjax.cli.models import params_of
from mxjax.io import safetensors
from mxjax.ops.qweight import is_quantized


def run(*arguments, code=0):
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


def same_leaves(a, b):
    a, b = jax.tree_util.tree_leaves_with_path(a), jax.tree_util.tree_leaves_with_path(b)
    return len(a) == len(b) and all(
        x.dtype == y.dtype and bool((x == y).all()) for (_, x), (_, y) in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4_a16", "hadamard_mxfp4"])
def test_a_known_model_gets_the_plan_and_paths_of_the_loaded_one(workplace, tmp_path, recipe):
    data = json.loads(run("quantize", workplace / "model", tmp_path / "q", "--recipe", recipe, "--json").stdout)
    assert data["files"] == 1 and data["resumed_files"] == 0 and data["gigabytes_per_second"] > 0
    model = params_of(params.load(workplace / "model"))
    plan = mxjax.plan(model, recipe)
    assert (data["quantized"], data["kept"]) == (len(plan.quantized), len(plan.kept))
    assert same_leaves(mxjax.load(tmp_path / "q"), mxjax.quantize(model, recipe))


def test_shard_size_and_an_unknown_model(tmp_path):
    """A family that mxjax has no code for: tensor names are the paths."""
    write_folder(tmp_path / "in", tiny())
    config = json.loads((tmp_path / "in" / "config.json").read_text()) | {"model_type": "unheard_of"}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    arguments = ["--recipe", "mxfp4", "--shard-size", "60kB"]
    text = run("quantize", tmp_path / "in", tmp_path / "q", *arguments).stdout
    assert "14 of 21 arrays quantized to 4.25 bits a weight" in text and "GB/s" in text
    files = sorted((tmp_path / "q").glob("*.safetensors"))
    assert len(files) > 1
    assert all(sum(e.nbytes for e in safetensors.read(f).values()) <= 80_000 for f in files)  # the embedding: 71 kB
    got = mxjax.load(tmp_path / "q")["model"]["layers"]["0"]["mlp"]["up_proj"]["weight"]
    assert got.format.name == "mxfp4" and got.shape == (128, 64)


@pytest.mark.parametrize("size", ["0", "-1", "5 apples", "GB", ""])
def test_sizes_that_are_none(workplace, tmp_path, size):
    wrong = run("quantize", workplace / "model", tmp_path / "q", "--recipe=mxfp4", f"--shard-size={size}", code=2)
    assert "is no size such as 5GB" in wrong.stderr


def test_verify(workplace, tmp_path):
    run("quantize", workplace / "model", tmp_path / "q", "--recipe", "mxfp4", "--format", "compressed-tensors")
    data = json.loads(run("inspect", tmp_path / "q", "--verify", "--json").stdout)
    assert data["verified_files"] == len(list((tmp_path / "q").iterdir())) - 1
    text = " ".join(run("inspect", tmp_path / "q", "--verify").stdout.split())  # lines may be broken anywhere
    assert f"{data['verified_files']} files are as they were written" in text
    assert json.loads(run("inspect", tmp_path / "q", "--json").stdout)["verified_files"] is None
    file = tmp_path / "q" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert "changed since it was written" in run("inspect", tmp_path / "q", "--verify", code=1).stderr
    (tmp_path / "q" / "SHA256SUMS").unlink()
    assert "has no SHA256SUMS: quantize_folder writes it" in run("inspect", tmp_path / "q", "--verify", code=1).stderr


def test_ctrl_c_says_how_to_go_on(tmp_path):
    """Interrupted while the first shard of many is there; the same command finishes, and the bytes are the same."""
    values = {f"layers.{i}.proj.weight": jnp.full((2048, 2048), i + 1, jnp.bfloat16) for i in range(24)}
    (tmp_path / "in").mkdir()
    safetensors.write(tmp_path / "in" / "model.safetensors", values)
    (tmp_path / "in" / "config.json").write_text("{}")
    start = "from mxjax.cli import entry; entry.main()"
    command = [sys.executable, "-c", start, "quantize", "in", "out", "--recipe", "nvfp4", "--shard-size", "2MB"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    partial, deadline = tmp_path / ".out.partial", time.monotonic() + 60
    while not list(partial.glob("*.safetensors")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    if process.returncode == 130:  # else it was faster than the signal
        assert "interrupted" in stderr and "the same command goes on" in stderr and not (tmp_path / "out").exists()
        again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert again.returncode == 0 and "going on from the files that are finished" in again.stderr
    assert not partial.exists()
    mxjax.quantize_folder(tmp_path / "in", tmp_path / "whole", "nvfp4", shard_size=2_000_000)
    for file in (tmp_path / "whole").iterdir():
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes(), file.name


def test_experts_of_gpt_oss(tmp_path):
    """The layout takes the experts alone, so they alone are quantized; their biases are matrices, and stay."""
    rng = np.random.default_rng(0)
    experts = "model.layers.0.mlp.experts"
    shapes = {
        f"{experts}.gate_up_proj": (3, 64, 96),
        f"{experts}.gate_up_proj_bias": (3, 96),
        f"{experts}.down_proj": (3, 64, 64),
        f"{experts}.down_proj_bias": (3, 64),
        "model.layers.0.mlp.router.weight": (3, 64),
        "model.layers.0.self_attn.q_proj.weight": (64, 64),
    }
    source = tmp_path / "in"
    source.mkdir()
    values = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    safetensors.write(source / "model.safetensors", values)
    (source / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    run("quantize", source, tmp_path / "q", "--recipe", "mxfp4_a16", "--format", "gpt-oss", "--shard-size", "10kB")
    loaded = mxjax.load(tmp_path / "q")["model"]["layers"]["0"]
    for name in ("gate_up_proj", "down_proj"):
        want = mxjax.quantize({"w": jnp.asarray(values[f"{experts}.{name}"])}, "mxfp4_a16")["w"].qtensor
        got = loaded["mlp"]["experts"][name].qtensor
        assert got.axis == -2 and bool((got.codes == want.codes).all()) and bool((got.scales == want.scales).all())
        assert loaded["mlp"]["experts"][f"{name}_bias"].dtype == jnp.bfloat16
    assert loaded["self_attn"]["q_proj"]["weight"].dtype == jnp.bfloat16
    run("quantize", source, tmp_path / "ours", "--recipe", "mxfp4_a16")
    layer = mxjax.load(tmp_path / "ours")["model"]["layers"]["0"]
    assert is_quantized(layer["self_attn"]["q_proj"]["weight"])
    assert not is_quantized(layer["mlp"]["experts"]["gate_up_proj_bias"])


@pytest.mark.parametrize("recipe", ["mxfp4", "gptq_mxfp4_a16"])
def test_a_tokenizer_elsewhere_is_refused_before_the_work(workplace, tmp_path, recipe):
    source = write_folder(tmp_path / "in", tiny(num_hidden_layers=1))
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.json").symlink_to("/etc/hostname")
    arguments = ["quantize", source, tmp_path / "q", "--recipe", recipe, "--calib", f"{workplace}/tokens.npz:text"]
    result = run(*arguments, code=1)
    assert "a link that leaves its folder" in result.stderr and "calibrating" not in result.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


def test_processes_share_a_folder(workplace, tmp_path):
    """What three processes write, one after the other, has the values of what one writes; the last completes it."""
    for i in range(3):
        assert not (tmp_path / "q").exists()
        arguments = ["quantize", workplace / "model", tmp_path / "q", "--recipe", "nvfp4", "--process", f"{i}/3"]
        result = run(*arguments, "--json")
        data = json.loads(result.stdout)
        assert (data["process"], data["processes"], data["complete"]) == (i, 3, i == 2)
        assert ("the share of process" in result.stderr) == (i < 2)
    run("quantize", workplace / "model", tmp_path / "whole", "--recipe", "nvfp4")
    assert same_leaves(mxjax.load(tmp_path / "q"), mxjax.load(tmp_path / "whole"))
    for bad in ("3/3", "1", "-1/2", "0/0"):
        assert "is no process of several" in run(*arguments[:-1], bad, code=2).stderr
    arguments[2], arguments[4] = tmp_path / "calibrated", "gptq_mxfp4"
    assert "--process shares the work of a data-free recipe" in run(*arguments, code=1).stderr
