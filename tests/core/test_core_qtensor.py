"""QTensor as a pytree: transformations, sharding, invariants."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mxjax.core.formats import FORMATS, MXFP8_E4M3
from mxjax.core.qtensor import QTensor
from mxjax.core.quantize import quantize_array
from mxjax.errors import BlockShapeError, FormatError

both = pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])


def make(fmt="mxfp4", shape=(4, 64), axis=-1, batch_axes=0, **options) -> QTensor:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return quantize_array(x, fmt, axis, batch_axes=batch_axes, **options)


@pytest.mark.parametrize("fmt", FORMATS)
def test_flattens_and_unflattens(fmt):
    q = make(fmt)
    leaves, treedef = jax.tree.flatten(q)
    assert len(leaves) == (3 if fmt == "nvfp4" else 2)
    again = jax.tree.unflatten(treedef, leaves)
    assert isinstance(again, QTensor) and again.shape == (4, 64) and again.format is q.format
    assert hash(treedef) == hash(jax.tree.structure(make(fmt))) and treedef == jax.tree.structure(make(fmt))


@both
def test_tree_map_and_eval_shape(fmt):
    q = make(fmt, (64, 6), axis=0)
    doubled = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), q)
    assert doubled.shape == (2, 64, 6)
    shapes = jax.eval_shape(lambda q: q, q)
    assert shapes.shape == (64, 6) and shapes.dtype == jnp.float32
    assert shapes.validate() is shapes
    assert jax.eval_shape(lambda x: quantize_array(x, fmt, 0), jnp.zeros((64, 6))).shape == (64, 6)
    assert "mxfp4" in repr(make()) and "float32[4, 64]" in repr(make())
    assert f"codes={PartitionSpec('x')!r}" in repr(jax.tree.map(lambda _: PartitionSpec("x"), q))


@both
@pytest.mark.parametrize("axis", [-1, -2])
def test_vmap_and_scan_strip_a_leading_axis(fmt, axis):
    shape = (3, 64, 5) if axis == -2 else (3, 5, 64)
    q = make(fmt, shape, axis, batch_axes=1)
    seen = []

    def body(layer):
        seen.append(layer.validate().shape)
        return layer.dequantize()

    stacked = jax.vmap(body)(q)
    scanned = jax.lax.scan(lambda c, layer: (c, body(layer)), 0, q)[1]
    assert set(seen) == {shape[1:]}
    np.testing.assert_array_equal(stacked, q.dequantize())
    np.testing.assert_array_equal(scanned, q.dequantize())
    out = jax.vmap(lambda x: quantize_array(x, fmt, axis))(q.dequantize())
    assert out.validate().shape == shape


def test_sizes():
    q = make("nvfp4", (4, 50), on_uneven="pad")
    assert (q.size, q.padded_size, q.shape, q.ndim) == (50, 64, (4, 50), 2)
    assert q.nbytes == 4 * 32 + 4 * 4 + 4
    assert make("mxfp6_e2m3").nbytes == 4 * 48 + 4 * 2


@both
def test_device_put_with_a_sharding(fmt):
    devices = jax.devices("cpu")
    assert len(devices) >= 8, "tests/conftest.py asks for 8 simulated devices"
    mesh = Mesh(np.array(devices[:8]).reshape(4, 2), ("rows", "blocks"))
    q = make(fmt, (8, 128))
    matrix = NamedSharding(mesh, PartitionSpec("rows", "blocks"))
    shardings = jax.tree.map(lambda leaf: matrix if leaf.ndim == 2 else NamedSharding(mesh, PartitionSpec()), q)
    placed = jax.device_put(q, shardings)
    assert placed.codes.sharding == matrix and len(placed.codes.addressable_shards) == 8
    assert placed.codes.addressable_shards[0].data.shape == (2, 32)
    np.testing.assert_array_equal(placed.dequantize(), q.dequantize())
    jitted = jax.jit(lambda q: q.dequantize(), in_shardings=(shardings,), out_shardings=matrix)(placed)
    np.testing.assert_array_equal(jitted, q.dequantize())
    # quantizing a sharded array gives the bytes of the unsharded one
    x = jax.device_put(q.dequantize(), matrix)
    again = quantize_array(x, fmt, global_scale=q.global_scale)
    np.testing.assert_array_equal(again.codes, quantize_array(q.dequantize(), fmt, global_scale=q.global_scale).codes)


BROKEN = [
    (dict(codes=jnp.zeros((4, 32), jnp.int8)), FormatError, "codes and scales are uint8, not int8 and uint8"),
    (dict(scales=jnp.zeros((4, 4), jnp.float32)), FormatError, "uint8 and float32"),
    (dict(scales=jnp.zeros((3, 4), jnp.uint8)), BlockShapeError, r"codes \(4, 32\) and scales \(3, 4\) disagree"),
    (dict(codes=jnp.uint8(0)), BlockShapeError, "disagree"),
    (dict(scales=jnp.zeros((4, 5), jnp.uint8)), BlockShapeError, "4 scales a row, not 32 and 5"),
    (dict(codes=jnp.zeros((4, 31), jnp.uint8)), BlockShapeError, "takes 32 code bytes"),
    (dict(size=65), BlockShapeError, "a contraction axis of 65 in nvfp4 takes 40 code bytes and 5 scales a row"),
    (dict(size=48), BlockShapeError, "takes 24 code bytes"),
    (dict(axis=0), BlockShapeError, r"axis 0 is not in \[-2, -1\]"),
    (dict(axis=-3), BlockShapeError, r"axis -3 is not in \[-2, -1\]"),
    (dict(global_scale=None), FormatError, "nvfp4 needs a global_scale"),
    (dict(global_scale=jnp.bfloat16(1)), FormatError, "global_scale is float32, not bfloat16"),
    (dict(global_scale=jnp.ones(3)), BlockShapeError, r"global_scale \(3,\) is no leading part"),
    (dict(global_scale=jnp.ones((4, 32))), BlockShapeError, "no leading part"),
    (dict(format=MXFP8_E4M3), BlockShapeError, "takes 64 code bytes and 2 scales"),
]


@pytest.mark.parametrize(("change", "error", "message"), BROKEN, ids=[b[2] for b in BROKEN])
def test_validate_finds_every_broken_invariant(change, error, message):
    q = make("nvfp4").validate()
    with pytest.raises(error, match=f"layer/w: .*{message}"):
        replace(q, **change).validate("layer/w")


def test_dequantize_to_other_dtypes():
    q = make("nvfp4")
    wide = np.asarray(q.dequantize())
    for dtype in (jnp.bfloat16, jnp.float16):
        np.testing.assert_array_equal(q.dequantize(dtype), wide.astype(dtype))
    with pytest.raises(FormatError, match="float dtype, not int32"):
        q.dequantize(jnp.int32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dequantize_saturates_and_keeps_subnormals(dtype):
    """Largest byte: the dtype's largest number. Smallest: rounded to the dtype's own grid, not flushed."""
    q = make("mxfp4", (2, 32))
    q = replace(q, codes=jnp.full((2, 16), 0x77, jnp.uint8), scales=jnp.array([[254], [0]], jnp.uint8))
    large, small = np.asarray(q.dequantize(dtype))[:, 0]
    assert large == np.asarray(jnp.finfo(dtype).max, jnp.dtype(dtype))
    assert small == np.float32(6 * 2.0**-127).astype(jnp.dtype(dtype))
    assert (small > 0) == (dtype != "float16")


def test_foreign_nan_bytes_stay_nan():
    """E4M3 has a second NaN, 127, which files of other tools hold."""
    q = make("nvfp4", (1, 16))
    assert np.isnan(replace(q, scales=jnp.array([[127]], jnp.uint8)).dequantize()).all()
