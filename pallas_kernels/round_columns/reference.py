"""round_columns in plain JAX."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def round_columns(w: jax.Array, u: jax.Array, scale_bytes: jax.Array, rounder: Callable) -> tuple[jax.Array, jax.Array]:
    """See :func:`pallas_kernels.round_columns.round_columns`."""

    def column(i, state):
        errors, codes = state
        # Rows of `errors` from i on are still zero, so the whole column of u may take part. HIGHEST: TF32 in the
        # compensation would lose what it compensates.
        w_i = w[i] - jnp.matmul(u[:, i], errors, precision=lax.Precision.HIGHEST)
        code, value = rounder(w_i, scale_bytes[i])
        return errors.at[i].set((w_i - value) / u[i, i]), codes.at[i].set(code)

    init = (jnp.zeros_like(w), jnp.zeros(w.shape, jnp.uint8))
    return lax.fori_loop(0, w.shape[0], column, init)
