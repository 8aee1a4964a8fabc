"""Models of published sizes with random weights, made on the device they run on: for benchmarks.

A quantized weight is made of random codes and scale bytes, so nothing larger than a layer ever exists in float. Blocks
are stacked and run by ``lax.scan`` (``mxjax_models.stacked``): a program is compiled once, whatever the depth.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import mxjax
from mxjax.core.formats import MXFP4, MXFP8_E4M3, MXINT8, BlockFormat
from mxjax.nn.nnx_graph import variables_of
from mxjax.ops import ActivationFormat, LowRank, QWeight
from mxjax.transforms import Kronecker, KroQuant

BF16 = jnp.bfloat16
BITS = {"w4a4": ActivationFormat(format=MXFP4), "w4a16": None}


def codes(key: jax.Array, rows: int, columns: int, fmt: BlockFormat, spread: int = 3) -> mxjax.QTensor:
    """A QTensor [rows, columns] of random codes; values have the size of 1 / sqrt(columns)."""
    first, second = jax.random.split(key)
    element = jax.random.bits(first, (rows, fmt.packed_size(columns)), jnp.uint8)
    if fmt == MXFP8_E4M3:
        element = element & 0xBF  # up to 1.9 in magnitude: no NaN
    if fmt == MXINT8:
        element = jnp.where(element == 0x80, 0, element)  # quantization makes no -2
    size = 3.0 if fmt == MXFP4 else 1.0  # of random elements
    top = 127 - round(math.log2(size * columns**0.5))
    shape = (rows, columns // fmt.block_size)
    scales = jax.random.randint(second, shape, top - spread, top + 1, jnp.int32).astype(jnp.uint8)
    return mxjax.QTensor(codes=element, scales=scales, format=fmt, axis=-1, size=columns, dtype_name="bfloat16")


def weight(
    key: jax.Array,
    k: int,
    n: int,
    bits: str,
    transform: Any = None,
    rank: int = 0,
    branch: BlockFormat = MXINT8,
    branch_size: float = 1 / 16,
) -> QWeight:
    """A random [k, n] kernel in MXFP4, with a branch in the format ``branch`` of ``rank``."""
    keys = jax.random.split(key, 3)
    q = replace(codes(keys[0], n, k, MXFP4), axis=-2)
    low = None
    if rank:
        a, b = codes(keys[1], rank, k, branch), codes(keys[2], n, rank, branch)
        b = replace(b, scales=b.scales - jnp.uint8(round(-math.log2(branch_size))))
        low = LowRank(a=a, b=b, activation=ActivationFormat(format=branch))
    return QWeight(qtensor=q, transform=transform, branch=low, activation=BITS[bits])


def kronecker(key: jax.Array, k: int, variant: str) -> Kronecker | None:
    """A random transform with the factors and scales that KroQuant learns ("kroquant"), one factor on each side and no
    scales ("shared"), or None ("none").
    """
    if variant == "none":
        return None
    left, right, scales = KroQuant().layout(k) if variant == "kroquant" else (1, 1, "none")
    keys = jax.random.split(key, 4)
    blocks = k // 32
    shapes = ((left, 4, 4), (right, 8, 8), (blocks, 4), (blocks, 8))
    noise = [0.1 * jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    return Kronecker(
        noise[0] + jnp.eye(4),
        noise[1] + jnp.eye(8),
        jnp.exp(noise[2]) if scales in ("both", "left") else None,
        jnp.exp(noise[3]) if scales in ("both", "right") else None,
    )


def filled(
    abstract: Any,
    key: jax.Array,
    rules: Sequence[tuple[str, str | None]] = (),
    *,
    shared: Sequence[Sequence[str]] = (),
    transform: str = "kroquant",
    rank: int = 64,
    branch: BlockFormat = MXINT8,
) -> Any:
    """An abstract module (``nnx.eval_shape``) with random values; for use inside ``jit``.

    Args:
        abstract: the module.
        key: of the values.
        rules: a pattern of the kernel's path and "w4a4", "w4a16" or None (bfloat16); the first match wins, and what
            matches none is bfloat16. A w4a4 kernel gets the transform and the branch.
        shared: groups of layers with one input: they have one transform.
        transform: as of ``kronecker``.
        rank, branch: as of ``weight``.
    """
    values: dict[str, Any] = {}
    transforms: dict[str, Any] = {}
    for i, (path, variable) in enumerate(variables_of(abstract).items()):
        own = jax.random.fold_in(key, i)
        if not path.endswith("kernel"):
            scale = path.endswith("scale")
            values[path] = jnp.ones(variable.shape, BF16) if scale else jnp.zeros(variable.shape, BF16)
            if path.endswith(("embedding", "table")):
                values[path] = jax.random.normal(own, variable.shape, BF16)
            continue
        k, n = variable.shape
        bits = next((bits for pattern, bits in rules if re.search(pattern, path)), None)
        if bits is None:
            values[path] = jax.random.normal(own, (k, n), BF16) * jnp.asarray(k**-0.5, BF16)
            continue
        name = path.removesuffix("/kernel")
        head = next((group[0] for group in shared if name in group), name)
        if bits == "w4a4" and head not in transforms:
            transforms[head] = kronecker(own, k, transform)
        online = (transforms[head], rank, branch) if bits == "w4a4" else ()
        values[path] = weight(own, k, n, bits, *online)
    return mxjax.nnx.from_params(abstract, values)


def stacked(make: Callable[[jax.Array], Any], layers: int, seed: int, shardings: Any = None) -> Any:
    """``make(key)`` for every layer, stacked, one at a time."""
    keys = jax.random.split(jax.random.key(seed), layers)
    return jax.block_until_ready(jax.jit(lambda keys: jax.lax.map(make, keys), out_shardings=shardings)(keys))


def without_blocks(model: Any, seed: int = 0) -> Any:
    """The abstract model with random bfloat16 values in everything but its blocks, which stay abstract."""
    model = nnx.clone(model)
    for i, (path, variable) in enumerate(variables_of(model).items()):
        if not re.search(r"(^|/)(layers|(single_)?transformer_blocks)/", path):
            key, size = jax.random.fold_in(jax.random.key(seed), i), 0.02
            variable.set_value(size * jax.random.normal(key, variable.shape, BF16))
    return model
