"""Pictures of formats: the data drawn is the format's, read back from the axes."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mxjax
from mxjax.errors import BlockShapeError
from mxjax.report import numbers

pytest.importorskip("matplotlib", reason="pip install 'mxjax[plot]'")

BLOCK = np.random.default_rng(0).standard_normal(32).astype(np.float32)
BLOCK[5] = 6.5


def drawn_lines(ax):
    """Positions of the vertical ticks, by the height of the row they stand on."""
    rows = {}
    for collection in ax.collections:
        for (x, low), (_, high) in collection.get_segments():
            rows.setdefault(round((low + high) / 2), []).append(x)
    return {row: sorted(xs) for row, xs in rows.items()}


@pytest.mark.parametrize("fmt", sorted(mxjax.FORMATS))
def test_element_values_are_those_of_ml_dtypes(fmt):
    element = mxjax.FORMATS[fmt].element
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    if element.name == "int8":
        expected = codes.view(np.int8) / np.float32(64)
    else:
        expected = codes.view(getattr(ml_dtypes, element.dtype)).astype(np.float32)
    expected = np.unique(expected[np.isfinite(expected)] + 0.0)
    np.testing.assert_array_equal(numbers.element_values(element), expected)


def test_number_lines_draw_every_value():
    (ax,) = numbers.number_lines(["mxfp4", "mxfp6_e2m3", "mxint8"]).axes
    rows = drawn_lines(ax)
    assert [len(rows[i]) for i in (2, 1, 0)] == [15, 63, 256]
    np.testing.assert_allclose(rows[2], np.array([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]) / 6)
    assert [t.get_text() for t in ax.get_yticklabels()] == ["mxint8 (int8)", "mxfp6_e2m3 (e2m3)", "mxfp4 (e2m1)"]
    assert ax.get_xlabel() and {"-6", "0.5", "6"} <= {t.get_text() for t in ax.texts}


@pytest.mark.parametrize("log", [False, True])
def test_labels_of_number_lines_do_not_overlap(log):
    fig = numbers.number_lines(list(mxjax.FORMATS), log=log)
    fig.canvas.draw()
    boxes = [t.get_window_extent() for t in fig.axes[0].texts]
    assert len(boxes) > 6
    assert not [1 for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]


def test_number_lines_on_a_logarithmic_axis_are_positive():
    (ax,) = numbers.number_lines(["mxfp8_e5m2", "nvfp4"], log=True).axes
    rows = drawn_lines(ax)
    assert ax.get_xscale() == "log" and min(rows[1]) == 2.0**-16 and max(rows[1]) == 57344
    assert rows[0] == [0.5, 1, 1.5, 2, 3, 4, 6]


def test_the_staircase_rounds_as_ml_dtypes_and_marks_ties():
    top, bottom = numbers.rounding_staircase("mxfp4").axes
    line = {a.get_label(): a for a in top.lines}
    x, y = line["rounded"].get_data()
    np.testing.assert_array_equal(y, np.asarray(x, np.float32).astype(ml_dtypes.float4_e2m1fn).astype(np.float32))
    assert x.max() == 7.5 and y.max() == 6
    ties = line["a tie goes here (even code)"].get_data()
    assert list(zip(*ties, strict=True)) == [
        (0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4),
    ]  # fmt: skip
    assert line["and not here"].get_ydata().tolist() == [0.5, 0.5, 1.5, 1.5, 3, 3, 6]
    np.testing.assert_array_equal(bottom.lines[0].get_ydata(), y - x)
    assert bottom.get_xlabel() and bottom.get_ylabel() and top.get_ylabel()


def test_policies_of_a_format():
    assert numbers.policies_of("nvfp4") == ["floor", "even", "ceil", "rceil", "mse", "four_over_six"]
    assert "third" not in numbers.policies_of("mxfp8_e4m3")


def test_a_panel_shows_the_block_where_it_lands_and_what_is_clipped():
    fig = numbers.block_policies(BLOCK, "mxfp4", ["floor", "rceil"])
    for ax, policy, exponent, clipped in zip(fig.axes, ("floor", "rceil"), (0, 1), (1, 0), strict=True):
        lines = {a.get_label(): a.get_ydata() for a in ax.lines}
        np.testing.assert_array_equal(lines["float"], BLOCK)
        np.testing.assert_array_equal(lines["quantized"], mxjax.fake_quantize(BLOCK, "mxfp4", scale=policy))
        assert len(lines["clipped"]) == clipped
        assert ax.get_title().startswith(f"{policy}: scale $2^{{{exponent}}}$, {clipped} clipped, error")
        assert ax.get_ylim()[1] > 6.5, "everything drawn is inside"
    grid = sorted({y for (_, y), _ in fig.axes[1].collections[0].get_segments()})
    assert grid == [2 * v for v in numbers.element_values(mxjax.FORMATS["mxfp4"].element)]
    assert fig.axes[0].get_ylabel() and [t.get_text() for t in fig.legends[0].texts] == [
        "float", "quantized", "clipped",
    ]  # fmt: skip


def test_a_block_of_another_length_is_refused():
    with pytest.raises(BlockShapeError, match=r"\(16,\)"):
        numbers.block_policies(BLOCK, "nvfp4")


def test_a_block_of_zeros_is_drawn():
    ax = numbers.block_policies(np.zeros(32), policies=["even"]).axes[0]
    assert "0 clipped, error 0.0 %" in ax.get_title()


def test_the_sweep_repeats_with_every_octave():
    (ax,) = numbers.policy_sweep(BLOCK, points=33).axes
    assert ax.get_xscale() == "log" and ax.get_xlabel() and ax.get_ylabel()
    lines = {a.get_label(): np.asarray(a.get_ydata()) for a in ax.lines}
    assert list(lines) == numbers.policies_of("mxfp4")
    for name, error in lines.items():
        # Sizes 16 apart differ by a factor of 2 and a rounding of float32 (2**-24), which moves the error by as little
        # unless it moves a value across a tie; this block has no value so near to one.
        np.testing.assert_allclose(error[:16], error[16:32], rtol=1e-4, err_msg=name)
    assert np.all(lines["mse"] <= lines["floor"] + 1e-4), "floor is among the candidates of mse"
    styles = {(a.get_color(), a.get_marker()) for a in ax.lines}
    assert len(styles) == len(lines) and len({m for _, m in styles}) == len(lines), "told apart in grey, too"


def test_nvfp4_blocks_are_seen_within_a_tensor():
    q = numbers.quantized_blocks(BLOCK[:16], "nvfp4", "even", tensor_amax=2688.0)
    assert float(q.global_scale) == 1.0  # 2688 = 6 * 448
    alone = numbers.quantized_blocks(BLOCK[:16], "nvfp4", "even")
    np.testing.assert_allclose(float(alone.global_scale), 6.5 / 2688, rtol=2**-23)
    same = numbers.quantized_blocks(BLOCK, "mxfp4", "even", tensor_amax=2688.0)
    assert same.global_scale is None


def test_relative_error_is_in_float64():
    assert numbers.relative_error(np.array([3.0, 4.0]), np.array([3.0, 3.0])) == 0.2
    assert numbers.relative_error(jnp.zeros(2), jnp.zeros(2)) == 0
