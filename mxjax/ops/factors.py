"""Matrices that are arrays or QTensors (blocks along columns): cut, padded and put together, exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.core.qtensor import QTensor

Factor = jax.Array | QTensor


def kind(x: Factor) -> Any:
    """What factors must agree in to be put together."""
    return x.format if isinstance(x, QTensor) else x.dtype


def block(x: Factor) -> int:
    """Columns that cannot be separated."""
    return x.format.block_size if isinstance(x, QTensor) else 1


def concatenate_rows(parts: Sequence[Any]) -> Any:
    """One factor of all rows, in order."""
    if not isinstance(parts[0], QTensor):
        return jnp.concatenate(parts, axis=-2)
    codes, scales = (jnp.concatenate([getattr(p, name) for p in parts], axis=-2) for name in ("codes", "scales"))
    return replace(parts[0], codes=codes, scales=scales)


def pad_columns(x: Any, before: int, after: int) -> Any:
    """Zero columns on both sides; of a QTensor in whole blocks, whose codes and scale bytes are zero."""

    def pad(y: jax.Array, unit: float) -> jax.Array:
        sides = [(0, 0)] * (y.ndim - 1) + [(int(before * unit), int(after * unit))]
        return jnp.pad(y, sides)

    if not isinstance(x, QTensor):
        return pad(x, 1)
    codes, scales = pad(x.codes, x.format.element.bits / 8), pad(x.scales, 1 / block(x))
    return replace(x, codes=codes, scales=scales, size=before + x.size + after)


def no_columns(like: Any, rows: int) -> Any:
    """A factor of the kind and leading axes of ``like`` with ``rows`` rows and no columns."""
    if not isinstance(like, QTensor):
        return jnp.zeros((*like.shape[:-2], rows, 0), like.dtype)
    empty = jnp.zeros((*like.codes.shape[:-2], rows, 0), jnp.uint8)
    return replace(like, codes=empty, scales=empty, size=0)


def cut_rows(x: Any, start: int, end: int) -> Any:
    """Rows start .. end."""
    if not isinstance(x, QTensor):
        return lax.slice_in_dim(x, start, end, axis=-2)
    codes, scales = (lax.slice_in_dim(y, start, end, axis=-2) for y in (x.codes, x.scales))
    return replace(x, codes=codes, scales=scales)


def cut_columns(x: Any, start: int, end: int) -> Any:
    """Columns start .. end; of a QTensor in whole blocks."""
    if not isinstance(x, QTensor):
        return lax.slice_in_dim(x, start, end, axis=-1)
    units = (x.format.element.bits / 8, 1 / block(x))
    codes, scales = (
        lax.slice_in_dim(y, int(start * unit), int(end * unit), axis=-1)
        for y, unit in zip((x.codes, x.scales), units, strict=True)
    )
    return replace(x, codes=codes, scales=scales, size=end - start)
