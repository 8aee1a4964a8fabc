"""Pictures in rows, matrices with numbers, falling losses: what is drawn is read back from the axes."""

import numpy as np
import pytest

from mxjax.errors import BlockShapeError
from mxjax.report import images, pictures, steps

pytest.importorskip("matplotlib", reason="pip install 'mxjax[plot]'")


def test_a_grid_shows_the_images_in_their_places():
    rng = np.random.default_rng(0)
    rows = {name: rng.integers(0, 256, (3, 4, 5, 3), np.uint8) for name in ("float", "mxfp4")}
    fig = pictures.image_grid(rows, ["x", "y", "z"], {"mxfp4": ["20 dB", "21 dB", "22 dB"]})
    assert len(fig.axes) == 6
    for i, (name, row) in enumerate(rows.items()):
        for j, image in enumerate(row):
            ax = fig.axes[3 * i + j]
            np.testing.assert_array_equal(ax.images[0].get_array(), image)
            assert ax.get_title() == ("xyz"[j] if i == 0 else "")
            assert ax.get_xlabel() == (f"{20 + j} dB" if name == "mxfp4" else "")
            assert ax.get_ylabel() == (name if j == 0 else "")


@pytest.mark.parametrize(
    ("rows", "columns", "notes"),
    [
        ({"a": np.zeros((2, 4, 4, 3), np.float32)}, (), None),
        ({"a": np.zeros((4, 4, 3), np.uint8)}, (), None),
        ({"a": np.zeros((2, 4, 4, 3), np.uint8), "b": np.zeros((1, 4, 4, 3), np.uint8)}, (), None),
        ({"a": np.zeros((2, 4, 4, 3), np.uint8)}, ["one"], None),
        ({"a": np.zeros((2, 4, 4, 3), np.uint8)}, (), {"a": ["one"]}),
    ],
)
def test_a_grid_refuses_what_does_not_fit(rows, columns, notes):
    with pytest.raises(BlockShapeError, match="rows are uint8"):
        pictures.image_grid(rows, columns, notes)


def test_matrices_share_a_scale_around_zero_and_write_small_numbers():
    large, small = np.full((20, 20), 0.5), np.array([[-2.0, 0.25], [1.0, 0.0]])
    left, right, bar = pictures.matrices({"large": large, "small": small}, "weight").axes
    for ax, m in ((left, large), (right, small)):
        np.testing.assert_array_equal(ax.images[0].get_array(), m)
        assert (ax.images[0].norm.vmin, ax.images[0].norm.vmax) == (-2, 2)
    assert [t.get_text() for t in left.texts] == [] and bar.get_ylabel() == "weight"
    assert [t.get_text() for t in right.texts] == ["-2.00", "0.25", "1.00", "0.00"]
    assert [t.get_color() for t in right.texts] == ["white", "black", "black", "black"], "legible on its colour"
    with pytest.raises(BlockShapeError, match="only matrices"):
        pictures.matrices({"v": np.ones(3)})


def test_falling_lines_leave_out_what_is_not_finite():
    (ax,) = pictures.falling({"a": [4.0, 2.0, 1.0], "b": [4.0, np.nan, 3.0]}, first=0).axes
    assert [list(line.get_xdata()) for line in ax.lines] == [[0, 1, 2], [0, 2]]
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["a: 1 at the end", "b: 3 at the end"]
    assert ax.get_yscale() == "log" and len({line.get_marker() for line in ax.lines}) == 2


def test_a_spectrum_marks_ranks():
    (ax,) = steps.spectrum({"a": [4.0, 3.0, 2.0, 1.0]}, "n", "value", {"rank 2": 2}).axes
    assert [t.get_text() for t in ax.texts] == ["rank 2"]
    assert ax.lines[0].get_xdata()[0] == 2.5, "between the last value that a rank takes and the first that it leaves"


def test_images_are_a_part_of_a_report():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 256, (2, 2, 8, 8, 3), np.uint8)
    alone = images.image_section("mxfp4", ["<cat>", "dog"], a)
    both = images.image_section("mxfp4", ["<cat>", "dog"], a, b, {"PSNR (dB)": [20.0, 21.5]})
    assert alone.count("<img") == 2 and both.count("<img") == 6, "float, quantized, difference of each"
    assert "&lt;cat&gt;" in both and "<cat>" not in both and "PSNR (dB) 21.5" in both
    assert both.count('width="192" style="image-rendering: pixelated"') == 6, "8 pixels are shown as 192"
    wide = images.image_section("mxfp4", ["cat"], np.zeros((1, 8, 200, 3), np.uint8))
    assert "width=" not in wide
    with pytest.raises(BlockShapeError, match="uint8"):
        images.image_section("mxfp4", ["cat"], a.astype(np.float32))
