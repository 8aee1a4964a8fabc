"""Pictures of GPTQ, exact FP8 and rooflines: what is drawn is read back from the axes."""

import ml_dtypes
import numpy as np
import pytest

from mxjax.errors import BlockShapeError
from mxjax.report import arrays, steps

pytest.importorskip("matplotlib", reason="pip install 'mxjax[plot]'")


def test_every_point_of_an_ellipse_has_the_cost_of_its_choice():
    h, w = np.array([[2.0, 1.2], [1.2, 1.0]]), np.array([1.3, 2.4])
    choices = {"a": np.array([1.5, 2.0]), "b": np.array([1.0, 3.0])}
    fig = steps.lattice(h, w, choices, [0, 0.5, 1, 1.5, 2, 3])
    (ax,) = fig.axes
    lines = {line.get_label(): line for line in ax.lines}
    for i, (label, q) in enumerate(choices.items()):
        cost = (q - w) @ h @ (q - w)
        ellipse = [line for line in ax.lines if len(line.get_xdata()) == 200][i]
        d = np.array(ellipse.get_data()).T - w
        np.testing.assert_allclose(np.einsum("pi,ij,pj->p", d, h, d), cost, rtol=1e-9)  # float64 sums of four terms
        assert f"{label}: cost {cost:.3g}" in lines
    assert len(ax.lines[0].get_xdata()) == 36, "every pair of values is a dot"
    assert len({line.get_linestyle() for line in ax.lines if len(line.get_xdata()) == 200}) == 2
    with pytest.raises(BlockShapeError, match="two weights"):
        steps.lattice(np.eye(3), np.ones(3), {}, [0, 1])


def test_running_cost_adds_up():
    (ax,) = steps.running_cost({"a": [1, 2, 3], "b": [0.5, 0.5, 0.5]}).axes
    assert [list(line.get_ydata()) for line in ax.lines] == [[1, 3, 6], [0.5, 1, 1.5]]
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["a: 6", "b: 1.5"]
    assert len({line.get_marker() for line in ax.lines}) == 2, "told apart in grey, too"


def test_spectrum_is_in_order_and_leaves_out_what_a_logarithm_cannot_show():
    (ax,) = steps.spectrum({"a": [1, 100, -1e-9, 10]}, "n", "value").axes
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), [100, 10, 1, np.nan])
    assert ax.get_yscale() == "log" and ax.get_legend() is None


def test_exact_binades_are_those_of_ml_dtypes():
    shifts = [0, 8, 14, 15, 18]
    (ax,) = steps.exact_binades(shifts).axes
    magnitudes = np.array([0.5, 1, 1.5, 2, 3, 4, 6])
    drawn = [line for line in ax.lines if line.get_label().startswith("_")]
    for i, shift in enumerate(reversed(shifts)):
        values = magnitudes * 2.0 ** (6 - shift)
        exact = values.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) == values
        full, hollow = drawn[2 * i : 2 * i + 2]
        np.testing.assert_array_equal(full.get_xdata(), values[exact])
        np.testing.assert_array_equal(hollow.get_xdata(), values[~exact])
        assert full.get_marker() != hollow.get_marker()
        assert exact.all() == (shift <= 14)


def test_a_roofline_has_its_ridge_where_both_limits_meet():
    points = {"a": [(1e9, 1e9, 1e-3), (1e12, 1e9, 1e-2)], "b": [(4e9, 1e9, 1e-3)]}
    (ax,) = steps.roofline(points, 2e12, {"fp8": 1e15, "bf16": 5e14}).axes
    roofs = {line.get_label(): line for line in ax.lines if len(line.get_xdata()) == 400}
    for label, peak in (("fp8: 1,000 TFLOP/s", 1000), ("bf16: 500 TFLOP/s", 500)):
        x, y = roofs[label].get_data()
        np.testing.assert_allclose(y, np.minimum(peak, 2 * x), rtol=1e-12)
    drawn = {line.get_label(): np.array(line.get_data()).T for line in ax.lines if len(line.get_xdata()) < 400}
    np.testing.assert_allclose(drawn["a"], [[1, 1], [1000, 100]])
    np.testing.assert_allclose(drawn["b"], [[4, 4]])
    assert len({line.get_linestyle() for line in roofs.values()}) == 2


def test_traffic_stacks_its_parts():
    (ax,) = steps.traffic({"one": {"read": 2, "write": 1}, "two": {"read": 4}}).axes
    reads, writes = ax.containers
    assert [bar.get_width() for bar in reads] == [2, 4] and [bar.get_width() for bar in writes] == [1, 0]
    assert writes[0].get_x() == 2 and [t.get_text() for t in ax.texts] == [" 3", " 4"]
    assert len({bars[0].get_hatch() for bars in ax.containers}) == 2


def test_curves_go_over_what_was_not_measured():
    (ax,) = arrays.curves([1, 2, 4], {"a": [1.0, float("nan"), 3.0], "b": [1.0, 1.0, 1.0]}, "x", "y").axes
    assert list(ax.lines[0].get_xdata()) == [1, 4] and list(ax.lines[1].get_xdata()) == [1, 2, 4]
