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
# # MR-GPTQ, step by step
#
# Rounding every weight to the nearest code gives the smallest error *of the weights*. Nobody looks at the weights: what
# counts is the output of the layer. GPTQ rounds so that the output changes least, and MR-GPTQ is GPTQ made for
# microscaling formats.
#
# This notebook builds it from its parts on one layer: the Hessian, the compensation, the order of columns, the scales,
# the rotation. At the end stand perplexities of a whole model.

# %%
# %matplotlib inline
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import mxjax
from mxjax.algorithms import WeightSpec, gptq, rtn
from mxjax.backend import cache_dir
from mxjax.calibration.stats import LayerStats
from mxjax.report import arrays, numbers, plots, steps
from mxjax.transforms import Hadamard

# %% [markdown]
# ## One layer
#
# If `mxjax demo` has run on this machine, the model is in the cache, and the layer is a real one: the query projection
# of block 2 of SmolLM2-135M, with its inputs on English prose. Otherwise a synthetic layer of the same kind does:
# correlated channels, some of them large.


# %%
def real_layer(file, block=2, tokens=1024):
    """Inputs [tokens, K] and weight [N, K] of a query projection."""
    from mxjax_models import llama, tokenizer

    from mxjax.data import demo_calibration_text

    model = llama.load(file)
    ids = tokenizer.load_tokenizer(file).encode(demo_calibration_text())[:tokens]
    x = model.embed(jnp.asarray(ids).reshape(-1, 256))
    for layer in model.layers[:block]:
        x = layer(x)
    layer = model.layers[block]
    x = layer.input_layernorm(x)
    return x.reshape(-1, x.shape[-1]), layer.self_attn.q_proj.kernel[...].T


def synthetic_layer(tokens=1024, channels=192, outputs=160):
    rng = np.random.default_rng(0)
    turn = np.linalg.qr(rng.standard_normal((channels, channels)))[0]
    x = rng.standard_normal((tokens, channels)) * np.arange(1, channels + 1) ** -0.8 @ turn
    x *= np.exp(0.7 * rng.standard_normal(channels))  # channels of different size
    return x, rng.standard_t(6, (outputs, channels)) / 16


# %%
model_file = cache_dir() / "SmolLM2-135M-Instruct.Q4_1.gguf"
x, w = real_layer(model_file) if model_file.is_file() else synthetic_layer()
x, w = jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)
(T, K), N = x.shape, len(w)
print("real layer" if model_file.is_file() else "synthetic layer", f"- {T} tokens, {K} inputs, {N} outputs")

# %% [markdown]
# ## Which errors the output sees
#
# Write `E` for the error of the weight. The output changes by $xE^T$, and summed over the tokens the squared change is
#
# $$\sum |x E^T|^2 \;\propto\; \mathrm{tr}\,(E H E^T), \qquad H = \tfrac{2}{n} \sum x^T x.$$
#
# `H` is all that the error needs to know about the inputs. Here it is, with its channels in storage order, and beside
# it the correlations: what is left when all channels are made equally large.

# %%
H = 2 * x.T @ x / T
size = jnp.sqrt(jnp.diag(H))
alike = jnp.abs(H) / jnp.outer(size, size)
arrays.heat_maps({"H, over its largest": H / jnp.abs(H).max(), "correlation": alike})

# %% [markdown]
# On the left a few large channels are all that one sees: an error there costs most. On the right many pairs are
# brighter than chance would make them: channels move together. That is what GPTQ lives on. An error in one channel can
# be made up for in another that carries the same information.

# %%
pairs = alike[np.triu_indices(K, 1)]
strong = 3 / T**0.5  # what one pair in 370 reaches by chance
print(f"correlations above {strong:.2f}: {100 * float((pairs > strong).mean()):.0f} % of the pairs, by chance 0.3 %")

# %% [markdown]
# How much so, its eigenvalues tell. Were all channels independent and alike, the line would be flat.

# %%
steps.spectrum({"H": np.linalg.eigvalsh(np.asarray(H, np.float64))}, "eigenvalue, in order", "eigenvalue")

# %% [markdown]
# A few directions matter a thousand times more than most. An error along the last ones is nearly free, so the right
# question is not how large the error is, but where it points.
#
# ## Two weights in a plane
#
# Of the channels of about equal size take the two that are most alike, and one row of the weight. The dots are what the
# two weights can be rounded to; every point of an ellipse costs the same.

# %%
pairs = np.where(np.maximum.outer(size, size) < 1.5 * np.minimum.outer(size, size), alike, 0)
np.fill_diagonal(pairs, 0)
i, j = np.unravel_index(pairs.argmax(), pairs.shape)
h2 = np.asarray(H)[np.ix_([i, j], [i, j])].astype(np.float64)
h2 /= h2[0, 0]
print(f"channels {i} and {j}: correlation {pairs[i, j]:.2f}")
grid = numbers.element_values(mxjax.get_format("mxfp4").element)


def nearest(value):
    return grid[np.abs(grid - value).argmin()]


def compensated(point):
    """Round the first, then move the second to where it makes up best for the error, and round that."""
    first = nearest(point[0])
    return np.array([first, nearest(point[1] + h2[0, 1] / h2[1, 1] * (point[0] - first))])


# %% [markdown]
# Look for a point where the two ways of rounding differ most:

# %%
points = np.random.default_rng(1).uniform(1, 3.5, (400, 2))
plain = np.array([[nearest(a), nearest(b)] for a, b in points])
moved = np.array([compensated(p) for p in points])
gain = np.einsum("pi,ij,pj->p", plain - points, h2, plain - points)
gain = gain - np.einsum("pi,ij,pj->p", moved - points, h2, moved - points)
best = gain.argmax()
steps.lattice(h2, points[best], {"nearest": plain[best], "compensated": moved[best]}, grid)

# %% [markdown]
# The compensated point is no nearer, and much cheaper: its error lies along the ellipse. With two weights one could try
# all dots. With hundreds nobody can, and rounding one after the other is how GPTQ walks.
#
# ## Column by column
#
# For each column in turn: round it, and push what was lost into the columns to come. With $H^{-1} = U^T U$, `U` upper
# triangular, the best push is a row of `U`:
#
# $$e_i = (w_i - \mathrm{round}(w_i)) / U_{ii}, \qquad w_j \leftarrow w_j - e_i U_{ij} \;\;(j > i)$$
#
# That is the whole algorithm. Block scales are fixed beforehand, so that rounding a column is rounding on known grids.


# %%
def damped(h, share=0.01):
    h = np.asarray(h, np.float64)
    return h + share * np.diag(h).mean() * np.eye(len(h))


def upper_factor(h):
    """U with H^-1 = U^T U."""
    return np.linalg.cholesky(np.linalg.inv(h)).T


def walk(w, h, q_scale, snapshots=()):
    """GPTQ on fixed scales: rounded weight, cost of each column, and how far the rest had moved at some columns."""
    u, w, original = upper_factor(h), np.array(w, np.float64), np.array(w, np.float64)
    cost, moved = np.zeros(len(u)), {}
    for c in range(len(u)):
        if c in snapshots:
            moved[c] = w - original
        rounded = on_grid(w[:, c] / q_scale[:, c]) * q_scale[:, c]
        e = (w[:, c] - rounded) / u[c, c]
        w[:, c + 1 :] -= np.outer(e, u[c, c + 1 :])
        w[:, c], cost[c] = rounded, (e**2).sum()
    return w, cost, moved


# %%
ELEMENT = mxjax.get_format("mxfp4").element
LEVELS = numbers.element_values(ELEMENT)
MIDDLES = (LEVELS[1:] + LEVELS[:-1]) / 2


def on_grid(values):
    return LEVELS[np.searchsorted(MIDDLES, values)]


def scales_of(w):
    """The scale of each value under the policy `even`."""
    q = mxjax.quantize_array(jnp.asarray(w, jnp.float32), "mxfp4")
    return np.repeat(2.0 ** (np.asarray(q.scales, np.float64) - 127), 32, axis=-1)


stops = (K // 8, K // 2, 7 * K // 8)
walked, cost, moved = walk(w, damped(H), scales_of(w), stops)
steps_of = scales_of(w)[:64]
arrays.heat_maps({f"{c} columns done": moved[c][:64] / steps_of for c in stops}, "moved by (block scales)")

# %% [markdown]
# Left of the front the weights are codes; the picture shows how far they are from where they began. Right of it they
# drift: the sum of all that was pushed at them so far. Late columns have moved as far as rounding itself moves.
#
# The costs add up to the error of the output exactly: $\mathrm{tr}(E H E^T) = \sum e_i^2$, with the damping that keeps
# the inverse sane included.

# %%
E = walked - np.asarray(w, np.float64)
print(f"sum of the columns' costs {cost.sum():.6g}, tr(E H E^T) {np.trace(E @ damped(H) @ E.T):.6g}")

# %% [markdown]
# The library does the same in one compiled scan. Its codes are those of the loop, but for values so close to a tie
# that float32 and float64 disagree; from there on the walk takes another path, of equal cost.

# %%
stats = LayerStats(hessian=H, n_tokens=jnp.array(T), amax=jnp.abs(x).max(0))


def quantized(algorithm=gptq, fmt="mxfp4", scale="even", transform=None, **options):
    spec = WeightSpec(
        path="layer", format=mxjax.get_format(fmt), scale=scale, axis=-1, transform=transform, options=options
    )
    return algorithm(w, spec, stats).dequantize(jnp.float32)


def output_error(w_q):
    """|x W^T - x W_q^T| / |x W^T|, in percent."""
    return 100 * numbers.relative_error(x @ w.T, x @ w_q.T)


ours = quantized(guard=False)
same = float((jnp.abs(ours - walked) < 1e-6).mean())
print(f"error of the output: the loop {output_error(jnp.asarray(walked, jnp.float32)):.2f} %, mxjax.gptq", end=" ")
print(f"{output_error(ours):.2f} %; {100 * same:.1f} % of the weights are equal")

# %% [markdown]
# ## The order
#
# The last columns have nobody left to compensate them. So the columns that matter most, those with the largest
# diagonal of `H`, should come first. Their codes and scales stay in storage order: nothing changes in the file.

# %%
by_size = np.argsort(-np.diag(H))
orders = {"storage order": np.arange(K), "smallest first": by_size[::-1], "largest first": by_size}
costs = {}
for label, order in orders.items():
    h = damped(H)[np.ix_(order, order)]
    costs[label] = walk(np.asarray(w)[:, order], h, scales_of(w)[:, order])[1]
steps.running_cost(costs)

# %% [markdown]
# With the largest first the cost is paid early, while there is room to compensate, and the rest is nearly free. The
# option is called `act_order`; "block" sorts whole scale blocks, which lets a block's scale be chosen when it is
# reached.
#
# ## The scales
#
# The scale of a block is fixed before its columns are rounded. The observer `mse` takes the one with the least squared
# error in place of what the largest value suggests. How much that brings depends on the layer.

# %%
options = {
    "nearest": output_error(quantized(rtn)),
    "GPTQ": output_error(quantized()),
    "+ order": output_error(quantized(act_order="column")),
    "+ mse scales": output_error(quantized(act_order="column", observer="mse")),
}
arrays.bars({"mxfp4, weights only": options}, "error of the output (%)")

# %% [markdown]
# ## The rotation
#
# MR-GPTQ (micro-rotated GPTQ) turns every block by a Hadamard matrix first. GPTQ then runs in the rotated space, with
# the rotated Hessian $T^T H T$. MXFP4 gets the scale policy `third` besides, which never clips.
#
# The inputs will be four-bit numbers as well, so now both factors are rounded.


# %%
def layer_error(fmt, transform=None, algorithm=gptq, scale="even", **options):
    """Error of the output with weight and input rounded, in percent."""
    q = quantized(algorithm, fmt, scale, transform, **options)
    y = x if transform is None else transform.activation(x)
    y = mxjax.fake_quantize(y, fmt, scale=scale)
    y = y if transform is None else transform.activation(y)  # a Hadamard matrix is its own inverse
    return 100 * numbers.relative_error(x @ w.T, y @ q.T)


full = dict(act_order="column", observer="mse")
groups = {}
for fmt, size, policy in (("mxfp4", 32, "third"), ("nvfp4", 16, "even")):
    h = Hadamard(size)
    groups[fmt] = {
        "nearest": layer_error(fmt, algorithm=rtn),
        "nearest, rotated": layer_error(fmt, h, rtn),
        "GPTQ": layer_error(fmt, **full),
        "MR-GPTQ": layer_error(fmt, h, scale=policy, **full),
    }
arrays.bars(groups, "error of the output (%)")

# %% [markdown]
# One layer is an example, not a rule. Notebook 04 explains when a rotation helps, and why NVFP4 gains less from it than
# MXFP4, or loses.
#
# ## A whole model
#
# In a model each block sees the errors of those before it. `quantize_sequential` walks the blocks in order and gathers
# every Hessian from inputs that came through the quantized blocks:
#
# ```python
# weights = mxjax.quantize_sequential(model, batches, "mr_gptq_mxfp4")
# ```
#
# That takes minutes on a CPU, so here are stored results: SmolLM2-135M, W4A4, calibrated on 64 x 512 tokens of Linux
# documentation, perplexity on 64 x 512 tokens of Python documentation.


# %%
def stored(name):
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (path := folder / "benchmarks" / "results" / name).is_file():
            return json.loads(path.read_text())
    raise FileNotFoundError(f"{name}: run this notebook inside the repository")


names = {"rtn": "round to nearest", "rtn_hadamard": "rotated", "mr_gptq": "MR-GPTQ", "best": "best"}
labels, values = [], []
result = stored("gptq_quality_h200.json")
for row in result["rows"]:
    if row["recipe"] in names and row["activations"] == "a4":
        labels.append(f"{row['format']}, {names[row['recipe']]}")
        values.append(row["perplexity"])
print("float model:", round(result["float"], 2), "-", result["device"], result["date"])
colours = {label: plots.COLOURS[label.startswith("nvfp4")] for label in labels}  # one for each format
plots.quality(labels, values, result["float"], colours)

# %% [markdown]
# MR-GPTQ wins back most of what MXFP4 loses. `best` goes further: WUSH's matrices in place of Hadamard's for MXFP4, and
# for NVFP4 no rotation at all, but scales chosen by replaying GPTQ and inputs that are rounded with more care. The
# documentation has a page on each.
