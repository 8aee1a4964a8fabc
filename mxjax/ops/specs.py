"""Where the parts of a quantized weight lie on a mesh, given where its float weight lies.

A weight ``[K, N]`` with ``P(k, n)`` becomes codes ``[N, K / 2]`` and scales ``[N, K / block]``, both ``P(n, k)``: a
code, its scale and the output that it belongs to stay on one device. That holds only while no block crosses a shard;
what lies along K in whole blocks (scales, matrices of a transform, factor A of a branch) has a common unit, and each
shard of K is a multiple of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from mxjax.core.qtensor import QTensor
from mxjax.errors import BlockShapeError, ConfigError
from mxjax.ops.activation import ActivationFormat
from mxjax.ops.low_rank import LowRank
from mxjax.ops.qweight import QWeight
from mxjax.transforms.base import Chain, describe
from mxjax.transforms.block_matrix import BlockMatrix
from mxjax.transforms.hadamard import Hadamard
from mxjax.transforms.kronecker import Kronecker
from mxjax.transforms.smooth import ChannelScale

ON_UNEVEN = ("error", "reshard")
Entry = Any  # of a PartitionSpec: None, the name of a mesh axis, or a tuple of names


def weight_specs(
    spec: PartitionSpec | None,
    w: QWeight | QTensor,
    *,
    mesh: Any = None,
    path: str = "QWeight",
    on_uneven: str = "error",
) -> Any:
    """``w`` with a PartitionSpec in the place of each array.

    ==================== ========================= ====================================================
    part                 shape                     spec, for a weight [*out, K] with P(*out, k)
    ==================== ========================= ====================================================
    codes, scales        [*out, K ..]              P(*out, k)
    tensor scale         out[:n]                   P(*out[:n])
    branch A             [*out[:n], r, K]          P(*out[:n], None, k)
    branch B             [*out, r]                 P(*out, None)
    channel scale        [K]                       P(k)
    block matrices       [K / b, b, b]             P(k)
    Kronecker factors    [groups, p, p]            P(k), or replicated where one serves all of K
    Hadamard, scalars    no values, []             P()
    ==================== ========================= ====================================================

    Args:
      spec: of the float weight, in its own order of axes; None is ``P()``.
      w: the quantized weight, of arrays or of ``jax.ShapeDtypeStruct``.
      mesh: whose sizes decide whether the shards hold whole blocks; None: not looked at.
      path: of the weight, for messages.
      on_uneven: what becomes of a contraction axis whose shards are no multiple of the unit. "error", or "reshard": its
        mesh axes move to the longest output axis that they divide, else the parts are replicated over them.

    Raises:
      BlockShapeError: a shard that is no multiple of the unit, or an output axis that is not cut evenly, with path,
        axis, mesh and the way out.
      ConfigError: a spec with more axes than the weight, or with a mesh axis that the mesh does not have or that cuts
        two axes.

    Example:
      >>> w = mxjax.quantize({"kernel": jnp.ones((64, 8))}, "mxfp4")["kernel"]
      >>> weight_specs(PartitionSpec("model", None), w).qtensor.scales == PartitionSpec(None, "model")
      True
    """
    if isinstance(w, QTensor):
        return weight_specs(spec, QWeight(qtensor=w), mesh=mesh, path=path, on_uneven=on_uneven).qtensor
    q = w.qtensor
    unit, why = unit_of(w)
    entries = entries_of(spec, q.ndim, path)
    entries = aligned(entries, q.shape, q.axis, unit, why, mesh=mesh, path=path, on_uneven=on_uneven)
    check_even(entries, q.shape, mesh, path)
    k = entries.pop(q.ndim + q.axis)
    parts: dict[str, Any] = {"qtensor": _qtensor(q, entries, k)}
    if w.transform is not None:
        parts["transform"] = _transform(w.transform, entries, k)
    if w.branch is not None:
        parts["branch"] = _branch(w.branch, entries, k)
    if w.input_scale is not None:
        parts["input_scale"] = PartitionSpec(*entries[: len(w.input_scale.shape)])
    return replace(w, **parts)


def entries_of(spec: PartitionSpec | None, ndim: int, path: str) -> list[Entry]:
    """The entries of a spec, one for each axis.

    Raises:
      ConfigError: more entries than axes.
    """
    entries = list(spec or ())
    if len(entries) > ndim:
        raise ConfigError(f"{path}: {spec} has {len(entries)} entries for {ndim} axes")
    return entries + [None] * (ndim - len(entries))


def names_of(entry: Entry) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else tuple(entry) if isinstance(entry, tuple) else (entry,)


def shards_of(entry: Entry, mesh: Any, path: str = "") -> int:
    """Into how many shards an entry cuts an axis.

    Raises:
      ConfigError: a mesh axis that is not there.
    """
    sizes: Mapping[str, int] = mesh.shape
    for name in names_of(entry):
        if name not in sizes:
            raise ConfigError(f"{path}: the mesh has axes {dict(sizes)}, none named {name!r}")
    return math.prod(sizes[name] for name in names_of(entry))


def check_even(entries: list[Entry], shape: tuple[int, ...], mesh: Any, path: str) -> None:
    """Whether the mesh can cut an array so: JAX's arrays have shards of one size. Without a mesh, nothing is looked at.

    Raises:
      BlockShapeError: an axis that its shards do not divide.
      ConfigError: a mesh axis that is not there, or that cuts two axes.
    """
    if mesh is None:
        return
    for axis, entry in enumerate(entries):
        shards = shards_of(entry, mesh, path)
        if shape[axis] % shards:
            raise BlockShapeError(
                f"{path}: axis {axis} of shape {tuple(shape)} is not cut evenly into {shards} shards by "
                f"{names_of(entry)} of the mesh {dict(mesh.shape)}; cut another axis, leave this one whole (None), or "
                f"use mesh axes whose product divides {shape[axis]}"
            )
    names = [name for entry in entries for name in names_of(entry)]
    if len(names) > len(set(names)):
        raise ConfigError(f"{path}: {PartitionSpec(*entries)} cuts two axes by one mesh axis; each can cut one")


def aligned(
    entries: list[Entry],
    shape: tuple[int, ...],
    axis: int,
    unit: int,
    why: str,
    *,
    mesh: Any,
    path: str,
    on_uneven: str,
) -> list[Entry]:
    """The entries, changed if need be so that each shard of ``axis`` is a multiple of ``unit``; see weight_specs."""
    if on_uneven not in ON_UNEVEN:
        raise ConfigError(f"on_uneven is one of {ON_UNEVEN}, not {on_uneven!r}")
    at = len(shape) + axis
    if mesh is None or entries[at] is None:
        return entries
    shards = shards_of(entries[at], mesh, path)
    if shards == 1 or shape[axis] % (shards * unit) == 0:
        return entries
    if on_uneven == "error":
        raise BlockShapeError(
            f"{path}: axis {axis} of shape {tuple(shape)} is cut into {shards} shards by {names_of(entries[at])} of "
            f"the mesh {dict(mesh.shape)}: {shape[axis]}/{shards} is no multiple of {unit} ({why}), so a block would "
            f"cross a shard; shard an output axis instead, use fewer shards there, or pass on_uneven='reshard'"
        )
    entries, names = list(entries), list(names_of(entries[at]))
    moved: list[str] = []
    while names and shape[axis] % (math.prod(mesh.shape[n] for n in names) * unit):
        moved.insert(0, names.pop())
    entries[at] = _entry(names)
    # Sharding is memory: what cannot lie along K lies along the longest output axis that still divides.
    for i in sorted((i for i in range(len(shape)) if i != at), key=lambda i: -shape[i]):
        more = [*names_of(entries[i]), *moved]
        if shape[i] % math.prod(mesh.shape[n] for n in more) == 0:
            entries[i] = _entry(more)
            break
    return entries


def _entry(names: list[str]) -> Entry:
    return None if not names else names[0] if len(names) == 1 else tuple(names)


def unit_of(w: QWeight) -> tuple[int, str]:
    """What each shard of the contraction axis is a multiple of, and why, in words."""
    units = {f"blocks of {w.format}": w.format.block_size}
    if w.activation is not None:
        units[f"blocks of {w.activation.format} inputs"] = w.activation.format.block_size
    if w.transform is not None:
        units[describe(w.transform)] = _transform_unit(w.transform, w.qtensor.size)
    if w.branch is not None:
        for x in (w.branch.a, w.branch.activation):
            if isinstance(x, (QTensor, ActivationFormat)):
                units[f"blocks of the branch in {x.format}"] = x.format.block_size
    unit = math.lcm(*units.values())
    return unit, ", ".join(why for why, n in units.items() if n > 1)


def _transform_unit(transform: Any, size: int) -> int:
    if isinstance(transform, Chain):
        return math.lcm(*(_transform_unit(part, size) for part in transform.parts))
    if isinstance(transform, Hadamard):
        return transform.size
    if isinstance(transform, ChannelScale):
        return 1
    if isinstance(transform, BlockMatrix):
        return transform.matrices.shape[-1]
    if isinstance(transform, Kronecker):
        groups = {transform.left.shape[-3], transform.right.shape[-3]} - {1}
        return math.lcm(transform.block, *(size // g for g in groups))  # whole runs of blocks with one factor
    return size  # somebody else's: it may mix all of K


def _qtensor(q: QTensor, lead: list[Entry], k: Entry) -> Any:
    parts: dict[str, Any] = {"codes": PartitionSpec(*lead, k), "scales": PartitionSpec(*lead, k)}
    if q.global_scale is not None:
        parts["global_scale"] = PartitionSpec(*lead[: len(q.global_scale.shape)])
    return replace(q, **parts)


def _branch(branch: LowRank, lead: list[Entry], k: Entry) -> Any:
    def factor(x: Any, stack: list[Entry], last: Entry) -> Any:
        return _qtensor(x, stack, last) if isinstance(x, QTensor) else PartitionSpec(*stack, last)

    a: Any = branch.a
    return replace(branch, a=factor(a, [*lead[: len(a.shape) - 2], None], k), b=factor(branch.b, lead, None))


def _transform(transform: Any, lead: list[Entry], k: Entry) -> Any:
    """Transforms of stacked layers have leading axes of the weight before their own."""

    def along(x: Any, rank: int) -> PartitionSpec:
        return PartitionSpec(*lead[: len(x.shape) - rank], k)

    def rest(x: Any) -> PartitionSpec | None:
        return None if x is None else PartitionSpec(*lead[: len(x.shape)])

    parts: dict[str, Any]
    if isinstance(transform, Chain):
        return Chain(tuple(_transform(part, lead, k) for part in transform.parts))
    if isinstance(transform, ChannelScale):
        parts = {"scale": along(transform.scale, 1), "exponent": rest(transform.exponent)}
    elif isinstance(transform, BlockMatrix):
        parts = {"matrices": along(transform.matrices, 3), "strength": rest(transform.strength)}
    elif isinstance(transform, Kronecker):
        factors = {"left": transform.left, "right": transform.right}
        parts = {name: along(x, 3) if x.shape[-3] > 1 else PartitionSpec() for name, x in factors.items()}
        scales = {"left_scale": transform.left_scale, "right_scale": transform.right_scale}  # of each block
        parts |= {name: along(x, 2) for name, x in scales.items() if x is not None}
    else:  # Hadamard has no arrays; somebody else's are replicated
        return jax.tree.map(lambda _: PartitionSpec(), transform)
    return replace(transform, **parts)
