"""Pictures of arrays: sizes, heat maps and shards show what the arrays hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mxjax
from mxjax.errors import BlockShapeError
from mxjax.report import arrays

pytest.importorskip("matplotlib", reason="pip install 'mxjax[plot]'")


def test_sizes_are_those_of_the_leaves():
    params = {"a": {"kernel": jnp.ones((64, 32)), "bias": jnp.zeros(16)}, "b": {"scale": jnp.ones(16)}}
    fig = arrays.sizes({"float32": params, "mxfp4": mxjax.quantize(params, "mxfp4")})
    (ax,) = fig.axes
    drawn = [[bar.get_width() for bar in bars] for bars in ax.containers]
    # 64 x 32 float32 are 8 KiB; in mxfp4 1024 bytes of codes and 64 of scales.
    assert drawn == [[8.0, 0.125], [1088 / 1024, 0.125]]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["a/kernel", "2 small arrays"]
    assert [t.get_text() for t in fig.legends[0].texts] == ["float32: 8.1 KiB", "mxfp4: 1.2 KiB"]
    assert ax.get_xlabel() == "KiB"


def test_heat_maps_share_one_scale():
    small, large = np.array([[-1.0, 0.5]]), np.array([[2.0, -100.0]])
    fig = arrays.heat_maps({"before": large, "after": small})
    first, second, bar = fig.axes
    np.testing.assert_array_equal(first.images[0].get_array(), np.abs(large))
    np.testing.assert_array_equal(second.images[0].get_array(), np.abs(small))
    assert first.images[0].norm is second.images[0].norm and first.images[0].norm.vmax == 100
    assert first.get_title() == "before\nlargest 100" and bar.get_ylabel() == "magnitude"
    assert first.get_xlabel() and first.get_ylabel()


def test_shards_list_the_devices_of_each_part():
    assert len(jax.devices()) >= 8, "tests/conftest.py asks XLA for eight"
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])
    x = jax.device_put(jnp.ones((8, 6)), NamedSharding(mesh, P("b", None)))
    everywhere = jax.device_put(jnp.ones((2, 2), jnp.uint8), NamedSharding(mesh, P()))
    split, whole = arrays.shards({"x": x, "y": everywhere}).axes
    ids = np.vectorize(lambda d: d.id)(mesh.devices)
    assert [t.get_text() for t in split.texts] == [f"device {ids[0, i]}, {ids[1, i]}" for i in range(4)]
    boxes = [(p.get_x(), p.get_y(), p.get_width(), p.get_height()) for p in split.patches]
    assert boxes == [(0, 2 * i, 6, 2) for i in range(4)]
    assert len({p.get_hatch() for p in split.patches}) == 4, "told apart in grey, too"
    assert [t.get_text() for t in whole.texts] == ["all 8 devices"]
    assert split.get_title() == "x float32 [8, 6]"
    with pytest.raises(BlockShapeError, match="only matrices"):
        arrays.shards({"v": jnp.ones(3)})


def test_curves_and_bars_draw_their_numbers():
    (ax,) = arrays.curves(
        [3, 30], {"mxfp4": [2.0, 1.0], "mxfp4 rotated": [1.0, 1.0], "nvfp4": [0.5, 0.6]}, "x", "y"
    ).axes
    assert [list(line.get_ydata()) for line in ax.lines] == [[2, 1], [1, 1], [0.5, 0.6]]
    assert ax.lines[0].get_color() == ax.lines[1].get_color() != ax.lines[2].get_color()
    assert [line.get_linestyle() for line in ax.lines] == ["-", "--", "-"]
    assert len({line.get_marker() for line in ax.lines}) == 3, "told apart in grey, too"
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_ylim()[0]) == ("x", "y", 0)
    fig = arrays.bars({"a": {"none": 1.0, "hadamard": 2.0}, "b": {"hadamard": 4.0, "none": 3.0}}, "error")
    (ax,) = fig.axes
    assert [[bar.get_height() for bar in group] for group in ax.containers] == [[1, 2], [3, 4]]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["none", "hadamard"] and ax.get_ylabel() == "error"
    assert len({group[0].get_hatch() for group in ax.containers}) == 2
