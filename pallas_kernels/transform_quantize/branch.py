"""``Q(x) A^T``, the down-projection of a low-rank branch whose input is quantized to MXFP8, in one pass over x.

A program takes ``rows`` rows of x and a share of the columns, 128 at a time: a chunk becomes codes and scales and at
once the values they stand for, which bfloat16 holds exactly, and meets the same columns of A on the tensor cores.
Nothing of the quantized x is written. XLA would write it, and read it again for its product.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax import backend
from mxjax.core import codec
from mxjax.core.formats import E8M0_BIAS, NAN_BYTE, BlockFormat, get_format
from mxjax.core.quantize import fake_quantize
from mxjax.core.scales import DEFAULT_POLICY, check_policy
from mxjax.errors import BlockShapeError
from pallas_kernels import _compat, _dispatch
from pallas_kernels._compat import pl
from pallas_kernels.transform_quantize import triton
from pallas_kernels.transform_quantize.low_rank import (
    CHUNK,
    MAX_RANK,
    LowRankConfig,
    down_projection,
    padded_rank,
    store_sums,
    tile_index,
)
from pallas_kernels.transform_quantize.rounding import quantize_tile


def branch_config(m: int, k: int, cores: int) -> LowRankConfig:
    """About two programs a core. Many rows a program: each reads its share of A again."""
    rows = 16 if m <= 512 else 32 if m <= 2048 else 64
    wanted = max(2 * max(cores, 1) // pl.cdiv(max(m, 1), rows), 1)
    return LowRankConfig(
        rows=rows, splits=max(s for s in (1, 2, 4, 8) if s == 1 or (s <= wanted and s * 4 * CHUNK <= k))
    )


def quantized_down_projection(
    x: jax.Array,
    a: jax.Array,
    fmt: str | BlockFormat,
    *,
    policy: str = DEFAULT_POLICY,
    implementation: str | None = None,
) -> jax.Array:
    """``Q(x) A^T`` [.., r] in x's dtype, accumulated in float32.

    Args:
      x: [.., K] bfloat16, float16 or float32.
      a: [r, K]; multiplied in x's dtype.
      fmt: the format that x is quantized to.
      policy: scale policy.
      implementation: None chooses; "xla", "triton" (bfloat16 x and MXFP8 only).

    Raises:
      BlockShapeError: an A that does not fit.
      FormatError: a policy that the format does not have.
      BackendUnsupported: a forced implementation that cannot run.

    Example:
      >>> quantized_down_projection(jnp.ones((2, 64)), jnp.ones((4, 64)), "mxfp8_e4m3")[0, 0]
      Array(64., dtype=float32)
    """
    fmt, x = get_format(fmt), jnp.asarray(x)
    check_policy(policy, fmt)
    if a.ndim != 2 or x.ndim == 0 or a.shape[1] != x.shape[-1]:
        raise BlockShapeError(f"A {a.shape} is no [r, {x.shape[-1:]}] for x {x.shape}")
    target = backend.target()
    obstacle = _obstacle(x, a, fmt, policy) or _dispatch.triton_obstacle(target)
    config = branch_config(x.size // max(x.shape[-1], 1), x.shape[-1], target.cores)
    rounding = "casts" if target.sm >= 89 else "floats"
    candidates = [
        _dispatch.Candidate("triton", partial(quantize_and_project, x, a, fmt, policy, config, rounding), obstacle),
        _dispatch.Candidate("xla", lambda: down_projection(fake_quantize(x, fmt, scale=policy), a)),
    ]
    return _dispatch.pick("quantized_down_projection", implementation, candidates).run()


def _obstacle(x: jax.Array, a: jax.Array, fmt: BlockFormat, policy: str) -> str | None:
    if policy not in triton.POLICIES:
        return f"scale policy {policy!r} compares errors; the kernels know {', '.join(triton.POLICIES)}"
    if fmt.element.bits != 8 or fmt.element.twos_complement or fmt.scale != "e8m0":
        return f"the kernel quantizes to MXFP8, not to {fmt}"
    if x.dtype != jnp.bfloat16:
        return f"x is {x.dtype}, the kernel multiplies bfloat16"
    if x.size == 0 or x.size >= 2**31:
        return f"{x.size} values are none, or beyond the 32-bit offsets of Pallas Triton"
    if x.shape[-1] % fmt.block_size:
        return f"the {fmt} block of {fmt.block_size} does not divide the last axis of x {x.shape}"
    if a.shape[0] > MAX_RANK:
        return f"sums of rank {a.shape[0]} do not stay in registers (at most {MAX_RANK})"
    return None


def _values(codes: jax.Array, byte: jax.Array, fmt: BlockFormat) -> jax.Array:
    """MXFP8 codes [B, 32] and scale bytes [B] to the bfloat16 values they stand for."""
    value = lax.bitcast_convert_type(codes, jnp.dtype(fmt.element.dtype)).astype(jnp.float32)
    n = byte.astype(jnp.int32) - E8M0_BIAS
    half = n >> 1  # in two steps, each of them a float32
    value = value * codec.float_of((half + 127) << 23)[:, None] * codec.float_of((n - half + 127) << 23)[:, None]
    return jnp.where((byte == NAN_BYTE)[:, None], jnp.nan, value).astype(jnp.bfloat16)


def _kernel(
    x_ref: Any, a_ref: Any, down_ref: Any, *, fmt: BlockFormat, policy: str, m: int, k: int, iters: int, rounding: str
) -> None:
    _, rows, rank = down_ref.shape
    row0, chunk0 = pl.program_id(0) * rows, pl.program_id(1) * iters

    def step(i: jax.Array, down: jax.Array) -> jax.Array:
        column0 = (chunk0 + i) * CHUNK
        at, a_at = tile_index(row0, rows, CHUNK, column0), tile_index(0, rank, CHUNK, column0)
        x = _compat.load(x_ref.at[at], (at[0] < m) & (at[1] < k), 0)
        a = _compat.load(a_ref.at[a_at], a_at[1] < k, 0)
        blocks = x.astype(jnp.float32).reshape(rows * CHUNK // fmt.block_size, fmt.block_size)
        codes, byte = quantize_tile(blocks, triton.factor_of(0), None, fmt, policy, rounding)
        values = _values(codes, byte, fmt).reshape(rows, CHUNK)
        return down + jnp.dot(values, a.T, preferred_element_type=jnp.float32)

    store_sums(down_ref, lax.fori_loop(0, iters, step, jnp.zeros((rows, rank), jnp.float32)), row0, m)


@partial(jax.jit, static_argnames=("fmt", "policy", "config", "rounding", "interpret"))
def quantize_and_project(
    x: jax.Array,
    a: jax.Array,
    fmt: BlockFormat,
    policy: str,
    config: LowRankConfig,
    rounding: str = "floats",
    *,
    interpret: bool = False,
) -> jax.Array:
    """The kernel: bfloat16 x, MXFP8."""
    lead, k, r = x.shape[:-1], x.shape[-1], a.shape[0]
    m = x.size // k
    args = [x.reshape(m, k), padded_rank(a.astype(x.dtype), 0)]
    rank = args[1].shape[0]
    iters = pl.cdiv(pl.cdiv(k, CHUNK), config.splits)
    sums = _compat.triton_call(
        partial(_kernel, fmt=fmt, policy=policy, m=m, k=k, iters=iters, rounding=rounding),
        name=f"tq_branch_{fmt}",
        grid=(pl.cdiv(m, config.rows), config.splits),
        in_specs=[pl.BlockSpec(arg.shape, lambda i, j: (0, 0)) for arg in args],
        out_specs=pl.BlockSpec((1, config.rows, rank), lambda i, j: (j, i, 0)),
        out_shape=jax.ShapeDtypeStruct((config.splits, m, rank), jnp.float32),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )(*args)
    return jnp.sum(sums, axis=0)[:, :r].astype(x.dtype).reshape(*lead, r)
