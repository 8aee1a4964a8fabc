"""The doors to calibration: ``calibrate`` and ``quantize_sequential``."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding

from mxjax import api, recipes
from mxjax.algorithms import ALGORITHMS
from mxjax.calibration.gather import PureCall, gather
from mxjax.calibration.options import CalibrationOptions
from mxjax.calibration.stats import LayerStats
from mxjax.config import QuantConfig
from mxjax.errors import ConfigError, MxjaxWarning
from mxjax.nn.devices import Devices
from mxjax.nn.jobs import Target, warn_of_unshared_scales
from mxjax.nn.nnx_graph import config_for, params_of
from mxjax.nn.probes import probe
from mxjax.nn.resume import RunFolder, fingerprint
from mxjax.nn.sequential import Progress, joined, quantize_blocks_in_order
from mxjax.ops.qweight import QWeight, is_quantized
from mxjax.ops.tap import TappedWeight, tap


def calibrate(model: Any, params: Any, batches: Iterable[Any], cfg: str | QuantConfig) -> dict[str, LayerStats]:
    """Statistics of the inputs of every weight that ``cfg`` will quantize, through the float model.

    Nothing is patched: nnx layers are wrapped in a copy, linen layers are seen through ``nn.intercept_methods``, and
    plain functions are seen where they call ``mxjax.qdot``, ``mxjax.qeinsum`` or ``mxjax.calibration.tap``. Weights
    with the same input (q, k, v; gate, up) share one entry, accumulated once, in float32 without loss over 10^6 tokens.

    Args:
      model: an nnx Module with ``params=None``; or a linen Module; or a function ``f(params, *batch)``.
      params: parameters of a linen module (the tree under "params") or of the function.
      batches: what the model is called with: one array, or a tuple of arguments, for each batch. Equal shapes compile
        once. They may be sharded over a mesh (``jax.device_put(x, NamedSharding(mesh, P("data")))``, with axes of type
        Auto; or Explicit, where no weight is cut along its contraction axis): every device then sees its own rows, and
        only the sums travel. Inside a ``shard_map`` of one's own, :meth:`GramSum.psum
        <mxjax.calibration.GramSum.psum>` adds them up.
      cfg: a recipe name or a QuantConfig.

    Returns:
      :class:`~mxjax.calibration.LayerStats` by path, for ``mxjax.quantize(params, cfg, stats=stats)``.

    Raises:
      CalibrationError: matched weights whose input was never seen (all listed), weights that are multiplied twice, or
        inside a ``jit``, ``vmap``, ``scan`` or ``remat`` of the model; no batches.
      ConfigError: an nnx model without ``params=None``.

    Warns:
      MxjaxWarning: a config that quantizes nothing (weights that are quantized already, for example); one whose
        ``calibration`` asks for more than one pass through the float model can see (``best_nvfp4``).

    Example:
      >>> params = {"up": {"kernel": jnp.ones((64, 8))}}
      >>> stats = calibrate(lambda p, x: mxjax.qdot(x, p["up"]["kernel"]), params, [jnp.ones((10, 64))], "mxfp4")
      >>> stats["up/kernel"].n_tokens.item()
      10
    """
    known = None
    if isinstance(model, nnx.Module):
        if params is not None:
            raise ConfigError("an nnx model holds its own parameters: calibrate(model, None, batches, cfg)")
        _, params, known = params_of(model)
        cfg = config_for(model, cfg)
    todo = api.plan(params, cfg, axes=known)
    if not todo.quantized:
        warnings.warn(
            "the config quantizes nothing here, so nothing is calibrated; mxjax.plan(params, cfg) lists why",
            MxjaxWarning,
            stacklevel=2,
        )
    if beyond := recipes.get(cfg).calibration.beyond_one_pass():
        warnings.warn(
            f"calibrate sees the float model's inputs in one pass; {', '.join(beyond)} of this config take "
            f"quantize_sequential and are left out here",
            MxjaxWarning,
            stacklevel=2,
        )
    axes = {entry.path: entry.spec.axis for entry in todo.quantized if entry.spec is not None}
    return gather(*tapped(model, params, axes), batches, list(axes))


def quantize_sequential(
    model: Any,
    batches: Iterable[Any],
    cfg: str | QuantConfig,
    *,
    options: CalibrationOptions | None = None,
    resume: str | os.PathLike[str] | None = None,
    host: bool = False,
    sharding: NamedSharding | None = None,
    dtype: Any = None,
    progress: Progress | None = None,
) -> dict[str, QWeight]:
    """Calibrate and quantize a language model block by block, every block seeing the errors of those before it.

    The device holds one block, its statistics and ``options.batch_size`` sequences at a time, so memory does not depend
    on the number of blocks. Parameters may be NumPy arrays or memory maps: each block is put on the device when its
    turn comes, so the model may be larger than the device. Weights that share an input (q, k, v; gate, up) share its
    statistics and its transform.

    Args:
      model: an nnx module with ``embed(tokens)``, a list ``layers`` of equal blocks callable as ``x = layer(x)``, and
        ``head(x)``, such as ``mxjax_models.llama.Llama``. It is not changed.
      batches: token arrays [B, S] of one length S.
      cfg: a recipe name or a QuantConfig. Only weights inside the blocks may match.
      options: how inputs are gathered; default: the config's own ``calibration``.
      resume: a folder (new or empty at first) that keeps every finished block. If the run stops, for whatever reason,
        the same call goes on after the last finished block, and the result is the same bit for bit. The folder holds
        the quantized weights and one copy of the activations; it may be removed when the run is done.
      host: return NumPy arrays: a block's quantized weights leave the device when the block is done.
      sharding: of a batch of activations, such as ``NamedSharding(mesh, P("data"))``: the devices of the mesh share the
        sequences of a batch (``options.batch_size`` is a multiple of them), each holds the whole block, and the weights
        of a block are solved on different devices, by cost; results come back to the first. All of one process.
      dtype: compute in this dtype: float parameters are cast on the device when their block's turn comes, so that a
        bfloat16 checkpoint in memory maps gives the bits of the same model in float32. Default: as they are stored.
      progress: called with a :class:`~mxjax.nn.sequential.BlockProgress` (``print`` shows its line: time spent, time
        left) before the first block and after each.

    Returns:
      Quantized weights by path, such as ``layers/0/mlp/up_proj/kernel``; put them into a tree or a model by path.

    Raises:
      ConfigError: a model without blocks; matched weights outside the blocks, or in modules that are no ``nnx.Linear``
        and declare no ``quantized_params``; a mesh with devices of other processes.
      CalibrationError: a Hessian that cannot be inverted, with the path.
      CheckpointError: ``resume`` was begun with another model, other tokens, another config or version, or holds
        something else.

    Warns:
      MxjaxWarning: rules that match nothing, a config that quantizes nothing, or ``share_scales`` for weights that are
        not solved as one (``options.fuse``): they keep tensor scales of their own.

    Example:
      >>> qweights = quantize_sequential(model, [tokens], "mr_gptq_mxfp4", progress=print)  # doctest: +SKIP

    Papers: GPTQ, arXiv 2210.17323; MR-GPTQ, arXiv 2509.23202.
    """
    cfg = config_for(model, cfg)
    for name in ("embed", "layers", "head"):
        if not hasattr(model, name):
            raise ConfigError(f"{type(model).__name__} has no {name!r}: quantize_sequential walks embed, layers, head")
    options = options or cfg.calibration
    _, params, axes = params_of(model)
    todo = api.plan(params, cfg, axes=axes)
    api.warn_unused(todo)
    targets: list[dict[str, Target]] = [{} for _ in model.layers]
    outside = []
    for entry in todo.quantized:
        assert entry.spec is not None
        match = re.fullmatch(r"layers/(\d+)/(.+)", entry.path)
        if match is None:
            outside.append(entry.path)
            continue
        index, path = int(match[1]), match[2]
        needs_stats = next(rule for rule in cfg.rules if rule.matches(entry.path)).needs_data
        targets[index][path] = Target(path, entry.spec, ALGORITHMS[entry.algorithm or ""], needs_stats)
    if outside:
        raise ConfigError(f"quantize_sequential quantizes blocks only; exclude {', '.join(outside)}")
    tokens = joined(list(batches))
    store = None if resume is None else RunFolder(resume, fingerprint(model, [tokens], cfg, options, dtype=dtype))
    out = quantize_blocks_in_order(
        model, tokens, targets, options, store=store, devices=Devices(sharding, dtype), host=host, progress=progress
    )
    warn_of_unshared_scales(out, cfg)
    return out


def tapped(model: Any, params: Any, axes: Mapping[str, int]) -> tuple[Callable[..., Any], Any]:
    """A pure function ``f(params, *batch)`` that taps the inputs of the paths in ``axes``, and its params."""
    if isinstance(model, nnx.Module):
        graphdef, state = nnx.split(probe(model, axes.__contains__))
        return _Merged(graphdef), state
    if isinstance(model, nn.Module):

        def apply(params: Any, *batch: Any) -> Any:
            with nn.intercept_methods(partial(_tap_linen, axes)):
                return model.apply({"params": params}, *batch)

        return apply, params

    def wrap(path: tuple, leaf: Any) -> Any:
        name = api.path_str(path)
        return TappedWeight(value=leaf, path=name, axis=axes[name]) if name in axes else leaf

    return (lambda params, *batch: model(jax.tree_util.tree_map_with_path(wrap, params), *batch)), params


@dataclass(frozen=True)
class _Merged(PureCall):
    """``f(state, *batch)`` of an nnx model."""

    graphdef: nnx.GraphDef[Any]

    def __call__(self, params: Any, *batch: Any) -> Any:
        return nnx.merge(self.graphdef, params)(*batch)


def _tap_linen(axes: Mapping[str, int], call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
    module = context.module
    path = "/".join((*module.path, "kernel"))
    if context.method_name == "__call__" and path in axes and args:
        tap(path, args[0])
    return call(*args, **kwargs)


def replace_leaves(params: Any, weights: dict[str, Any]) -> Any:
    """The tree with the leaves at the given paths replaced.

    Raises:
      ConfigError: a path that is not in the tree.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_quantized)
    paths = [api.path_str(path) for path, _ in flat]
    if unknown := set(weights) - set(paths):
        raise ConfigError(f"not in the tree: {', '.join(sorted(unknown))}")
    leaves = [weights.get(path, leaf) for path, (_, leaf) in zip(paths, flat, strict=True)]
    return jax.tree_util.tree_unflatten(treedef, leaves)
