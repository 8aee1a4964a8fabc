"""Equal-shaped weights are solved in one vmapped call, and get what each would get alone."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calibration_models import WIDTH, Blocks, config, same, tokens
from flax import nnx

import mxjax
from mxjax.algorithms import WeightSpec, gptq
from mxjax.calibration import CalibrationOptions, LayerStats
from mxjax.core.formats import get_format
from mxjax.errors import CalibrationError
from mxjax.nn import jobs, stages
from mxjax.transforms import Hadamard, Wush


class Squares(nnx.Module):
    """Three weights [32, 32] with inputs of their own, and one of another shape."""

    def __init__(self, rngs, hidden):
        self.one, self.two, self.three = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3))
        self.wide = nnx.Linear(WIDTH, hidden, rngs=rngs)

    def __call__(self, x):
        x = x + jnp.tanh(self.one(x))
        x = x + jnp.tanh(self.two(x))
        x = x + self.three(jnp.tanh(x))
        return x + jnp.tanh(self.wide(x))[..., :WIDTH]


@pytest.fixture
def solves(monkeypatch):
    """The kernel shapes that the algorithm is called with."""
    shapes, solved = [], stages.solved

    def algorithm(w, spec, stats):
        shapes.append((spec.path, w.shape))
        return gptq(w, spec, stats)

    def spy(todo, devices):
        with monkeypatch.context() as patch:
            patch.setattr(jobs, "gptq", algorithm)
            return solved([replace(job, algorithm=algorithm) for job in todo], devices)

    monkeypatch.setattr(stages, "solved", spy)
    return shapes


CASES = {
    "hadamard": dict(transform=Hadamard(32), act_order="column", observer="mse"),
    "fitted": dict(transform=Wush(), calibration=CalibrationOptions(batch_size=5, mismatch=True), correction=0.5),
    "nvfp4": dict(weight="nvfp4", activation=None, observer="mse"),
}


@pytest.mark.parametrize("case", CASES)
def test_together_equals_alone(monkeypatch, solves, case):
    model, cfg = Blocks(1, layer=Squares), config(**CASES[case])
    together = mxjax.quantize_sequential(model, [tokens()], cfg)
    assert [shape for _, shape in solves] == [(3, 32, 32), (32, 64)]
    names = [f"layers/0/{name}/kernel" for name in ("one", "two", "three")]
    assert solves[0][0] == " | ".join(names)
    solves.clear()
    monkeypatch.setattr(jobs.Job, "alike", lambda self, other: False)
    alone = mxjax.quantize_sequential(model, [tokens()], cfg)
    assert [shape for _, shape in solves] == [(32, 32)] * 3 + [(32, 64)]
    assert same(together, alone)


def test_bfloat16_stays_bfloat16():
    model = Blocks(1, layer=Squares)
    for name in ("one", "two", "three"):
        kernel = getattr(model.layers[0], name).kernel
        kernel.set_value(kernel[...].astype(jnp.bfloat16))
    got = mxjax.quantize_sequential(model, [tokens()], config(transform=Hadamard(32)))
    assert got["layers/0/one/kernel"].dtype == jnp.bfloat16
    assert got["layers/0/wide/kernel"].dtype == jnp.float32


@pytest.mark.parametrize(("fmt", "stack"), [("mxfp4", (4,)), ("nvfp4", (2, 3))])
def test_a_stack_of_layers_equals_its_members(fmt, stack):
    """[L, K, N] with [L, K, K], and [L, E, K, N] with [L, E, K, K]."""
    x = jax.random.normal(jax.random.key(0), (*stack, 256, 64)) @ jax.random.normal(jax.random.key(1), (64, 64))
    w = jax.random.normal(jax.random.key(2), (*stack, 64, 24))
    h = 2 * jnp.matmul(jnp.swapaxes(x, -1, -2), x) / 256
    stats = LayerStats(hessian=h, n_tokens=jnp.full(stack, 256), amax=jnp.abs(x).max(-2))
    spec = WeightSpec(path="w", format=get_format(fmt), options={"act_order": "column", "observer": "mse"})
    whole = gptq(w, spec, stats)
    for index in np.ndindex(stack):
        member = gptq(w[index], spec, jax.tree.map(lambda leaf, index=index: leaf[index], stats))
        assert same({"w": jax.tree.map(lambda leaf, index=index: leaf[index], whole)}, {"w": member})


def test_one_compilation_for_each_shape():
    """Twelve weights of two shapes in three blocks cost two compilations of the solver; another model costs none."""
    seen = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **more: seen.append(more.get("fun_name")) if "backend_compile" in event else None
    )
    # A shape of its own, so that no other test has compiled it
    mxjax.quantize_sequential(Blocks(3, layer=Squares, hidden=96), [tokens()], config(damping=0.02))
    assert sum(name == "jit(solve)" for name in seen) == 2
    seen.clear()
    mxjax.quantize_sequential(Blocks(2, seed=1, layer=Squares, hidden=96), [tokens()], config(damping=0.02))
    assert set(seen) == {"jit(<lambda>)"}  # the embedding, whose parameters are told apart from the blocks anew


def test_a_hessian_that_cannot_be_inverted_is_reported_with_its_path():
    """Inputs that overflow: the block and the weight are named, and nothing is rounded to nearest quietly."""
    model = Blocks(2, layer=Squares)
    model.layers[1].one.kernel.set_value(model.layers[1].one.kernel[...].at[0, 0].set(1e38))
    model.embedding.embedding.set_value(model.embedding.embedding[...] * 1e20)
    cfg = config().replace(rules=[mxjax.Rule(path="layers/1/wide", weight="mxfp4", algorithm="gptq")])
    with pytest.raises(CalibrationError, match=r"layers/1/wide/kernel.*NaN or Inf"):
        mxjax.quantize_sequential(model, [tokens()], cfg)
