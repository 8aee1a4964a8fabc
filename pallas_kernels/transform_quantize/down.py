"""The down-projection of a low-rank branch whose input is rounded to MXFP8 on the way: ``Q(x) A^T``, x read once.

A program takes ``rows`` rows of x and a share of the columns, 128 at a time: a chunk is rounded in registers and goes
to the tensor cores as bfloat16, which holds an FP8 value times its power of two exactly. Nothing of x is written. The
shares' float32 sums are added by XLA in a fixed order.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mxjax import backend
from mxjax.core import codec
from mxjax.core.formats import NAN_BYTE, BlockFormat, get_format
from mxjax.core.quantize import fake_quantize
from mxjax.core.scales import DEFAULT_POLICY
from mxjax.errors import BlockShapeError
from pallas_kernels import _compat, _dispatch
from pallas_kernels._compat import pl
from pallas_kernels.transform_quantize import api
from pallas_kernels.transform_quantize.low_rank import CHUNK, MAX_RANK, LowRankConfig, down_projection, low_rank_config
from pallas_kernels.transform_quantize.reference import Transform
from pallas_kernels.transform_quantize.rounding import quantize_tile


def down_config(m: int, k: int, cores: int) -> LowRankConfig:
    """Tiles of 64 rows where there are many: every program reads all of A, and nothing but the sums is stored."""
    if m <= 2048:
        return low_rank_config(m, k, cores)
    wanted = max(2 * max(cores, 1) // pl.cdiv(m, 64), 1)
    splits = max(s for s in (1, 2, 4, 8) if s == 1 or (s <= wanted and s * 4 * CHUNK <= k))
    return LowRankConfig(rows=64, splits=splits, num_warps=8)


def down_projection_rounded(
    x: jax.Array,
    a: jax.Array,
    fmt: str | BlockFormat,
    *,
    policy: str = DEFAULT_POLICY,
    implementation: str | None = None,
) -> jax.Array:
    """``Q(x) A^T`` with x rounded in blocks along K, accumulated in float32.

    Args:
      x: [.., K] bfloat16 for the kernel; any float for XLA.
      a: [r, K].
      fmt: a format without tensor scale, such as "mxfp8_e4m3".
      policy: scale policy of x.
      implementation: None chooses; "xla", "triton".

    Returns:
      [.., r] in x's dtype.

    Raises:
      BlockShapeError: an A that does not fit.
      BackendUnsupported: a forced implementation that cannot run.

    Example:
      >>> down_projection_rounded(jnp.ones((2, 64)), jnp.ones((4, 64)), "mxfp8_e4m3").shape
      (2, 4)
    """
    fmt, x = get_format(fmt), jnp.asarray(x)
    if a.ndim != 2 or x.ndim == 0 or a.shape[1] != x.shape[-1]:
        raise BlockShapeError(f"A {a.shape} is no [r, {x.shape[-1:]}] for x {x.shape}")
    target = backend.target()
    obstacle = api.obstacle_of(target, x, fmt, policy, Transform())
    if x.dtype != jnp.bfloat16 or fmt.element.bits != 8:
        obstacle = obstacle or f"x is {x.dtype} and goes to {fmt}; the kernel rounds bfloat16 to 8 bits"
    if x.shape[-1] % fmt.block_size:
        obstacle = obstacle or f"blocks of {fmt} do not divide {x.shape[-1]}"
    if a.shape[0] > MAX_RANK:
        obstacle = obstacle or f"sums of rank {a.shape[0]} do not stay in registers (at most {MAX_RANK})"
    rounding = "casts" if target.sm >= 89 else "floats"
    config = down_config(x.size // max(x.shape[-1], 1), x.shape[-1], target.cores)
    kernel = partial(down_rounded, x, a, fmt, policy, config, rounding=rounding)
    candidates = [
        _dispatch.Candidate("triton", kernel, obstacle),
        _dispatch.Candidate("xla", lambda: down_projection(fake_quantize(x, fmt, -1, policy), a)),
    ]
    return _dispatch.pick("down_projection_rounded", implementation, candidates).run()


def _kernel(
    x_ref: Any, a_ref: Any, down_ref: Any, *, fmt: BlockFormat, policy: str, m: int, k: int, iters: int, rounding: str
) -> None:
    _, rows, rank = down_ref.shape
    row0, chunk0 = pl.program_id(0) * rows, pl.program_id(1) * iters
    blocks = CHUNK // fmt.block_size

    def index(first: Any, count: int, chunk: Any) -> tuple[jax.Array, jax.Array]:
        row = first + lax.broadcasted_iota(jnp.int32, (count, CHUNK), 0)
        return row, chunk * CHUNK + lax.broadcasted_iota(jnp.int32, (count, CHUNK), 1)

    def step(i: jax.Array, down: jax.Array) -> jax.Array:
        at, a_at = index(row0, rows, chunk0 + i), index(0, rank, chunk0 + i)
        x = _compat.load(x_ref.at[at], (at[0] < m) & (at[1] < k), 0)
        a = _compat.load(a_ref.at[a_at], a_at[1] < k, 0)
        y = x.astype(jnp.float32).reshape(rows * blocks, fmt.block_size)
        codes, byte = quantize_tile(y, np.float32(1), None, fmt, policy, rounding)
        byte = byte.astype(jnp.int32)
        # 2**(byte - 127); a byte of 0 comes with codes of 0, or with values below 2**-126
        scale = codec.float_of(jnp.maximum(byte, 1) << 23)
        scale = jnp.where(byte == NAN_BYTE, jnp.nan, scale)[:, None]
        element = jnp.dtype(fmt.element.dtype)
        if rounding == "casts":
            values = lax.bitcast_convert_type(codes, element).astype(jnp.float32)
        else:
            values = codec.decode(codes, fmt.element)
        values = (values * scale).astype(a.dtype).reshape(rows, CHUNK)
        return down + jnp.dot(values, a.T, preferred_element_type=jnp.float32)

    down = lax.fori_loop(0, iters, step, jnp.zeros((rows, rank), jnp.float32))
    row = row0 + lax.broadcasted_iota(jnp.int32, (1, rows, rank), 1)
    _compat.store(down_ref.at[:, :, :], down[None], row < m)


@partial(jax.jit, static_argnames=("fmt", "policy", "config", "interpret", "rounding"))
def down_rounded(
    x: jax.Array,
    a: jax.Array,
    fmt: BlockFormat,
    policy: str,
    config: LowRankConfig,
    *,
    interpret: bool = False,
    rounding: str = "floats",
) -> jax.Array:
    """The kernel, for bfloat16 x."""
    lead, k, r = x.shape[:-1], x.shape[-1], a.shape[0]
    m = x.size // k
    rank = max(16, 1 << (r - 1).bit_length())
    args = [x.reshape(m, k), jnp.pad(a.astype(jnp.bfloat16), ((0, rank - r), (0, 0)))]
    kernel = partial(
        _kernel, fmt=fmt, policy=policy, m=m, k=k, iters=pl.cdiv(pl.cdiv(k, CHUNK), config.splits), rounding=rounding
    )
    sums = _compat.triton_call(
        kernel,
        name=f"tq_down_{fmt}",
        grid=(pl.cdiv(m, config.rows), config.splits),
        in_specs=[pl.BlockSpec(arg.shape, lambda i, j: (0, 0)) for arg in args],
        out_specs=pl.BlockSpec((1, config.rows, rank), lambda i, j: (j, i, 0)),
        out_shape=jax.ShapeDtypeStruct((config.splits, m, rank), jnp.float32),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )(*args)
    return jnp.sum(sums, axis=0)[:, :r].astype(x.dtype).reshape(*lead, r)
