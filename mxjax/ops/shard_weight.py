"""Spreading a quantized matrix over a mesh: which device holds which part, packed for its kernels if need be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mxjax.errors import BlockShapeError, ConfigError
from mxjax.ops.kernels import KernelWeight, pack
from mxjax.ops.qweight import QWeight
from mxjax.ops.sharded import ShardedWeight
from mxjax.ops.specs import names_of, shards_of, weight_specs
from pallas_kernels.block_scaled_matmul import default_layout

# Of a packed weight: where output rows and contraction columns lie among the axes of its codes.
_PACKED_AXES = {"rows": (0, 1), "tiles": (1, 0), "fp8_fragments": (0, 1), "bf16_fragments": (0, 1)}
# Parts of N are whole tiles of these many rows where they are put together again.
_PACKED_ROWS = {"rows": 1, "tiles": 128, "fp8_fragments": 64, "bf16_fragments": 64}


def shard_weight(
    w: QWeight,
    mesh: Mesh,
    spec: P,
    *,
    gather: Sequence[str] = (),
    batch: Sequence[str] = (),
    kernels: bool = False,
    reduce_dtype: Any = "float32",
    path: str = "QWeight",
) -> ShardedWeight:
    """A weight for ``qdot`` on a mesh; see the module's table for what travels.

    Args:
      w: a matrix, quantized along its contraction axis.
      mesh: the mesh.
      spec: of the float weight, in its own order of axes: ``P(None, "model")`` for columns of a [K, N] kernel.
      gather: axes of ``spec`` along which codes and scales are gathered before each product (FSDP).
      batch: mesh axes that cut the first axis of x; the length of that axis is a multiple of their product.
      kernels: pack each part for this machine's kernels, as :func:`mxjax.prepare_kernels` does.
      reduce_dtype: in which partial results of ``P("model", None)`` are summed. "bfloat16" halves what travels, and
        rounds once a device.
      path: for messages.

    Raises:
      BlockShapeError: weights other than matrices; parts that are uneven, cut a block, or are not whole kernel tiles.
      ConfigError: mesh axes that are not there, or packed weights gathered along K.

    Example:
      >>> w = mxjax.quantize({"kernel": jnp.ones((64, 8))}, "mxfp4")["kernel"]
      >>> w = shard_weight(w, jax.make_mesh((1,), ("model",)), P(None, "model"))
      >>> mxjax.qdot(jnp.ones((2, 64)), w).shape
      (2, 8)
    """
    if not isinstance(w, QWeight) or w.ndim != 2 or w.qtensor.axis not in (-1, -2):
        raise BlockShapeError(f"{path}: a QWeight of two axes is sharded for qdot, not {w!r}")
    leaf_specs = weight_specs(spec, w, mesh=mesh, path=path)
    n, k = leaf_specs.qtensor.codes
    for name in (*gather, *batch):
        shards_of(name, mesh, path)
    for entry in (n, k):
        if len(names_of(entry)) > 1 and set(names_of(entry)) & set(gather) not in (set(), set(names_of(entry))):
            raise ConfigError(f"{path}: {entry} is gathered as a whole or not at all, not along {tuple(gather)}")
    local = _part_of(w, shards_of(n, mesh), shards_of(k, mesh))
    placed = jax.device_put(w, jax.tree.map(partial(NamedSharding, mesh), leaf_specs))
    parts: Any = _with_sizes_of(local, placed)
    size = w.qtensor.codes.shape[0]
    if kernels:
        if set(names_of(k)) & set(gather):
            raise ConfigError(f"{path}: a packed weight is gathered along N, not K: its rows have factors of their own")
        # The layout of the default device, said outright: inside shard_map, the mesh would answer.
        layout = default_layout(w.format, activation=None if w.activation is None else w.activation.format)
        shape, step = jax.eval_shape(partial(pack, layout=layout), local), _PACKED_ROWS[layout]
        if set(names_of(n)) & set(gather) and (size // shards_of(n, mesh)) % step:
            raise BlockShapeError(f"{path}: {size} outputs in {shards_of(n, mesh)} parts are not whole tiles of {step}")
        packed_specs = _packed_specs(shape, n, k, _with_sizes_of(local, leaf_specs))
        specs: Any = dict(in_specs=(_with_sizes_of(local, leaf_specs),), out_specs=packed_specs)
        put = jax.shard_map(partial(pack, layout=layout), mesh=mesh, check_vma=False, **specs)
        parts, leaf_specs = jax.jit(put)(parts), packed_specs
    return ShardedWeight(
        weight=parts,
        specs=tuple(jax.tree.leaves(leaf_specs, is_leaf=lambda x: isinstance(x, P))),
        mesh=mesh,
        spec=(k, n),
        gather=tuple(gather),
        batch=tuple(batch),
        shape=(w.qtensor.size, size),
        reduce_dtype=jnp.dtype(reduce_dtype).name,
    )


def _with_sizes_of(local: Any, tree: Any) -> Any:
    """The leaves of ``tree``, which differs from ``local`` in static sizes alone."""
    return jax.tree.unflatten(jax.tree.structure(local), jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, P)))


def _part_of(w: QWeight, n: int, k: int) -> QWeight:
    """The shapes of one device's part of a weight that is cut into n parts of its outputs and k along K."""
    q = w.qtensor

    def cut(x: Any, spec: tuple[int, ...]) -> Any:
        return jax.ShapeDtypeStruct(tuple(a // b for a, b in zip(x.shape, spec, strict=True)), x.dtype)

    # By a mesh of two axes whose names stand for the two cuts: each part's spec says which of its axes are cut.
    specs = weight_specs(P("k", "n") if q.axis == -2 else P("n", "k"), w)
    sizes = {"n": n, "k": k}

    def one(x: Any, spec: P) -> Any:
        entries = [*spec, *[None] * (x.ndim - len(spec))]
        return cut(x, tuple(sizes[e] if e else 1 for e in entries))

    flat = [one(x, s) for x, s in zip(jax.tree.leaves(w), jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P)),
                                      strict=True)]  # fmt: skip
    part = jax.tree.unflatten(jax.tree.structure(w), flat)
    return replace(part, qtensor=replace(part.qtensor, size=q.size // k))


def _packed_specs(shape: KernelWeight, n: Any, k: Any, specs: Any) -> KernelWeight:
    rows, columns = _PACKED_AXES[shape.packed.layout]

    def lie(x: Any) -> P:
        entries: list[Any] = [None] * x.ndim
        entries[rows], entries[columns] = n, k
        return P(*entries)

    p = shape.packed
    # Each part of a row has a factor of its own, so they lie one after the other, N's parts outside.
    both = (*names_of(n), *names_of(k))
    parts: dict[str, Any] = {"codes": lie(p.codes)}
    if p.scales is not None:
        parts["scales"] = lie(p.scales)
    if p.row_scale is not None:
        parts["row_scale"] = P(both or None)
    packed = replace(p, **parts)
    return replace(shape, packed=packed, transform=specs.transform, branch=specs.branch, input_scale=specs.input_scale)
