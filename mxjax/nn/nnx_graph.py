"""Walks over nnx models: who holds which weight, what can run quantized, and the swap of the layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mxjax import recipes
from mxjax.api import Plan
from mxjax.config import DEFAULT_EXCLUDE, QuantConfig
from mxjax.errors import ConfigError
from mxjax.nn import products
from mxjax.nn.nnx_layers import QEinsum, QLinear, QLinearGeneral, QLoRALinear, QParam

# Exact types: a subclass may compute anything.
LAYERS: dict[type, Any] = {
    nnx.Linear: QLinear,
    nnx.LoRALinear: QLoRALinear,
    nnx.LinearGeneral: QLinearGeneral,
    nnx.Einsum: QEinsum,
}


def config_for(model: Any, cfg: str | QuantConfig) -> QuantConfig:
    """The config, with the model's own list of what stays in high precision where the config has no list of its own.

    A model has one as the class attribute ``quantization_exclude``, patterns as in ``QuantConfig.exclude``; it replaces
    the default list, and any other ``exclude`` replaces it.
    """
    cfg, own = recipes.get(cfg), getattr(type(model), "quantization_exclude", None)
    return cfg if own is None or cfg.exclude != DEFAULT_EXCLUDE else cfg.replace(exclude=own)


class Owner(NamedTuple):
    """A module that holds a Variable as its attribute ``name``."""

    path: str
    module: Any
    name: str


def params_of(model: Any) -> tuple[dict[str, nnx.Param], dict[str, Any], dict[str, int]]:
    """Params by path, their values, and the contraction axes that their modules imply."""
    variables = {path: v for path, v in variables_of(model).items() if isinstance(v, nnx.Param)}
    owners = owners_of(model)
    axes = {}
    for path, variable in variables.items():
        summed = next(filter(None, map(_summed_axes, owners.get(id(variable), ()))), ())
        if summed:
            axes[path] = summed[-1]
    return variables, {path: variable.get_value() for path, variable in variables.items()}, axes


def check(todo: Plan, variables: Mapping[str, nnx.Param], owners: Mapping[int, list[Owner]]) -> None:
    """Raise ConfigError for weights that will be quantized and cannot run."""
    problems = []
    for entry in todo.quantized:
        assert entry.spec is not None
        problems += problems_of(entry.path, entry.shape, entry.spec.axis, owners.get(id(variables[entry.path]), ()))
    if problems:
        raise ConfigError(
            "the config matches weights that cannot run quantized:\n"
            + "\n".join(problems)
            + "\nexclude them (QuantConfig.exclude, or Rule(path=..., weight=None) before the others), or let the "
            "module multiply with mxjax.qdot and declare quantized_params = {'name': axis}"
        )


def variables_of(model: Any) -> dict[str, nnx.Variable]:
    """Variables by path; a shared one under its first path, as in ``nnx.state``."""
    return {"/".join(map(str, path)): v for path, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)}


def owners_of(model: Any) -> dict[int, list[Owner]]:
    """Who holds each Variable, by its id. Shared Variables have several owners."""
    found: dict[int, list[Owner]] = {}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Pytree):
            for name, child in vars(node).items():
                if isinstance(child, nnx.Variable):
                    found.setdefault(id(child), []).append(Owner("/".join(map(str, path)), node, name))
    return found


def declared(module: Any) -> Mapping[str, int]:
    return getattr(type(module), "quantized_params", {})


def _summed_axes(owner: Owner) -> tuple[int, ...]:
    """The axes of the weight that its module sums over, ascending; () where that is not known."""
    module = owner.module
    if owner.name in declared(module):
        return (declared(module)[owner.name],)
    if owner.name != "kernel":
        return ()
    if isinstance(module, nnx.Linear):
        return (-2,)
    if isinstance(module, nnx.LinearGeneral):
        n_out = len(module.out_features)
        return tuple(range(-n_out - len(module.in_features), -n_out))
    if isinstance(module, nnx.Einsum) and module.einsum_str:
        return products.summed_axes(module.einsum_str)
    return ()


def problems_of(path: str, shape: tuple[int, ...], axis: int, owners: Iterable[Owner]) -> list[str]:
    """Why the weight cannot run quantized: one line for each owner that objects."""
    owners = list(owners)
    if not owners:
        return [f"  {path} {shape}: held by a list or dict, not by a module that mxjax knows"]
    lines = []
    for owner in owners:
        layer, at = owner.module, f"  {path} {shape}: {owner.path or 'the model'} ({type(owner.module).__name__})"
        if owner.name in declared(layer):
            continue
        if type(layer) not in LAYERS or owner.name != "kernel":
            lines.append(f"{at} is no layer that mxjax can run quantized")
        elif (
            getattr(layer, "dot_general", None) not in (None, jax.lax.dot_general)
            or getattr(layer, "dot_general_cls", None) is not None
            or getattr(layer, "einsum_op", jnp.einsum) is not jnp.einsum
        ):
            lines.append(f"{at} has a dot_general or einsum_op of its own")
        elif (summed := _summed_axes(owner)) and axis not in summed:
            lines.append(f"{at} sums over the axes {summed} of its kernel, not over {axis}")
    return lines


def install(model: Any, swaps: Mapping[int, QParam]) -> Any:
    """The model with the Variables whose id is in ``swaps`` replaced, and with them the layers that hold them."""

    def swap(path: Any, node: Any) -> Any:
        for name in declared(node):
            if id(getattr(node, name, None)) in swaps:
                setattr(node, name, swaps[id(getattr(node, name))])
        if type(node) in LAYERS and id(node.kernel) in swaps:
            return LAYERS[type(node)].from_layer(node, swaps[id(node.kernel)])
        return node

    try:
        return nnx.recursive_map(swap, model)
    except ValueError as e:  # a layer inside a tuple, or a model that contains itself
        raise ConfigError(f"cannot put quantized layers into this model: {e}; keep submodules in nnx.List") from e
