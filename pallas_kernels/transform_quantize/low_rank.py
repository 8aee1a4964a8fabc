"""transform_quantize with the down-projection of a low-rank branch in the same pass: x is read once for both.

A program takes ``rows`` rows of x and a share of the columns, 128 at a time: a chunk is transformed, quantized and
stored, and multiplied as it came by the same columns of A on the tensor cores. The shares' float32 sums are added by
XLA in a fixed order. The exact-FP8 pair has no such kernel: its rows are scaled by their maximum, which is known only
after the last chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax import backend
from mxjax.core.formats import BlockFormat, get_format
from mxjax.core.scales import DEFAULT_POLICY
from mxjax.errors import BlockShapeError
from pallas_kernels import _compat, _dispatch
from pallas_kernels._compat import pl
from pallas_kernels.transform_quantize import api, triton
from pallas_kernels.transform_quantize.reference import Transform
from pallas_kernels.transform_quantize.rounding import quantize_tile

CHUNK = 128  # columns at a time: whole blocks of every format and every transform
MAX_RANK = 256  # the sums [rows, r] stay in registers


@dataclass(frozen=True)
class LowRankConfig:
    """Rows of x a program, programs along K, and the compiler's parameters."""

    rows: int = 16
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 2


def low_rank_config(m: int, k: int, cores: int) -> LowRankConfig:
    """About two programs a core; a split has at least four chunks."""
    rows = 16 if m <= 2048 else 32
    wanted = max(2 * max(cores, 1) // pl.cdiv(max(m, 1), rows), 1)
    return LowRankConfig(
        rows=rows, splits=max(s for s in (1, 2, 4, 8) if s == 1 or (s <= wanted and s * 4 * CHUNK <= k))
    )


def down_projection(x: jax.Array, a: jax.Array) -> jax.Array:
    """``x A^T`` [.., r] in x's dtype, accumulated in float32; what follows where no kernel does both."""
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    y = lax.dot_general(x, a.astype(x.dtype), dims, precision=precision, preferred_element_type=jnp.float32)
    return y.astype(x.dtype)


def transform_quantize_low_rank(
    x: jax.Array,
    a: jax.Array,
    fmt: str | BlockFormat,
    *,
    policy: str = DEFAULT_POLICY,
    transform: Transform = api.NONE,
    tensor_scale: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """:func:`transform_quantize` of x, and ``x A^T`` of the x that came, in one pass.

    Args:
      x: [.., K] bfloat16, float16 or float32.
      a: [r, K].
      Others as :func:`transform_quantize`.

    Returns:
      Codes, scale bytes, and x A^T [.., r] in x's dtype.

    Raises:
      BlockShapeError: an A that does not fit.
      Others as :func:`transform_quantize`.

    Example:
      >>> a = jnp.ones((4, 64))
      >>> codes, scales, down = transform_quantize_low_rank(jnp.ones((2, 64)), a, "mxfp4")
      >>> codes.shape, scales.shape, down.shape
      ((2, 32), (2, 2), (2, 4))
    """
    fmt, x = get_format(fmt), jnp.asarray(x)
    if a.ndim != 2 or x.ndim == 0 or a.shape[1] != x.shape[-1]:
        raise BlockShapeError(f"A {a.shape} is no [r, {x.shape[-1:]}] for x {x.shape}")
    options: dict[str, Any] = dict(policy=policy, transform=transform, tensor_scale=tensor_scale)
    target = backend.target()

    def apart() -> tuple[jax.Array, jax.Array, jax.Array]:
        codes, scales = api.transform_quantize(x, fmt, implementation=implementation, **options)
        return codes, scales, down_projection(x, a)

    rounding = "casts" if target.sm >= 89 else "floats"
    config = low_rank_config(x.size // max(x.shape[-1], 1), x.shape[-1], target.cores)
    obstacle = api.obstacle_of(target, x, fmt, policy, transform)
    if transform.per_block:
        obstacle = obstacle or "one matrix a block needs tiles of one block column"
    if a.shape[0] > MAX_RANK:
        obstacle = obstacle or f"sums of rank {a.shape[0]} do not stay in registers (at most {MAX_RANK})"
    if obstacle is not None:
        return apart()
    api.check(x, fmt, policy, transform, tensor_scale)
    candidates = [
        _dispatch.Candidate(
            "triton",
            lambda: quantize_low_rank(x, a, transform, tensor_scale, fmt, policy, config, rounding=rounding),
        ),
        _dispatch.Candidate("xla", apart),
    ]
    return _dispatch.pick("transform_quantize_low_rank", implementation, candidates).run()


def tile_index(first: Any, count: int, columns: int, offset: Any) -> tuple[jax.Array, jax.Array]:
    """Row and column of each value of a tile [count, columns] that begins at row ``first`` and column ``offset``."""
    row = first + lax.broadcasted_iota(jnp.int32, (count, columns), 0)
    return row, offset + lax.broadcasted_iota(jnp.int32, (count, columns), 1)


def store_sums(down_ref: Any, down: jax.Array, row0: Any, m: int) -> None:
    """A program's part of x A^T [rows, rank] to its place in [1, rows, rank], within the ``m`` rows of x."""
    row = row0 + lax.broadcasted_iota(jnp.int32, (1, *down.shape), 1)
    _compat.store(down_ref.at[:, :, :], down[None], row < m)


def padded_rank(a: jax.Array, axis: int = -1) -> jax.Array:
    """A factor of a branch with zeros along its rank, up to what the matrix units take: a power of two, 16 or more."""
    r = a.shape[axis]
    widths = [(0, 0)] * a.ndim
    widths[axis] = (0, max(16, 1 << (r - 1).bit_length()) - r)
    return jnp.pad(a, widths)


def _kernel(
    *refs: Any, scaled: bool, hadamard: int, fmt: BlockFormat, policy: str, m: int, k: int, iters: int, rounding: str
) -> None:
    """Refs: x, A, channel scale (if ``scaled``), tensor scale (NVFP4), matrix terms (0 to 2); codes, scales, down."""
    refs_in, (codes_ref, scales_ref, down_ref) = list(refs[:-3]), refs[-3:]
    x_ref, a_ref = refs_in.pop(0), refs_in.pop(0)
    channel_ref = refs_in.pop(0) if scaled else None
    tensor_ref = refs_in.pop(0) if fmt.has_tensor_scale else None
    terms = [ref[...] for ref in refs_in]
    _, rows, rank = down_ref.shape
    row0, chunk0 = pl.program_id(0) * rows, pl.program_id(1) * iters
    blocks = CHUNK // fmt.block_size

    tensor_scale = None
    if tensor_ref is not None:
        row = row0 + lax.broadcasted_iota(jnp.int32, (rows,), 0)
        g = _compat.load(tensor_ref.at[row], row < m, 1.0)
        tensor_scale = jnp.broadcast_to(g[:, None], (rows, blocks)).reshape(-1, 1)

    def step(i: jax.Array, down: jax.Array) -> jax.Array:
        chunk = chunk0 + i
        at = tile_index(row0, rows, CHUNK, chunk * CHUNK)
        x = _compat.load(x_ref.at[at], (at[0] < m) & (at[1] < k), 0)
        a_at = tile_index(0, rank, CHUNK, chunk * CHUNK)
        a = _compat.load(a_ref.at[a_at], a_at[1] < k, 0)
        down += jnp.dot(x.astype(a.dtype), a.T, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
        if channel_ref is not None:
            x = x.astype(jnp.float32) * _compat.load(channel_ref.at[at[1]], at[1] < k, 0).astype(jnp.float32)
        if terms:
            size = terms[0].shape[0]
            y = triton.transform_tile(x.astype(terms[0].dtype).reshape(rows * CHUNK // size, size), terms)
        else:
            y = x.astype(jnp.float32)
        y = y.reshape(rows * blocks, fmt.block_size)
        codes, byte = quantize_tile(y, triton.factor_of(hadamard), tensor_scale, fmt, policy, rounding)
        for ref, value, width in ((codes_ref, codes, fmt.packed_size(k)), (scales_ref, byte, k // fmt.block_size)):
            columns = value.size // rows
            out = tile_index(row0, rows, columns, chunk * columns)
            _compat.store(ref.at[out], value.reshape(rows, columns), (out[0] < m) & (out[1] < width))
        return down

    store_sums(down_ref, lax.fori_loop(0, iters, step, jnp.zeros((rows, rank), jnp.float32)), row0, m)


@partial(jax.jit, static_argnames=("fmt", "policy", "config", "interpret", "rounding"))
def quantize_low_rank(
    x: jax.Array,
    a: jax.Array,
    t: Transform,
    tensor_scale: jax.Array | None,
    fmt: BlockFormat,
    policy: str,
    config: LowRankConfig,
    *,
    interpret: bool = False,
    rounding: str = "floats",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The kernel; not for one matrix a block."""
    lead, k, r = x.shape[:-1], x.shape[-1], a.shape[0]
    m = x.size // k
    wide = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32
    args = [x.reshape(m, k), padded_rank(a.astype(wide), 0)]
    rank = args[1].shape[0]
    if t.channel_scale is not None:
        args.append(t.channel_scale)
    if tensor_scale is not None:
        args.append(tensor_scale.reshape(m).astype(jnp.float32))
    args += triton.matrix_terms(t, triton.dot_dtype(x, t))
    code_bytes, blocks, splits = fmt.packed_size(k), k // fmt.block_size, config.splits
    kernel = partial(
        _kernel, scaled=t.channel_scale is not None, hadamard=t.hadamard, fmt=fmt, policy=policy, m=m, k=k,
        iters=pl.cdiv(pl.cdiv(k, CHUNK), splits), rounding=rounding,
    )  # fmt: skip

    def whole(*shape: int) -> Any:
        return pl.BlockSpec(shape, lambda i, j: (0,) * len(shape))

    codes, byte, sums = _compat.triton_call(
        kernel,
        name=f"tq_low_rank_{fmt}",
        grid=(pl.cdiv(m, config.rows), splits),
        in_specs=[whole(*arg.shape) for arg in args],
        out_specs=[
            whole(m, code_bytes),
            whole(m, blocks),
            pl.BlockSpec((1, config.rows, rank), lambda i, j: (j, i, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((m, code_bytes), jnp.uint8),
            jax.ShapeDtypeStruct((m, blocks), jnp.uint8),
            jax.ShapeDtypeStruct((splits, m, rank), jnp.float32),
        ],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )(*args)
    down = jnp.sum(sums, axis=0)[:, :r].astype(x.dtype)
    return codes.reshape(*lead, code_bytes), byte.reshape(*lead, blocks), down.reshape(*lead, r)
