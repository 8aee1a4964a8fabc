"""Layers of an nnx model that share an input, fused: ``mxjax.nnx.fuse_shared_inputs``.

A model takes part where it calls such layers together::

    q, k, v = mxjax.nnx.shared_input(x, self.q_proj, self.k_proj, self.v_proj)

which calls them one by one until they are fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from mxjax.errors import ConfigError
from mxjax.fusion import DEFAULT_GROUPS, fuse_leaves, unfuse_leaves
from mxjax.nn import products
from mxjax.nn.nnx_graph import owners_of, variables_of
from mxjax.nn.nnx_layers import QLinear, QParam
from mxjax.ops.fused import FusedWeight, qdot_shared


def fuse_shared_inputs(model: Any, groups: Sequence[Sequence[str]] = DEFAULT_GROUPS) -> Any:
    """A copy of a quantized model whose layers with one input are fused; the model given stays as it is.

    The model calls such layers through :func:`shared_input`; the models of ``mxjax_models`` do. Results do not change.

    Args:
      model: a model that ``mxjax.nnx.quantize`` made.
      groups: names of layers that share an input, as in :func:`mxjax.fuse_shared_inputs`.

    Raises:
      ConfigError, BlockShapeError: as :func:`mxjax.fuse_shared_inputs`; also layers other than :class:`QLinear`, and
        layers of a group with different dtypes or precisions.

    Example:
      >>> class MLP(flax.nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.gate_proj, self.up_proj = (flax.nnx.Linear(64, 96, rngs=rngs) for _ in range(2))
      ...     def __call__(self, x):
      ...         gate, up = mxjax.nnx.shared_input(x, self.gate_proj, self.up_proj)
      ...         return jax.nn.silu(gate) * up
      >>> model = mxjax.nnx.quantize(MLP(flax.nnx.Rngs(0)), "mxfp4")
      >>> fuse_shared_inputs(model)(jnp.ones((2, 64))).shape
      (2, 96)
    """
    model = nnx.clone(model)
    variables = {path: v for path, v in variables_of(model).items() if isinstance(v, QParam)}
    owners = owners_of(model)
    swaps = fuse_leaves({path: v.get_value() for path, v in variables.items()}, groups)
    head: dict[str, Any] = {}
    for path, value in swaps.items():
        held_by = owners[id(variables[path])]
        layer = held_by[0].module
        if len(held_by) != 1 or type(layer) is not QLinear:
            raise ConfigError(f"{path}: only a QLinear of one owner can be fused, not {type(layer).__name__}")
        options = {name: getattr(layer, name) for name in QLinear.option_names}
        if isinstance(value, FusedWeight):
            head = options
        elif options != head:
            raise ConfigError(f"{path} and the layer it would be fused with differ in their options: {options}, {head}")
        variables[path].set_value(value)
    return model


def unfuse_shared_inputs(model: Any) -> Any:
    """A copy of the model as it was before :func:`fuse_shared_inputs`, for saving among others."""
    model = nnx.clone(model)
    variables = {path: v for path, v in variables_of(model).items() if isinstance(v, QParam)}
    for path, value in unfuse_leaves({path: v.get_value() for path, v in variables.items()}).items():
        variables[path].set_value(value)
    return model


def shared_input(x: jax.Array, *layers: Any) -> tuple[jax.Array, ...]:
    """``layer(x)`` of every layer; layers that were fused run as one product (:func:`mxjax.qdot_shared`).

    Args:
      x: [..., K].
      layers: callables, in the order of the group that ``fuse_shared_inputs`` was given.

    Raises:
      ConfigError: fused layers of which some are missing or in another order.
    """
    fused = layers[0].kernel.get_value() if type(layers[0]) is QLinear else None
    if not isinstance(fused, FusedWeight):
        return tuple(layer(x) for layer in layers)
    if any(type(layer) is not QLinear for layer in layers):
        raise ConfigError(f"fused layers stay QLinear, all of them: {', '.join(type(n).__name__ for n in layers)}")
    inputs, biases = [], []
    for layer in layers:
        bias = None if layer.bias is None else layer.bias[...]
        promoted, bias = products.promote(layer.promote, x, fused.weight, bias)
        inputs.append(promoted)
        biases.append(bias)
    if len({value.dtype for value in inputs}) != 1:
        raise ConfigError(f"biases of different dtypes make x {', '.join(str(value.dtype) for value in inputs)}")
    # The biases stay outside: they may be of different dtypes, and some layers may have none.
    outputs = qdot_shared(inputs[0], *(layer.kernel.get_value() for layer in layers), **layers[0].dot_options)
    return tuple(y if b is None else y + b for y, b in zip(outputs, biases, strict=True))
