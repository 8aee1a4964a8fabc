"""A model of a few small blocks, for what does not depend on attention: few operations, so few compilations."""

import jax
import numpy as np
from flax import nnx

import mxjax
from mxjax.calibration import CalibrationOptions

WIDTH = 32


class Layer(nnx.Module):
    """``x + down(relu(up(x) * side(x)))``."""

    def __init__(self, rngs, hidden):
        self.up = nnx.Linear(WIDTH, hidden, rngs=rngs)
        self.side = nnx.Linear(WIDTH, hidden, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(hidden, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.relu(self.up(x) * self.side(x)))


class Blocks(nnx.Module):
    def __init__(self, depth=3, seed=0, hidden=64, layer=Layer):
        rngs = nnx.Rngs(seed)
        self.embedding = nnx.Embed(64, WIDTH, rngs=rngs)
        self.layers = nnx.List([layer(rngs, hidden) for _ in range(depth)])
        self.out = nnx.Linear(WIDTH, 64, rngs=rngs)

    def embed(self, tokens):
        return self.embedding(tokens)

    def head(self, x):
        return self.out(x)


def on_host(model):
    """The model with NumPy arrays for parameters."""
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(np.array, state))


def tokens(sequences=10, length=16, seed=0):
    return np.random.default_rng(seed).integers(0, 64, (sequences, length))


def config(calibration=None, weight="mxfp4", activation="mxfp4", algorithm="gptq", transform=None, **options):
    rule = mxjax.Rule(
        path="^layers/", weight=weight, activation=activation, algorithm=algorithm, transform=transform, options=options
    )
    return mxjax.QuantConfig(rules=[rule], calibration=calibration or CalibrationOptions(batch_size=4))


def same(a, b):
    """Whether two results of ``quantize_sequential`` are equal bit for bit, static fields included."""
    if sorted(a) != sorted(b):
        return False
    a, b = ({path: w[path] for path in sorted(w)} for w in (a, b))
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )
