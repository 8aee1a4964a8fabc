"""Quantize Flax nnx models: modules are swapped in a copy, Flax itself stays as it is. Public as ``mxjax.nnx``.

    qmodel = mxjax.nnx.quantize(model, "mxfp4")
    qmodel = mxjax.nnx.from_params(nnx.eval_shape(make_model), mxjax.load("folder"))

A module of one's own that multiplies with ``mxjax.qdot`` or ``mxjax.qeinsum`` says so with a class attribute, the
contraction axis of each weight by its name; ``self.up[...]`` is then an array before and a QWeight after::

    class Experts(nnx.Module):
        quantized_params = {"up": -2}

        def __call__(self, x):  # [experts, tokens, K]
            return mxjax.qeinsum("ebk,ekn->ebn", x, self.up[...])

A model that knows which of its layers need high precision says so with the class attribute ``quantization_exclude``:
regular expressions, or a mapping from them to what they stand for, that take the place of
``mxjax.config.DEFAULT_EXCLUDE`` in configs without an ``exclude`` of their own (``mxjax_models.pixart.PixArt`` does);
:func:`kept` lists what that leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mxjax import api
from mxjax.config import QuantConfig
from mxjax.errors import ConfigError
from mxjax.nn.nnx_fuse import fuse_shared_inputs as fuse_shared_inputs
from mxjax.nn.nnx_fuse import shared_input as shared_input
from mxjax.nn.nnx_fuse import unfuse_shared_inputs as unfuse_shared_inputs
from mxjax.nn.nnx_graph import (
    LAYERS,
    check,
    config_for,
    declared,
    install,
    owners_of,
    params_of,
    problems_of,
    variables_of,
)
from mxjax.nn.nnx_layers import QEinsum as QEinsum
from mxjax.nn.nnx_layers import QLinear as QLinear
from mxjax.nn.nnx_layers import QLinearGeneral as QLinearGeneral
from mxjax.nn.nnx_layers import QLoRALinear as QLoRALinear
from mxjax.nn.nnx_layers import QParam as QParam
from mxjax.nn.nnx_shard import shard as shard
from mxjax.nn.parts import calibrate_and_quantize as calibrate_and_quantize
from mxjax.ops.qweight import QWeight, is_quantized


def quantize(model: Any, cfg: str | QuantConfig = "mxfp4", stats: Mapping[str, Any] | None = None) -> Any:
    """A copy of the model with quantized weights; the model given stays as it is, unquantized arrays are shared.

    Every ``nnx.Linear``, ``LoRALinear``, ``LinearGeneral`` (so ``MultiHeadAttention`` too) and ``Einsum`` whose kernel
    ``cfg`` matches becomes a :class:`QLinear`, ... with a :class:`QParam`. Paths are those of
    ``mxjax.plan(nnx.state(model, nnx.Param), cfg)``, such as ``layers/0/self_attn/q_proj/kernel``; contraction axes are
    read off the modules where the rule names none. Shared modules and shared Variables stay shared. The result works
    with ``nnx.split``, ``jit``, ``grad``, ``vmap``, ``scan`` over stacked layers, ``remat``, and under ``eval_shape``.

    Args:
      model: an nnx Module.
      cfg: a recipe name or a QuantConfig. Where its ``exclude`` is the default list and the model's class has one
        of its own (``quantization_exclude``), that one holds.
      stats: calibration statistics by path, where an algorithm needs them.

    Raises:
      ConfigError: matched weights in modules that cannot run quantized; all are listed.
      BlockShapeError, NonFiniteError: as ``mxjax.quantize``.

    Example:
      >>> model = flax.nnx.Sequential(flax.nnx.Linear(64, 32, rngs=flax.nnx.Rngs(0)), flax.nnx.relu)
      >>> qmodel = quantize(model, "mxfp4")
      >>> qmodel.layers[0].kernel.get_value().format
      <mxfp4>
    """
    model, cfg = nnx.clone(model), config_for(model, cfg)
    variables, values, axes = params_of(model)
    check(api.plan(values, cfg, axes=axes), variables, owners_of(model))
    quantized = api.quantize(values, cfg, stats, axes=axes)
    return install(model, {id(variables[p]): QParam(w) for p, w in quantized.items() if is_quantized(w)})


def plan(model: Any, cfg: str | QuantConfig = "mxfp4") -> api.Plan:
    """What ``quantize(model, cfg)`` would do, leaf by leaf. An abstract model (``nnx.eval_shape``) is enough.

    Differs from ``mxjax.plan(nnx.state(model, nnx.Param), cfg)`` in that it knows the modules: contraction axes are
    theirs, and weights that cannot run quantized are an error.

    Raises:
      ConfigError, BlockShapeError: as :func:`quantize`.

    Example:
      >>> print(plan(flax.nnx.Linear(64, 8, use_bias=False, rngs=flax.nnx.Rngs(0)), "mxfp4_a16"))
      kernel  (64, 8) float32: rtn: weight mxfp4, activation float, axis -2
    """
    variables, values, axes = params_of(model)
    todo = api.plan(values, config_for(model, cfg), axes=axes)
    check(todo, variables, owners_of(model))
    return todo


@dataclass(frozen=True)
class Kept:
    """A matrix that stays in high precision, and why."""

    path: str
    shape: tuple[int, ...]
    reason: str


def kept(model: Any, cfg: str | QuantConfig = "mxfp4") -> list[Kept]:
    """Which matrices ``quantize(model, cfg)`` leaves as they are, and why.

    The model's own list (``quantization_exclude``) may be a mapping from patterns to what they stand for, which is then
    the reason. To decide otherwise give the config an ``exclude`` of its own, or rules: a ``Rule(path=...,
    weight=None)`` before the others keeps more.

    Args:
      model: an nnx Module; an abstract one is enough.
      cfg: a recipe name or a QuantConfig.

    Example:
      >>> kept(flax.nnx.Linear(48, 8, rngs=flax.nnx.Rngs(0)), QuantConfig(rules=[], name="nothing"))
      [Kept(path='kernel', shape=(48, 8), reason='no rule matches')]
    """
    own, cfg = getattr(type(model), "quantization_exclude", ()), config_for(model, cfg)
    reasons = own if isinstance(own, Mapping) else {}
    out = []
    for entry in plan(model, cfg).kept:
        if len(entry.shape) >= 2:
            pattern = cfg.excluded_by(entry.path)
            out.append(Kept(entry.path, entry.shape, reasons.get(pattern or "", entry.reason)))
    return out


def from_params(model: Any, params: Any) -> Any:
    """The model with the values of a tree in it, quantized ones included.

    Takes an abstract model (``nnx.eval_shape(make_model)``), so that a checkpoint is restored without ever making the
    float weights. The model given stays as it is.

    Args:
      model: an nnx Module, float or quantized, concrete or abstract.
      params: nested dicts or an nnx.State with the paths of the model, as ``mxjax.load`` returns; leaves are arrays and
        QWeights.

    Raises:
      ConfigError: paths that are missing or unknown, shapes that differ, weights that cannot run quantized, or values
        that are still abstract at the end; all are listed.

    Example:
      >>> make = lambda: flax.nnx.Linear(64, 8, rngs=flax.nnx.Rngs(0))
      >>> qparams = mxjax.quantize(flax.nnx.state(make()), "mxfp4")
      >>> from_params(flax.nnx.eval_shape(make), qparams)(jnp.ones((2, 64))).shape
      (2, 8)
    """
    model = nnx.clone(model)
    flat = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_quantized)[0]
    given = {api.path_str(path): leaf for path, leaf in flat}
    owners = owners_of(model)
    problems, swaps = [], {}
    for path, variable in variables_of(model).items():
        if path not in given:
            if isinstance(variable, (nnx.Param, QParam)):
                problems.append(f"  {path}: missing in the tree")
            continue
        value = given.pop(path)
        if jnp.shape(value) != tuple(variable.shape):
            problems.append(f"  {path}: {jnp.shape(value)} in the tree, {tuple(variable.shape)} in the model")
        elif isinstance(value, QWeight) and not isinstance(variable, QParam):
            problems += problems_of(path, value.shape, value.qtensor.axis, owners.get(id(variable), ()))
            swaps[id(variable)] = QParam(value)
        elif is_quantized(value) == isinstance(variable, QParam):
            variable.set_value(value)
        else:
            problems.append(f"  {path}: {type(value).__name__} in the tree, {type(variable).__name__} in the model")
    problems += [f"  {path}: not in the model" for path in given]
    if problems:
        raise ConfigError("the tree does not fit the model:\n" + "\n".join(problems))
    model = install(model, swaps)
    abstract = [
        p
        for p, v in variables_of(model).items()
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(v.get_value()))
    ]
    if abstract:
        raise ConfigError(
            f"still abstract: {', '.join(abstract)}; put their values into the tree, or make the model as it is"
        )
    return model


def dequantize(model: Any, dtype: Any = None) -> Any:
    """A copy of the model with the float layers back in place, holding the dequantized weights; fused ones apart.

    Args:
      model: a quantized nnx Module.
      dtype: of the weights; default: the dtype each was made from.
    """
    params: dict[int, nnx.Param] = {}

    def param(variable: QParam) -> nnx.Param:
        if id(variable) not in params:
            params[id(variable)] = nnx.Param(variable.get_value().dequantize(dtype))
        return params[id(variable)]

    def swap(path: Any, node: Any) -> Any:
        for float_layer, layer in LAYERS.items():
            if type(node) is layer:
                return node.to_layer(float_layer, param(node.kernel))
        for name in declared(node):
            if isinstance(getattr(node, name, None), QParam):
                setattr(node, name, param(getattr(node, name)))
        return node

    return nnx.recursive_map(swap, unfuse_shared_inputs(model))  # which copies
