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
# # Exchanging checkpoints
#
# vLLM, transformers, AMD Quark and NVIDIA ModelOpt each have a layout of their own for 4-bit weights. The numbers
# inside are the same; names, scales and configs differ. mxjax reads and writes them, and converts one into another
# without touching a value.
#
# The models are a two-layer Llama with random weights, of the test data of this repository: what each tool's own
# exporter made of it.

# %%
# %matplotlib inline
import json
import tempfile
from pathlib import Path

import jax

import mxjax
from mxjax.report import arrays, plots

HERE = Path.cwd()
INTEROP = next(d for p in (HERE, *HERE.parents) if (d := p / "tests/data/interop").is_dir())
out = Path(tempfile.mkdtemp())
sorted(p.name for p in INTEROP.iterdir() if p.is_dir())

# %% [markdown]
# ## Reading what others wrote
#
# `load` looks at the files to see what they are. A quantized matrix becomes a `QWeight`, whatever the layout.

# %%
folders = {"quark": "quark_mxfp4", "compressed-tensors": "compressed_tensors_nvfp4", "modelopt": "modelopt_nvfp4"}
trees = {name: mxjax.load(INTEROP / folder) for name, folder in folders.items()}
for name, tree in trees.items():
    print(f"{name:19} {tree['model']['layers']['0']['mlp']['up_proj']['weight']}")

# %% [markdown]
# Paths are the tensor names with slashes for dots, and weights are `[out, in]`, as PyTorch stores them. For a Flax
# model, `load(folder, names=...)` maps names to paths; paths that end in `kernel` are given `[in, out]`.
#
# ## The same numbers
#
# Quantize the source here, and compare with what the others wrote. All use the scale rule "even", so every value
# should be equal.


# %%
def quantized(tree):
    """The quantized weights of a tree, in order."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, mxjax.QWeight))
    return [leaf for leaf in leaves if isinstance(leaf, mxjax.QWeight)]


source = mxjax.load(INTEROP / "source_tiny_llama")
ours = quantized(mxjax.quantize(source, "mxfp4"))
for folder in ("compressed_tensors_mxfp4", "quark_mxfp4"):
    pairs = list(zip(ours, quantized(mxjax.load(INTEROP / folder)), strict=True))
    codes = sum(int((a.qtensor.blocked_codes() != b.qtensor.blocked_codes()).sum()) for a, b in pairs)
    values = sum(int((a.dequantize() != b.dequantize()).sum()) for a, b in pairs)
    print(f"{folder:25} {len(pairs)} matrices; codes that differ: {codes}, values that differ: {values}")

# %% [markdown]
# compressed-tensors agrees in every bit. Quark drops the sign where a small negative number becomes zero, so codes
# 1000 are 0000 there: another code, the same value.

# %% [markdown]
# ## What differs: the files
#
# One matrix in each layout. Packed codes have one order everywhere, low nibble first. Scales are bytes, called
# `uint8` or `float8`; NVFP4's tensor scale is a multiplier in one layout and a divisor in another. Such a mix-up is
# the classic mistake of a converter: the model loads, and talks nonsense.

# %%
from safetensors import safe_open

for name, folder in folders.items():
    print(name)
    with safe_open(INTEROP / folder / "model.safetensors", framework="np") as file:
        for key in sorted(file.keys()):
            if "layers.0.mlp.up_proj" in key:
                part = file.get_slice(key)
                print(f"   {key.removeprefix('model.layers.0.mlp.'):28} {part.get_dtype():8} {part.get_shape()}")

# %% [markdown]
# ## Converting
#
# `convert` goes through memory maps, so the model may be larger than memory. Here ModelOpt's folder becomes one of
# compressed-tensors, which vLLM and transformers read, and comes back. (transformers has read such folders in our
# tests; vLLM itself has not been run on them.)

# %%
mxjax.convert(INTEROP / "modelopt_nvfp4", out / "converted", "compressed-tensors")
mxjax.convert(out / "converted", out / "back", "modelopt")
same = (out / "back/model.safetensors").read_bytes() == (INTEROP / "modelopt_nvfp4/model.safetensors").read_bytes()
print("there and back, the file is identical:", same)

# %% [markdown]
# The config is what an engine reads to find the right kernel. Ours, for the converted folder:

# %%
config = json.loads((out / "converted/config.json").read_text())["quantization_config"]
print(json.dumps(config["config_groups"], indent=1)[:900])

# %% [markdown]
# ## Writing
#
# From a tree of your own, `save` needs a layout and, for a folder that engines can serve, the model's config.
#
# Engines multiply q, k and v as one matrix, with one tensor scale. For NVFP4 `share_scales` sees to that while
# quantizing; no later step could without changing values.

# %%
from mxjax.config import FUSED

cfg = mxjax.recipes.rtn("nvfp4", None).replace(share_scales=FUSED)
served = mxjax.quantize(source, cfg)
attention = served["model"]["layers"]["0"]["self_attn"]
scales = [float(attention[name]["weight"].qtensor.global_scale) for name in ("q_proj", "k_proj", "v_proj")]
print("tensor scales of q, k, v:", *(f"{scale:.3e}" for scale in scales))

model_config = json.loads((INTEROP / "source_tiny_llama/config.json").read_text())
mxjax.save(out / "served", served, format="compressed-tensors", config=model_config)
sorted(p.name for p in (out / "served").iterdir())

# %% [markdown]
# ## What does not fit is refused first
#
# No layout of others carries everything. `check_recipe` says so before an hour is spent on calibration; `save` says
# it again.

# %%
recipes = ("mxfp4", "nvfp4", "mxfp6_e2m3_a16", "mxfp8_e4m3", "hadamard_mxfp4", "mr_gptq_mxfp4")
layouts = ("compressed-tensors", "modelopt", "quark", "mxjax")
print(f"{'':16}" + "".join(f"{layout:20}" for layout in layouts))
for recipe in recipes:
    row = []
    for layout in layouts:
        try:
            mxjax.io.check_recipe(source, recipe, layout)
            row.append("yes")
        except mxjax.errors.CheckpointError:
            row.append("-")
    print(f"{recipe:16}" + "".join(f"{cell:20}" for cell in row))

# %% [markdown]
# The message tells which weights, why, and which layouts could:

# %%
try:
    mxjax.io.check_recipe(source, "hadamard_mxfp4", "modelopt")
except mxjax.errors.CheckpointError as error:
    print(str(error)[:600])

# %% [markdown]
# ## How the tools spend their scales
#
# Reading everybody's files makes them comparable: MXFP4's scales have one step an octave, NVFP4's have eight.

# %%
plots.histograms("Quark, MXFP4", plots.qtensors(quantized(trees["quark"])))

# %%
plots.histograms("ModelOpt, NVFP4", plots.qtensors(quantized(trees["modelopt"])), plots.COLOURS[2])

# %% [markdown]
# And the bytes, in the model as Quark saved it:

# %%
arrays.sizes({"source": source, "MXFP4 by Quark": trees["quark"]})

# %% [markdown]
# docs/format.md says of each layout what every tensor means.
