"""gptq(w, spec, stats): shapes, spaces, stacks, options and reports."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax.algorithms import WeightSpec, gptq, observers, rtn
from mxjax.calibration.stats import LayerStats, transform_gram
from mxjax.core.formats import MXFP4, NVFP4, get_format
from mxjax.errors import BlockShapeError, CalibrationError, ConfigError, MxjaxWarning, NonFiniteError
from mxjax.transforms import Hadamard

# One compilation each instead of one an operation.
observe = jax.jit(observers.observe, static_argnums=(1, 2, 3, 4))
decode_unit, round_unit = (jax.jit(f, static_argnums=2) for f in (observers.decode_unit, observers.round_unit))


def inputs(key, n=512, k=64, stack=()):
    mix = jnp.eye(k) + jax.random.normal(jax.random.fold_in(key, 1), (k, k)) / np.sqrt(k)
    return jax.random.normal(key, (*stack, n, k)) @ mix


def stats_of(x):
    h = 2 * jnp.einsum("...nk,...nl->...kl", x, x) / x.shape[-2]
    return LayerStats(hessian=h, n_tokens=jnp.full(x.shape[:-2], x.shape[-2], jnp.int32), amax=jnp.abs(x).max(axis=-2))


def spec(fmt="mxfp4", path="layer/kernel", **kwargs):
    return WeightSpec(path=path, format=get_format(fmt), **kwargs)


def output_error(q, w, x):
    return float(jnp.sum(jnp.square(x @ (q.dequantize(jnp.float32) - w))))


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "mxfp6_e2m3"])
def test_beats_rounding_on_the_output_and_loses_on_the_weight(fmt):
    x, w = inputs(jax.random.key(0)), jax.random.normal(jax.random.key(1), (64, 24))
    q, plain = gptq(w, spec(fmt), stats_of(x)), rtn(w, spec(fmt))
    q.validate()
    assert output_error(q, w, x) < 0.75 * output_error(plain, w, x)
    assert jnp.sum((q.dequantize() - w) ** 2) > jnp.sum((plain.dequantize() - w) ** 2)


@pytest.mark.parametrize(
    ("fmt", "scale"), [("mxfp4", "third"), ("mxfp4", "even"), ("nvfp4", "even"), ("mxint8", "even")]
)
def test_identity_hessian_gives_the_rtn_weight(fmt, scale):
    w = jax.random.normal(jax.random.key(2), (3, 64, 5)).astype(jnp.bfloat16)
    stats = LayerStats(hessian=jnp.eye(64), n_tokens=jnp.array(64), amax=jnp.ones(64))
    got, want = (f(w, spec(fmt, scale=scale), stats) for f in (gptq, rtn))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.array_equal(a, b)


def test_attention_shapes_and_odd_axes():
    x = inputs(jax.random.key(0))
    w = jax.random.normal(jax.random.key(1), (64, 3, 8))  # (embed, heads, head_dim)
    q = gptq(w, spec(axis=-3), stats_of(x))
    assert q.shape == w.shape
    flat = gptq(w.reshape(64, 24), spec(), stats_of(x))
    assert np.array_equal(q.dequantize().reshape(64, 24), flat.dequantize())
    turned = gptq(w.reshape(64, 24).T, spec(axis=-1), stats_of(x))
    assert np.array_equal(turned.dequantize().T, flat.dequantize())


def test_uneven_axis_is_padded_or_reported():
    x, w = inputs(jax.random.key(0), k=40), jax.random.normal(jax.random.key(1), (40, 6))
    with pytest.raises(BlockShapeError, match="layer/kernel"):
        gptq(w, spec(), stats_of(x))
    q = gptq(w, spec(on_uneven="pad"), stats_of(x))
    q.validate()
    assert q.shape == (40, 6) and output_error(q, w, x) < output_error(rtn(w, spec(on_uneven="pad")), w, x)


def test_a_stack_equals_its_members():
    x = inputs(jax.random.key(3), stack=(3,))
    w = jax.random.normal(jax.random.key(4), (3, 64, 24))
    stacked = gptq(w, spec("nvfp4"), stats_of(x))
    for e in range(3):
        one = gptq(w[e], spec("nvfp4"), stats_of(x[e]))
        assert np.mean(np.asarray(stacked.qtensor.codes[e]) != np.asarray(one.qtensor.codes)) < 0.02  # sums reassociate
        assert np.array_equal(stacked.qtensor.scales[e], one.qtensor.scales)


def test_an_expert_without_tokens_is_rounded_with_a_warning():
    x = inputs(jax.random.key(3), stack=(3,)).at[1].set(0)
    stats = stats_of(x)
    stats = LayerStats(hessian=stats.hessian, n_tokens=jnp.array([512, 0, 512]), amax=stats.amax)
    w = jax.random.normal(jax.random.key(4), (3, 64, 24))
    with pytest.warns(MxjaxWarning, match=r"experts/up: 1 of 3 .* \[512, 0, 512\]"):
        q = gptq(w, spec(path="experts/up"), stats)
    plain = rtn(w, spec())
    assert np.array_equal(q.dequantize()[1], plain.dequantize()[1])
    assert not np.array_equal(q.dequantize()[0], plain.dequantize()[0])
    assert np.isfinite(q.dequantize()).all()


def test_transform_turns_weight_and_hessian():
    x, w = inputs(jax.random.key(0)), jax.random.normal(jax.random.key(1), (64, 24))
    turn = Hadamard(32)
    q = gptq(w, spec(transform=turn), stats_of(x))
    assert q.transform == turn
    rotated = gptq(turn.weight(w.T).T, spec(), stats_of(turn.activation(x)))
    # T^T H T and the Hessian of rotated inputs differ by rounding, so a few numbers near a middle may flip.
    assert np.mean(np.asarray(q.qtensor.codes) != np.asarray(rotated.qtensor.codes)) < 0.05
    assert output_error(q, w, x) < 0.8 * output_error(rtn(w, spec(transform=turn)), w, x)
    moved = LayerStats(
        hessian=transform_gram(turn, stats_of(x).hessian), n_tokens=jnp.array(512), amax=jnp.ones(64), transform=turn
    )
    again = gptq(w, spec(transform=turn), moved)
    assert np.array_equal(again.qtensor.codes, q.qtensor.codes)


def test_what_cannot_be_inverted_is_an_error_with_the_path():
    w, good = jax.random.normal(jax.random.key(1), (64, 24)), stats_of(inputs(jax.random.key(0)))
    with pytest.raises(CalibrationError, match=r"a/b/kernel: gptq needs calibration"):
        gptq(w, spec(path="a/b/kernel"))
    bad = {
        "NaN": good.hessian.at[3, 3].set(jnp.nan),
        "not positive definite": good.hessian - 3 * jnp.trace(good.hessian) / 64 * (1 - jnp.eye(64)),
        "no nonzero input": jnp.zeros((64, 64)),
        "does not fit": jnp.eye(32),
    }
    for message, hessian in bad.items():
        broken = LayerStats(hessian=hessian, n_tokens=good.n_tokens, amax=good.amax)
        with pytest.raises(CalibrationError, match=f"a/b/kernel.*{message}"):
            gptq(w, spec(path="a/b/kernel"), broken)
    broken = LayerStats(hessian=bad["not positive definite"], n_tokens=good.n_tokens, amax=good.amax)
    traced = jax.jit(lambda s: gptq(w, spec(), s).dequantize())(broken)
    assert np.isnan(traced).all()  # never plain rounding in silence, also where no error can be raised


def test_more_damping_than_asked_for_is_told():
    w, good = jax.random.normal(jax.random.key(1), (64, 24)), stats_of(inputs(jax.random.key(0)))
    lowest = np.linalg.eigvalsh(np.asarray(good.hessian))[0]
    h = good.hessian - (lowest + 0.05 * jnp.trace(good.hessian) / 64) * jnp.eye(64)
    with pytest.warns(MxjaxWarning, match=r"layer/kernel: the Hessian needed damping 0\.1"):
        gptq(w, spec(), LayerStats(hessian=h, n_tokens=good.n_tokens, amax=good.amax))


def test_options_are_checked():
    w, stats = jnp.ones((64, 24)), stats_of(inputs(jax.random.key(0)))
    for options in (
        {"actorder": True},
        {"observer": "best"},
        {"act_order": "yes"},
        {"scales": "refit", "act_order": "column"},
        {"damping": 0.0},
        {"damping": float("nan")},
        {"block_size": 0},
        {"correction": 2},
    ):
        with pytest.raises(ConfigError, match="layer/kernel"):
            gptq(w, spec(options=options), stats)


def test_nonfinite_weights_follow_the_policy():
    w = jax.random.normal(jax.random.key(1), (64, 24)).at[5, 2].set(jnp.nan)
    stats = stats_of(inputs(jax.random.key(0)))
    with pytest.raises(NonFiniteError, match="layer/kernel"):
        gptq(w, spec(), stats)
    marked = np.asarray(gptq(w, spec(on_nonfinite="nan"), stats).dequantize())
    assert np.isnan(marked[:32, 2]).all() and np.isfinite(np.delete(marked, 2, axis=1)).all()
    assert np.isfinite(marked[32:, 2]).all()
    assert np.isfinite(gptq(w, spec(on_nonfinite="saturate"), stats).dequantize()).all()


def test_correction_reaches_the_least_squares_weight():
    """With C = x_float^T x the corrected weight is the ridge solution: it follows the float model's output."""
    key = jax.random.key(9)
    x_float = inputs(key, n=2048)
    x = x_float + 0.3 * jax.random.normal(jax.random.fold_in(key, 2), x_float.shape)  # upstream errors
    w = jax.random.normal(jax.random.fold_in(key, 3), (64, 24))
    h, cross = 2 * x.T @ x / 2048, 2 * x_float.T @ x / 2048
    stats = LayerStats(hessian=h, n_tokens=jnp.array(2048), amax=jnp.ones(64), cross=cross)
    errors = {}
    for c in (0.0, 1.0):
        q = gptq(w, spec("mxfp8_e4m3", options={"correction": c}), stats)
        errors[c] = float(jnp.sum((x @ q.dequantize() - x_float @ w) ** 2))
    best = np.linalg.lstsq(np.asarray(x, np.float64), np.asarray(x_float @ w, np.float64), rcond=None)[0]
    optimum = float(np.sum((np.asarray(x) @ best - np.asarray(x_float @ w)) ** 2))
    assert optimum < 0.97 * errors[0.0]
    # What is left above the optimum: 8-bit rounding (about 2e-3 of the mismatch) and damping 0.01.
    assert errors[1.0] < optimum + 0.1 * (errors[0.0] - optimum)


@pytest.mark.parametrize(("fmt", "policy"), [(MXFP4, "even"), (MXFP4, "third"), (NVFP4, "even")])
def test_observers_only_improve(fmt, policy):
    blocks = jax.random.t(jax.random.key(5), 4.0, (40, 6, fmt.block_size)) * 0.02
    errors = {}
    for observer in observers.OBSERVERS:
        unit, byte, g = observe(blocks, fmt, policy, 0, observer)
        value = round_unit(unit, byte[..., None], fmt)[1]
        errors[observer] = float(jnp.sum(jnp.square(value * (1.0 if g is None else g) - blocks)))
        assert np.allclose(unit * (1.0 if g is None else g), blocks, rtol=1e-6)
    assert errors["mse"] < errors["minmax"]
    assert errors["alternating"] <= errors["mse"] * (1 + 1e-6)
    if fmt is NVFP4:
        assert errors["alternating"] < errors["mse"]


def test_decode_unit_is_the_value_of_the_qtensor():
    w = jax.random.normal(jax.random.key(6), (8, 64))
    for fmt, policy in ((MXFP4, "third"), (NVFP4, "even")):
        q = mxjax.quantize_array(w, fmt, scale=policy)
        unit = decode_unit(q.blocked_codes(), q.scales[..., None], fmt) * q.global_scale
        assert np.allclose(unit.reshape(8, 64), q.dequantize(), rtol=3e-7, atol=0)


def test_quantize_door_passes_stats_by_path():
    x = inputs(jax.random.key(0))
    params = {"a": {"kernel": jax.random.normal(jax.random.key(1), (64, 24))}, "bias": jnp.ones(3)}
    cfg = mxjax.QuantConfig(rules=[mxjax.Rule(weight="mxfp4", algorithm="gptq")])
    q = mxjax.quantize(params, cfg, stats={"a/kernel": stats_of(x)})
    assert np.array_equal(
        q["a"]["kernel"].qtensor.codes, gptq(params["a"]["kernel"], spec(), stats_of(x)).qtensor.codes
    )
    with pytest.raises(CalibrationError, match="a/kernel"):
        mxjax.quantize(params, cfg)
