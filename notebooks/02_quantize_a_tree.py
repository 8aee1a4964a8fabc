# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Quantize a tree
#
# To JAX a model is a pytree of arrays and a function. mxjax keeps it so: `quantize` gives the same tree, with a
# quantized weight where a matrix was, and every transformation of JAX goes on working.
#
# We take a small transformer-shaped tree through all of it: plan, rules, sizes, errors, `jit`, `grad`, `vmap`,
# `scan`, and three ways to disk.

# %%
# %matplotlib inline
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import mxjax
from mxjax import QuantConfig, Rule
from mxjax.report import arrays, depth, plots

# %% [markdown]
# ## A tree
#
# Four blocks, each with a norm and two matrices, an embedding and a head. Kernels are `[in, out]`, as in Flax. The
# weights are random with heavy tails, since real ones have them.

# %%
WIDTH, HIDDEN, BLOCKS, VOCABULARY = 128, 256, 4, 200
rng = np.random.default_rng(0)


def matrix(*shape):
    return jnp.asarray(rng.standard_t(6, shape) / np.sqrt(shape[-2]), jnp.float32)


def block():
    return {
        "norm": {"scale": jnp.ones(WIDTH)},
        "up_proj": {"kernel": matrix(WIDTH, HIDDEN), "bias": jnp.zeros(HIDDEN)},
        "down_proj": {"kernel": matrix(HIDDEN, WIDTH)},
    }


params = {
    "embed": {"embedding": matrix(VOCABULARY, WIDTH)},
    "layers": [block() for _ in range(BLOCKS)],
    "lm_head": {"kernel": matrix(WIDTH, VOCABULARY)},
}

# %% [markdown]
# ## One line

# %%
qparams = mxjax.quantize(params, "mxfp4")
qparams["layers"][0]["up_proj"]["kernel"]

# %% [markdown]
# `"mxfp4"` is a recipe: weights and activations in MXFP4, round to nearest, no data. What came out is a `QWeight`.
# Its bytes are plain `uint8` arrays: codes, two a byte with the contraction axis last, and one scale byte for each 32
# values.

# %%
w = qparams["layers"][0]["up_proj"]["kernel"].qtensor
print("codes ", w.codes.dtype, w.codes.shape)
print("scales", w.scales.dtype, w.scales.shape)
print("shape of the float weight it stands for:", w.shape)

# %% [markdown]
# ## What happened to each leaf, and why
#
# `plan` says it before anything is computed. It needs shapes only, so it also takes what `jax.eval_shape` returns for
# a model that would not fit into memory.

# %%
print(mxjax.plan(jax.eval_shape(lambda: params), "mxfp4"))

# %% [markdown]
# The embedding, the head, norms and biases stay as they are: that is the default of every published recipe.
# `QuantConfig(exclude=())` lifts it.
#
# ## Rules
#
# Not all layers are alike. A config is a list of rules, and the first whose regular expression is found in the path
# decides. Here the first block stays in float, and the down projections get six bits.

# %%
cfg = QuantConfig(
    rules=[
        Rule(path=r"layers/0/", weight=None),
        Rule(path="down_proj", weight="mxfp6_e2m3", activation="mxfp8_e4m3"),
        Rule(weight="mxfp4", activation="mxfp4"),
    ]
)
mixed = mxjax.quantize(params, cfg)
print(mxjax.summary(mixed))

# %% [markdown]
# A rule that matches nothing is a typing error more often than not, so it warns. A contraction axis that the block
# does not divide is an error that lists every such path, unless `on_uneven` says "skip" or "pad".

# %%
try:
    mxjax.plan({"odd": {"kernel": jnp.ones((100, 8))}}, "mxfp4")
except mxjax.errors.BlockShapeError as error:
    print(error)

# %% [markdown]
# ## Size
#
# MXFP4 takes 4.25 bits a weight: four for the code, and a quarter for its share of the scale. What remains large is
# what was left alone, here the embedding and the head.

# %%
arrays.sizes({"float32": params, "mixed rules": mixed, "mxfp4": qparams})

# %% [markdown]
# ## Error
#
# The SQNR of each weight says how much of it survived: six decibels are about one bit.

# %%
from mxjax.eval import weight_errors

trees = {"mxfp4": qparams, "mixed rules": mixed, "nvfp4": mxjax.quantize(params, "nvfp4")}
depth.error_by_depth({label: weight_errors(params, tree) for label, tree in trees.items()})

# %% [markdown]
# How the codes are spent: the histogram of element values, and of block scales. A format that is used well has no
# empty bars.

# %%
plots.histograms("mxfp4", plots.qtensors([layer["up_proj"]["kernel"] for layer in qparams["layers"]]))

# %% [markdown]
# `mxjax.report(params, qparams)` writes all of this as one HTML page.
#
# ## Multiply
#
# `qdot(x, w)` multiplies with a float matrix or with a quantized one. So one function serves both trees.


# %%
def layer(p, x):
    h = x * p["norm"]["scale"]
    h = jax.nn.gelu(mxjax.qdot(h, p["up_proj"]["kernel"]) + p["up_proj"]["bias"])
    return x + mxjax.qdot(h, p["down_proj"]["kernel"])


@jax.jit
def model(p, tokens):
    x = p["embed"]["embedding"][tokens]
    for block in p["layers"]:
        x = layer(block, x)
    return x @ p["lm_head"]["kernel"]


tokens = jnp.asarray(rng.integers(0, VOCABULARY, (2, 16)))
exact = model(params, tokens)
for label, tree in trees.items():
    error = mxjax.eval.compare_arrays(exact, model(tree, tokens)).relative_error
    print(f"{label:12} relative error of the logits: {error:.3f}")

# %% [markdown]
# ## grad
#
# Gradients pass through `qdot` to its input, and so to norms, biases and adapters: rounding counts as the identity
# (straight-through). Codes are integers and have no gradient. Split the tree into what trains and what does not, as
# for any frozen model.

# %%
block0 = qparams["layers"][0]
x = matrix(4, WIDTH)


def loss(norm, x):
    return jnp.mean(layer(block0 | {"norm": norm}, x) ** 2)


gradient, dx = jax.jit(jax.grad(loss, argnums=(0, 1)))(block0["norm"], x)
gradient["scale"].shape, dx.shape

# %% [markdown]
# ## scan over stacked layers
#
# Leading axes come and go: stack the blocks, and `scan` hands one at a time to the layer. The stacked tree can also
# be quantized as a stack; the bytes are the same.

# %%
stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *qparams["layers"])
also = mxjax.quantize(jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"]), "mxfp4")
assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(stacked), jax.tree.leaves(also), strict=True))


@jax.jit
def scanned(layers, x):
    return jax.lax.scan(lambda x, p: (layer(p, x), None), x, layers)[0]


@jax.jit
def looped(layers, x):
    for p in layers:
        x = layer(p, x)
    return x


print("largest difference of scan and loop:", float(jnp.abs(scanned(stacked, x) - looped(qparams["layers"], x)).max()))

# %% [markdown]
# ## vmap over experts
#
# The same stack, mapped instead of scanned: each expert sees inputs of its own.

# %%
inputs = jnp.stack([matrix(3, WIDTH) for _ in range(BLOCKS)])
jax.jit(jax.vmap(layer))(stacked, inputs).shape

# %% [markdown]
# ## To disk
#
# `save` writes a folder, whole or not at all. The default layout is one safetensors file and one JSON file with the
# formats; `"orbax"` keeps the arrays as Orbax does; the layouts of other stacks are the subject of notebook 08. What
# is read back is bit for bit what was written.

# %%
folder = Path(tempfile.mkdtemp())
for layout in ("mxjax", "orbax"):
    mxjax.save(folder / layout, qparams, format=layout)
    loaded = mxjax.load(folder / layout)
    same = jax.tree.map(np.array_equal, loaded, qparams)
    files = ", ".join(sorted(p.name for p in (folder / layout).iterdir()))
    print(f"{layout:6} identical: {all(jax.tree.leaves(same))}; files: {files}")

# %% [markdown]
# Plain Orbax works as well, given the tree as a template, since a quantized weight is a registered pytree.

# %%
import orbax.checkpoint as ocp

with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder / "plain", qparams)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(folder / "plain", jax.tree.map(ocp.utils.to_shape_dtype_struct, qparams))
all(jax.tree.leaves(jax.tree.map(np.array_equal, restored, qparams)))

# %% [markdown]
# And back to float, in the shapes and dtypes of the start:

# %%
floats = mxjax.dequantize(qparams)
jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), floats, params)["layers"][0]

# %% [markdown]
# Next: notebook 03 puts quantized weights into Flax models without a change to their code.
