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
# # Kernels: where four bits become speed
#
# Four-bit weights are a quarter of the bytes. Whether that makes a layer faster depends on two things: what happens to
# the *input* on its way into the product, and what arithmetic the machine has.
#
# This notebook explains the two ideas behind the kernels with arrays small enough to look at, and then shows what was
# measured on an NVIDIA H200. It runs anywhere; the last part measures live if there is a GPU.

# %%
# %matplotlib inline
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import mxjax
from mxjax.core import codec
from mxjax.report import arrays, numbers, steps
from mxjax.transforms import Hadamard
from pallas_kernels import transform_quantize as tq

# %% [markdown]
# ## One pass over x
#
# A W4A4 layer quantizes its input online. Written as array operations that is a rotation, a maximum for each block, a
# division, a rounding and a packing. Each reads its operand from memory and writes its result back.
#
# For a bfloat16 input, in bytes moved for each value:

# %%
steps.traffic(
    {
        "bfloat16, as it is": {"read": 2},
        "one kernel": {"read": 2, "write": 1 / 2 + 1 / 32},
        "rotate, then quantize": {"read": 2 + 2, "write": 2 + 1 / 2 + 1 / 32},
        "an array operation a step": {"read": 2 + 2 + 2 + 1, "write": 2 + 1 / 32 + 1 + 1 / 2},
    }
)

# %% [markdown]
# `transform_quantize` does all of it in one pass: a row of x comes in, codes and scales go out. Here is one block on
# its way. First as it arrives, with an outlier, then rotated; in both pictures the block is rounded to MXFP4.

# %%
rng = np.random.default_rng(0)
x = rng.standard_normal((8, 64)).astype(np.float32)
x[0, 5] = 9.0
numbers.block_policies(x[0, :32], "mxfp4", ["even"])

# %%
numbers.block_policies(np.asarray(Hadamard(32).activation(jnp.asarray(x)))[0, :32], "mxfp4", ["even"])

# %% [markdown]
# The kernel gives the same bytes as the functions one by one. It has an XLA form that always runs, one in Triton, and
# one in Mosaic GPU; the tests hold all of them to the first.

# %%
codes, scales = tq.transform_quantize(jnp.asarray(x), "mxfp4", transform=tq.Transform(hadamard=32))
by_hand = mxjax.quantize_array(Hadamard(32).activation(jnp.asarray(x)), "mxfp4")
print("codes ", codes.shape, codes.dtype, "equal:", bool((codes == by_hand.codes).all()))
print("scales", scales.shape, scales.dtype, "equal:", bool((scales == by_hand.scales).all()))

# %% [markdown]
# Two codes share a byte, the first in the low half:

# %%
byte = int(codes[0, 0])
low, high = byte & 15, byte >> 4
e2m1 = mxjax.get_format("mxfp4").element
values = codec.decode(jnp.array([low, high], jnp.uint8), e2m1)
print(
    f"{byte:08b}  ->  {low:04b} and {high:04b}  ->  {values[0]:g} and {values[1]:g}, times 2^{int(scales[0, 0]) - 127}"
)

# %% [markdown]
# ## Exact FP8
#
# Blackwell and MI350 multiply FP4. Hopper does not; it multiplies FP8 (E4M3), twice as fast as bfloat16. So can a block
# of FP4 be *written* as FP8?
#
# One value can, always. E2M1 is `S EE M`, E4M3 is `S EEEE MMM`: put the bits in the right places, and what comes out is
# the same number times 2^-6. Subnormal numbers work out, too.

# %%
print("code   E2M1        bits as E4M3     E4M3 x 64")
for c in (0, 1, 2, 3, 5, 7, 15):
    bits = (c & 8) << 4 | (c & 7) << 2
    as_fp8 = float(np.array([bits], np.uint8).view(jnp.float8_e4m3fn)[0]) * 64
    print(
        f"{c:04b}   {float(codec.decode(jnp.array([c], jnp.uint8), e2m1)[0]):4g}        {bits:08b}         {as_fp8:4g}"
    )

# %% [markdown]
# That is a shift and a mask, for four codes at a time in a 32-bit register. No table, no conversion.
#
# A whole row has many blocks, each with its own power of two, and a product over the row needs *one* factor. So each
# block's scale must go into its FP8 numbers. E4M3 has exponents to spare: the picture shows the eight magnitudes of
# E2M1 for blocks with smaller and smaller scales.

# %%
steps.exact_binades(range(0, 19))

# %% [markdown]
# Down to 14 powers of two below the row's largest scale every value is an E4M3 number: the conversion loses nothing.
# Below, the smallest values are rounded, by less than 2^-15 of the row's largest value.
#
# `transform_quantize_fp8` returns such a pair, and it is the MXFP4 quantization, bit for bit:

# %%
values, row_scale = tq.transform_quantize_fp8(jnp.asarray(x), transform=tq.Transform(hadamard=32))
restored = values.astype(jnp.float32) * row_scale[:, None]
print(values.dtype, values.shape, "and", row_scale.dtype, row_scale.shape)
print("equal to MXFP4:", bool((restored == by_hand.dequantize()).all()))
spread = scales.max(-1).astype(int) - scales.min(-1)
print("powers of two between a row's scales, at most:", int(spread.max()))

# %% [markdown]
# A product of two such operands is exact in its terms. What an FP4 unit would compute, the FP8 units compute: the same
# products of the same numbers, summed in another order.

# %%
w = rng.standard_normal((64, 16)).astype(np.float32)
q = mxjax.quantize({"kernel": jnp.asarray(w)}, "hadamard_mxfp4")["kernel"]
w_rows = q.qtensor.dequantize().T
by_fp8 = (values.astype(jnp.float32) @ w_rows.T) * row_scale[:, None]
difference = jnp.abs(by_fp8 - mxjax.qdot(jnp.asarray(x), q)).max()
print(f"largest difference to qdot: {float(difference):.1e} of {float(jnp.abs(by_fp8).max()):.1f}")

# %% [markdown]
# ## What was measured
#
# The rest is from `benchmarks/results/kernels_h200.json`: device time on one H200, of whole layers, quantization of the
# input included.


# %%
def stored(name):
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (path := folder / "benchmarks" / "results" / name).is_file():
            return json.loads(path.read_text())
    raise FileNotFoundError(f"{name}: run this notebook inside the repository")


result = stored("kernels_h200.json")
times = {tuple(key.split()): row for key, row in result["device_time_us"].items()}
print(result["device"], result["arch"], result["date"], "jax", result["versions"]["jax"])


def layers(kind, n=8192, k=8192):
    """Rows of x -> what was measured, for one shape."""
    found = {int(key[-1]): row for key, row in times.items() if key[:-1] == (kind, str(n), str(k))}
    return dict(sorted(found.items()))


# %% [markdown]
# Speed against a bfloat16 product of the same layer, 8192 x 8192; above 1 four bits are faster.

# %%
w4a16, w4a4 = layers("w4a16"), layers("w4a4")
rows = sorted({m for kind in (w4a16, w4a4) for m, row in kind.items() if "ratio" in row})
ratios = {
    name: [kind[m]["ratio"] if m in kind and "ratio" in kind[m] else np.nan for m in rows]
    for name, kind in (("W4A16", w4a16), ("W4A4 with Hadamard", w4a4))
}
ratios["bfloat16"] = [1.0] * len(rows)
arrays.curves(rows, ratios, "rows of x", "times faster than bfloat16")

# %% [markdown]
# Weight-only (W4A16) wins while reading the weight is the cost, up to somewhere between 128 and 256 rows. Beyond, the
# same bfloat16 arithmetic runs with the decoding on top, and it loses. W4A4 goes on winning: its arithmetic is FP8's.
#
# A roofline says why. Each point is a layer of 8192 x 8192 with some number of rows; the lines are what the machine
# reached at best in the same run: a copy, and XLA's own products.

# %%
N = K = 8192


def operations(m):
    return 2.0 * m * N * K


bf16 = {m: row for m, row in layers("bf16").items() if m in w4a16 or m in w4a4}
points = {
    "bfloat16": [(operations(m), 2.0 * (N * K + m * K + m * N), row["us"] * 1e-6) for m, row in bf16.items()],
    "W4A16": [(operations(m), row["bytes"], row["us"] * 1e-6) for m, row in w4a16.items() if "bytes" in row],
    "W4A4": [(operations(m), row["bytes"], row["us"] * 1e-6) for m, row in w4a4.items() if "bytes" in row],
}
fp8 = times["fp8", "xla", "8192"]
peaks = {
    "FP8 product of XLA": fp8["flops"] / fp8["us"] * 1e6,
    "bfloat16 product of XLA": max(ops / seconds for ops, _, seconds in points["bfloat16"]),
}
steps.roofline(points, times["copy", "triton"]["gb_per_s"] * 1e9, peaks)

# %% [markdown]
# Read it from left to right. With one row all points sit under the slanted roof: memory is the limit, and the four-bit
# points stand farther right and higher, because they move a quarter of the bytes. As rows are added, points climb
# along the roof until they reach a flat one. W4A16 stops at bfloat16's, W4A4 goes on to FP8's.
#
# How close do the kernels come? The share of the floor is the time that the bytes (or the operations) need at least,
# over the time it took.

# %%
print("rows      W4A16             W4A4")
for m in sorted({*w4a16, *w4a4}):
    cells = []
    for kind in (w4a16, w4a4):
        row = kind.get(m)
        share = f"{100 * row['share_of_floor']:.0f} %" if row and "share_of_floor" in row else ""
        cells.append(f"{row['us']:7.1f} us {share:>5}" if row else " " * 16)
    print(f"{m:5}  " + "  ".join(cells))

# %% [markdown]
# And the input's own kernel, against a plain copy of the same bytes:

# %%
sizes = sorted({int(key[-1]) for key in times if key[:3] == ("tq", "fp8", "hadamard32")})
shares = {
    name: {f"K = {k}": 100 * times["tq", "fp8", name, "4096", str(k)]["share_of_floor"] for k in sizes}
    for name in ("hadamard32", "kronecker", "none")
}
arrays.bars(shares, "share of the speed of a copy (%)")

# %% [markdown]
# ## Which kernel runs
#
# `prepare_kernels` packs the weights once for the machine at hand; from then on `qdot` takes the fastest route that it
# knows for the number of rows. `kernels_used` tells what a function contains. On a CPU that is nothing: plain XLA.

# %%
params = {"layer": {"kernel": jnp.asarray(rng.standard_normal((256, 512)), jnp.float32)}}
packed = mxjax.prepare_kernels(mxjax.quantize(params, "hadamard_mxfp4"))["layer"]["kernel"]
print(packed)
for m in (1, 64, 1024):
    print(f"{m:5} rows:", mxjax.kernels_used(mxjax.qdot, jnp.ones((m, 256), jnp.bfloat16), packed) or "XLA")

# %% [markdown]
# A route can be forced. One that cannot run here is an error that says why, never a silent detour:

# %%
try:
    mxjax.qdot(jnp.ones((4, 256), jnp.bfloat16), packed, implementation="mosaic_gpu")
    print("Mosaic GPU runs here")
except mxjax.errors.BackendUnsupported as error:
    print(error)

# %% [markdown]
# ## Live
#
# With a GPU, the next cell measures a small table on it; `mxjax bench` makes the whole one.

# %%
if jax.default_backend() == "gpu":
    from pallas_kernels.bench import table

    live = table.rows(table.layer_times(((4096, 4096),), (1, 16, 256, 1024)))
    for row in live:
        print(f"{row['layer']:6} M = {row['m']:5}: {row['us']:8.1f} us, {row['ratio']:.2f}x bfloat16")
else:
    print(f"no GPU here ({jax.devices()[0].device_kind}): the figures above are the stored ones")

# %% [markdown]
# `benchmarks/NOTES.md` has every shape, with those where four bits lose, and for each step of the kernels what was
# predicted, what was measured, and why.
