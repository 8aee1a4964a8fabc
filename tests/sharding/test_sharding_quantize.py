"""Quantizing on a mesh of eight (simulated) devices gives the bits of one device, where the float weights lay."""

import contextlib
import dataclasses
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mxjax
from mxjax import sharding
from mxjax.algorithms import on_mesh, spread
from mxjax.calibration import GramSum, stats_of, update
from mxjax.errors import MxjaxWarning, NonFiniteError
from mxjax.recipes import RECIPES
from mxjax.transforms import Chain, ChannelScale, Hadamard, KroQuant

K, N = 128, 16
# Output rows, input columns, both (as for FSDP on top of tensor parallelism), everything over one axis, all replicated.
CUTS = [P(None, "a"), P("a", None), P("b", "a"), P(None, ("a", "b")), P()]


def mesh_of(kind=AxisType.Auto):
    assert len(jax.devices()) >= 8, "tests/conftest.py asks XLA for eight"
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2, devices=jax.devices()[:8])


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture(scope="module")
def stats():
    x = random(256, K, seed=1) * np.exp(random(K, seed=2))
    return jax.device_put(stats_of(update(GramSum.zeros(K, sample=64), x)), jax.devices()[0])


def on_one_device(tree, cfg, stats=None):
    """As the solvers of a mesh run: with a default device, so that nothing is compiled twice."""
    with jax.default_device(jax.devices()[0]):
        return mxjax.quantize(jax.device_put(tree, jax.devices()[0]), cfg, stats)


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b), jax.tree_util.keystr(path)


def assert_lies(got, mesh, spec):
    """Every array of the result lies where specs() says."""
    wanted = sharding.named(mesh, sharding.specs(spec, tree=got, mesh=mesh, on_uneven="reshard"))
    for x, want in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert x.sharding.is_equivalent_to(want, x.ndim), (x.shape, x.sharding, want)


def quick(recipe):
    """The recipe with little learning, or none, where it learns: what is tested here does not depend on that.

    KroQuant gets a factor for each block: one for half of K could not be cut into four."""
    cfg = RECIPES[recipe]()

    def rule(r):
        options = {**r.options, "steps": 3, "iterations": 2} if r.algorithm == "loraq" else r.options
        if isinstance(r.transform, KroQuant):
            groups = dict(left_groups=K // r.transform.size, right_groups=1)
            transform = dataclasses.replace(r.transform, train=0, starts=("identity", "hadamard"), **groups)
            return dataclasses.replace(r, transform=transform, options=options)
        return dataclasses.replace(r, options=options)

    return cfg.replace(rules=[rule(r) for r in cfg.rules])


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe(recipe, stats):
    index = list(RECIPES).index(recipe)
    cut, cfg = CUTS[index % len(CUTS)], quick(recipe)
    # The name that quarot has a rule of its own for.
    tree, stats = {"down_proj": {"kernel": random(K, N)}}, {"down_proj/kernel": stats}
    with unoptimized(cfg.needs_data or cfg.rules[0].algorithm != "rtn"):
        want = quiet(on_one_device, tree, cfg, stats)
        got = quiet(mxjax.quantize, sharding.shard(tree, mesh_of(), cut), cfg, stats)
    assert_same(got, want)
    assert_lies(got, mesh_of(), cut)


@contextlib.contextmanager
def unoptimized(wanted=True):
    """Solvers compile in half the time without LLVM's optimizations. What is rounded in place keeps them: there the
    question is whether programs for other shapes, fused in other ways, give the same bits."""
    jax.config.update("jax_disable_most_optimizations", wanted)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


def quiet(f, *args):
    """Without the warning that a rule of quarot matches nothing here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "rule .* matches no parameter")
        return f(*args)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4"])
def test_rounding_moves_no_weight(recipe, kind, monkeypatch):
    """Rows, columns, experts, FSDP: the only communication is the largest magnitude of a tensor (NVFP4)."""
    programs, rounded = [], on_mesh._rounded

    def compiled(*args, **kwargs):
        programs.append(rounded.lower(*args, **kwargs).compile())
        return programs[-1](*args)

    monkeypatch.setattr(on_mesh, "_rounded", compiled)
    matrix, experts, mesh = random(K, N), random(8, 64, N), mesh_of(kind)
    cases = [(matrix, cut) for cut in CUTS[:4]] + [(experts, P("a")), (experts, P(("a", "b")))]
    for x, cut in cases if kind is AxisType.Auto else cases[2:5]:
        tree, shards = {"kernel": x}, sharding.shard({"kernel": x}, mesh, cut)
        got = mxjax.quantize(shards, recipe)
        assert_same(got, on_one_device(tree, recipe))
        assert_lies(got, mesh, cut)
        program = programs.pop().as_text()
        assert not re.search(r" (all-gather|all-to-all|collective-permute|reduce-scatter)", program)
        for shape in re.findall(r"= \w+\[([\d,]*)\]\S* all-reduce", program):
            assert count(shape) <= (1 if x.ndim == 2 else len(x))
        local = shards["kernel"].addressable_shards[0].data.size
        assert local < x.size and max(map(count, re.findall(r"f32\[([\d,]*)\]", program))) <= local


def count(shape):
    return np.prod([int(n) for n in shape.split(",") if n], dtype=int)


@pytest.mark.parametrize("policy", ["mse", "third"])
def test_scale_policies_and_transforms(policy):
    transform = Chain((ChannelScale(jnp.asarray(np.exp(random(K)))), Hadamard(32)))
    cfg = mxjax.QuantConfig(rules=[mxjax.Rule(weight_scale=policy, transform=transform)])
    got = mxjax.quantize(sharding.shard({"kernel": random(K, N)}, mesh_of(), P("a", "b")), cfg)
    assert_same(got, on_one_device({"kernel": random(K, N)}, cfg))
    assert_lies(got, mesh_of(), P("a", "b"))


def test_a_shard_that_would_cut_a_block_is_moved_with_a_warning():
    tree = {"up": {"kernel": random(96, N)}}
    with pytest.warns(MxjaxWarning, match=r"up/kernel: .*'a'.* would cut a block of axis -2 of \(96, 16\)"):
        got = mxjax.quantize(sharding.shard(tree, mesh_of(), P("a")), "nvfp4")
    assert_same(got, on_one_device(tree, "nvfp4"))
    assert got["up"]["kernel"].qtensor.codes.sharding.is_equivalent_to(NamedSharding(mesh_of(), P("a")), 2)


def test_weights_that_share_a_tensor_scale():
    tree = {"l": {name: {"kernel": random(K, N, seed=i) * (i + 1)} for i, name in enumerate(["q_proj", "k_proj"])}}
    cfg = mxjax.recipes.get("nvfp4").replace(share_scales=mxjax.config.FUSED)
    got = mxjax.quantize(sharding.shard(tree, mesh_of(), P("a", "b")), cfg)
    assert_same(got, on_one_device(tree, cfg))
    scales = [w["kernel"].qtensor.global_scale for w in got["l"].values()]
    assert scales[0] == scales[1]


def test_nan_is_found_in_any_shard():
    w = random(K, N)
    w[-1, -1] = np.nan
    with pytest.raises(NonFiniteError, match=r"a/kernel: 1 of 2048 values"):
        mxjax.quantize(sharding.shard({"a": {"kernel": w}}, mesh_of(), P("a", "b")), "mxfp4")


def test_solvers_are_spread_over_the_devices(stats, monkeypatch):
    """Three weights, two devices: each goes whole to one device, and the results are those of one device."""
    seen, gptq = [], on_mesh.ALGORITHMS["gptq"]

    def solve(w, spec, stats):
        seen.append((spec.path, *w.sharding.device_set, *stats.hessian.sharding.device_set))
        return gptq(w, spec, stats)

    monkeypatch.setitem(on_mesh.ALGORITHMS, "gptq", solve)
    cfg = "gptq_mxfp4"
    tree = {str(i): {"kernel": random(K, N, seed=i)} for i in range(3)}
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    all_stats = {f"{i}/kernel": stats for i in tree}
    with unoptimized():
        got = mxjax.quantize(sharding.shard(tree, mesh, P("a")), cfg, all_stats)
    assert [len(one) for one in seen] == [3] * 3 and all(a is b for _, a, b in seen)
    assert sorted(d.id for _, d, _ in seen) == [0, 0, 1]
    monkeypatch.undo()
    with unoptimized():
        assert_same(got, on_one_device(tree, cfg, all_stats))
    assert_lies(got, mesh, P("a"))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_inside_set_mesh(stats, kind):
    """The mesh of the caller holds for weights that are rounded in place, not for those that one device solves."""
    mesh, tree = mesh_of(kind), {"kernel": random(K, N)}
    with unoptimized():
        for recipe in ("mxfp4", "gptq_mxfp4"):
            with jax.set_mesh(mesh):
                got = mxjax.quantize(sharding.shard(tree, mesh, P("b", "a")), recipe, {"kernel": stats})
            assert_same(got, on_one_device(tree, recipe, {"kernel": stats}))
            assert_lies(got, mesh, P("b", "a"))


def test_a_failing_solver_is_heard_of(stats):
    tree = {str(i): {"kernel": random(K, N)} for i in range(2)}
    with pytest.raises(mxjax.errors.CalibrationError, match="1/kernel: gptq needs calibration statistics"):
        mxjax.quantize(sharding.shard(tree, mesh_of(), P("a")), "gptq_mxfp4", {"0/kernel": stats})


def test_assignment_is_balanced():
    """Longest first: within 4/3 - 1/(3 m) of the best, here known, and the same for the same costs."""
    costs = np.random.default_rng(0).integers(1, 100, 40).tolist()
    for workers in (1, 3, 8):
        at = spread.assign(costs, workers)
        loads = np.bincount(at, costs, workers)
        best = max(sum(costs) / workers, max(costs))  # a lower bound of the best
        assert loads.max() <= (4 / 3 - 1 / (3 * workers)) * best + 1e-9
        assert at == spread.assign(costs, workers)
    assert spread.assign([3, 3, 2, 2, 2], 2) == [0, 1, 0, 1, 0]  # 7 and 5; the best is 6 and 6, and 7 <= 7/6 * 6
    assert spread.assign([1] * 8, 8) == list(range(8))
    assert spread.assign([], 4) == []
    # One down_proj (K = 4 K') costs as much as four up_projs of the same size.
    assert spread.solver_cost((4 * 64, 64), -2) == 4 * spread.solver_cost((64, 4 * 64), -2)


def test_products_and_summaries_of_sharded_trees():
    """Sums of eighths times powers of two are exact in any order: a mesh gives the bits of one device."""
    x = np.random.default_rng(0).integers(-8, 9, (4, K)).astype(np.float32) / 8
    tree = {"kernel": np.random.default_rng(1).integers(-8, 9, (K, N)).astype(np.float32)}
    one = on_one_device(tree, "mxfp4_a16")
    for cut in CUTS[:3]:
        got = mxjax.quantize(sharding.shard(tree, mesh_of(), cut), "mxfp4_a16")
        y = mxjax.qdot(jax.device_put(x, NamedSharding(mesh_of(), P())), got["kernel"])
        assert np.array_equal(y, mxjax.qdot(x, one["kernel"]))
        if cut == P(None, "a"):
            assert y.sharding.is_equivalent_to(NamedSharding(mesh_of(), P(None, "a")), 2)
        assert mxjax.summary(got) == mxjax.summary(one)
        assert np.array_equal(mxjax.dequantize(got)["kernel"], mxjax.dequantize(one)["kernel"])


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(K, 64, rngs=rngs), nnx.Linear(64, K, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def test_nnx_models():
    """The specs of the model's own state; batches over the other axis."""
    model, mesh = Mlp(nnx.Rngs(0)), mesh_of()
    rules = {"up/kernel": P("a", "b"), "up/bias": P("b"), "down/kernel": P("b", "a"), "down/bias": P("a")}
    graph, state = nnx.split(model)
    on_mesh = nnx.merge(graph, sharding.shard(state, mesh, rules.get))
    got, want = (mxjax.nnx.quantize(m, "nvfp4_a16") for m in (on_mesh, model))
    assert_same(nnx.state(got), nnx.state(want))
    assert_lies(nnx.state(got), mesh, rules.get)
    x = jax.device_put(random(4, K), NamedSharding(mesh, P("a")))
    y = nnx.jit(lambda model, x: model(x))(got, x)
    # Another order of summing up K products, twice: sqrt(K) roundings of a sum of about 1.
    assert np.abs(y - want(np.asarray(x))).max() < 2 * np.sqrt(K) * 2.0**-24 * 8
