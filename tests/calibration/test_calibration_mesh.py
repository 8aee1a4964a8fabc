"""Calibration over a mesh of eight (simulated) devices equals calibration on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calibration_models import Blocks, config, tokens
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mxjax
from mxjax.calibration import CalibrationOptions, GramSum, stats_of, update

KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


def mesh_of(kind=AxisType.Auto):
    assert len(jax.devices()) >= 8, "tests/conftest.py asks XLA for eight"
    return jax.make_mesh((8,), ("data",), axis_types=(kind,), devices=jax.devices()[:8])


def whole_numbers(shape, seed=0):
    """Small integers as floats: every sum of products is exact, so the order of summation cannot matter."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32)


def summed_over_a_mesh(x, y=None):
    def local(*rows):
        return GramSum.zeros(x.shape[-1]).add(*rows).psum("data")

    given = (x,) if y is None else (x, y)
    f = jax.shard_map(local, mesh=mesh_of(), in_specs=(P("data"),) * len(given), out_specs=P())
    return jax.jit(f)(*given)


def test_psum_is_exact_where_sums_are():
    x, y = whole_numbers((64, 5, 16)), whole_numbers((64, 5, 16), 1)
    for got, want in (
        (summed_over_a_mesh(x), GramSum.zeros(16).add(x)),
        (summed_over_a_mesh(x, y), GramSum.zeros(16).add(x, y)),
    ):
        assert int(got.count) == int(want.count) == 320
        for name in ("high", "low", "amax"):
            assert np.array_equal(getattr(got, name), getattr(want, name)), name
    assert np.abs(want.high).max() < 2**24


def test_psum_within_float32_rounding():
    x = np.random.default_rng(0).standard_normal((8 * 256, 16)).astype(np.float32) * 3 + 1
    got, want = (np.asarray(stats_of(s).hessian, np.float64) for s in (summed_over_a_mesh(x), GramSum.zeros(16).add(x)))
    # Each side sums n = 2048 products in some order: the error of one is below n * 2**-24 * sum |x_i x_j| and in
    # practice its square root; mean() rounds three times more.
    scale = 2 * (np.abs(x.astype(np.float64)).T @ np.abs(x)) / len(x)
    assert np.all(np.abs(got - want) <= 2 * (np.sqrt(2048) + 3) * 2.0**-24 * scale)


@KINDS
def test_sharded_rows_stay_where_they_are(kind):
    """More rows than one chunk: no row travels, the only communication is adding up sums."""
    x = jax.device_put(whole_numbers((16, 600, 8)), NamedSharding(mesh_of(kind), P("data")))
    program = update.lower(GramSum.zeros(8), x).compile().as_text()
    assert " all-reduce(" in program
    assert not any(f" {op}" in program for op in ("all-gather", "all-to-all", "collective-permute"))
    got, want = update(GramSum.zeros(8), x), update(GramSum.zeros(8), jnp.asarray(whole_numbers((16, 600, 8))))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))


@KINDS
def test_calibrate_with_sharded_batches(kind):
    params = {"up": {"kernel": jnp.asarray(whole_numbers((32, 64)))}, "down": {"kernel": jnp.ones((64, 32))}}

    def f(params, x):
        return mxjax.qdot(jax.nn.relu(mxjax.qdot(x, params["up"]["kernel"])), params["down"]["kernel"])

    batches = [whole_numbers((16, 4, 32), seed) / 8 for seed in range(3)]
    sharding = NamedSharding(mesh_of(kind), P("data"))
    want = mxjax.calibrate(f, params, batches, "gptq_mxfp4")
    got = mxjax.calibrate(f, params, [jax.device_put(x, sharding) for x in batches], "gptq_mxfp4")
    assert got.keys() == want.keys()
    for path in want:
        assert int(got[path].n_tokens) == int(want[path].n_tokens) == 3 * 64
        assert np.array_equal(got[path].hessian, want[path].hessian)
        assert np.array_equal(got[path].amax, want[path].amax)
    quantized = mxjax.quantize(params, "gptq_mxfp4", stats=jax.device_put(got, jax.devices()[0]))
    straight = mxjax.quantize(params, "gptq_mxfp4", stats=want)
    for a, b in zip(jax.tree.leaves(quantized), jax.tree.leaves(straight), strict=True):
        assert np.array_equal(a, b)


def test_quantize_sequential_over_a_mesh():
    """Ten sequences in batches of eight: the rest of two is not divisible and runs on every device."""
    options = CalibrationOptions(batch_size=8, mismatch=True)
    cfg = config(options, correction=0.5)
    model, sharding = Blocks(2), NamedSharding(mesh_of(), P("data"))
    want = mxjax.quantize_sequential(model, [tokens(10)], cfg)
    got = mxjax.quantize_sequential(model, [tokens(10)], cfg, sharding=sharding)
    assert got.keys() == want.keys()
    for path, w in got.items():
        assert w.qtensor.codes.sharding.device_set == {jax.devices()[0]}
        # Another order of summation; a code flips only at the middle of two grid points.
        assert np.mean(np.asarray(w.qtensor.codes) != np.asarray(want[path].qtensor.codes)) < 0.02
        assert np.mean(np.asarray(w.qtensor.scales) != np.asarray(want[path].qtensor.scales)) < 0.02


def test_the_mesh_shares_the_batch(monkeypatch):
    """Every device gets one sequence of a batch of eight."""
    from mxjax.nn.devices import Devices

    seen, batch = [], Devices.batch
    monkeypatch.setattr(Devices, "batch", lambda self, x: seen.append(batch(self, x)) or seen[-1])
    cfg = config(CalibrationOptions(batch_size=8), algorithm="rtn")
    mxjax.quantize_sequential(Blocks(1), [tokens(8)], cfg, sharding=NamedSharding(mesh_of(), P("data")))
    assert seen and all(x.addressable_shards[0].data.shape[0] == 1 and len(x.sharding.device_set) == 8 for x in seen)


def test_the_mesh_shares_the_solving(monkeypatch):
    """Groups of different inputs are solved on different devices; who solves what changes no bit."""
    from mxjax.nn import jobs

    seen, together, solved = {}, jobs._together, jobs.solved

    def look(same):
        seen.setdefault(same[0].spec.path, same[0].kernel.sharding.device_set)
        assert same[0].stats.hessian.sharding.device_set == same[0].kernel.sharding.device_set
        return together(same)

    monkeypatch.setattr(jobs, "_together", look)
    cfg, sharding = config(CalibrationOptions(batch_size=8)), NamedSharding(mesh_of(), P("data"))
    got = mxjax.quantize_sequential(Blocks(1), [tokens(8)], cfg, sharding=sharding)
    assert len(set(map(frozenset, seen.values()))) == len(seen) > 1
    monkeypatch.setattr("mxjax.nn.stages.solved", lambda given, devices: solved(given))
    want = mxjax.quantize_sequential(Blocks(1), [tokens(8)], cfg, sharding=sharding)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.array_equal(a, b) and a.sharding == b.sharding
