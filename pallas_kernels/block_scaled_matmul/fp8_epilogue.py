"""What happens to the sums of the FP8 product in ``wgmma``'s registers: scales, low-rank branch, bias, function.

Registers bound the order of things. A warpgroup of 128 x 128 sums takes 128 of a thread's 232 registers, a step of x
A^T 32, the factors of the columns and the bias 32 each. What lives across the loop over tiles has to fit what these
leave below 168, which is what a thread has until the warpgroups share the registers anew. So scaling goes by 64
columns, the bias comes after the branch, and with a branch the rows go by 64 too: the product of both scales, which
comes first (reference.finish), takes half as many. Then ptxas spills nothing (tests/kernels/test_kernels_mosaic.py);
with everything at once it spilled 32 to 320 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax import lax

from pallas_kernels import _compat
from pallas_kernels._compat import pl
from pallas_kernels.block_scaled_matmul.epilogue import FUNCTIONS

PIECE = 64  # rows and columns that leave through shared memory at once
RANK_STEP = 64  # columns of the low-rank factors at a time: 128 bytes, one swizzle row


class Operands(NamedTuple):
    """Arrays in global memory: factors of rows and columns, and what there is of bias, x A^T and B."""

    row: Any
    column: Any
    bias: Any
    down: Any
    up: Any


def finished(
    acc: jax.Array,
    refs: Operands,
    row0: Any,
    column0: Any,
    branch: Any,
    up_smem: Any,
    barrier: Any,
    factor: float,
    function: str | None,
) -> Iterator[tuple[int, int, jax.Array]]:
    """(row, column, piece [64, 64]) of the finished sums of one warpgroup, in float32.

    Args:
      acc: sums, [rows, columns], in ``wgmma``'s layout.
      refs: operands.
      row0, column0: where the sums lie in the result.
      branch: which block of columns of x A^T is the one of these columns.
      up_smem: shared memory [>= columns, 64] for a step of B, free until the first piece is taken.
      barrier: of one arrival, for the copies of B.
      factor: a constant factor of the product.
      function: a name of FUNCTIONS, or None.
    """
    plgpu = _compat.mosaic()
    rows, columns = acc.shape
    steps = 0 if refs.up is None else refs.up.shape[1] // RANK_STEP
    height = PIECE if steps else rows
    shape = (height, PIECE)
    places = [(i, j) for i in range(0, rows, height) for j in range(0, columns, PIECE)]

    def vector(ref: Any, start: Any, axis: int) -> jax.Array:
        """A slice of a vector along ``axis`` of a piece, broadcast over the other."""
        values = _compat.mosaic_load(ref, start, shape[axis], plgpu.Layout.WGMMA.reduce(1 - axis))
        return lax.broadcast_in_dim(values, shape, (axis,))

    def scaled(i: int, j: int) -> jax.Array:
        scales = (vector(refs.row, row0 + i, 0) * factor) * vector(refs.column, column0 + j, 1)  # reference.finish
        return acc[i : i + height, j : j + PIECE] * scales

    def multiplied(piece: jax.Array, down: jax.Array, j: int) -> jax.Array:
        def multiply(acc_ref: Any) -> None:
            plgpu.wgmma(acc_ref, down, _compat.mosaic_transpose(up_smem.at[pl.ds(j, PIECE)]))
            plgpu.wgmma_wait(0)

        return pl.run_state(multiply)(plgpu.ACC.init(piece))

    pieces = {} if steps else {at: scaled(*at) for at in places}
    for step in range(steps):
        up = refs.up.at[pl.ds(column0, columns), pl.ds(step * RANK_STEP, RANK_STEP)]
        plgpu.copy_gmem_to_smem(up, up_smem.at[pl.ds(0, columns)], barrier)
        down = {}
        for i in range(0, rows, height):
            if i not in down:
                # one after another would wait for memory twice; with more steps the registers hold one only
                for row in range(0, rows, height) if steps == 1 else (i,):
                    start = branch * refs.up.shape[1] + step * RANK_STEP
                    at = (pl.ds(row0 + row, height), pl.ds(start, RANK_STEP))
                    down[row] = _compat.mosaic_load_at(refs.down, at, plgpu.Layout.WGMMA)
            if i == 0:
                plgpu.barrier_wait(barrier)
            for j in range(0, columns, PIECE):
                pieces[i, j] = multiplied(pieces[i, j] if step else scaled(i, j), down[i], j)
    if refs.bias is not None:
        pieces = {(i, j): piece + vector(refs.bias, column0 + j, 1) for (i, j), piece in pieces.items()}
    for i in range(0, rows, PIECE):
        for j in range(0, columns, PIECE):
            piece = pieces[i, j] if height == PIECE else pieces[0, j][i : i + PIECE]
            yield i, j, piece if function is None else FUNCTIONS[function](piece)
