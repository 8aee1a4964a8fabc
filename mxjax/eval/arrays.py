"""How far one array is from another: SQNR and cosine similarity."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.errors import BlockShapeError


class ArrayError(NamedTuple):
    """The difference of ``x`` from ``reference``, as plain floats."""

    sqnr_db: float
    cosine: float
    relative_error: float  # ||reference - x|| / ||reference||
    max_abs: float
    median_row_sqnr_db: float = math.nan  # of the rows (last axis) one by one: a few huge rows do not decide it


def row_sums(reference: jax.Array, x: jax.Array) -> jax.Array:
    """[5, rows]: sums over the last axis of r^2, x^2, r x, and the largest |r - x|; float32."""
    r, x = jnp.atleast_1d(reference).astype(jnp.float32), jnp.atleast_1d(x).astype(jnp.float32)
    e = r - x
    sums = [jnp.sum(e * e, -1), jnp.sum(r * r, -1), jnp.sum(x * x, -1), jnp.sum(r * x, -1)]
    return jnp.stack([s.reshape(-1) for s in [*sums, jnp.max(jnp.abs(e), -1, initial=0)]])


_row_sums = jax.jit(row_sums)


def compare_arrays(reference: jax.Array, x: jax.Array) -> ArrayError:
    """All measures of one pair at once; see :func:`sqnr` and :func:`cosine` for the formulas.

    Rows are summed in float32 on the device, the rows' sums in float64 on the host: the size of an array costs no
    accuracy.

    Raises:
      BlockShapeError: different shapes.
    """
    if jnp.shape(reference) != jnp.shape(x):
        raise BlockShapeError(f"arrays to compare have one shape, not {jnp.shape(reference)} and {jnp.shape(x)}")
    return from_sums(np.asarray(_row_sums(reference, x), np.float64))


def from_sums(rows: np.ndarray) -> ArrayError:
    """The measures, from :func:`row_sums` as float64 [5, rows]."""
    error, power, x_power, dot = rows[:4].sum(axis=1)
    max_abs = float(rows[4].max(initial=0))
    median = _median_row_sqnr(rows[0], rows[1])
    if error == 0:
        return ArrayError(math.inf, 1.0, 0.0, max_abs, median)
    if power == 0:
        return ArrayError(-math.inf, 0.0, math.inf, max_abs, median)
    similarity = float(dot / math.sqrt(power * x_power)) if x_power else 0.0
    return ArrayError(float(10 * np.log10(power / error)), similarity, math.sqrt(error / power), max_abs, median)


def _median_row_sqnr(error: np.ndarray, power: np.ndarray) -> float:
    """The lower median, so that it is some row's value; equal rows count as inf, lost zero rows as -inf."""
    if not error.size:
        return math.inf
    with np.errstate(divide="ignore", invalid="ignore"):
        sqnr_db = np.where(error == 0, np.inf, 10 * np.log10(power / error))
    return float(np.sort(sqnr_db)[(sqnr_db.size - 1) // 2])


def sqnr(reference: jax.Array, x: jax.Array) -> float:
    """Signal to quantization noise ratio in decibels: ``10 log10(sum r^2 / sum (r - x)^2)``; inf for equal arrays.

    Example:
      >>> round(sqnr(jnp.ones(4), jnp.full(4, 0.9)), 3)
      20.0
    """
    return compare_arrays(reference, x).sqnr_db


def cosine(reference: jax.Array, x: jax.Array) -> float:
    """Cosine similarity of two arrays as vectors: ``r . x / (|r| |x|)``; 1 for equal arrays, 0 where one is all zero.

    Example:
      >>> cosine(jnp.array([1.0, 0.0]), jnp.array([0.0, 2.0]))
      0.0
    """
    return compare_arrays(reference, x).cosine
