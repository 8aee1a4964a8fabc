"""FP-Quant's real quantization, from files built here by its rules: the reader gives the weights that were meant."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from io_cases import E2M1, assert_same, config_of

import mxjax
from mxjax.errors import CheckpointError
from mxjax.io import safetensors as st
from mxjax.transforms import BlockMatrix, Hadamard, hadamard_matrix

WEIGHTS = "model.safetensors"
ROWS, K = 8, 128


def orthogonal(size):
    return np.linalg.qr(np.random.default_rng(1).standard_normal((size, size)))[0].astype(np.float32)


MATRICES = {"hadamard": hadamard_matrix, "identity": lambda n: np.eye(n, dtype=np.float32), "other": orthogonal}


def quantize(x, dtype):
    """Codes (one a byte), scale bytes and divisor, in float64; ties do not matter here."""
    block = 32 if dtype == "mxfp4" else 16
    blocks = x.reshape(ROWS, -1, block)
    amax = np.abs(blocks).max(-1)
    if dtype == "mxfp4":
        byte, divisor = (np.floor(np.log2(amax)) + 127).astype(np.uint8), 3.0
        scale = np.exp2(byte.astype(np.float64) - 127)
    else:
        divisor = float(np.float32(2688 / np.abs(x).max()))
        rounded = (amax / 6 * divisor).astype(ml_dtypes.float8_e4m3fn)
        byte, scale = rounded.view(np.uint8), rounded.astype(np.float64)
    unit = blocks * divisor / scale[..., None]
    magnitude = np.abs(np.abs(unit)[..., None] - E2M1).argmin(-1)
    codes = (magnitude | np.where(unit < 0, 8, 0)).astype(np.uint8)
    values = np.where(codes & 8, -1, 1) * E2M1[codes & 7] * scale[..., None] / divisor
    return codes.reshape(ROWS, K), byte, divisor, values.reshape(ROWS, K)


def folder_of(path, dtype="mxfp4", matrix="hadamard", size=32, store="bfloat16", **config):
    """A folder with one Linear; returns its tensors and the weight in the space of the model."""
    path.mkdir(parents=True, exist_ok=True)
    w = np.random.default_rng(0).standard_normal((ROWS, K))
    m = MATRICES[matrix](size).astype(store)
    exact = m.astype(np.float64)
    turned = (w.reshape(ROWS, -1, size) @ exact).reshape(ROWS, K)
    codes, byte, divisor, values = quantize(turned, dtype)
    tensors = {
        "a.qweight": codes[:, ::2] | codes[:, 1::2] << 4,
        "a.scales": byte,
        "a.weight_global_scale": np.array([divisor], np.float32),
        "a.act_global_scale": np.array([3.0 if dtype == "mxfp4" else 500.0], np.float32),
        "a.forward_hadamard_matrix": m,
        "a.backward_hadamard_matrix": m,
        "norm.weight": np.ones(4, np.float32),
    }
    quantization = {
        "quant_method": "fp_quant",
        "forward_dtype": dtype,
        "forward_method": "abs_max",
        "backward_dtype": "bf16",
        "hadamard_group_size": size,
        "pseudoquantization": False,
        "store_master_weights": False,
        "transform_init": matrix,
        "modules_to_not_convert": ["lm_head"],
        **config,
    }
    write(path, tensors, {"dtype": "bfloat16", "quantization_config": quantization})
    return tensors, (values.reshape(ROWS, -1, size) @ np.linalg.inv(exact)).reshape(ROWS, K), exact


def write(path, tensors, config):
    st.write(path / WEIGHTS, tensors, {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("dtype, size", [("mxfp4", 32), ("mxfp4", 128), ("nvfp4", 16), ("nvfp4", 64)])
def test_weights_and_products(tmp_path, dtype, size, matrix):
    _, w, stored = folder_of(tmp_path, dtype, matrix, size)
    got = mxjax.load(tmp_path)["a"]["weight"]
    # bfloat16 matrices are orthogonal to 2^-8; our Hadamard is the exact one.
    assert np.allclose(got.dequantize("float32"), w, atol=2.0**-7 * np.abs(w).max())
    assert got.activation.format == mxjax.get_format(dtype)
    assert got.activation.scale == ("third" if dtype == "mxfp4" else "even")
    if dtype == "nvfp4":
        assert got.input_scale == np.float32(1) / np.float32(500)
    kind = {"hadamard": Hadamard, "other": BlockMatrix}.get(matrix)
    assert got.transform is None if kind is None else isinstance(got.transform, kind)
    x = np.random.default_rng(2).standard_normal((4, K)).astype(np.float32)
    if kind is not None:
        assert np.allclose(got.transform.activation(x), (x.reshape(4, -1, size) @ stored).reshape(4, K), atol=2e-2)
    # The weight without its activations, so that the product can be compared.
    plain = mxjax.QWeight(qtensor=got.qtensor, transform=got.transform)
    y = mxjax.qdot(x, plain)
    assert np.allclose(y, x @ w.T, atol=2.0**-7 * np.abs(x @ w.T).max() * 4)


def test_the_global_factor_is_exact(tmp_path):
    """value = code * 2^(byte - 127) / 3, rounded once by the reciprocal and once by the product."""
    tensors, _, _ = folder_of(tmp_path, matrix="identity")
    q = mxjax.load(tmp_path)["a"]["weight"].qtensor
    assert q.global_scale == np.float32(1) / np.float32(3)
    packed = tensors["a.qweight"]
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(ROWS, -1, 32)
    exact = (
        np.where(codes & 8, -1, 1) * E2M1[codes & 7] * np.exp2(tensors["a.scales"].astype(float) - 127)[..., None] / 3
    )
    got = np.asarray(q.dequantize("float32"), np.float64)
    assert np.all(np.abs(got - exact.reshape(ROWS, K)) <= 2 * 2.0**-24 * np.abs(got))


def test_our_own_format_carries_it(tmp_path):
    folder_of(tmp_path / "peer", matrix="other")
    tree = mxjax.load(tmp_path / "peer")
    mxjax.save(tmp_path / "ours", tree)
    assert_same(mxjax.load(tmp_path / "ours"), tree)
    with pytest.raises(CheckpointError, match=r"transform \(BlockMatrix\)"):
        mxjax.save(tmp_path / "ct", tree, "compressed-tensors")


DAMAGE = {
    "no matrix": ({"a.forward_hadamard_matrix": None}, {}, r"a\.forward_hadamard_matrix is missing"),
    "no backward": ({"a.backward_hadamard_matrix": None}, {}, r"a\.backward_hadamard_matrix is missing"),
    "no scales": ({"a.scales": None}, {}, r"a\.scales is missing"),
    "no global": ({"a.weight_global_scale": None}, {}, r"a\.weight_global_scale is missing"),
    "no act global": ({"a.act_global_scale": None}, {}, r"a\.act_global_scale is missing"),
    "act global 1": ({"a.act_global_scale": np.ones(1, np.float32)}, {}, r"a\.act_global_scale in .*1\.0; the rule"),
    "zero global": ({"a.weight_global_scale": np.zeros(1, np.float32)}, {}, r"a\.weight_global_scale in .*no global"),
    "matrix of 64": ({"a.forward_hadamard_matrix": np.eye(64, dtype=np.float32)}, {}, r"a\.forward.* says \[32, 32\]"),
    "matrix of ints": ({"a.forward_hadamard_matrix": np.eye(32, dtype=np.int32)}, {}, "int32"),
    "no rotation": ({"a.forward_hadamard_matrix": np.ones((32, 32), np.float32)}, {}, "no orthogonal matrix"),
    "nan": ({"a.forward_hadamard_matrix": np.full((32, 32), np.nan, np.float32)}, {}, "no orthogonal matrix"),
    "pseudo tensor": ({"a.dqweight": np.ones((8, 128), np.float32)}, {}, r"a\.dqweight in .*no such tensor"),
    "pseudo": ({}, {"pseudoquantization": True}, "pseudoquantization"),
    "quest": ({}, {"forward_method": "quest"}, "'quest'"),
    "dtype": ({}, {"forward_dtype": "mxfp8"}, "forward_dtype 'mxfp8'"),
    "size": ({}, {"hadamard_group_size": 16}, "hadamard_group_size '16'"),
    "size text": ({}, {"hadamard_group_size": [32]}, "hadamard_group_size"),
    "ignored": ({}, {"modules_to_not_convert": ["a"]}, "the config does not quantize a"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged(tmp_path, case):
    changes, config, message = DAMAGE[case]
    tensors = folder_of(tmp_path, **config)[0] if "dtype" not in case else folder_of(tmp_path)[0]
    full = config_of(tmp_path)
    full["quantization_config"] |= config
    tensors = {n: x for n, x in {**tensors, **changes}.items() if x is not None}
    write(tmp_path, tensors, full)
    with pytest.raises(CheckpointError, match=message):
        mxjax.load(tmp_path)


def test_shardings_reach_the_matrices(tmp_path):
    folder_of(tmp_path, matrix="other")
    mesh = jax.make_mesh((4,), ("x",))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    w = mxjax.load(tmp_path, shardings=where)["a"]["weight"]
    assert w.transform.matrices.sharding == where and w.transform.matrices.shape == (4, 32, 32)
    assert w.transform.matrices.dtype == jnp.float32
