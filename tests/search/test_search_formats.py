"""Mixed precision: the exact budget solver, the sensitivities, and the config that comes out."""

import itertools
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax.calibration import LayerStats
from mxjax.errors import BlockShapeError, CalibrationError, ConfigError
from mxjax.search import allocate, budget, sensitivities
from mxjax.transforms import Choose, Hadamard, Wush


def brute_force(costs, errors, limit):
    found = [
        (sum(e[i] for e, i in zip(errors, c, strict=True)), c)
        for c in itertools.product(*(range(len(c)) for c in costs))
        if sum(k[i] for k, i in zip(costs, c, strict=True)) <= limit
    ]
    return min(found)[0]


@pytest.mark.parametrize("seed", range(20))
def test_the_budget_is_solved_exactly(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 9, 6) * 96
    costs = [[int(n * bits) for bits in (4.25, 6.25, 8.25)] for n in sizes]
    errors = (np.sort(rng.exponential(size=(6, 3)))[:, ::-1] * np.exp(rng.standard_normal((6, 1)))).tolist()
    low, high = (sum(f(c) for c in costs) for f in (min, max))
    for limit in [*rng.integers(low, high + 1, 5).tolist(), low, high, 2 * high]:
        choice = allocate(costs, errors, limit)
        assert sum(c[i] for c, i in zip(costs, choice, strict=True)) <= limit
        assert sum(e[i] for e, i in zip(errors, choice, strict=True)) == pytest.approx(
            brute_force(costs, errors, limit)
        )
    with pytest.raises(ConfigError, match=str(low)):
        allocate(costs, errors, low - 1)


def test_costs_without_a_common_factor_stay_within_the_budget(monkeypatch):
    monkeypatch.setattr(budget, "MAX_CELLS", 200)
    rng = np.random.default_rng(0)
    costs = [[int(n), int(2 * n + 1)] for n in rng.integers(10_000, 20_000, 12)]
    errors = [[float(e), 0.0] for e in rng.exponential(size=12)]
    limit = sum(c[0] for c in costs) + 100_000
    choice = allocate(costs, errors, limit)
    got = sum(e[i] for e, i in zip(errors, choice, strict=True))
    assert sum(c[i] for c, i in zip(costs, choice, strict=True)) <= limit
    # Rounding up loses at most a unit (500) a group: no worse than the exact answer with that much less room.
    assert brute_force(costs, errors, limit) <= got <= brute_force(costs, errors, limit - 12 * 501) + 1e-12


def rounded(w, fmt, scale="even"):
    return np.asarray(mxjax.fake_quantize(jnp.asarray(w.T), fmt, -1, scale), float).T


@pytest.fixture(scope="module")
def model():
    """Weights with q and k on one input and very different sensitivities, and the statistics."""
    rng = np.random.default_rng(0)
    shapes = {"attn/q": (64, 32), "attn/k": (64, 16), "mlp/up": (64, 96), "mlp/down": (96, 64)}
    params = {}
    for path, shape in shapes.items():
        block, name = path.split("/")
        params.setdefault(block, {})[name] = {"kernel": jnp.asarray(rng.standard_normal(shape), jnp.float32)}
    a, b, c = (jnp.asarray(s * rng.standard_normal((200, k)), jnp.float32) for k, s in ((64, 1), (64, 3), (96, 0.3)))

    def apply(p, a, b, c):
        for path, x in (("attn/q", a), ("attn/k", a), ("mlp/up", b), ("mlp/down", c)):
            block, name = path.split("/")
            mxjax.qdot(x, p[block][name]["kernel"])

    stats = mxjax.calibrate(apply, params, [(a, b, c)], "mxfp4")
    return params, stats, {"attn/q": a, "attn/k": a, "mlp/up": b, "mlp/down": c}


def test_sensitivity_is_the_squared_output_error(model):
    params, stats, inputs = model
    got = sensitivities(params, stats)
    assert set(got) == set(stats) and all(list(v) == ["mxfp4", "mxfp6_e2m3", "mxfp8_e4m3"] for v in got.values())
    for path, x in inputs.items():
        block, name = path.split("/")
        w, x = np.asarray(params[block][name]["kernel"], float), np.asarray(x, float)
        for fmt, value in got[f"{path}/kernel"].items():
            want = 2 * np.sum((x @ (rounded(w, fmt) - w)) ** 2) / len(x)  # H = 2/n x^T x
            assert value == pytest.approx(want, rel=1e-4)
    relative = sensitivities(params, stats, relative=True)["mlp/up/kernel"]["mxfp4"]
    x, w = np.asarray(inputs["mlp/up"], float), np.asarray(params["mlp"]["up"]["kernel"], float)
    assert relative == pytest.approx(got["mlp/up/kernel"]["mxfp4"] / (2 * np.sum((x @ w) ** 2) / 200), rel=1e-4)


def stored_bits(params, cfg):
    rows = [r for r in mxjax.summary(mxjax.quantize(params, cfg)).rows if r.quantized]
    return sum(r.nbytes * 8 for r in rows) / sum(np.prod(r.shape) for r in rows)


def test_the_budget_holds_and_more_bits_mean_less_error(model):
    params, stats, _ = model
    table, errors = sensitivities(params, stats), []
    for bits in (4.25, 5.0, 6.0, 7.5, 8.25, 10.0):
        cfg = mxjax.search_formats(params, stats, average_bits=bits)
        assert stored_bits(params, cfg) <= bits + 1e-9
        chosen = {r.path[1:-1]: r.weight for r in cfg.rules}
        assert chosen["attn/q/kernel"] == chosen["attn/k/kernel"]  # one input
        errors.append(sum(table[p][f] for p, f in chosen.items()))
    assert all(a >= b for a, b in itertools.pairwise(errors)) and errors[0] > 10 * errors[-1]
    members = (("attn/q/kernel", "attn/k/kernel"), ("mlp/up/kernel",), ("mlp/down/kernel",))
    least = sum(min(sum(table[p][f] for p in group) for f in table[group[0]]) for group in members)
    assert errors[-1] == pytest.approx(least)  # with room for everything each group has its best
    free = mxjax.search_formats(params, stats, average_bits=5.0, fuse=False)
    assert sum(table[r.path[1:-1]][r.weight] for r in free.rules) <= errors[1]


def test_groups_are_optimal_by_brute_force(model):
    params, stats, _ = model
    table, names = sensitivities(params, stats), ("mxfp4", "mxfp6_e2m3", "mxfp8_e4m3")
    groups = [["attn/q/kernel", "attn/k/kernel"], ["mlp/up/kernel"], ["mlp/down/kernel"]]
    size = {p: np.prod(params[p.split("/")[0]][p.split("/")[1]]["kernel"].shape) for g in groups for p in g}
    costs = [[sum(size[p] for p in g) * mxjax.get_format(f).bits_per_value for f in names] for g in groups]
    errors = [[sum(table[p][f] for p in g) for f in names] for g in groups]
    for bits in (4.5, 5.5, 6.5):
        cfg = mxjax.search_formats(params, stats, names, bits)
        got = sum(table[r.path[1:-1]][r.weight] for r in cfg.rules)
        assert got == pytest.approx(brute_force(costs, errors, bits * sum(size.values())))


def test_base_says_how_and_activations_follow(model):
    params, stats, _ = model
    rule = mxjax.Rule(weight="mxfp4", activation="mxfp4", weight_scale="third", activation_scale="third")
    base = mxjax.QuantConfig(rules=[replace(rule, path="mlp", transform=Hadamard(32), algorithm="gptq")])
    cfg = mxjax.search_formats(params, stats, ("mxfp4", "mxfp8_e4m3"), 6.5, base=base)
    assert len(cfg.rules) == 2 and {r.weight for r in cfg.rules} == {"mxfp4", "mxfp8_e4m3"}
    for rule in cfg.rules:
        policy = "third" if rule.weight == "mxfp4" else "even"
        assert (rule.activation, rule.weight_scale, rule.activation_scale) == (rule.weight, policy, policy)
        assert rule.transform == Hadamard(32) and rule.algorithm == "gptq"
    q = mxjax.quantize(params, cfg, stats=stats)
    assert q["attn"] is not None and not isinstance(q["attn"]["q"]["kernel"], mxjax.QWeight)


def test_stacked_weights_count_with_their_own_hessians():
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.standard_normal((2, 64, 8)), jnp.float32)
    h = jnp.stack([jnp.eye(64), 100 * jnp.eye(64)])
    stats = {"w": LayerStats(hessian=h, n_tokens=jnp.ones(2), amax=jnp.ones((2, 64)))}
    got = sensitivities({"w": w}, stats, ("mxfp4",))["w"]["mxfp4"]
    squares = [np.sum((rounded(m, "mxfp4") - m) ** 2) for m in np.asarray(w)]
    assert got == pytest.approx(squares[0] + 100 * squares[1], rel=1e-5)


def test_reports(model):
    params, stats, _ = model
    with pytest.raises(ConfigError, match=r"average_bits=4 .*from 4.25 to 8.25"):
        mxjax.search_formats(params, stats, average_bits=4)
    with pytest.raises(CalibrationError, match="mlp/up/kernel"):
        mxjax.search_formats(params, {p: s for p, s in stats.items() if p != "mlp/up/kernel"})
    with pytest.raises(ConfigError, match="no candidate"):
        mxjax.search_formats(params, stats, ())
    with pytest.raises(ConfigError, match="quantizes no parameter"):
        mxjax.search_formats(params, stats, base=mxjax.QuantConfig(rules=[]))


def test_rules_are_chosen_by_what_they_give(model):
    params, stats, inputs = model
    table = {}
    cfg = mxjax.search_rules(params, stats, ["wush_mxfp4", "mxfp4", "best_mxfp4"],
                             report=lambda paths, errors: table.update({tuple(paths): errors}))  # fmt: skip
    assert list(table) == [("attn/k/kernel", "attn/q/kernel"), ("mlp/down/kernel",), ("mlp/up/kernel",)]
    for paths, errors in table.items():
        assert len(errors) == 3  # "mxfp4" has no transform, so nothing is added
        best = (mxjax.recipes.get(n).rules[0] for n in ("wush_mxfp4", "mxfp4", "best_mxfp4"))
        want = list(best)[int(np.argmin(errors))]
        for path in paths:
            (rule,) = (r for r in cfg.rules if r.path == f"^{path}$")
            assert (rule.transform, rule.algorithm, rule.activation_scale) == (
                want.transform, want.algorithm, want.activation_scale)  # fmt: skip
    x, w = inputs["mlp/up"], params["mlp"]["up"]["kernel"]
    plain = mxjax.qdot(x, mxjax.quantize(params, "mxfp4")["mlp"]["up"]["kernel"])
    # A sample of all 200 rows: the same number as on the rows themselves.
    assert table[("mlp/up/kernel",)][1] == pytest.approx(
        float(jnp.sum((plain - x @ w) ** 2) / jnp.sum((x @ w) ** 2)), rel=1e-3
    )
    got = mxjax.search_rules(params, stats, ["wush_mxfp4"], report=lambda paths, errors: table.update(added=errors))
    assert len(table["added"]) == 2 and len(got.rules) == 4
    with pytest.raises(ConfigError, match="one candidate"):
        mxjax.search_rules(params, stats, [])


def test_configs_are_saved_and_loaded(model, tmp_path):
    params, stats, _ = model
    found = mxjax.search_formats(params, stats, average_bits=5.0, base="best_mxfp4")
    for cfg in (found, *(mxjax.recipes.get(name) for name in mxjax.recipes.RECIPES)):
        mxjax.save_config(tmp_path / "c.json", cfg)
        assert mxjax.load_config(tmp_path / "c.json") == cfg
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]
    fitted = Wush().fit(stats["mlp/up/kernel"], [params["mlp"]["up"]["kernel"].T])
    for bad in (fitted, Choose([fitted])):
        with pytest.raises(ConfigError, match=r"rules\[0\].transform.*fitted"):
            mxjax.save_config(tmp_path / "c.json", mxjax.QuantConfig(rules=[mxjax.Rule(transform=bad)]))
    for text in ("{", "[]", '{"class": "os.system"}', '{"class": "Rule", "weight": "mxfp4"}',
                 '{"class": "QuantConfig"}', '{"class": "QuantConfig", "rules": [], "surprise": 1}'):  # fmt: skip
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(ConfigError):
            mxjax.load_config(tmp_path / "c.json")
    with pytest.raises(ConfigError, match="nowhere"):
        mxjax.load_config(tmp_path / "nowhere.json")


def test_candidates_fit_the_axis():
    """No config comes out that quantize would then refuse."""
    params, nv = {"w": jnp.ones((48, 8))}, mxjax.recipes.get("nvfp4_a16")
    stats = {"w": LayerStats(hessian=jnp.eye(48), n_tokens=jnp.array(48), amax=jnp.ones(48))}
    with pytest.raises(BlockShapeError, match=r"^w: blocks of mxfp8_e4m3 do not divide an axis of 48"):
        mxjax.search_formats(params, stats, ("nvfp4", "mxfp8_e4m3"), 9, base=nv)
    assert mxjax.search_formats(params, stats, ("nvfp4",), 9, base=nv).rules[0].weight == "nvfp4"
    cfg = mxjax.search_formats(params, stats, ("nvfp4", "mxfp8_e4m3"), 9, base=nv.replace(on_uneven="pad"))
    assert mxjax.quantize(params, cfg)["w"].qtensor.format.name == cfg.rules[0].weight
