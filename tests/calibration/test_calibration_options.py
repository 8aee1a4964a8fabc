"""Each option of calibration by block does what it says, and a test here fails if it does nothing."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calibration_models import WIDTH, Blocks, config, same, tokens

import mxjax
from mxjax.algorithms import ALGORITHMS, WeightSpec, gptq
from mxjax.calibration import CalibrationOptions, LayerStats
from mxjax.core.formats import MXFP4, get_format
from mxjax.errors import MxjaxWarning
from mxjax.nn import stages
from mxjax.ops import ActivationFormat
from mxjax.transforms import Hadamard


@pytest.fixture
def seen(monkeypatch):
    """The statistics of each weight, by path in the block, one for each block; the weights are rounded to nearest."""
    found = {}

    def spy(w, spec, stats=None):
        found.setdefault(re.sub(r"^layers/\d+/", "", spec.path), []).append(stats)
        return ALGORITHMS["rtn"](w, replace(spec, options={}), stats)

    monkeypatch.setitem(ALGORITHMS, "gptq", spy)
    return found


def gram(x, y=None):
    x = np.asarray(x, np.float64).reshape(-1, x.shape[-1])
    y = x if y is None else np.asarray(y, np.float64).reshape(x.shape)
    return 2 * x.T @ y / len(x)


def close(a, b):
    # Float32 sums of 160 products, and activations that were rounded once more on the way: 160 * 2**-24 relative to
    # the largest entry; the differences that are tested for are above 1e-3.
    return np.abs(np.asarray(a, np.float64) - b).max() < 1e-5 * np.abs(b).max()


def inside(layer, x, weights=None):
    """Inputs of up and down, and the output; ``weights`` replaces kernels."""
    weights = weights or {}

    def dot(name, x):
        linear = getattr(layer, name)
        y = mxjax.qdot(x, weights[name]) if name in weights else x @ linear.kernel[...]
        return y if linear.bias is None else y + linear.bias[...]

    h = jax.nn.relu(dot("up", x) * dot("side", x))
    return x, h, x + dot("down", h)


def reference(model, **options):
    """What the inputs of up (x) and down (h) are in each block: as the block gets them with its float weights, with
    its own quantized ones before it (h_true), and in the float model. Computed here from the run's weights."""
    cfg = config(CalibrationOptions(batch_size=10, fuse=False, **options))
    got = mxjax.quantize_sequential(model, [tokens()], cfg)
    x = x_float = model.embed(jnp.asarray(tokens()))
    found = []
    for i, layer in enumerate(model.layers):
        prefix = f"layers/{i}/"
        weights = {p.removeprefix(prefix).removesuffix("/kernel"): w for p, w in got.items() if p.startswith(prefix)}
        _, h_float, next_float = inside(layer, x_float)
        _, h, _ = inside(layer, x)
        _, h_true, after = inside(layer, x, weights)
        found.append({"x": x, "h": h, "h_true": h_true, "x_float": x_float, "h_float": h_float})
        x, x_float = after, next_float
    return found


def test_upstream(seen):
    model = Blocks(2)
    found = reference(model)
    assert close(seen["up/kernel"][1].hessian, gram(found[1]["x"]))
    assert not close(seen["up/kernel"][1].hessian, gram(found[1]["x_float"]))
    seen.clear()
    reference(model, upstream=False)
    assert close(seen["up/kernel"][1].hessian, gram(found[1]["x_float"]))
    assert close(seen["down/kernel"][1].hessian, gram(found[1]["h_float"]))


def test_true_sequential(seen):
    model = Blocks(1)
    found = reference(model)[0]
    assert close(seen["down/kernel"][0].hessian, gram(found["h"]))
    seen.clear()
    found = reference(model, true_sequential=True)[0]
    assert close(seen["down/kernel"][0].hessian, gram(found["h_true"]))
    assert not close(gram(found["h_true"]), gram(found["h"]))


def test_inputs(seen):
    model = Blocks(1)
    found = reference(model, inputs="quantized")[0]
    rounded = ActivationFormat(format=MXFP4).quantize(found["x"])
    assert close(seen["up/kernel"][0].hessian, gram(rounded))
    assert not close(gram(rounded), gram(found["x"]))
    seen.clear()
    cfg = config(CalibrationOptions(inputs="quantized", fuse=False), transform=Hadamard(32))
    mxjax.quantize_sequential(model, [tokens()], cfg)
    turned = ActivationFormat(format=MXFP4).quantize(Hadamard(32).activation(found["x"]))
    assert close(seen["up/kernel"][0].hessian, gram(turned))


def test_mismatch(seen):
    model = Blocks(2)
    reference(model)
    assert all(s.cross is None for found in seen.values() for s in found)
    seen.clear()
    found = reference(model, mismatch=True)
    assert close(seen["up/kernel"][1].cross, gram(found[1]["x_float"], found[1]["x"]))
    assert close(seen["down/kernel"][1].cross, gram(found[1]["h_float"], found[1]["h"]))
    assert not close(seen["up/kernel"][1].cross, gram(found[1]["x"]))


def test_static_input_scale():
    model = Blocks(1)
    cfg = config(CalibrationOptions(static_input_scale=True), "nvfp4", "nvfp4", algorithm="rtn")
    got = mxjax.quantize_sequential(model, [tokens()], cfg)
    largest = float(jnp.abs(model.embed(jnp.asarray(tokens()))).max())
    # NVFP4: the tensor scale maps the largest magnitude to 6 * 448.
    assert np.isclose(got["layers/0/up/kernel"].input_scale, largest / (6 * 448), rtol=2.0**-20)
    plain = cfg.replace(calibration=CalibrationOptions())
    assert mxjax.quantize_sequential(model, [tokens()], plain)["layers/0/up/kernel"].input_scale is None


def test_fuse():
    """NVFP4: one tensor scale for weights with one input; apart, each has its own."""
    scales = {}
    for fuse in (True, False):
        cfg = config(CalibrationOptions(fuse=fuse), "nvfp4", None)
        got = mxjax.quantize_sequential(Blocks(1), [tokens()], cfg)
        scales[fuse] = [float(got[f"layers/0/{name}/kernel"].qtensor.global_scale) for name in ("up", "side")]
    assert scales[True] == [max(scales[False])] * 2 and scales[False][0] != scales[False][1]


def test_scales_that_are_not_shared_are_told(recwarn):
    """``share_scales`` holds where the group is one wide weight; where it is not, no reader is left to find out."""
    for fuse in (True, False):
        cfg = config(CalibrationOptions(fuse=fuse), "nvfp4", None).replace(share_scales=["(up|side)"])
        recwarn.clear()
        mxjax.quantize_sequential(Blocks(2), [tokens()], cfg)
        told = [str(w.message) for w in recwarn if issubclass(w.category, MxjaxWarning)]
        assert told == [] if fuse else len(told) == 1 and "share_scales: the weights of layers/0/*/kernel, " in told[0]


def test_batch_size(monkeypatch):
    shapes = []
    accumulate = stages.accumulate
    monkeypatch.setattr(stages, "accumulate", lambda *a, **k: shapes.append(a[4].shape) or accumulate(*a, **k))
    mxjax.quantize_sequential(Blocks(1), [tokens(7), tokens(3)], config(CalibrationOptions(batch_size=4)))
    assert shapes == [(4, 16, WIDTH), (4, 16, WIDTH), (2, 16, WIDTH)]


@pytest.fixture(scope="module")
def mismatched():
    """A layer whose input differs from the float model's: x, x_float, W [K, N] in float64, and statistics."""
    rng = np.random.default_rng(0)
    x_float = rng.standard_normal((512, 64)) @ (np.eye(64) + rng.standard_normal((64, 64)) / 8)
    x = x_float + 0.2 * rng.standard_normal((512, 64)) + 0.1 * x_float[:, ::-1]
    w = rng.standard_normal((64, 16))
    stats = LayerStats(
        hessian=jnp.asarray(gram(x), jnp.float32),
        n_tokens=jnp.array(512),
        amax=jnp.abs(jnp.asarray(x)).max(0),
        cross=jnp.asarray(gram(x_float, x), jnp.float32),
    )
    return x, x_float, w, stats


def test_the_correction_is_the_least_squares_solution(mismatched):
    """GPTAQ's and Qronos' objective: argmin |x W' - x_float W|, against NumPy's lstsq in float64."""
    from mxjax.algorithms.gptq import correct

    x, x_float, w, stats = mismatched
    best = np.linalg.lstsq(x, x_float @ w, rcond=None)[0]
    damping = 1e-6
    rows = jnp.asarray(w.T, jnp.float32)[None]
    got = np.asarray(correct(rows, stats.hessian[None], stats.cross[None], damping, 1.0)[0].T, np.float64)
    # The damping moves it by at most damping * cond(H) of the correction; float32 solves lose cond * K * 2**-24.
    condition = np.linalg.cond(gram(x))
    bound = (damping + 64 * 2.0**-24) * condition * np.abs(best - w).max()
    assert bound < 0.1 * np.abs(best - w).max()
    assert np.abs(got - best).max() < bound
    # With d: W' (H + d) = W (C + d)
    d = 0.01 * np.trace(gram(x)) / 64 * np.eye(64)
    damped = np.linalg.solve(gram(x) + d, (gram(x_float, x) + d).T @ w)
    got = np.asarray(correct(rows, stats.hessian[None], stats.cross[None], 0.01, 1.0)[0].T, np.float64)
    assert np.abs(got - damped).max() < 64 * 2.0**-24 * condition * np.abs(best - w).max()
    half = np.asarray(correct(rows, stats.hessian[None], stats.cross[None], 0.01, 0.5)[0].T, np.float64)
    assert np.allclose(half - w, (got - w) / 2, atol=1e-6)


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_correction_brings_the_output_nearer_to_the_float_model(mismatched, fmt):
    x, x_float, w, stats = mismatched
    errors = []
    for correction in (0.0, 0.5, 1.0):
        spec = WeightSpec(path="w", format=get_format(fmt), options={"correction": correction})
        q = gptq(jnp.asarray(w, jnp.float32), spec, stats)
        errors.append(np.mean((x @ np.asarray(q.dequantize(), np.float64) - x_float @ w) ** 2))
    assert errors[0] > errors[1] > errors[2]
    same_input = replace(stats, cross=stats.hessian)
    spec = WeightSpec(path="w", format=get_format(fmt), options={"correction": 1.0})
    kernel = jnp.asarray(w, jnp.float32)
    assert same({"w": gptq(kernel, spec, same_input)}, {"w": gptq(kernel, spec, replace(stats, cross=None))})
