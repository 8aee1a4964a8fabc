"""Weights that lie on a mesh: rounded where they are, or solved one a device.

Round to nearest knows blocks and, in NVFP4, one maximum of a tensor: each device rounds its own shard, and what travels
is that maximum. A solver (GPTQ, a branch, a transform that is measured) sums over all of a weight, and its sums would
depend on how the weight is cut; so each weight goes whole to one device, the weights to different ones, and what comes
back is cut as the weight was. Either way the result is that of one device, bit for bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mxjax.algorithms import ALGORITHMS
from mxjax.algorithms.base import WeightSpec
from mxjax.algorithms.rtn import rtn, transformed
from mxjax.algorithms.spread import assign, solver_cost, spread
from mxjax.core import processes
from mxjax.core.formats import NAN_BYTE
from mxjax.core.quantize import quantize_array
from mxjax.errors import MxjaxWarning, NonFiniteError
from mxjax.ops.qweight import QWeight
from mxjax.ops.specs import entries_of, names_of, weight_specs
from mxjax.transforms.base import needs_fit


@dataclass(frozen=True)
class MeshWeight:
    """A weight on a mesh, and what to do with it.

    Attributes:
      value: the float weight, with a NamedSharding.
      spec: how to quantize it.
      algorithm: by what (a name in ``ALGORITHMS``).
      stats: LayerStats, or None.
    """

    value: jax.Array
    spec: WeightSpec
    algorithm: str
    stats: Any = None

    @property
    def mesh(self) -> Any:
        return self.sharding.mesh

    @property
    def sharding(self) -> NamedSharding:
        sharding = self.value.sharding
        assert isinstance(sharding, NamedSharding)  # lies_on_mesh said so
        return sharding

    @property
    def in_place(self) -> bool:
        """Whether shards are rounded each on its own."""
        return self.algorithm == "rtn" and not needs_fit(self.spec.transform)


def lies_on_mesh(x: Any) -> bool:
    """Whether ``x`` is a concrete array on the devices of a mesh, more than one."""
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        return False
    return isinstance(x.sharding, NamedSharding) and x.sharding.mesh.size > 1


def quantize_on_mesh(weights: Sequence[MeshWeight]) -> list[QWeight]:
    """The quantized weights, each cut as its float weight is (:func:`~mxjax.ops.specs.weight_specs`).

    Raises, warns: as the algorithms; and
      MxjaxWarning: a contraction axis whose shards would cut a block, and which was cut elsewhere.
    """
    out: dict[int, QWeight] = {i: round_in_place(w) for i, w in enumerate(weights) if w.in_place}
    rest = [i for i in range(len(weights)) if i not in out]
    out |= dict(zip(rest, _solve([weights[i] for i in rest]), strict=True))
    return [out[i] for i in range(len(weights))]


# --- in place ---------------------------------------------------------------------------------------------------------


def round_in_place(weight: MeshWeight) -> QWeight:
    """Round to nearest, shard by shard; the weight is moved only where its shards would cut a block.

    Raises:
      NonFiniteError, BlockShapeError: as ``rtn``.
    """
    w, spec, mesh = weight.value, weight.spec, weight.mesh
    given: Any = None if spec.tensor_scale is None else processes.on_host(spec.tensor_scale)
    marks = "nan" if spec.on_nonfinite == "raise" else spec.on_nonfinite
    quiet = replace(spec, on_nonfinite=marks, tensor_scale=given)
    shapes = jax.eval_shape(lambda w: rtn(w, quiet), jax.ShapeDtypeStruct(w.shape, w.dtype))
    placed, float_spec = _placed(weight, shapes)
    w = jax.device_put(w, NamedSharding(mesh, float_spec))
    transform = jax.device_put(jax.tree.map(processes.on_host, spec.transform), _named(mesh, placed.transform))
    stack = placed.qtensor.global_scale or PartitionSpec()
    given = None if given is None else jax.device_put(given, NamedSharding(mesh, stack))
    codes, scales, global_scale, bad = _rounded(
        w,
        transform,
        given,
        mesh=mesh,
        specs=(float_spec, tuple(jax.tree.leaves(placed.transform)), stack, placed.qtensor.codes),
        options=(quiet.format, spec.axis, spec.scale, quiet.on_nonfinite, spec.on_uneven, len(stack)),
        axis_name=tuple(name for entry in placed.qtensor.codes[len(stack) :] for name in names_of(entry)),
    )
    if spec.on_nonfinite == "raise" and bool(bad):
        count = int(jnp.sum(~jnp.isfinite(w.astype(jnp.float32))))
        raise NonFiniteError(
            f"{spec.path}: {count} of {w.size} values are NaN or Inf (shape {w.shape}), as float32; "
            f"on_nonfinite='nan' marks their blocks, 'saturate' clamps them"
        )
    qtensor = replace(shapes.qtensor, codes=codes, scales=scales, global_scale=global_scale)
    return QWeight(qtensor=qtensor, transform=transform, activation=spec.activation)


@partial(jax.jit, static_argnames=("mesh", "specs", "options", "axis_name"))
def _rounded(
    w: jax.Array, transform: Any, given: jax.Array | None, *, mesh: Any, specs: Any, options: Any, axis_name: Any
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array]:
    """Codes, scales, tensor scale, and whether a block had NaN or Inf. One compilation a shape and sharding."""
    w_spec, transform_leaves, stack, out = specs
    fmt, axis, scale, on_nonfinite, on_uneven, batch_axes = options
    everywhere = tuple(name for entry in out for name in names_of(entry))

    def local(w: jax.Array, transform: Any, given: jax.Array | None) -> Any:
        if transform is not None:
            w = transformed(w, transform, axis=axis)
        q = quantize_array(
            w, fmt, axis, scale, on_nonfinite, on_uneven=on_uneven, batch_axes=batch_axes, global_scale=given,
            axis_name=axis_name,
        )  # fmt: skip
        bad = jnp.any(q.scales == NAN_BYTE).astype(jnp.int32)
        return q.codes, q.scales, q.global_scale, jax.lax.pmax(bad, everywhere) if everywhere else bad

    transform_specs = jax.tree.unflatten(jax.tree.structure(transform), transform_leaves)
    in_specs = (w_spec, transform_specs, None if given is None else stack)
    scaled = fmt.has_tensor_scale or given is not None or scale == "third"
    out_specs = (out, out, stack if scaled else None, PartitionSpec())
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(w, transform, given)


def _placed(weight: MeshWeight, result: QWeight) -> tuple[Any, PartitionSpec]:
    """The specs of the result, and that of the float weight, which is another than before if blocks would be cut."""
    w, path = weight.value, weight.spec.path
    given = weight.sharding.spec
    placed = weight_specs(given, result, mesh=weight.mesh, path=path, on_uneven="reshard")
    *lead, k = placed.qtensor.codes
    lead.insert(w.ndim + result.qtensor.axis, k)
    before, after = ([names_of(e) for e in entries_of(s, w.ndim, path)] for s in (given, PartitionSpec(*lead)))
    if before != after:
        warnings.warn(
            f"{path}: {given} on the mesh {dict(weight.mesh.shape)} would cut a block of axis {result.qtensor.axis} of "
            f"{w.shape}; its result lies as {PartitionSpec(*lead)} would",
            MxjaxWarning,
            stacklevel=6,
        )
    return placed, PartitionSpec(*lead)


def _named(mesh: Any, specs: Any) -> Any:
    return jax.tree.map(partial(NamedSharding, mesh), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


# --- one a device -----------------------------------------------------------------------------------------------------


def _solve(weights: list[MeshWeight]) -> list[QWeight]:
    """Each weight whole on one device; the devices of the meshes share them by cost."""
    if not weights:
        return []
    devices = sorted({d for w in weights for d in w.mesh.devices.flat}, key=lambda d: d.id)
    costs = [solver_cost(w.value.shape, w.spec.axis) for w in weights]
    if processes.several():
        found = _solve_in_processes(weights, costs, devices)
    else:
        found = spread([partial(_solve_one, w, w.value, w.stats) for w in weights], costs, devices)
    return [_put(w, q) for w, q in zip(weights, found, strict=True)]


def _solve_one(weight: MeshWeight, value: Any, stats: Any, device: jax.Device) -> QWeight:
    spec = weight.spec
    if spec.tensor_scale is not None:
        spec = replace(spec, tensor_scale=jax.device_put(processes.on_host(spec.tensor_scale), device))
    return ALGORITHMS[weight.algorithm](jax.device_put(value, device), spec, jax.device_put(stats, device))


def _solve_in_processes(weights: list[MeshWeight], costs: list[int], devices: list[Any]) -> list[QWeight]:
    """Each process solves for its own devices; every weight passes through all of them, one at a time."""
    owners = [devices[worker].process_index for worker in assign(costs, len(devices))]
    mine = [i for i, owner in enumerate(owners) if owner == jax.process_index()]
    calls = []
    for i, w in enumerate(weights):
        value, stats = processes.on_host(w.value), jax.tree.map(processes.on_host, w.stats)
        if i in mine:
            calls.append(partial(_solve_one, w, value, stats))
    solved: dict[int, QWeight] = {}
    failure: Exception | None = None
    try:
        here = [d for d in devices if d.process_index == jax.process_index()]
        solved = dict(zip(mine, spread(calls, [costs[i] for i in mine], here), strict=True))
    except Exception as e:  # raised below, in every process: the others wait for what this one owes them
        failure = e

    def answer(i: int) -> QWeight:
        if failure is not None:
            raise failure
        return jax.tree.map(np.asarray, solved[i])

    return [processes.one_for_all(partial(answer, i), owner) for i, owner in enumerate(owners)]


def _put(weight: MeshWeight, result: QWeight) -> QWeight:
    def put(x: Any, sharding: NamedSharding) -> jax.Array:
        if isinstance(x, jax.Array):
            return jax.device_put(x, sharding)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(put, result, _named(weight.mesh, _placed(weight, result)[0]))
