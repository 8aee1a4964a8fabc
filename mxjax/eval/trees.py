"""The error of every quantized weight of a tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from mxjax.api import path_str
from mxjax.errors import BlockShapeError, ConfigError
from mxjax.eval.arrays import from_sums, row_sums
from mxjax.ops.qweight import is_quantized


@dataclass(frozen=True)
class WeightError:
    """One quantized weight against the float weight it was made from."""

    path: str
    shape: tuple[int, ...]
    format: str
    nbytes: int
    bits_per_value: float
    sqnr_db: float
    cosine: float
    relative_error: float
    max_abs: float


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Leaves of a tree under their paths (``layers/0/mlp/up_proj/kernel``), quantized weights whole."""
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_quantized)[0]
    return {path_str(path): leaf for path, leaf in flat}


def weight_errors(params: Any, qparams: Any) -> list[WeightError]:
    """Compare every quantized leaf of ``qparams`` with the leaf of ``params`` at the same path.

    Args:
      params: the float tree.
      qparams: what ``mxjax.quantize(params, cfg)`` made of it.

    Returns:
      One row a quantized weight, in the tree's order: SQNR, cosine, ``||W - W_q|| / ||W||`` and the largest difference,
      measured in the weight's own space (transforms undone).

    Raises:
      ConfigError: a quantized leaf without a float leaf of its path.
      BlockShapeError: leaves of different shapes.

    Example:
      >>> params = {"layer": {"kernel": jnp.ones((64, 8))}}
      >>> weight_errors(params, mxjax.quantize(params, "mxfp4"))[0].sqnr_db
      inf
    """
    floats = leaves_by_path(params)
    rows = []
    for path, leaf in leaves_by_path(qparams).items():
        if not is_quantized(leaf):
            continue
        reference = floats.get(path)
        if reference is None or is_quantized(reference):
            raise ConfigError(f"{path} is quantized, but the reference tree has no float array there")
        if tuple(reference.shape) != tuple(leaf.shape):
            raise BlockShapeError(f"{path}: {tuple(leaf.shape)} quantized, {tuple(reference.shape)} in the reference")
        measured = from_sums(np.asarray(_row_sums(reference, leaf), np.float64))
        bits = leaf.nbytes * 8 / reference.size if reference.size else 0.0
        name = leaf.format.name
        rows.append(WeightError(path, tuple(leaf.shape), name, leaf.nbytes, bits, *measured[:4]))
    return rows


@jax.jit
def _row_sums(reference: jax.Array, leaf: Any) -> jax.Array:
    return row_sums(reference, leaf.dequantize("float32"))
