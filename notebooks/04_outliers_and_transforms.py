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
# # Outliers, and what transforms do about them
#
# A block shares one scale, so one large value costs its neighbours their precision. Language models have such values:
# a few channels are always large, and a few tokens have *massive activations*, hundreds of times the rest.
#
# A transform is an invertible matrix `T` put between input and weight. It changes nothing in exact arithmetic, since
# $(xT)(WT^{-T})^T = xW^T$, but it can make both factors easier to round.
#
# The data here is synthetic, shaped like a transformer's, so that the notebook needs no download and runs in seconds.

# %%
# %matplotlib inline
import jax
import jax.numpy as jnp
import numpy as np

import mxjax
from mxjax.calibration.stats import LayerStats
from mxjax.report import arrays, numbers
from mxjax.transforms import Choose, Hadamard, Rounding, SmoothQuant, Wush

# %% [markdown]
# ## Inputs with outliers
#
# 512 tokens, 256 channels. Six channels are large for every token; the first token is massive in two of them.

# %%
rng = np.random.default_rng(0)
TOKENS, CHANNELS, OUTPUTS = 512, 256, 192
x = rng.standard_normal((TOKENS, CHANNELS)).astype(np.float32)
large = rng.choice(CHANNELS, 6, replace=False)
x[:, large] *= 12
x[0, large[:2]] = 400, -300
w = (rng.standard_t(5, (OUTPUTS, CHANNELS)) / 16).astype(np.float32)
x, w = jnp.asarray(x), jnp.asarray(w)
stats = LayerStats(hessian=2 * x.T @ x / TOKENS, n_tokens=jnp.array(TOKENS), amax=jnp.abs(x).max(0), sample=x)

# %% [markdown]
# Before and after, on one colour scale: a Hadamard rotation of blocks of 32 spreads each large value over its block.
# SmoothQuant divides each channel by a number and multiplies the weight's by the same.

# %%
hadamard = Hadamard(32)
smooth = SmoothQuant(alpha=0.5).fit(stats, [w])
maps = {"x": x, "x, Hadamard": hadamard.activation(x), "x, SmoothQuant": smooth.activation(x)}
arrays.heat_maps({title: m[:48] for title, m in maps.items()})

# %% [markdown]
# In the middle the stripes have become bands as wide as a block: many values are fairly large, none stands out. On
# the right stripes and massive values are gone, and the weight paid for it:

# %%
arrays.heat_maps({"W": w[:48], "W, Hadamard": hadamard.weight(w)[:48], "W, SmoothQuant": smooth.weight(w)[:48]})

# %% [markdown]
# One block with a large channel, before and after the rotation, as MXFP4 sees it. Before, the scale is made for one
# value, and the 31 others share the few levels near zero; after, all levels are in use.

# %%
start = int(large[2]) // 32 * 32
numbers.block_policies(np.asarray(x[5, start : start + 32]), "mxfp4", ["even"])

# %%
numbers.block_policies(np.asarray(hadamard.activation(x)[5, start : start + 32]), "mxfp4", ["even"])

# %% [markdown]
# ## Why rotation helps MXFP4 and hurts NVFP4
#
# Take values with tails from heavy to normal (Student's t), and round them with and without a rotation.


# %%
def error(values, fmt):
    return 100 * numbers.relative_error(values, mxjax.fake_quantize(values, fmt))


freedom = (2.5, 3, 4, 6, 10, 30)
lines = {label: [] for label in ("mxfp4", "mxfp4 rotated", "nvfp4", "nvfp4 rotated")}
for df in freedom:
    values = jnp.asarray(rng.standard_t(df, (256, 512)), jnp.float32)
    for fmt, size in (("mxfp4", 32), ("nvfp4", 16)):
        lines[fmt].append(error(values, fmt))
        lines[f"{fmt} rotated"].append(error(Hadamard(size).activation(values), fmt))
arrays.curves(freedom, lines, "degrees of freedom (left: heavy tails)", "relative error (%)")

# %% [markdown]
# A rotation makes any values nearly normal, so the dashed lines are almost flat. The solid ones go in opposite
# directions: heavy tails hurt MXFP4 and *help* NVFP4.
#
# The reason is the largest value of a block. NVFP4's scale has eight steps an octave, so the largest value can be put
# close to the element 6. MXFP4's scale is a power of two: the largest value lands anywhere in a binade. With heavy
# tails the largest value has about half of the block's energy.

# %%
values = jnp.asarray(rng.standard_t(3, (256, 512)), jnp.float32)
for fmt in ("mxfp4", "nvfp4"):
    size = mxjax.get_format(fmt).block_size
    blocks = values.reshape(-1, size)
    rounded = mxjax.fake_quantize(values, fmt).reshape(-1, size)
    top = jnp.abs(blocks).argmax(-1)[:, None]
    largest, its_rounding = jnp.take_along_axis(blocks, top, -1), jnp.take_along_axis(rounded, top, -1)
    energy = float((largest**2).sum() / (blocks**2).sum())
    print(
        f"{fmt}: the largest of a block has {100 * energy:.0f} % of the energy and an error of "
        f"{100 * numbers.relative_error(largest, its_rounding):.1f} %"
    )

# %% [markdown]
# A rotation takes that gift away from NVFP4: it spreads the value that was stored almost exactly.
#
# ## A whole layer
#
# What counts is the error of the output, with both factors rounded. `Choose` measures candidates on calibration data.
# `Wush` fits a matrix to each block, from the second moments of inputs and weights.

# %%
candidates = Choose([hadamard, SmoothQuant(alpha=0.5), Wush(size=32), Wush(size=32, strength=0.5)])
groups = {}
for name in ("mxfp4", "nvfp4"):
    fmt = mxjax.get_format(name)
    measured = candidates.errors(stats, [w], rounding=Rounding(weight=fmt, activation=fmt))
    names = ("none", "Hadamard", "SmoothQuant", "WUSH", "WUSH 0.5")
    groups[name] = {label: 100 * e**0.5 for label, (_, e) in zip(names, measured, strict=True)}
arrays.bars(groups, "error of the output (%)")

# %% [markdown]
# Synthetic outliers are simpler than real ones, so take the order of the bars here as an example, not as advice; the
# README has figures of a real model.
#
# ## Letting each layer choose
#
# A rule may hold the choice itself. `calibrate` then gathers what it needs, and `quantize` gives every input the
# candidate that measured best, which may be none. The recipe `auto_mxfp4` does this with a longer list. The second
# layer here sees inputs without outliers.

# %%
params = {
    "first": {"kernel": w.T},
    "second": {"kernel": jnp.asarray(rng.standard_normal((OUTPUTS, 64)) / 16, jnp.float32)},
}


def model(p, x):
    h = mxjax.qdot(x, p["first"]["kernel"])
    return mxjax.qdot(jnp.tanh(h), p["second"]["kernel"])


choice = Choose([hadamard, Wush(size=32)])
cfg = mxjax.QuantConfig(rules=[mxjax.Rule(weight="mxfp4", activation="mxfp4", transform=choice)])
chosen = mxjax.quantize(params, cfg, stats=mxjax.calibrate(model, params, [x], cfg))
print(mxjax.summary(chosen))

# %% [markdown]
# The bits include WUSH's float matrices, a 32x32 for each 32 inputs: in layers with so few outputs they outweigh the
# codes, in one with thousands they are a fraction of a bit.

# %%
exact = model(params, x)
for label, tree in {"round to nearest": mxjax.quantize(params, "mxfp4"), "choice": chosen}.items():
    print(f"{label:17} error of the output {100 * numbers.relative_error(exact, jax.jit(model)(tree, x)):.1f} %")
