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
# # Flax models, wrapped
#
# A Flax model is quantized without a change to its code, be it written in nnx or in linen. This notebook does both,
# shows that they give the same numbers, runs the result under `jit`, `grad` and `scan`, and spreads it over eight
# devices.
#
# The eight devices are simulated on the CPU. XLA must be told before JAX starts, so this cell comes first; on a
# machine with real devices leave it out.

# %%
import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

# %%
# %matplotlib inline
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mxjax
from mxjax.report import arrays

jax.devices()

# %% [markdown]
# ## nnx: modules are swapped in a copy
#
# A small residual model, written as one would anyway.


# %%
class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.up = nnx.Linear(64, 256, rngs=rngs)
        self.down = nnx.Linear(256, 64, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(100, 64, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(3)])
        self.lm_head = nnx.Linear(64, 100, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


model = Model(nnx.Rngs(0))
qmodel = mxjax.nnx.quantize(model, "mxfp4")
print(mxjax.summary(nnx.state(qmodel)))

# %% [markdown]
# Each `nnx.Linear` that the recipe matches became a `QLinear`. `model` itself is untouched, and what is not quantized
# is shared with it, not copied.

# %%
print(type(model.layers[0].up).__name__, "->", type(qmodel.layers[0].up).__name__)
print("the embedding's array is shared:", qmodel.embed.embedding[...] is model.embed.embedding[...])

# %%
arrays.sizes({"float32": nnx.state(model, nnx.Param), "mxfp4": nnx.state(qmodel)})

# %% [markdown]
# ## jit
#
# The quantized model is an nnx module like any other: `nnx.jit`, `nnx.split`, `nnx.merge` take it.


# %%
@nnx.jit
def forward(model, tokens):
    return model(tokens)


tokens = jax.random.randint(jax.random.key(1), (8, 16), 0, 100)
exact = forward(model, tokens)
for recipe in ("mxfp4", "mxfp4_a16", "nvfp4"):
    logits = forward(mxjax.nnx.quantize(model, recipe), tokens)
    print(f"{recipe:11} relative error of the logits: {mxjax.eval.compare_arrays(exact, logits).relative_error:.4f}")

# %% [markdown]
# ## Training around it
#
# Quantized weights are `QParam`, not `nnx.Param`. So `nnx.grad` and `nnx.Optimizer`, which look for `nnx.Param`, see
# norms, biases and adapters only: fine-tuning beside frozen 4-bit weights needs no filter of your own.


# %%
@nnx.jit
def gradients(model, tokens):
    return nnx.grad(lambda m: jnp.mean(m(tokens) ** 2))(model)


sorted(nnx.to_pure_dict(gradients(qmodel, tokens))["layers"][0])

# %% [markdown]
# ## scan over stacked layers
#
# Deep models are compiled as one layer under `scan`. Make the blocks stacked with `nnx.vmap`, quantize the stack,
# scan.

# %%
stacked = nnx.vmap(lambda key: Block(nnx.Rngs(key)))(jax.random.split(jax.random.key(2), 3))
qstacked = mxjax.nnx.quantize(stacked, "nvfp4")


@nnx.jit
@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
def run(x, block):
    return block(x)


x = jax.random.normal(jax.random.key(3), (8, 64))
kernel = qstacked.up.kernel[...]
print("stacked kernel", kernel.shape, "- one tensor scale a layer:", kernel.qtensor.global_scale.shape)
print("output", run(x, qstacked).shape)

# %% [markdown]
# ## From a checkpoint, without ever making the float weights
#
# `nnx.eval_shape` gives the model without values; `from_params` puts a quantized tree in.

# %%
import tempfile

folder = tempfile.mkdtemp() + "/model"
mxjax.save(folder, nnx.state(qmodel))
restored = mxjax.nnx.from_params(nnx.eval_shape(lambda: Model(nnx.Rngs(0))), mxjax.load(folder))
assert np.array_equal(forward(restored, tokens), forward(qmodel, tokens))

# %% [markdown]
# ## linen: the parameters are quantized, the module stays
#
# In linen the model is a function of its parameters, so there is nothing to swap. Quantize `params`, and apply the
# module inside `mxjax.linen.quantized()`, or with `mxjax.linen.apply`.


# %%
class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm(name="norm")(x)
        return x + nn.Dense(64, use_bias=False, name="down")(nn.gelu(nn.Dense(256, name="up")(h)))


module = LinenBlock()
params = module.init(jax.random.key(4), x)["params"]
qparams = mxjax.quantize(params, "mxfp4")
jax.jit(lambda p, x: mxjax.linen.apply(module, {"params": p}, x))(qparams, x).shape

# %% [markdown]
# Without the context, Flax itself says that the shapes do not fit: a quantized tree is never taken for a float one.

# %%
try:
    module.apply({"params": qparams}, x)
except Exception as error:
    print(type(error).__name__)

# %% [markdown]
# Both libraries, the same parameters, the same numbers:

# %%
twin = mxjax.nnx.from_params(nnx.eval_shape(lambda: Block(nnx.Rngs(0))), params)
in_nnx = mxjax.nnx.quantize(twin, "mxfp4")(x)
in_linen = mxjax.linen.apply(module, {"params": qparams}, x)
print("largest difference:", float(jnp.abs(in_nnx - in_linen).max()))

# %% [markdown]
# ## Eight devices
#
# Codes and scales have the contraction axis last and the output axis before it. To give each device some of the
# output channels, shard axis 0 of both: a block and its scale then stay together, and no device needs another's
# bytes.

# %%
mesh = jax.make_mesh((2, 4), ("data", "model"))


def place(leaf):
    """Output channels over "model"; vectors everywhere."""
    spec = P("model", None) if leaf.ndim == 2 else P()
    return jax.device_put(leaf, NamedSharding(mesh, spec))


graphdef, state = nnx.split(twin_q := mxjax.nnx.quantize(twin, "mxfp4"))
state = jax.tree.map(place, state)
batch = jax.device_put(x, NamedSharding(mesh, P("data", None)))
up = nnx.merge(graphdef, state).up.kernel[...].qtensor
arrays.shards({"x": batch, "up, codes": up.codes, "up, scales": up.scales})

# %% [markdown]
# Each part lists the devices that hold it: rows of `x` are split in two over "data", output channels in four over
# "model". `jit` does the rest.

# %%
sharded = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
y = sharded(state, batch)
print("output sharding:", y.sharding.spec)
print("largest difference from one device:", float(jnp.abs(y - forward(twin_q, x)).max()))

# %% [markdown]
# What travels between devices? The second product sums over channels that are spread out, so their activations are
# gathered or their partial sums added. The 4-bit weights stay where they are.

# %%
hlo = sharded.lower(state, batch).compile().as_text()
for op in ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"):
    lines = [line for line in hlo.splitlines() if f" {op}(" in line or f" {op}-start(" in line]
    print(f"{op:19} {len(lines)}", *(line.split("=")[1].split("{")[0].strip() for line in lines))
