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
# a few channels are always large, and a few tokens have *massive activations*, thousands of times the rest.
#
# A transform is an invertible matrix `T` put between input and weight. It changes nothing in exact arithmetic, since
# $(xT)(WT^{-T})^T = xW^T$, but it can make both factors easier to round.
#
# First we look at a real model, SmolLM2-135M. Then we take one layer, and watch what each transform does to it.

# %%
# %matplotlib inline
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import mxjax
from mxjax.backend import cache_dir
from mxjax.calibration.stats import LayerStats
from mxjax.report import arrays, depth, numbers
from mxjax.transforms import Choose, Hadamard, KroQuant, Rounding, SmoothQuant, Wush

# %% [markdown]
# ## Massive activations
#
# 512 tokens of English prose go through SmolLM2-135M. Between its blocks travels the *hidden state*, a vector for each
# token, to which every block adds something. Here are its largest and its median magnitude at each block. (The figures
# are stored with the repository, so this part needs no model.)


# %%
def stored(name):
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (path := folder / "benchmarks" / "results" / name).is_file():
            return json.loads(path.read_text())
    raise FileNotFoundError(f"{name}: run this notebook inside the repository")


smollm2 = stored("smollm2_activations_cpu.json")
hidden = smollm2["hidden"]
lines = {what: [row[what] for row in hidden] for what in ("largest", "median")}
depth.lines_by_depth(lines, "magnitude of the hidden state")

# %%
worst = max(range(len(hidden)), key=lambda i: hidden[i]["largest"])
where = hidden[worst]
print(
    f"before block {worst}: {where['largest']:,.0f} in channel {where['channel']} of token {where['token']};", end=" "
)
print(f"the median is {where['median']:.1f}")

# %% [markdown]
# One block writes a value of more than ten thousand times the median into one channel of the first token. It stays
# there until the last blocks take it away again. Models use such tokens as a place that attention can look at when it
# wants to look at nothing.
#
# The hidden state itself is not quantized. What layers see of it has gone through a norm first. So which of their
# inputs are hard? The largest value of each over its root mean square says it: normal numbers have 4 to 6.

# %%
peaks = smollm2["input_peak_over_rms"]
kinds = {"q, k, v": "self_attn/q_proj", "gate, up": "mlp/gate_proj", "o": "self_attn/o_proj", "down": "mlp/down_proj"}
inputs = {label: [peaks[f"layers/{i}/{kind}/kernel"] for i in range(len(hidden))] for label, kind in kinds.items()}
depth.lines_by_depth(inputs, "largest / rms of the input")

# %% [markdown]
# The inputs of the down projections stand out, most of all in the blocks that write the massive values and that take
# them away. Inputs of q, k and v have outliers of another kind: the same few channels in every token.
#
# ## One layer
#
# If `mxjax demo` has run on this machine, the model is in the cache, and the layer is real: the query projection of
# block 2. Otherwise a synthetic one with the same trait does: a few channels that are large for every token.


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


def synthetic_layer(tokens=512, channels=256, outputs=192, large=6):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((tokens, channels))
    x[:, rng.choice(channels, large, replace=False)] *= 12
    return x, rng.standard_t(5, (outputs, channels)) / 16


# %%
model_file = cache_dir() / "SmolLM2-135M-Instruct.Q4_1.gguf"
x, w = real_layer(model_file) if model_file.is_file() else synthetic_layer()
x, w = jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)
(T, K), N = x.shape, len(w)
size = jnp.sqrt(jnp.mean(x**2, axis=0))
print("real layer" if model_file.is_file() else "synthetic layer", f"- {T} tokens, {K} inputs, {N} outputs")
print(f"channels by their size: largest {size.max():.2f}, median {jnp.median(size):.3f}")

# %% [markdown]
# Before and after, on one colour scale. A *Hadamard rotation* of blocks of 32 spreads each large value over its block:
# it needs no data. *SmoothQuant* divides each channel by a number and multiplies the weight's by the same.

# %%
stats = LayerStats(hessian=2 * x.T @ x / T, n_tokens=jnp.array(T), amax=jnp.abs(x).max(0), sample=x)
mxfp4 = mxjax.get_format("mxfp4")
rounding = Rounding(weight=mxfp4, activation=mxfp4)
hadamard = Hadamard(32)
smooth = SmoothQuant(alpha=0.5).fit(stats, [w])
maps = {"x": x, "x, Hadamard": hadamard.activation(x), "x, SmoothQuant": smooth.activation(x)}
arrays.heat_maps({title: m[:48] for title, m in maps.items()})

# %% [markdown]
# In the middle the stripes have become bands as wide as a block: many values are fairly large, none stands out. On
# the right the stripes are gone, and the weight paid for it:

# %%
arrays.heat_maps({"W": w[:48], "W, Hadamard": hadamard.weight(w)[:48], "W, SmoothQuant": smooth.weight(w)[:48]})

# %% [markdown]
# Two transforms are fitted to both factors at once. *WUSH* computes a 32 x 32 matrix for each block from the second
# moments of input and weight, so that afterwards both have the same. A *Kronecker* transform, as KroQuant learns it, is
# built from a 4 x 4 and an 8 x 8 matrix for the whole layer and a few scales for each block: a fraction of the numbers.

# %%
wush = Wush(size=32).fit(stats, [w])
kronecker = KroQuant(steps=20, exponents=(0.6,)).fit(stats, [w], "layer", rounding)
arrays.heat_maps({f"x, {t.describe()}": t.activation(x)[:48] for t in (wush, kronecker)})

# %%
arrays.heat_maps({f"W, {t.describe()}": t.weight(w)[:48] for t in (wush, kronecker)})

# %% [markdown]
# No stripes are left, in the input or in the weight. WUSH keeps bands where the large channels were, but within a block
# all channels are alike. Kronecker's scales flatten the bands as well.
#
# One block with a large channel, before and after the rotation, as MXFP4 sees it. Before, the scale is made for one
# value, and the 31 others share the few levels near zero; after, it fits all of them.

# %%
start = int(size.argmax()) // 32 * 32
numbers.block_policies(np.asarray(x[5, start : start + 32]), "mxfp4", ["even"])

# %%
numbers.block_policies(np.asarray(hadamard.activation(x)[5, start : start + 32]), "mxfp4", ["even"])

# %% [markdown]
# ## Why rotation helps MXFP4 and hurts NVFP4
#
# Take values with tails from heavy to normal (Student's t), and round them with and without a rotation.


# %%
rng = np.random.default_rng(1)


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
# What counts is the error of the output, with both factors rounded. `Choose` measures candidates on calibration data;
# each is made for the block that the format has.

# %%
names = ("none", "Hadamard", "SmoothQuant", "WUSH", "Kronecker")
groups = {}
for fmt in (mxfp4, mxjax.get_format("nvfp4")):
    candidates = Choose([Hadamard(fmt.block_size), SmoothQuant(alpha=0.5), Wush(size=fmt.block_size), kronecker])
    measured = candidates.errors(stats, [w], rounding=Rounding(weight=fmt, activation=fmt))
    groups[fmt.name] = {label: 100 * e**0.5 for label, (_, e) in zip(names, measured, strict=True)}
arrays.bars(groups, "error of the output (%)")

# %% [markdown]
# The first two pairs of bars show it on a layer: the rotation helps MXFP4 and hurts NVFP4. One layer is an example, not
# advice; the documentation's pages on recipes have perplexities of the whole model.
#
# ## Letting each layer choose
#
# A rule may hold the choice itself. `calibrate` then gathers what it needs, and `quantize` gives every input the
# candidate that measured best, which may be none. The recipe `auto_mxfp4` does this with a longer list. The second
# layer here sees inputs without outliers.

# %%
params = {
    "first": {"kernel": w.T},
    "second": {"kernel": jnp.asarray(rng.standard_normal((N, 64)) / 16, jnp.float32)},
}


def model(p, x):
    h = mxjax.qdot(x, p["first"]["kernel"])
    return mxjax.qdot(jnp.tanh(h), p["second"]["kernel"])


choice = Choose([hadamard, Wush(size=32)])
cfg = mxjax.QuantConfig(rules=[mxjax.Rule(weight="mxfp4", activation="mxfp4", transform=choice)])
chosen = mxjax.quantize(params, cfg, stats=mxjax.calibrate(model, params, [x], cfg))
print(mxjax.summary(chosen))

# %% [markdown]
# The bits include WUSH's float matrices, a 32x32 for each 32 inputs. The fewer outputs share them, the more they weigh:
# here a good part of the codes or more, in a layer with thousands a fraction of a bit.

# %%
exact = model(params, x)
for label, tree in {"round to nearest": mxjax.quantize(params, "mxfp4"), "choice": chosen}.items():
    print(f"{label:17} error of the output {100 * numbers.relative_error(exact, jax.jit(model)(tree, x)):.1f} %")
