"""Products with weights that are spread over a mesh: each device runs the kernel on its own part.

    mesh = jax.make_mesh((2,), ("model",))
    up   = shard_weight(qparams["up"]["kernel"], mesh, P(None, "model"))       # by columns: no communication
    down = shard_weight(qparams["down"]["kernel"], mesh, P("model", None))     # by rows: one sum over "model"
    y    = mxjax.qdot(jax.nn.relu(mxjax.qdot(x, up)), down)

A QWeight with a NamedSharding needs none of this: ``qdot`` under ``jit`` is XLA's own program, and XLA partitions it.
What it cannot do is cut a Pallas kernel, or know that codes are what should travel. Here the product is a
``shard_map``: the kernel sees one device's part, and the collective is chosen by how the weight ``[K, N]`` lies:

========================  =====================  ==============================  ======================================
spec of the weight        x [.., K]              result [.., N]                  what travels
========================  =====================  ==============================  ======================================
``P(None, "model")``      whole                  cut along N                     nothing
``P("model", None)``      cut along K            whole                           float32 partial results (psum)
any, in ``gather``        cut along its first    cut like x                      codes and scales (all-gather): in
                          axis (``batch``)                                       MXFP4 4.25 bits for bfloat16's 16
========================  =====================  ==============================  ======================================

The first two move activations and suit few rows or weights that fill the memory (tensor parallelism); ``gather`` moves
weights and suits many rows (FSDP). Both may be combined: ``P("fsdp", "model")`` with ``gather=("fsdp",)``.

Papers: Megatron-LM, arXiv 1909.08053 (columns, rows); ZeRO, arXiv 1910.02054 (gathered weights).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mxjax.core import codec
from mxjax.core.scales import tensor_scale
from mxjax.errors import BlockShapeError, ConfigError
from mxjax.ops.kernels import KernelWeight, kernel_dot, pack
from mxjax.ops.product import product, quantize_input
from mxjax.ops.qweight import QWeight
from mxjax.ops.specs import names_of, shards_of, weight_specs
from pallas_kernels.block_scaled_matmul import default_layout

# Of a packed weight: where output rows and contraction columns lie among the axes of its codes.
_PACKED_AXES = {"rows": (0, 1), "tiles": (1, 0), "fp8_fragments": (0, 1), "bf16_fragments": (0, 1)}
# Parts of N are whole tiles of these many rows where they are put together again.
_PACKED_ROWS = {"rows": 1, "tiles": 128, "fp8_fragments": 64, "bf16_fragments": 64}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ShardedWeight:
    """A quantized matrix spread over a mesh; made by :func:`shard_weight`, multiplied by ``qdot``.

    Attributes:
      weight: the arrays of all devices; its static sizes are those of *one device's part*, which is what a kernel sees.
      specs: a PartitionSpec for each array of ``weight``, in the order of its leaves (static).
      mesh: the mesh (static).
      spec: of the matrix [K, N] (static).
      gather: mesh axes along which parts are put together before the product (static).
      batch: mesh axes that cut the first axis of x (static).
      shape: of the whole matrix, [K, N] (static).
      reduce_dtype: in which partial results are summed (static).
    """

    weight: QWeight | KernelWeight
    specs: tuple[P, ...] = field(metadata=dict(static=True))
    mesh: Mesh = field(metadata=dict(static=True))
    spec: tuple[Any, Any] = field(metadata=dict(static=True))
    gather: tuple[str, ...] = field(default=(), metadata=dict(static=True))
    batch: tuple[str, ...] = field(default=(), metadata=dict(static=True))
    shape: tuple[int, int] = field(metadata=dict(static=True))
    reduce_dtype: str = field(default="float32", metadata=dict(static=True))

    def __repr__(self) -> str:
        return f"ShardedWeight({self.shape} as {self.spec} on {dict(self.mesh.shape)}, gather={self.gather})"

    @property
    def ndim(self) -> int:
        return 2

    @property
    def axis(self) -> int:
        return -2

    @property
    def dtype(self) -> np.dtype:
        return self.weight.dtype

    @property
    def nbytes(self) -> int:
        """Stored bytes on all devices, what is replicated counted once."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.weight))


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
      BlockShapeError: weights other than matrices; parts that would cut a block, or are not whole kernel tiles.
      ConfigError: mesh axes that are not there, or packed weights gathered along K.

    Example:
      >>> w = mxjax.quantize({"kernel": jnp.ones((64, 8))}, "mxfp4")["kernel"]
      >>> w = shard_weight(w, jax.make_mesh((1,), ("model",)), PartitionSpec(None, "model"))
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
    local = _part_of(w, shards_of(n, mesh), shards_of(k, mesh), path)
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


def sharded_dot(x: jax.Array, w: ShardedWeight, implementation: str | None = None, dtype: Any = None) -> jax.Array:
    """:func:`mxjax.qdot` for a ShardedWeight: [..., K] -> [..., N]."""
    if x.ndim == 0 or x.shape[-1] != w.shape[0]:
        raise BlockShapeError(f"qdot: x {x.shape} does not end in {w.shape[0]}, the contraction axis of {w!r}")
    k, n = (None if set(names_of(entry)) & set(w.gather) else entry for entry in w.spec)
    lead = [w.batch or None, *[None] * (x.ndim - 2)] if x.ndim > 1 else []
    count = shards_of(tuple(w.batch), w.mesh)
    if w.batch and (x.ndim < 2 or x.shape[0] % count):
        raise BlockShapeError(f"qdot: the first axis of x {x.shape} is cut into {count} parts by {w.batch} of the mesh")
    treedef = jax.tree.structure(w.weight)

    def one_device(x: jax.Array, *arrays: jax.Array) -> jax.Array:
        part = _gathered(jax.tree.unflatten(treedef, arrays), w)
        if k is not None:
            return row_product(x, part, names_of(k), implementation, w.reduce_dtype).astype(dtype or x.dtype)
        return local_dot(x, part, implementation, dtype or x.dtype)

    x_spec = P(*lead, k)
    if AxisType.Explicit in w.mesh.axis_types:  # there, nothing is moved that the program does not say
        x = jax.reshard(x, NamedSharding(w.mesh, x_spec))
    specs = (x_spec, *w.specs)
    f = jax.shard_map(one_device, mesh=w.mesh, in_specs=specs, out_specs=P(*lead, n), check_vma=False)
    return f(x, *jax.tree.leaves(w.weight))


def local_dot(x: jax.Array, w: QWeight | KernelWeight, implementation: str | None, dtype: Any) -> jax.Array:
    """One device's product with a part that has all of K."""
    if isinstance(w, KernelWeight):
        return kernel_dot(x, w, implementation).astype(dtype)
    if implementation in (None, "xla"):
        return _xla_product(x, w).astype(dtype)
    return kernel_dot(x, pack(w, "rows"), implementation).astype(dtype)


def row_product(
    x: jax.Array,
    w: QWeight | KernelWeight,
    names: tuple[str, ...],
    implementation: str | None = None,
    reduce_dtype: Any = "float32",
) -> jax.Array:
    """``x @ W`` inside ``shard_map`` where x [.., K] and W lie in parts along K over the mesh axes ``names``.

    The sum of the devices' products. What is not linear in x is done on whole sums: NVFP4's tensor scale of a token is
    that of the whole token (pmax), and x A^T of a low-rank branch is summed before it is rounded. Differs from the
    product on one device by the order of float32 sums alone.

    Args:
      x, w: one device's parts.
      names: mesh axes.
      implementation: as in ``qdot``.
      reduce_dtype: of the partial results.

    Returns:
      The whole result [.., N] in ``reduce_dtype``, on every device.
    """
    if w.activation is not None and w.activation.format.has_tensor_scale and w.input_scale is None:
        w = replace(w, input_scale=_token_scale(x, w, names))
    branch, w = w.branch, replace(w, branch=None)
    if isinstance(w, QWeight) and implementation not in (None, "xla"):
        w = pack(w, "rows")
    if isinstance(w, KernelWeight):
        y = kernel_dot(x, w, implementation, out_dtype=reduce_dtype)
    else:
        y = _xla_product(x, w)
    y = lax.psum(y.astype(reduce_dtype), names)
    if branch is None:
        return y
    down = lax.psum(branch.partial_down(x), names).astype(x.dtype)
    return (y + branch.up(branch.quantized(down))).astype(reduce_dtype)


def _token_scale(x: jax.Array, w: QWeight | KernelWeight, names: tuple[str, ...]) -> jax.Array:
    """NVFP4's tensor scale of each token, over all parts of it."""
    assert w.activation is not None
    y = x.astype(jnp.float32)
    if w.transform is not None:
        y = w.transform.activation(y)
    bits = codec.bits_of(y) & codec.MAGNITUDE_MASK
    amax = jnp.max(jnp.where(bits >= codec.INF_BITS, 0, bits), axis=-1)
    return tensor_scale(lax.pmax(amax, names), w.activation.scale)


def _xla_product(x: jax.Array, w: QWeight) -> jax.Array:
    return product(quantize_input(x, w), x, w, None)


def _with_sizes_of(local: Any, tree: Any) -> Any:
    """The leaves of ``tree``, which differs from ``local`` in static sizes alone."""
    return jax.tree.unflatten(jax.tree.structure(local), jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, P)))


def _part_of(w: QWeight, n: int, k: int, path: str) -> QWeight:
    """The shapes of one device's part of a weight that is cut into n parts of its outputs and k along K."""
    q = w.qtensor
    if q.codes.shape[0] % n:
        raise BlockShapeError(f"{path}: {q.codes.shape[0]} outputs are not cut evenly by {n} devices")

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
    packed = replace(
        p,
        codes=lie(p.codes),
        scales=None if p.scales is None else lie(p.scales),
        row_scale=None if p.row_scale is None else P(both or None),
    )
    return replace(shape, packed=packed, transform=specs.transform, branch=specs.branch, input_scale=specs.input_scale)


def _gathered(part: Any, w: ShardedWeight) -> Any:
    """One device's part, put together along the axes that are to be gathered."""
    k, n = (names_of(entry) if set(names_of(entry)) & set(w.gather) else () for entry in w.spec)
    if not (k or n):
        return part

    def whole(x: jax.Array, spec: P) -> jax.Array:
        for axis, entry in enumerate(spec):
            names = tuple(name for name in names_of(entry) if name in (*k, *n))
            if names:
                x = lax.all_gather(x, names, axis=axis, tiled=True)
        return x

    arrays = [whole(x, spec) for x, spec in zip(jax.tree.leaves(part), w.specs, strict=True)]
    part = jax.tree.unflatten(jax.tree.structure(part), arrays)
    if isinstance(part, QWeight):
        return replace(part, qtensor=replace(part.qtensor, size=part.qtensor.size * shards_of(k, w.mesh)))
    size = part.packed.n * shards_of(n, w.mesh)
    return replace(part, packed=replace(part.packed, n=size), out_shape=(size,))
