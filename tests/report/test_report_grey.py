"""Every plot: a figure of its own, no global state, and readable without colour."""

import importlib
import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mxjax
from mxjax.eval import ArrayError, LayerError, Sensitivity, WeightError
from mxjax.report import plots

matplotlib = pytest.importorskip("matplotlib", reason="pip install 'mxjax[plot]'")

KINDS = [f"layers/{i}/{kind}/kernel" for i in range(2) for kind in "abcdefghij"]  # more kinds than colours
BLOCK = np.linspace(-7, 7.6, 32, dtype=np.float32)


def weight(path):
    return WeightError(path, (2, 2), "mxfp4", 1, 4.0, 20.0, 1.0, 0.1, 0.1)


def layer(path):
    return LayerError(path, 20.0, 0.01, 18.0, 5.0, 8)


def sharded():
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    return jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P("a")))


CASES = {
    "plots.histograms": lambda f: f("x", [mxjax.quantize_array(BLOCK, "mxfp4")]),
    "plots.weight_histogram": lambda f: f({path: BLOCK for path in KINDS}),
    "plots.quality": lambda f: f(["a", "b"], [1.0, 2.0], 0.5),
    "depth.error_by_depth": lambda f: f({"a": [weight(p) for p in KINDS]}),
    "depth.output_by_depth": lambda f: f({"a": [layer(p) for p in KINDS]}),
    "depth.inputs_by_depth": lambda f: f({"a": [layer(p) for p in KINDS]}),
    "depth.sensitivity_by_depth": lambda f: f([Sensitivity(p, 0.1, None, 0.1, 0.9) for p in KINDS]),
    "depth.lines_by_depth": lambda f: f({k: [1.0, 2.0] for k in "abcdefghij"}, "y"),
    "depth.drift_by_depth": lambda f: f({k: [ArrayError(1.0, 1.0, 0.1, 0.1, 2.0)] for k in "abcdefghij"}),
    "numbers.number_lines": lambda f: f(["mxfp4"]),
    "numbers.rounding_staircase": lambda f: f("mxfp4"),
    "numbers.block_policies": lambda f: f(BLOCK, "mxfp4", ["floor"]),
    "numbers.policy_sweep": lambda f: f(BLOCK, points=9),
    "arrays.sizes": lambda f: f({"a": {"w": jnp.ones((8, 8))}, "b": {"w": jnp.ones((8, 8))}}),
    "arrays.heat_maps": lambda f: f({"a": np.eye(3)}),
    "arrays.curves": lambda f: f([1, 2], {k: [1.0, 2.0] for k in ("a", "a b", "c")}, "x", "y"),
    "arrays.bars": lambda f: f({"a": {"x": 1.0}, "b": {"x": 2.0}}, "y"),
    "arrays.shards": lambda f: f({"a": sharded()}),
    "steps.lattice": lambda f: f(np.eye(2), np.ones(2), {"a": (1, 2), "b": (0, 1)}, [0, 1, 2]),
    "steps.running_cost": lambda f: f({k: [1.0, 2.0] for k in "ab"}),
    "steps.spectrum": lambda f: f({k: [1.0, 2.0] for k in "ab"}, "x", "y"),
    "steps.exact_binades": lambda f: f(range(3)),
    "steps.roofline": lambda f: f({k: [(1e9, 1e9, 1e-3)] for k in "ab"}, 1e12, {"u": 1e12, "v": 2e12}),
    "pictures.image_grid": lambda f: f({k: np.zeros((2, 4, 4, 3), np.uint8) for k in "ab"}),
    "pictures.matrices": lambda f: f({"a": np.eye(3), "b": -np.ones((2, 4))}),
    "pictures.falling": lambda f: f({k: [2.0, 1.0] for k in "ab"}),
    "steps.traffic": lambda f: f({"a": {"read": 1.0, "write": 1.0}}),
}


def test_every_plot_is_a_case():
    found = set()
    for name in ("plots", "depth", "numbers", "arrays", "steps", "pictures"):
        module = importlib.import_module(f"mxjax.report.{name}")
        found |= {
            f"{name}.{n}"
            for n, f in vars(module).items()
            if inspect.isfunction(f) and f.__module__ == module.__name__ and not n.startswith("_")
            if f.__annotations__.get("return") == "Figure"
        }
    assert found == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_it_can_be_read_in_grey(name):
    module, function = name.split(".")
    fig = CASES[name](getattr(importlib.import_module(f"mxjax.report.{module}"), function))
    assert isinstance(fig, matplotlib.figure.Figure)
    fig.canvas.draw()
    labelled = [ax for ax in fig.axes if ax.get_visible()]
    assert any(ax.get_xlabel() or ax.get_ylabel() for ax in labelled) or name == "arrays.shards"
    for ax in labelled:
        lines = [line for line in ax.lines if not line.get_label().startswith("_")]
        styles = [
            (line.get_marker(), line.get_linestyle(), line.get_markerfacecolor() == "white", line.get_linewidth() > 3)
            for line in lines
        ]
        assert len(set(styles)) == len(styles), "two lines differ in colour alone"
        hatches = [bars[0].get_hatch() for bars in ax.containers if len(bars) and hasattr(bars[0], "get_hatch")]
        assert len(set(hatches)) == len(hatches), "two groups of bars differ in colour alone"


def test_28_lines_differ_without_colour():
    styles = [plots.line_style(i) for i in range(28)]
    assert len({(s["marker"], s["linestyle"]) for s in styles}) == 28


def test_colours_differ_for_colour_blind_readers():
    """Okabe and Ito's palette, by its published values."""
    assert set(plots.COLOURS) == {"#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000"}


def test_pyplot_is_never_imported():
    code = (
        "import sys, numpy as np; from mxjax.report import numbers, arrays; "
        "numbers.number_lines(['mxfp4']); arrays.heat_maps({'a': np.eye(2)}); "
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
