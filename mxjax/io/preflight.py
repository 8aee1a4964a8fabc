"""Whether a layout can carry what a recipe will make, before an hour has been spent on making it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from mxjax import api
from mxjax.algorithms.rtn import rtn
from mxjax.config import QuantConfig
from mxjax.io import hf, hf_write
from mxjax.io.layouts import get
from mxjax.ops.qweight import QWeight
from mxjax.transforms.base import needs_fit

OWN = ("mxjax", "orbax")


def check_recipe(
    params: Any,
    cfg: str | QuantConfig,
    format: str,
    *,
    names: hf.Names | None = None,
    axes: Mapping[str, int] | None = None,
) -> None:
    """Raise CheckpointError where ``mxjax.save(folder, quantize(params, cfg), format)`` would.

    Formats, transforms (fitted ones too), scale policies, activations, shapes and names are looked at; what an
    algorithm adds by itself, such as a low-rank branch, is seen by ``save`` only. Nothing is computed.

    Args:
      params: pytree of arrays or of ``jax.ShapeDtypeStruct``.
      cfg: a recipe name or a QuantConfig.
      format: as in :func:`mxjax.save`.
      names: as in :func:`mxjax.save`.
      axes: as in :func:`mxjax.plan`.

    Raises:
      CheckpointError: weights that the layout cannot carry, with the reasons and the layouts that can.

    Example:
      >>> tree = {"layer": {"kernel": jax.ShapeDtypeStruct((64, 8), "bfloat16")}}
      >>> check_recipe(tree, "mxfp4", "quark")
    """
    if format in OWN:
        return
    refused = hf_write.Refused(get(format))
    for entry in api.plan(params, cfg, axes=axes).quantized:
        refused.check(entry.path, hf.apply_names(names or hf.default_names, entry.path), _stand_in(entry))
    refused.done()


def _stand_in(entry: api.PlanEntry) -> QWeight:
    """A weight like the one that is planned: right shapes and fields, no memory, all values 1."""
    assert entry.spec is not None
    fitted = needs_fit(entry.spec.transform)
    spec = (
        replace(entry.spec, transform=None, on_nonfinite="nan") if fitted else replace(entry.spec, on_nonfinite="nan")
    )
    shapes = jax.eval_shape(lambda w: rtn(w, spec), jax.ShapeDtypeStruct(entry.shape, entry.dtype))
    weight = jax.tree.map(lambda x: np.broadcast_to(np.ones((), x.dtype), x.shape), shapes)
    return replace(weight, transform=entry.spec.transform) if fitted else weight
