"""Tiles of the fused Hopper kernel: the configuration, what fits the chip, and which tiles are the fastest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels._compat import pl
from pallas_kernels.block_scaled_matmul import fragments

STAGED_ROWS = 64  # rows of x a warpgroup stages at once on the way out
SMEM_LIMIT = 226 * 1024  # a launch with more fails although it compiles


@dataclass(frozen=True)
class FusedConfig:
    """Tiles of the fused kernel.

    Attributes:
      row_groups: compute warpgroups of a block, 64 weight rows each.
      block_m: rows of x a block multiplies; a multiple of 8, at most 256.
      splits: blocks along K.
      stages: ring depth at most; one stage is 128 columns.
      overlap: blocks that are decoded and multiplied before the matrix units are waited for.
      gather: how bfloat16 x gets its permuted columns. 1: by a kernel before, then TMA copies it. 2: by the copying
        warpgroup, from global memory through registers to the ring. e4m3 x needs none; there it is 1.
    """

    row_groups: int = 2
    block_m: int = 64
    splits: int = 1
    stages: int = 8
    overlap: int = 2
    gather: int = 1


# Microseconds in which a warpgroup decodes and multiplies one block of 64 x 128, by (row_groups, block_m): H200.
_BLOCK_COST = {
    True: {1: {64: 0.25, 128: 0.36, 256: 0.48}, 2: {32: 0.165, 64: 0.19, 128: 0.225, 256: 0.35},
           3: {64: 0.21, 128: 0.233}, 4: {64: 0.2, 128: 0.2}},
    False: {1: {32: 0.3, 64: 0.38, 128: 0.5}, 2: {32: 0.22, 64: 0.25, 128: 0.35},
            3: {32: 0.21, 64: 0.27, 128: 0.4}, 4: {32: 0.19, 64: 0.24}},
}  # fmt: skip
_ROUND, _SUM = 1.8, 2.0  # to fill and to empty the multiprocessors once; XLA's kernel for the partial results
_PARTIAL_BYTES = 2.5e6  # of partial results that a microsecond writes and reads again
# The copying warpgroup of gather 2 takes 0.7 microseconds for 32 rows of 128 columns and 1.0 to 1.4 for 64: one load
# is waited for after the other. The kernel of gather 1 permutes 4 bytes a value (read, written) beside its launch.
_GATHER, _GATHER_ROW = 0.2, 0.015
_PERMUTE, _PERMUTED_BYTES = 1.7, 2.8e6


def fused_config(m: int, n: int, k: int, fp8: bool, cores: int) -> FusedConfig:
    return _choose(m, n, k, fp8, cores)[1]


def fused_time(m: int, n: int, k: int, fp8: bool, cores: int) -> float:
    """Predicted microseconds of :func:`fused_matmul` with the configuration of :func:`fused_config`."""
    return _choose(m, n, k, fp8, cores)[0]


def _choose(m: int, n: int, k: int, fp8: bool, cores: int) -> tuple[float, FusedConfig]:
    """The tiles with the least predicted time: rounds of blocks, and the sum of the partial results.

    The model is within 15 % of what was measured on seven shapes for M = 32 to 1024, and picks the fastest or one
    within 5 % of it.
    """
    blocks = pl.cdiv(k, fragments.COLUMNS)

    def choices() -> Any:
        for row_groups, costs in _BLOCK_COST[fp8].items():
            for most, cost in costs.items():
                block_m = min(most, m + -m % 8)
                for splits in range(1, max(min(8, blocks // 4), 1) + 1):
                    tiling = FusedConfig(row_groups, block_m, splits)
                    yield _time(m, n, k, cores, tiling, cost), row_groups, block_m, splits

    time, row_groups, block_m, splits = min(choices())
    overlap = 2 if _overlaps(fp8, row_groups, block_m) else 1
    stages = 8 if fp8 or row_groups < 4 else 4
    return time, FusedConfig(row_groups, block_m, splits, stages, overlap)


def _overlaps(fp8: bool, row_groups: int, block_m: int) -> bool:
    """Whether the registers hold two blocks in flight; else ptxas puts the products in sequence."""
    if fp8:
        return row_groups < 4 and block_m <= 128
    return row_groups <= 2 and block_m <= 64


def _time(m: int, n: int, k: int, cores: int, c: FusedConfig, cost: float) -> float:
    """Microseconds, if a warpgroup takes ``cost`` for one block of 64 x 128 while the others want theirs."""
    tiles, blocks = pl.cdiv(n, fragments.ROWS), pl.cdiv(k, fragments.COLUMNS)
    rounds = pl.cdiv(pl.cdiv(tiles, c.row_groups) * pl.cdiv(m, c.block_m) * c.splits, cores)
    time = rounds * (_ROUND + pl.cdiv(blocks, c.splits) * c.row_groups * cost)
    return time + (_SUM + 4 * c.splits * m * n / _PARTIAL_BYTES if c.splits > 1 else 0)


def predicted_time(m: int, n: int, k: int, fp8: bool, cores: int, c: FusedConfig) -> float:
    """Predicted microseconds of a configuration, of x's permutation too: the order in which ``mxjax tune`` tries them.

    Between the rows of :data:`_BLOCK_COST` the cost is interpolated, beyond them it grows with the rows. ``overlap``
    saves 5 % where the registers hold it (measured with e4m3), and is put last where they do not.
    """
    costs = _BLOCK_COST[fp8][c.row_groups]
    cost = float(np.interp(c.block_m, list(costs), list(costs.values()))) * max(c.block_m / max(costs), 1.0)
    if c.overlap > 1:
        cost *= 0.95 if _overlaps(fp8, c.row_groups, c.block_m) else 1.5
    if c.gather == 2:
        cost = max(cost, (_GATHER + _GATHER_ROW * c.block_m) / c.row_groups)
    permuted = 0.0 if fp8 or c.gather == 2 else _PERMUTE + 4 * m * k / _PERMUTED_BYTES
    return _time(m, n, k, cores, c, cost) + permuted


def ring(blocks: int, c: FusedConfig, itemsize: int, whole: bool, taken: int = 0) -> tuple[int, int]:
    """(stages, rounds) for ``blocks`` blocks along K: the ring that fits and overshoots the blocks of a split least.

    Args:
      itemsize: bytes of a value of x.
      whole: whether the result is staged in shared memory.
      taken: bytes of shared memory that something else takes.
    """
    blocks = pl.cdiv(blocks, c.splits)
    stage = c.row_groups * fragments.BLOCK_BYTES + c.block_m * fragments.COLUMNS * itemsize
    fixed = (
        4096 + taken + (c.row_groups * min(c.block_m, STAGED_ROWS) * 128 if whole else 1024)
    )  # table, barriers, output
    most = min(c.stages, (SMEM_LIMIT - fixed) // stage, blocks)
    least = max(most // 2, min(2 * c.overlap, most), 1)
    return min(((s, pl.cdiv(blocks, s)) for s in range(most, least - 1, -1)), key=lambda r: r[0] * r[1])
