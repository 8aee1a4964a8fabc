"""What several tests of ``mxjax.io`` share: trees, peer files, a NumPy decoder of their own."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import mxjax
from mxjax.config import FUSED

INTEROP = Path(__file__).parents[1] / "data" / "interop"
SOURCE = INTEROP / "source_tiny_llama"
PEERS = {"mxfp4": INTEROP / "compressed_tensors_mxfp4", "nvfp4": INTEROP / "compressed_tensors_nvfp4"}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def quantized_source(fmt: str, activation: str | None) -> dict:
    """The tiny Llama as round-to-nearest, with shared tensor scales, in PyTorch's names and orientation."""
    rule = mxjax.Rule(weight=fmt, activation=activation, axis=-1)
    return mxjax.quantize(mxjax.load(SOURCE), mxjax.QuantConfig(rules=[rule], share_scales=FUSED))


def assert_same(a, b) -> None:
    """Same structure (static fields included), dtypes, shapes and bytes."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree_util.tree_flatten_with_path(a)[0], jax.tree.leaves(b), strict=True):
        name = jax.tree_util.keystr(path)
        if not hasattr(x, "dtype"):
            assert type(x) is type(y) and x == y, name
            continue
        assert x.dtype == y.dtype and x.shape == y.shape, (name, x.dtype, y.dtype, x.shape, y.shape)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), name


def raw_tensors(file: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """dtype, shape and bytes of every tensor, read with nothing but the definition of the file format."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    body = data[8 + size :]
    return {n: (t["dtype"], t["shape"], body[slice(*t["data_offsets"])]) for n, t in header.items()}


def decode_numpy(module: str, tensors: dict) -> np.ndarray:
    """The weight of a module in float64: low nibble first, E8M0 or E4M3 block scales, global scale as a divisor."""
    _, shape, packed = tensors[f"{module}.weight_packed"]
    codes = np.frombuffer(packed, np.uint8).reshape(shape)
    codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(shape[0], -1)
    values = np.where(codes & 8, -1.0, 1.0) * E2M1[codes & 7]
    dtype, shape, scales = tensors[f"{module}.weight_scale"]
    byte = np.frombuffer(scales, np.uint8).reshape(shape).astype(np.int64)
    if dtype == "U8":
        scale = np.exp2(byte.astype(np.float64) - 127)
    else:
        exponent, fraction = byte >> 3, byte & 7
        scale = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * np.exp2(exponent - 7.0))
        scale = scale / np.frombuffer(tensors[f"{module}.weight_global_scale"][2], np.float32)[0].astype(np.float64)
    return (values.reshape(*scale.shape, -1) * scale[..., None]).reshape(values.shape)
