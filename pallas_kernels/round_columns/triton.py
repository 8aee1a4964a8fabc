"""round_columns in Pallas Triton.

XLA runs the loop over columns as a loop of small kernels: about 25 us a column on an H200, of which next to nothing is
arithmetic. Rows of the weight do not depend on each other, so one program takes some of them through all columns with
everything in registers. A register array has no dynamic index: column ``i`` is read by a masked sum, which costs the
32 columns 32 additions each and hides behind the serial chain of roundings.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _compat
from pallas_kernels._compat import pl

ROWS = 32  # rows of the weight a program takes: one a thread of its single warp


def _kernel(w_ref: Any, u_ref: Any, byte_ref: Any, errors_ref: Any, codes_ref: Any, *, rounder: Callable) -> None:
    size = w_ref.shape[0]
    index = lax.broadcasted_iota(jnp.int32, w_ref.shape, 0)

    def column(i, w):
        w_i = jnp.sum(jnp.where(index == i, w, 0.0), axis=0)
        code, value = rounder(w_i, byte_ref[i, :])
        error = (w_i - value) / u_ref[i, i]
        errors_ref[i, :] = error
        codes_ref[i, :] = code
        return w - jnp.where(index > i, u_ref[i, :][:, None] * error[None, :], 0.0)

    lax.fori_loop(0, size, column, w_ref[...])


def round_columns(
    w: jax.Array, u: jax.Array, scale_bytes: jax.Array, rounder: Callable, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """See :func:`pallas_kernels.round_columns.round_columns`."""
    size, n = w.shape
    if n == 0:
        return jnp.zeros((size, 0), jnp.float32), jnp.zeros((size, 0), jnp.uint8)
    pad = ((0, 0), (0, -n % ROWS))
    w, scale_bytes = jnp.pad(w, pad), jnp.pad(scale_bytes, pad)
    tile = pl.BlockSpec((size, ROWS), lambda i: (0, i))
    errors, codes = _compat.triton_call(
        partial(_kernel, rounder=rounder),
        name="round_columns",
        grid=(w.shape[1] // ROWS,),
        in_specs=[tile, pl.BlockSpec((size, size), lambda i: (0, 0)), tile],
        out_specs=[tile, tile],
        out_shape=[jax.ShapeDtypeStruct(w.shape, jnp.float32), jax.ShapeDtypeStruct(w.shape, jnp.uint8)],
        num_warps=1,
        num_stages=1,
        interpret=interpret,
    )(w, u, scale_bytes)
    return errors[:, :n], codes[:, :n]
