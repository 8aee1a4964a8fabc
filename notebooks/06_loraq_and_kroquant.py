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
# # LoRaQ and KroQuant on PixArt-Mini
#
# A diffusion transformer is called again and again, and each call goes on from where the last one ended. In four bits
# its errors can be seen: they are in the picture.
#
# Two ideas make them small. **LoRaQ** puts a few directions of each weight into a small branch beside it, and rounds
# the branch as well. **KroQuant** learns a small map of each layer's input that makes rounding kinder. This notebook
# takes both apart on one layer, then draws with the whole model.
#
# The model is PixArt-Mini, which ships with `mxjax`: 12.5 million parameters, 64x64 pixels, trained on clip art and
# emoji. It is small enough to draw on a laptop, and real enough to fail like the large ones.

# %%
# %matplotlib inline
import os
from dataclasses import replace
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from mxjax_models import pixart_mini
from mxjax_models.samplers import flow_schedule

import mxjax
from mxjax.algorithms import ALGORITHMS
from mxjax.algorithms.loraq import optimize
from mxjax.core.formats import MXFP8_E4M3
from mxjax.eval import psnr
from mxjax.report import arrays, pictures, steps
from mxjax.transforms import KroQuant

# %% [markdown]
# Everything is sized for a laptop. The tests of this repository set a variable that makes it smaller still: one block
# of the seven, two steps, and one layer of the block in four bits.

# %%
SMALL = "MXJAX_SMALL_NOTEBOOKS" in os.environ
PROMPTS = ["red apple", "grinning face emoji", "flag of brazil", "pizza"][: 2 if SMALL else 4]
STEPS = 2 if SMALL else 8
BLOCK = 0 if SMALL else 3
SKIPPED = "attn1/|ff/|attn2/to_[kvo]" if SMALL else "attn2/to_[kv]/"  # stays in float

mini = pixart_mini.load()
model = mini.transformer
if SMALL:
    model.transformer_blocks = nnx.List(list(model.transformer_blocks)[:1])
print(f"{sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param))) / 1e6:.1f} million parameters")

# %% [markdown]
# ## How it draws
#
# A picture starts as noise. The model says in which direction the picture lies, the *velocity*, and the sampler goes a
# step that way:
#
# $$x_t = t \cdot \mathrm{noise} + (1 - t) \cdot \mathrm{image}, \qquad v = \mathrm{noise} - \mathrm{image}.$$
#
# At any time, $x_t - t v$ is what the model believes the picture will be. `mini.images` does all this in one compiled
# loop; here the loop is Python, so that the velocity of every step can be kept.

# %%
captions, masks = mini.encode(PROMPTS)
nothing = mini.encode([""])  # what guidance starts from
noise = pixart_mini.noise(range(len(PROMPTS)))
times = np.asarray(flow_schedule(STEPS).sigmas)


@partial(jax.jit, static_argnames="graph")
def velocity(graph, state, x, t):
    predict = pixart_mini.guided(nnx.merge(graph, state), captions, masks, nothing, pixart_mini.GUIDANCE)
    return predict(x, 1000 * t)


def draw(transformer):
    """Latents and velocities before each step, and the images at the end."""
    graph, state = nnx.split(transformer)
    x, xs, vs = noise, [], []
    for now, then in pairwise(times):
        xs.append(x)
        vs.append(velocity(graph, state, x, now))
        x = x + (then - now) * vs[-1]
    return xs, vs, np.asarray(pixart_mini.to_pixels(x))


def belief(x, v, t):
    """The image that the model expects, as pixels."""
    return np.asarray(pixart_mini.to_pixels(x - t * v))


# %%
float_xs, float_vs, float_images = draw(model)
shown = range(0, STEPS, max(STEPS // 4, 1))
early = {f"step {i + 1}": belief(float_xs[i], float_vs[i], times[i]) for i in shown}
pictures.image_grid(early | {"image": float_images}, PROMPTS)

# %% [markdown]
# From top to bottom: what the model believes at some of its steps. Position and colour are there after the first, then
# comes the outline, last the details. An error early on moves things; a late one is grain.
#
# ## Four bits, rounded to nearest
#
# Weights and inputs of attention and MLPs become MXFP4. Embedders, adaLN and the last projection stay as they are, as
# in published work; so do the keys and values of the caption, which are the same at all steps and need computing only
# once.


# %%
def config(recipe, transform=None, **options):
    """The recipe with other options, and the caption's keys and values left alone."""
    (rule,) = mxjax.recipes.get(recipe).rules
    rule = replace(rule, options={**rule.options, **options})
    if transform:
        rule = replace(rule, transform=replace(rule.transform, **transform))
    skipped = mxjax.Rule(path=SKIPPED, weight=None)
    return mxjax.QuantConfig(rules=[skipped, rule])


rtn_images = draw(mxjax.nnx.quantize(model, config("mxfp4")))[2]


def notes(images):
    return [f"{psnr(a, b):.1f} dB" for a, b in zip(float_images, images, strict=True)]


pictures.image_grid({"float": float_images, "RTN": rtn_images}, PROMPTS, {"RTN": notes(rtn_images)})

# %% [markdown]
# Same prompts, same noise. The subjects are still there, but white is no longer white, surfaces are grainy, and details
# have become others: look at the teeth, and at the edges of the flag. Below each image stands its PSNR against the
# float one: 6 dB more mean half the error.
#
# ## One layer
#
# To see why, take one layer: the query projection of cross-attention in the middle of the model. Its inputs are
# gathered while the float model draws some captions from its training, at all timesteps in equal parts.

# %%
calibration = mini.calibration_prompts[: 2 if SMALL else 8]
batches = mini.calibration_batches(calibration, steps=STEPS, each=2, batch=4 if SMALL else 16)
stats = mxjax.calibrate(model, None, batches, config("svdquant_mxfp4"))
name = f"transformer_blocks/{BLOCK}/attn2/to_q/kernel"
seen = stats[name]
x = seen.sample
kernel = model.transformer_blocks[BLOCK].attn2.to_q.kernel[...]
W = kernel.T  # [outputs, inputs]
y = x @ kernel


def output_error(y_q):
    return 100 * float(jnp.sum(jnp.square(y_q - y)) / jnp.sum(jnp.square(y)))


x_q, W_q = mxjax.fake_quantize(x, "mxfp4"), mxjax.fake_quantize(W, "mxfp4")
print(f"inputs {x.shape}, weight {W.shape}; squared error of the output")
print(f"  weight rounded {output_error(x @ W_q.T):.2f} %, input rounded {output_error(x_q @ W.T):.2f} %,", end=" ")
print(f"both {output_error(x_q @ W_q.T):.2f} %")

# %% [markdown]
# Two sources of error, and one cure for each: a branch takes directions out of the weight, a transform tames the
# input.
#
# ## What a branch can take
#
# Singular values of the weight, of its rounding error, and of random numbers as large as that error:

# %%
K = W.shape[1]


def singular(m):
    return np.linalg.svd(np.asarray(m), compute_uv=False)


random = np.random.default_rng(0).standard_normal(W.shape)
random *= float(jnp.linalg.norm(W - W_q)) / np.linalg.norm(random)
values = {"weight": singular(W), "error of rounding it": singular(W - W_q), "random numbers": singular(random)}
ranks = {"rank 32": 32, "rank 64": 64}
shown_first = 3 * K // 4  # the last fall to zero whatever one does
steps.spectrum({k: v[:shown_first] for k, v in values.items()}, "direction, in order", "singular value", ranks)

# %% [markdown]
# Look at the two lower lines: they are nearly one. Rounding is noise, and noise has no directions of its own. So a
# branch that repairs the error *afterwards* can do little. The weight's line starts steeper. That is where a branch
# helps: take these directions out *before* rounding, and what is left to round is smaller, with smaller steps.

# %%
for label, v in values.items():
    share = [100 * np.square(v[:rank]).sum() / np.square(v).sum() for rank in ranks.values()]
    print(f"{label:<22} rank 32 holds {share[0]:.0f} % of it, rank 64 {share[1]:.0f} %")

# %% [markdown]
# ## SVDQuant's branch and LoRaQ's
#
# SVDQuant keeps a branch of rank 32 in 16 bits. LoRaQ keeps one of rank 64 in 8 bits, which takes the same bytes (3 %
# more), and optimizes it for what is left once *everything* is rounded:
#
# $$\min_{A, B} \; \big\| W - Q(W - B A) - q(B)\, q(A) \big\|^2$$
#
# Here are the two on this layer, with fewer iterations than the recipes take.

# %%
KRO = {"steps": 10 if SMALL else 30, "exponents": (0.6,)}
CONFIGS = {
    "RTN": config("mxfp4"),
    "SVDQuant": config("svdquant_mxfp4", {"grid": 2}, iterations=1 if SMALL else 2),
    "LoRaQ": config("loraq_mxfp4", iterations=2 if SMALL else 4, steps=2 if SMALL else 30),
    "KroQuant + LoRaQ": config("kroquant_loraq_mxfp4", KRO, iterations=2, steps=2 if SMALL else 10),
}


def solved(label):
    rule = CONFIGS[label].rules[-1]
    spec = rule.spec(name, 2, on_nonfinite="raise", on_uneven="error")
    return ALGORITHMS[rule.algorithm](kernel, spec, seen)


layers = {label: solved(label) for label in CONFIGS}
errors = {label: W - layers[label].dequantize(jnp.float32).T for label in ("RTN", "SVDQuant", "LoRaQ")}
steps.spectrum(
    {f"error of {label}": singular(e)[:shown_first] for label, e in errors.items()},
    "direction, in order", "singular value", ranks,
)  # fmt: skip

# %% [markdown]
# Both lower the whole line, not only its beginning: every one of the 320 directions is rounded with smaller steps.
# LoRaQ lies lower, with twice the directions for the same bytes, although its branch has rounding errors of its own.
# SVDQuant is not made for this measure, though: it looks at the output of the layer.

# %%
print("method            rank   branch KiB   weight error   bytes in all")
for label in errors:
    q = layers[label]
    size = 0 if q.branch is None else sum(leaf.nbytes for leaf in jax.tree.leaves(q.branch))
    relative = 100 * float(jnp.linalg.norm(errors[label]) / jnp.linalg.norm(W))
    rank = 0 if q.branch is None else q.branch.rank
    print(f"{label:<16} {rank:5} {size / 1024:12.1f} {relative:12.2f} % {q.nbytes:14,}")

# %% [markdown]
# ## How LoRaQ gets there
#
# It starts with a few rounds in turn: the SVD of what rounding leaves, rounding of what the SVD leaves. Then it
# follows the gradient, with both factors rounded at every step. The loss is that of the formula above, relative to the
# weight.

# %%
rule = CONFIGS["LoRaQ"].rules[-1]
rounding = rule.spec(name, 2, on_nonfinite="raise", on_uneven="error").rounding
found = optimize(
    W, None, jax.random.key(0), rounding=rounding, factors=MXFP8_E4M3, rank=64,
    iterations=rule.options["iterations"], steps=rule.options["steps"], learning_rate=0.2, rotation=False,
)  # fmt: skip
pictures.falling({"LoRaQ": found.losses}, "round, then step", "squared weight error, relative")

# %% [markdown]
# Rounding makes the loss rough, so a step may go up. The method keeps the best that it has seen.
#
# ## What the input looks like
#
# A branch leaves the input as it is, and here the input is the larger part of the error. A block of 32 channels
# shares one scale, so one large channel makes all others in its block coarse. Here are three blocks of the input,
# around its largest channel; rows are tokens.

# %%
recipe = CONFIGS["KroQuant + LoRaQ"].rules[-1].transform
assert isinstance(recipe, KroQuant)
candidates = recipe.search(seen, [W], name, rounding)
learned = min(candidates, key=lambda c: c.error)
start = candidates[0]
views = {"input": x, "at the start": start.transform.activation(x), "learned": learned.transform.activation(x)}
widest = int(jnp.argmax(jnp.mean(jnp.square(x), axis=0))) // 32  # the block with the largest channel
window = slice(32 * max(widest - 1, 0), 32 * max(widest - 1, 0) + 96)
arrays.heat_maps({title: view[:48, window] for title, view in views.items()})

# %% [markdown]
# Bright columns on the left are channels that are large whatever the token. A map of the block spreads them over their
# neighbours. What rounding feels is how far the peak of a block is above its mean size:


# %%
def peaks(view):
    blocks = np.asarray(view).reshape(-1, 32)
    ratio = np.abs(blocks).max(1) / np.sqrt(np.square(blocks).mean(1))
    return {"median": float(np.median(ratio)), "worst 10 %": float(np.quantile(ratio, 0.9))}


arrays.bars({title: peaks(view) for title, view in views.items()}, "peak / rms of a block")

# %% [markdown]
# ## What KroQuant learns
#
# A full 32 x 32 matrix for each block would cost more than it saves. KroQuant writes it as a Kronecker product of a 4
# x 4 and an 8 x 8 matrix, the same for the whole layer, with a few scales for each block:
#
# $$T_b = D_b \, (L \otimes R), \qquad y \approx Q(x T)\, Q(W T^{-\mathsf{T}})^{\mathsf{T}}.$$
#
# It tries some starts, and trains the best one on the error that rounding is expected to make. These are its factors.

# %%
before, after = start.transform, learned.transform
pictures.matrices(
    {"L at the start": before.left[0], "L learned": after.left[0], "R at the start": before.right[0],
     "R learned": after.right[0]}, "entry",
)  # fmt: skip

# %% [markdown]
# The pattern of signs is a Hadamard matrix', which every start but the identity has in it. Training leaves it, and
# shifts the entries: small differences that trade peaks of the input against errors of the weight, which goes through
# the inverse.
#
# That is why the condition number matters: it says by how much the inverse could blow up what the map shrinks.


# %%
def conditions(t):
    blocks = np.linalg.cond(np.asarray(t.dense(K).matrices))
    return {"L": np.linalg.cond(t.left[0]), "R": np.linalg.cond(t.right[0]), "worst block": blocks.max()}


arrays.bars({"start": conditions(before), "learned": conditions(after)}, "condition number")

# %% [markdown]
# One means orthogonal. L and R serve the whole layer; the scales of each block do the rest, pulling channels that stand
# out down, and the weight there up.
#
# And the loss, step by step. Every ten steps the branch is made anew for the transform at hand, which shows as a bend.

# %%
trained = next(c for c in candidates if c.losses is not None)
pictures.falling({trained.name: trained.losses}, "step of Adam", "expected squared error, relative")

# %%
for c in candidates:
    print(f"{c.name:<34} error of the output {100 * c.error:.3f} %")
print(f"numbers in the transform: {after.parameters}, a scale for each channel would be {K}")

# %% [markdown]
# ## Both on the layer
#
# Now inputs and weights are rounded, as the layer will run.

# %%
outcome = {label: output_error(mxjax.qdot(x, q)) for label, q in layers.items()}
arrays.bars({"squared error of the output": outcome}, "%")

# %% [markdown]
# A branch helps with the input's error, too: what goes through it is not rounded to four bits. The last bar has the
# learned transform besides, and a branch that is fitted to the output rather than to the weight.
#
# ## The whole model
#
# The same for attention in all blocks, with the statistics from above, and options that are shorter still: 42 matrices
# are to be solved four times. The MLPs stay in float: each new shape of a weight compiles every method anew.

# %%
mlps = mxjax.Rule(path="ff/", weight=None)
short = {
    "RTN": CONFIGS["RTN"],
    "SVDQuant": config("svdquant_mxfp4", {"grid": 2}, iterations=1),
    "LoRaQ": config("loraq_mxfp4", iterations=2, steps=2 if SMALL else 10),
    "KroQuant + LoRaQ": config(
        "kroquant_loraq_mxfp4", {"steps": 10, "exponents": (0.6,), "starts": ("wush",)}, iterations=1, steps=2
    ),
}
whole = {label: cfg.replace(rules=[mlps, *cfg.rules]) for label, cfg in short.items()}
models = {label: mxjax.nnx.quantize(model, cfg, stats) for label, cfg in whole.items()}
drawn = {label: draw(m) for label, m in models.items()}
rows = {"float": float_images} | {label: images for label, (_, _, images) in drawn.items()}
pictures.image_grid(rows, PROMPTS, {label: notes(rows[label]) for label in drawn})

# %% [markdown]
# Go down a column and compare with its first image: the white of the background, grain on surfaces, then the small
# features. A low PSNR need not be an ugly picture. It says that it became *another* picture.
#
# ## Over the steps
#
# What each model believes of the first prompt at its steps, from left to right:

# %%
titles = [f"t = {times[i]:.2f}" for i in shown]


def beliefs(xs, vs):
    return np.concatenate([belief(xs[i][:1], vs[i][:1], times[i]) for i in shown])


paths = {"float": (float_xs, float_vs)} | {label: found[:2] for label, found in drawn.items()}
pictures.image_grid({label: beliefs(*path) for label, path in paths.items()}, titles)

# %% [markdown]
# Look at where a row first differs from the top one. At the first steps only large shapes exist, and a large shape that
# moved stays where it is; later steps polish whatever the early ones have left.
#
# How far they are apart, in numbers: the distance of each model's latents from the float model's, for all prompts.


# %%
def apart(xs):
    pairs = list(zip(xs, float_xs, strict=True))[1:]  # all begin with the same noise
    return [float(jnp.sum(jnp.square(a - b)) / jnp.sum(jnp.square(b))) for a, b in pairs]


pictures.falling({label: apart(xs) for label, (xs, _, _) in drawn.items()}, "step", "squared distance, relative", 2)

# %% [markdown]
# Every step starts from what the one before has made of its errors, so distances grow along the way.
#
# The *velocity error* leaves this drift out. Every model is asked at the latents of the float model, so that nothing
# adds up. It is less noisy than PSNR, and what our benchmark ranks by.


# %%
def velocity_error(transformer):
    graph, state = nnx.split(transformer)
    ratios = []
    for i in shown:
        v = velocity(graph, state, float_xs[i], times[i])
        ratios.append(float(jnp.sum(jnp.square(v - float_vs[i])) / jnp.sum(jnp.square(float_vs[i]))))
    return 100 * sum(ratios) / len(ratios)


print("method             PSNR (dB)   velocity error   bits a weight")
for label, m in models.items():
    quality = np.mean([psnr(a, b) for a, b in zip(float_images, rows[label], strict=True)])
    bits = mxjax.summary(nnx.state(m, mxjax.nnx.QParam)).bits_per_weight
    print(f"{label:<18} {quality:9.2f} {velocity_error(m):14.2f} % {bits:15.2f}")

# %% [markdown]
# The bits of the branches look large: at a width of 320 a branch weighs most of what the weight itself does. On a
# layer of 3072 it is a third of a bit.
#
# ## Where to go from here
#
# Four images and short options show how things work, not how good they are. The benchmark takes the full recipes on
# all layers, all calibration prompts, 64 held-out prompts, three seeds and both formats:
#
# ```sh
# python benchmarks/pixart_quality.py --out out/pixart_quality.json
# ```
#
# For a page with your own prompts, before and after:
#
# ```sh
# mxjax generate --model pixart-mini --recipe kroquant_loraq_mxfp4 --prompt "red apple"
# ```
