"""The GPTQ solver on plain arrays: one ``lax.scan`` over column blocks, compiled once per shape.

Letters of the paper (arXiv 2210.17323): ``W [N, K]`` the weight, ``H [K, K]`` the Hessian of the layer's input,
``U`` upper triangular with ``H^-1 = U^T U``, ``Q`` the quantized weight. Column ``i`` in turn is rounded, and its error
``e_i = (w_i - q_i) / U_ii`` is taken out of the columns after it::

    w_j <- w_j - e_i U_ij   (j > i)          so that    (W - Q) H (W - Q)^T summed = sum_i e_i^2

The update is applied when column ``j`` is reached, not when column ``i`` is left: ``w_j - E[:j]^T U[:j, j]``. So the
weight is read once and written never, and the scan carries only ``E``. Everything is stored transposed, ``[K, N]``: a
column of W is then one contiguous row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.algorithms.observers import best_bytes, candidate_bytes, decode_unit, round_unit
from mxjax.core.formats import BlockFormat
from pallas_kernels.round_columns import round_columns

HIGHEST = lax.Precision.HIGHEST  # TF32 in the compensation would lose what it compensates
DAMPING_GROWTH = 10.0
MAX_DAMPING = 1.0

ORDERS = ("none", "column", "block")
SCALE_MODES = ("frozen", "refit", "replay")


@dataclass(frozen=True, kw_only=True)
class SolverOptions:
    """Static options of the solver.

    Attributes:
      damping: added to the diagonal of H, relative to its mean; grows tenfold up to 1 while Cholesky fails.
      block_size: columns between two wide updates; lowered to a divisor of K. Only rounding of sums depends on it.
      act_order: "none"; "column": columns in falling order of diag(H), each with the scale of its own block ("static"
        activation reordering: storage order and scales are those of the original columns); "block": whole scale blocks
        in falling order of their mean diag(H).
      scales: "frozen": as observed. "refit": each block's scale is observed again (mse) on the compensated weights when
        the block is reached. "replay": the candidate with the least GPTQ loss of the block, found by replaying the
        block's columns under each (Schur Replay's rule; the metric is the conditional Hessian). Both need whole blocks
        in a row, so not act_order "column".
      guard: rows that plain rounding serves better in the Hessian norm take plain rounding: on the same scales, and
        where ``scales`` chose others, on those that were observed.
    """

    damping: float = 0.01
    block_size: int = 128
    act_order: str = "none"
    scales: str = "frozen"
    guard: bool = True


class Solution(NamedTuple):
    """What the solver returns: ``codes`` uint8 [N, K], ``bytes`` uint8 [N, blocks], the relative ``damping`` used, and
    whether the Hessian could be inverted at all."""

    codes: jax.Array
    bytes: jax.Array
    damping: jax.Array
    ok: jax.Array


def inverse_factor(h: jax.Array, damping: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Upper triangular ``U`` with ``(H + d mean(diag H) I)^-1 = U^T U``, the ``d`` that it took, and success.

    With ``R`` upper triangular and ``H = R R^T`` (a Cholesky factor of the reversed matrix), ``U = R^-1``: one
    factorization and one triangular inverse. ``d`` starts at ``damping`` and grows tenfold up to 1 while the
    factorization fails.

    Args:
      h: float32 [K, K], symmetric, diagonal not all zero.
      damping: first relative damping.
    """
    lower, used, ok = damped_cholesky(h[::-1, ::-1], damping)
    r = lower[::-1, ::-1]
    u = jax.scipy.linalg.solve_triangular(r, jnp.eye(h.shape[-1], dtype=h.dtype), lower=False)
    return u, used, ok & jnp.all(jnp.isfinite(u))


def damped_cholesky(h: jax.Array, damping: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Lower triangular ``L`` with ``H + d mean(diag H) I = L L^T``, the ``d`` that it took, and success.

    ``d`` starts at ``damping`` and grows tenfold up to 1 while the factorization fails.
    """
    size = h.shape[-1]
    mean = jnp.trace(h) / size
    eye = jnp.eye(size, dtype=h.dtype)

    def attempt(state):
        _, tried, _ = state
        lower = jnp.linalg.cholesky(h + tried * mean * eye)
        return lower, tried * DAMPING_GROWTH, jnp.all(jnp.isfinite(lower))

    def unfinished(state):
        _, next_damping, ok = state
        # 1.001: ten times 0.1 is a little more than 1 in float32.
        return ~ok & (next_damping <= 1.001 * max(MAX_DAMPING, damping))

    start = (jnp.zeros_like(h), jnp.float32(damping), jnp.asarray(False))
    lower, next_damping, ok = lax.while_loop(unfinished, attempt, start)
    return lower, next_damping / DAMPING_GROWTH, ok


def hessian_error(d: jax.Array, h: jax.Array) -> jax.Array:
    """``d H d^T`` of each row of ``d [N, K]``: the squared error of the layer's output, summed over the tokens."""
    return jnp.sum(jnp.matmul(d, h, precision=HIGHEST) * d, axis=-1)


def column_order(diagonal: jax.Array, block: int, act_order: str) -> jax.Array:
    """The permutation in which columns are visited, int32 [K]."""
    size = diagonal.shape[0]
    if act_order == "column":
        return jnp.argsort(-diagonal)
    if act_order == "block":
        blocks = jnp.argsort(-jnp.mean(diagonal.reshape(-1, block), axis=-1))
        return (blocks[:, None] * block + jnp.arange(block)).reshape(-1)
    return jnp.arange(size)


def _divisor(size: int, unit: int, limit: int) -> int:
    """The largest multiple of ``unit`` that divides ``size`` and is at most ``limit`` (at least ``unit``)."""
    return max([n for n in range(unit, min(size, limit) + 1, unit) if size % n == 0], default=unit)


@partial(jax.jit, static_argnames=("fmt", "options"))
def solve(w: jax.Array, h: jax.Array, scale_bytes: jax.Array, *, fmt: BlockFormat, options: SolverOptions) -> Solution:
    """Quantize a stack of unit-space weights against their Hessians.

    Dead columns are decoupled before anything is permuted: an input that was always zero (``H_ii = 0``) is rounded
    plainly, a column of zeros stays zero, and neither takes or gives compensation.

    Args:
      w: float32 [B, N, K], already divided by the global scale.
      h: float32 [B, K, K], or [1, K, K] for all of the stack.
      scale_bytes: uint8 [B, N, K / block] observed scales.
      fmt: block format.
      options: see :class:`SolverOptions`.

    Returns:
      A :class:`Solution` with leading B; codes are in the original column order. Where ``ok`` is false the codes mean
      nothing.
    """
    one = partial(_solve_one, fmt=fmt, options=options)
    if h.shape[0] != w.shape[0]:
        return jax.vmap(one, in_axes=(0, None, 0))(w, h[0], scale_bytes)
    return jax.vmap(one)(w, h, scale_bytes)


def _solve_one(
    w: jax.Array, h: jax.Array, scale_bytes: jax.Array, fmt: BlockFormat, options: SolverOptions
) -> Solution:
    bs = fmt.block_size
    diagonal = jnp.diagonal(h)
    mean = jnp.mean(diagonal)
    apart = (diagonal <= 0) | jnp.all(w == 0, axis=0)
    coupled = jnp.where(apart[:, None] | apart[None, :], 0.0, h)
    coupled = coupled + jnp.diag(jnp.where(apart, jnp.where(mean > 0, mean, 1.0), 0.0))

    perm = column_order(jnp.diagonal(coupled), bs, options.act_order)
    u, damping, ok = inverse_factor(coupled[perm][:, perm], options.damping)
    codes, new_bytes = _columns(w.T[perm], u, scale_bytes.T, perm, fmt, options)
    codes = jnp.zeros_like(codes).at[perm].set(codes).T
    new_bytes = new_bytes.T
    # A block of zeros has no scale to express compensation with; it stays zero.
    codes = jnp.where(jnp.repeat(new_bytes == 0, bs, axis=-1) & (w == 0), 0, codes)

    new_bytes = new_bytes.astype(jnp.uint8)
    if options.guard:
        codes, new_bytes = _guarded(w, h, (codes, new_bytes), new_bytes, fmt)
        if options.scales != "frozen":  # plain rounding as it would have been, on the scales as observed
            codes, new_bytes = _guarded(w, h, (codes, new_bytes), scale_bytes.astype(jnp.uint8), fmt)
    return Solution(codes, new_bytes, damping, ok)


def _guarded(
    w: jax.Array, h: jax.Array, found: tuple[jax.Array, jax.Array], scale_bytes: jax.Array, fmt: BlockFormat
) -> tuple[jax.Array, jax.Array]:
    """The codes and bytes that were ``found``, or plain rounding on ``scale_bytes`` in rows where that has the smaller
    error in the Hessian norm."""
    codes, new_bytes = found
    mine = decode_unit(codes, jnp.repeat(new_bytes, fmt.block_size, axis=-1), fmt)
    plain_codes, plain = round_unit(w, jnp.repeat(scale_bytes, fmt.block_size, axis=-1), fmt)
    # d1 H d1 - d2 H d2 = (d1 - d2) H (d1 + d2) for a symmetric H: one product instead of two.
    product = jnp.matmul(mine - plain, h, precision=HIGHEST) * (mine + plain - 2 * w)
    worse = (jnp.sum(product, axis=-1) > 0)[:, None]
    return jnp.where(worse, plain_codes, codes), jnp.where(worse, scale_bytes, new_bytes)


def _columns(
    wt: jax.Array, u: jax.Array, bytes_t: jax.Array, perm: jax.Array, fmt: BlockFormat, options: SolverOptions
) -> tuple[jax.Array, jax.Array]:
    """Codes [K, N] in the visiting order and scale bytes [blocks, N] in the original order."""
    size, n = wt.shape
    bs = fmt.block_size
    wide = _divisor(size, bs, options.block_size)
    groups = wide // bs

    def block_step(carry, x):
        errors, all_bytes = carry
        start, w_block = x
        u_columns = lax.dynamic_slice(u, (0, start), (size, wide))
        w_block = w_block - jnp.matmul(u_columns.T, errors, precision=HIGHEST)

        def group_step(g, state):
            block_errors, codes, all_bytes = state
            w_group = lax.dynamic_slice(w_block, (g * bs, 0), (bs, n))
            u_group = lax.dynamic_slice(u, (start, start + g * bs), (wide, bs))  # [wide, bs]
            w_group = w_group - jnp.matmul(u_group.T, block_errors, precision=HIGHEST)
            u_inner = lax.dynamic_slice(u, (start + g * bs, start + g * bs), (bs, bs))
            blocks_of = lax.dynamic_slice(perm, (start + g * bs,), (bs,)) // bs
            group_errors, group_codes, new_byte = _group(w_group, u_inner, all_bytes[blocks_of], fmt, options)
            if options.scales != "frozen":
                all_bytes = all_bytes.at[blocks_of[0]].set(new_byte)
            block_errors = lax.dynamic_update_slice(block_errors, group_errors, (g * bs, 0))
            return block_errors, lax.dynamic_update_slice(codes, group_codes, (g * bs, 0)), all_bytes

        init = (jnp.zeros((wide, n), jnp.float32), jnp.zeros((wide, n), jnp.uint8), all_bytes)
        block_errors, codes, all_bytes = lax.fori_loop(0, groups, group_step, init)
        return (lax.dynamic_update_slice(errors, block_errors, (start, 0)), all_bytes), codes

    starts = jnp.arange(0, size, wide)
    carry = (jnp.zeros((size, n), jnp.float32), bytes_t.astype(jnp.uint8))
    (_, all_bytes), codes = lax.scan(block_step, carry, (starts, wt.reshape(-1, wide, n)))
    return codes.reshape(size, n), all_bytes


def _group(
    w: jax.Array, u: jax.Array, byte_columns: jax.Array, fmt: BlockFormat, options: SolverOptions
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One scale block's worth of columns ``w [bs, N]``: errors, codes, and the scale byte [N] of the block."""
    rounder = partial(round_unit, fmt=fmt)
    if options.scales == "frozen":
        return *round_columns(w, u, byte_columns, rounder), byte_columns[0]
    unit = w.T[:, None, :]  # [N, 1 block, bs]
    if options.scales == "refit":
        byte = best_bytes(unit, fmt)[:, 0]
        return *round_columns(w, u, jnp.broadcast_to(byte, w.shape), rounder), byte
    candidates = jnp.stack([byte_columns[0].astype(jnp.int32), *(c[:, 0] for c in candidate_bytes(unit, fmt))])

    def replay(best, byte):
        errors, codes = round_columns(w, u, jnp.broadcast_to(byte, w.shape), rounder)
        loss = jnp.sum(errors * errors, axis=0)
        better = loss < best[0]
        return (
            jnp.where(better, loss, best[0]),
            jnp.where(better, errors, best[1]),
            jnp.where(better, codes, best[2]),
            jnp.where(better, byte, best[3]),
        ), None

    start = (jnp.full(w.shape[1], jnp.inf), jnp.zeros_like(w), jnp.zeros(w.shape, jnp.uint8), candidates[0])
    (_, errors, codes, byte), _ = lax.scan(replay, start, candidates)
    return errors, codes, byte.astype(jnp.uint8)
