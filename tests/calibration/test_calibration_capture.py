"""What calibrate sees through nnx, linen and plain functions, and how it adds it up."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import mxjax
from mxjax.calibration import GramSum, capture, stats_of, tap, update
from mxjax.errors import CalibrationError, ConfigError

CFG = mxjax.QuantConfig(rules=[mxjax.Rule(weight="mxfp4", algorithm="gptq")], on_uneven="skip")


def gram(x):
    x = np.asarray(x, np.float64).reshape(-1, x.shape[-1])
    return 2 * x.T @ x / len(x)


def test_tap_is_the_identity_and_shared_inputs_are_one_entry():
    def f(x):
        y = tap("q", x) + tap("k", x)
        return tap("o", y)

    x = jnp.arange(6.0).reshape(2, 3)
    assert np.array_equal(f(x), 2 * x)
    out, seen = jax.jit(lambda x: capture(f, x))(x)
    assert seen.members() == [["q", "k"], ["o"]]
    assert np.array_equal(seen.inputs[seen.groups["o"]], out)
    assert capture(f, x, wanted=lambda p: p == "o")[1].members() == [["o"]]
    with pytest.raises(CalibrationError, match="w was used twice"):
        capture(lambda x: tap("w", x) + tap("w", 2 * x), x)


TRANSFORMED = {
    "jit": jax.jit,
    "vmap": jax.vmap,
    "remat": jax.checkpoint,
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, length=2)[0],
}


@pytest.mark.parametrize("outside", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("inside", TRANSFORMED)
def test_a_tap_inside_a_transformation_is_told(inside, outside):
    """Its value dies with the inner trace: a clear error, where JAX would speak of leaked tracers, or nothing would."""
    f = TRANSFORMED[inside](lambda x: 2 * tap("up/kernel", x))
    with pytest.raises(CalibrationError, match="up/kernel is multiplied inside a jit, vmap, scan"):
        outside(lambda x: capture(f, x))(jnp.ones((2, 4)))


def test_a_part_of_a_weight_is_told():
    params = {"w": jnp.ones((2, 32, 32))}
    with pytest.raises(CalibrationError, match=r"^w: .* not of its part \[0\]"):
        mxjax.calibrate(lambda p, x: mxjax.qdot(x, p["w"][0]), params, [jnp.ones((4, 32))], CFG)


def test_a_million_tokens_lose_nothing():
    """The compensated sum against float64; a plain float32 sum is shown to be worse by two orders of magnitude."""
    k, rows, steps = 8, 512, 2048  # 2**20 tokens
    x = np.random.default_rng(0).standard_normal((rows, k)).astype(np.float32) * 3 + 1
    exact = gram(x)
    total, plain = GramSum.zeros(k), jnp.zeros((k, k), jnp.float32)
    add_plain = jax.jit(lambda s, x: s + jnp.matmul(x.T, x, precision="highest"))
    for _ in range(steps):
        total, plain = update(total, jnp.asarray(x)), add_plain(plain, jnp.asarray(x))
    stats = stats_of(total)
    assert int(stats.n_tokens) == rows * steps
    assert np.allclose(stats.amax, np.abs(x).max(0))
    scale = np.abs(exact).max()
    error = np.abs(np.asarray(stats.hessian, np.float64) - exact).max() / scale
    # One product over 512 rows: at most 512 roundings of 2**-24, in practice their square root; three more in mean().
    # The number of steps does not enter.
    bound = (np.sqrt(512) + 3) * 2.0**-24
    assert error < bound
    plain_error = np.abs(2 * np.asarray(plain, np.float64) / (rows * steps) - exact).max() / scale
    assert plain_error > bound and plain_error > 20 * error  # the bound can fail: a plain sum does not keep it


def test_buffers_are_donated():
    """The old sums become the new ones in place: all four arrays alias an output, and are gone afterwards."""
    total, x = GramSum.zeros(4, (2,)), jnp.ones((2, 3, 4))
    assert update.lower(total, x).as_text().count("tf.aliasing_output") == 4
    update(total, x)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(total))


def test_calibrate_donates_its_sums():
    """As many sums as one batch makes are alive after many batches, not as many as batches."""
    k, params = 96, {"w": jnp.ones((96, 8))}
    counts = []

    def batches():
        for i in range(5):
            counts.append(sum(x.shape == (k, k) for x in jax.live_arrays()))
            yield jnp.full((4, k), float(i))

    gc.collect()
    mxjax.calibrate(lambda p, x: mxjax.qdot(x, p["w"]), params, batches(), CFG)
    assert counts[1:] == [counts[0] + 2] * 4  # high and low


def test_one_long_batch_is_cut_into_chunks():
    x = jax.random.normal(jax.random.key(0), (10_000, 4))
    stats = stats_of(update(GramSum.zeros(4), x))
    assert np.abs(np.asarray(stats.hessian) - gram(x)).max() < 100 * 2.0**-24 * np.abs(gram(x)).max()


def test_stacks_count_their_own_tokens():
    x = jax.random.normal(jax.random.key(0), (3, 10, 4)).at[1, 4:].set(0)
    stats = stats_of(update(GramSum.zeros(4, (3,)), x))
    assert stats.n_tokens.tolist() == [10, 4, 10]
    assert np.allclose(stats.hessian[1], gram(x[1, :4]), atol=1e-6)


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.q = nnx.Linear(32, 16, rngs=rngs)
        self.k = nnx.Linear(32, 16, use_bias=False, rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.o = nnx.Linear(16, 32, rngs=rngs)

    def __call__(self, x):
        h = self.norm(x)
        return self.o(self.q(h) * self.k(h))


def test_nnx_model_is_seen_and_left_alone():
    model = Attention(nnx.Rngs(0))
    cfg = CFG.replace(rules=[mxjax.Rule(path="(q|k)/kernel", weight="mxfp4", algorithm="gptq")])
    batches = [jax.random.normal(jax.random.key(i), (4, 5, 32)) for i in range(3)]
    before = jax.tree.structure(nnx.state(model))
    stats = mxjax.calibrate(model, None, batches, cfg)
    assert jax.tree.structure(nnx.state(model)) == before and type(model.q) is nnx.Linear
    assert sorted(stats) == ["k/kernel", "q/kernel"] and stats["q/kernel"] is stats["k/kernel"]
    assert int(stats["q/kernel"].n_tokens) == 60
    inputs = jnp.concatenate([model.norm(b).reshape(-1, 32) for b in batches])
    assert np.allclose(stats["q/kernel"].hessian, gram(inputs), atol=1e-5)
    quantized = mxjax.quantize(nnx.to_pure_dict(nnx.state(model)), cfg, stats=stats)
    assert quantized["q"]["kernel"].format.name == "mxfp4"
    with pytest.raises(ConfigError, match="None"):
        mxjax.calibrate(model, {}, batches, cfg)


TRACES: list[str] = []


class Traced(nnx.Module):
    """Says when it is traced."""

    def __init__(self, rngs):
        self.up = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        TRACES.append("")
        return self.up(x)


def test_equal_nnx_models_are_traced_once():
    """Other weights, other data, another algorithm with the same inputs: the program that gathers is the same."""
    batches = [jnp.ones((4, 32))] * 2
    first = mxjax.calibrate(Traced(nnx.Rngs(0)), None, batches, CFG)
    traced = len(TRACES)
    assert traced > 0
    other = mxjax.calibrate(Traced(nnx.Rngs(1)), None, [2 * b for b in batches], "smoothquant_mxfp4")
    assert len(TRACES) == traced
    np.testing.assert_array_equal(4 * first["up/kernel"].hessian, other["up/kernel"].hessian)  # powers of two
    mxjax.calibrate(Traced(nnx.Rngs(0)), None, [jnp.ones((5, 32))], CFG)
    assert len(TRACES) > traced


def test_linen_model_is_seen():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.Dense(32, name="up")(x)
            return nn.Dense(8, name="down")(nn.relu(h))

    net, x = Net(), jax.random.normal(jax.random.key(0), (10, 32))
    params = net.init(jax.random.key(1), x)["params"]
    stats = mxjax.calibrate(net, params, [x], CFG)
    assert np.allclose(stats["up/kernel"].hessian, gram(x), atol=1e-5)
    h = jax.nn.relu(x @ params["up"]["kernel"] + params["up"]["bias"])
    assert np.allclose(stats["down/kernel"].hessian, gram(h), atol=1e-5)


def test_plain_function_with_qdot_qeinsum_and_taps():
    key = jax.random.key(0)
    params = {
        "a": jax.random.normal(key, (32, 64)),
        "experts": jax.random.normal(key, (2, 64, 8)),
        "last": jax.random.normal(key, (8, 64)).T,
    }

    def f(params, x, scale):
        h = mxjax.qdot(x, params["a"]) * scale
        h = jnp.stack([h, jnp.zeros_like(h)])
        return mxjax.qeinsum("ebk,ekn->ebn", h, params["experts"])

    cfg = CFG.replace(rules=[mxjax.Rule(path="^(a|experts)$", weight="mxfp4", algorithm="gptq")])
    x = jax.random.normal(key, (10, 32))
    stats = mxjax.calibrate(f, params, [(x, 2.0)], cfg)
    h = 2 * x @ params["a"]
    assert np.allclose(stats["a"].hessian, gram(x), atol=1e-5)
    assert stats["experts"].n_tokens.tolist() == [10, 0]
    assert np.allclose(stats["experts"].hessian[0], gram(h), rtol=1e-5, atol=1e-3)
    with pytest.warns(mxjax.errors.MxjaxWarning, match=r"experts: 1 of 2 .*\[10, 0\]"):
        quantized = mxjax.quantize(params, cfg, stats=stats)
    assert np.isfinite(f(quantized, x, 2.0)).all()
    with pytest.raises(CalibrationError, match="never saw the input of last"):
        mxjax.calibrate(f, params, [(x, 2.0)], CFG)
    with pytest.raises(CalibrationError, match="no batches"):
        mxjax.calibrate(f, params, [], cfg)
