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
# # Formats: what four bits can say
#
# A microscaling format stores a block of 16 or 32 numbers as tiny floats that share one scale:
#
# $$\text{value} = \text{element(code)} \times \text{scale(byte)} \times \text{tensor scale}$$
#
# This notebook looks at each of the three factors. By its end you will have seen every code of every format, every
# rounding decision, and what a choice of scale does to a block. It needs no model, no data and less than a minute.

# %%
# %matplotlib inline
import jax.numpy as jnp
import numpy as np

import mxjax
from mxjax.core import codec
from mxjax.report import numbers

# %% [markdown]
# ## Sixteen codes
#
# FP4 (E2M1) has a sign, two bits of exponent and one of mantissa. `decode` turns codes into values; here are all of
# them. There is no Inf and no NaN: with sixteen codes nobody can afford one.

# %%
e2m1 = mxjax.get_format("mxfp4").element
for code in range(16):
    value = codec.decode(jnp.array([code], jnp.uint8), e2m1)[0]
    print(f"{code:04b}  {value:+.1f}")

# %% [markdown]
# Eight magnitudes: 0, 0.5, 1, 1.5, 2, 3, 4, 6. The gaps grow with the values, which suits weights: many are small, a
# few are large.
#
# ## Every value of every format
#
# Each line below is one format, divided by its largest element so that lines can be compared. Blue values are normal,
# orange ones subnormal: there the steps stop shrinking.

# %%
numbers.number_lines(list(mxjax.FORMATS))

# %% [markdown]
# E2M3 and E3M2 spend the same six bits differently. E2M3 has finer steps; E3M2 reaches closer to zero. INT8 has even
# steps throughout.
#
# On an axis of powers of two the same values show their *range*. A float format is a comb with equal teeth: its
# relative error is the same everywhere, until the subnormals.

# %%
numbers.number_lines(list(mxjax.FORMATS), log=True)

# %% [markdown]
# The block formats wrap these elements with a scale. `bits` counts the shared scale, too.

# %%
print(f"{'format':12} {'element':8} block scale  bits  largest element")
for f in mxjax.FORMATS.values():
    print(f"{f.name:12} {f.element.name:8} {f.block_size:5} {f.scale:6} {f.bits_per_value:5}  {f.element.max_value:g}")

# %% [markdown]
# ## Rounding
#
# A number goes to the nearest element. Half way between two it goes to the one whose code is *even*: a filled dot. Of
# two neighbours one is always even, so ties go up as often as down, and sums of many rounded numbers do not drift.

# %%
numbers.rounding_staircase("mxfp4")

# %% [markdown]
# Two things to remember from the picture. Up to 0.25 everything becomes zero. Above 6 everything becomes 6: the error
# then grows without limit, which is why the scale matters so much.
#
# The six-bit staircase has the same shape with finer steps.

# %%
numbers.rounding_staircase("mxfp6_e2m3", limit=2.5)

# %% [markdown]
# The rounding is done in integer arithmetic, so that it means the same in eager code, under `jit`, in `scan` and in a
# GPU kernel. A cast to `float4_e2m1fn` and back would not: under `jit` on a GPU, XLA may fold it into nothing.

# %%
ties = jnp.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
codec.decode(codec.encode(ties, e2m1), e2m1)

# %% [markdown]
# ## A block and its scale
#
# Take 32 normal numbers with one outlier. MXFP4's scale is a power of two (E8M0: eight bits of exponent), and a
# *policy* decides which one.
#
# The grey lines are what can be represented. Follow the small values: a scale that is one step larger leaves them
# half the lines.

# %%
rng = np.random.default_rng(0)
block = rng.standard_normal(32).astype(np.float32)
block[5] = 5.2
numbers.block_policies(block)

# %% [markdown]
# What the policies do, for the largest magnitude `amax`:
#
# | policy | rule | price |
# |---|---|---|
# | `floor` | OCP's: the exponent of amax, minus two | clips what lies above 6 |
# | `even` | the same after rounding amax to one mantissa bit; the default | clips a little |
# | `rceil` | the smallest power of two that clips nothing | coarser where amax is just above 6 |
# | `ceil` | rounds the exponent up | never clips, coarsest |
# | `mse` | tries three exponents, keeps the best | three times the work |
# | `third` | 4/3 of a power of two, which never clips (MR-GPTQ) | not idempotent |
#
# Now an `amax` of 7.6, where they part. Red values are clipped.

# %%
numbers.block_policies(block / 5.2 * 7.6)

# %% [markdown]
# ## No policy wins everywhere
#
# Let the block grow through two octaves and measure the relative error. A power-of-two scale can only follow in
# jumps, so the error is a wave that repeats with every octave.

# %%
numbers.policy_sweep(block)

# %% [markdown]
# NVFP4 has blocks of 16 and an E4M3 scale, which has eight steps an octave instead of one. Its waves are shorter and
# lower. `four_over_six` lets each block choose whether its largest value becomes 6 or 4.

# %%
numbers.policy_sweep(block[:16], "nvfp4")

# %% [markdown]
# ## Move it yourself
#
# `look` draws one block of your choice. With ipywidgets installed, the cell below it has sliders.


# %%
def look(amax=6.5, outlier=5.2, policy="even", fmt="mxfp4"):
    values = block[: mxjax.get_format(fmt).block_size].copy()
    values[5] = outlier
    values *= amax / np.abs(values).max()
    return numbers.block_policies(values, fmt, [policy], tensor_amax=100.0)


# %%
try:
    import ipywidgets
except ImportError:
    print("pip install ipywidgets, and run this cell again: it will have sliders")
else:
    policies = ["floor", "even", "ceil", "rceil", "mse"]  # those that every format has
    ipywidgets.interact(look, amax=(4.0, 16.0, 0.1), outlier=(0.5, 20.0, 0.1), policy=policies, fmt=list(mxjax.FORMATS))

# %% [markdown]
# The same without sliders: `amax` 4.5, 6.5 and 7.9 under `even`. At 4.5 everything fits, at 6.5 the largest value is
# clipped, at 7.9 the scale has doubled.

# %%
look(4.5)

# %%
look(6.5)

# %%
look(7.9)

# %% [markdown]
# ## What an outlier costs
#
# One large value sets the scale for all its neighbours. The relative error of the *other* 31 values grows with it, up
# to the point where all of them are zero.

# %%
print("outlier   mxfp4   nvfp4   mxfp6   mxfp8     error of the other values, %")
for outlier in (2.0, 4.0, 8.0, 16.0, 32.0):
    errors = []
    for name in ("mxfp4", "nvfp4", "mxfp6_e2m3", "mxfp8_e4m3"):
        x = block.copy()
        x[5] = outlier
        others = np.arange(32) != 5
        errors.append(100 * numbers.relative_error(x[others], mxjax.fake_quantize(x, name)[others]))
    print(f"{outlier:7.0f} " + "".join(f"{e:8.1f}" for e in errors))

# %% [markdown]
# NVFP4's blocks are half as long, so half the neighbours get away. Notebook 04 shows what rotations and smoothing do
# about outliers.
#
# ## Special values
#
# A block of zeros is scale byte 0 and codes 0. NaN and Inf raise an error by default; with `on_nonfinite="nan"` they
# mark their block, and only theirs.

# %%
x = jnp.ones((1, 64)).at[0, 3].set(jnp.nan)
q = mxjax.quantize_array(x, "mxfp4", on_nonfinite="nan")
print("scale bytes:", q.scales.tolist(), " values:", q.dequantize()[0, 30:34])

# %%
try:
    mxjax.quantize_array(x, "mxfp4")
except mxjax.errors.NonFiniteError as error:
    print(error)
