"""The table of row tiles of a grouped product: which expert each tile belongs to, and which rows it has."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def spans(group_sizes: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """First row and end of every group, int32 [E]; sizes that reach beyond ``rows`` are cut."""
    ends = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), rows)
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), ends[:-1]]), ends


def row_tiles(group_sizes: jax.Array, rows: int, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Expert, first row and end of every tile, int32 [T].

    A tile has at most ``block`` rows, all of one expert. Groups without rows get no tile. Rows beyond the last group
    get tiles of expert -1. T is what any sizes can need: ``rows // block + E + 1``; tiles that are not needed are empty
    (first row = end = rows).

    Args:
      group_sizes: integers [E].
      rows: rows of x.
      block: rows of a tile.
    """
    experts = group_sizes.shape[0]
    start, end = spans(group_sizes, rows)
    start, end = jnp.append(start, end[-1]), jnp.append(end, rows)  # the rest is one group more
    needed = jnp.cumsum((end - start + block - 1) // block)
    tile = jnp.arange(min(rows // block + experts + 1, rows), dtype=jnp.int32)
    group = jnp.searchsorted(needed, tile, side="right").astype(jnp.int32)
    there = group <= experts
    group = jnp.minimum(group, experts)
    before = jnp.where(group > 0, needed[group - 1], 0).astype(jnp.int32)
    first = jnp.where(there, start[group] + (tile - before) * block, rows)
    last = jnp.where(there, jnp.minimum(first + block, end[group]), rows)
    return jnp.where(group == experts, -1, group), first, last
