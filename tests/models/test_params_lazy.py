"""``load(..., lazy=True)``: the weights stay in the file until somebody uses them."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from mxjax_models import llama, params
from mxjax_models.llama import LlamaConfig
from test_params import assert_holds, weights, write_folder

import mxjax


def leaves(model):
    return nnx.to_flat_state(nnx.state(model))


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shards", [0, 3])
def test_parameters_are_maps_of_the_file(tmp_path, stored, shards):
    config = LlamaConfig.tiny()
    tensors = weights(config, stored)
    model = llama.load(write_folder(tmp_path, config, tensors, shards), None, lazy=True)
    for path, variable in leaves(model):
        value = variable.get_value()
        assert type(value) is np.ndarray and value.dtype == stored and not value.flags.writeable, path
        base = value
        while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
            base = base.base
        assert isinstance(base, np.memmap), path
    assert_holds(model, tensors)


def test_another_dtype_is_a_copy_on_the_host(tmp_path):
    config = LlamaConfig.tiny(num_hidden_layers=1)
    tensors = weights(config, ml_dtypes.bfloat16)
    model = llama.load(write_folder(tmp_path, config, tensors), lazy=True)
    assert all(type(v.get_value()) is np.ndarray and v.get_value().dtype == np.float32 for _, v in leaves(model))
    assert_holds(model, {name: x.astype(np.float32) for name, x in tensors.items()})


def test_dtype_none_keeps_what_is_stored(tmp_path):
    config = LlamaConfig.tiny(num_hidden_layers=1)
    folder = write_folder(tmp_path, config, weights(config, ml_dtypes.bfloat16))
    model = params.load(folder, None)
    assert all(isinstance(x, jax.Array) and x.dtype == jnp.bfloat16 for x in jax.tree.leaves(nnx.state(model)))


def test_a_lazy_model_computes_the_same(tmp_path):
    config = LlamaConfig.tiny(num_hidden_layers=2)
    folder = write_folder(tmp_path, config, weights(config, ml_dtypes.bfloat16))
    tokens = np.arange(12).reshape(2, 6)
    expected = llama.load(folder, jnp.bfloat16)(tokens)
    np.testing.assert_array_equal(llama.load(folder, None, lazy=True)(tokens), expected)


def test_a_lazy_model_is_calibrated_block_by_block(tmp_path):
    """The same bits as from a model in memory."""
    config = LlamaConfig.tiny(num_hidden_layers=1)
    folder = write_folder(tmp_path, config, weights(config, ml_dtypes.bfloat16))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 16))
    want = mxjax.quantize_sequential(llama.load(folder, jnp.bfloat16), [tokens], "gptq_mxfp4")
    got = mxjax.quantize_sequential(llama.load(folder, None, lazy=True), [tokens], "gptq_mxfp4")
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_a_lazy_model_is_calibrated_in_another_dtype(tmp_path):
    """bfloat16 in the file, float32 on the device: the bits of the model in float32, and a run of its own to resume."""
    config = LlamaConfig.tiny(num_hidden_layers=1)
    folder = write_folder(tmp_path, config, weights(config, ml_dtypes.bfloat16))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 16))
    want = mxjax.quantize_sequential(llama.load(folder), [tokens], "gptq_mxfp4")
    lazy, kept = llama.load(folder, None, lazy=True), tmp_path / "kept"
    got = mxjax.quantize_sequential(lazy, [tokens], "gptq_mxfp4", dtype=jnp.float32, resume=kept)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
    with pytest.raises(mxjax.errors.CheckpointError, match="dtype"):
        mxjax.quantize_sequential(lazy, [tokens], "gptq_mxfp4", resume=kept)


CHILD = """
import sys, jax.numpy as jnp
from mxjax_models import llama
def resident():
    return int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0]) * 1024
jnp.zeros(1).block_until_ready()
before = resident()
model = llama.load(sys.argv[1], None, lazy=True)
print(resident() - before)
"""


def test_loading_takes_no_memory(tmp_path):
    config = LlamaConfig.tiny(hidden_size=512, intermediate_size=8192, num_hidden_layers=4)
    tensors = weights(config, ml_dtypes.bfloat16)
    total = sum(x.nbytes for x in tensors.values())
    folder = write_folder(tmp_path, config, tensors)
    done = subprocess.run([sys.executable, "-c", CHILD, str(folder)], capture_output=True, text=True, check=True)
    # Tracing the model for its shapes takes some 20 MB of Python objects, whatever its size.
    assert total > 100e6 and int(done.stdout) < total / 2
