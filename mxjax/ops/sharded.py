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

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mxjax.core import codec
from mxjax.core.scales import tensor_scale
from mxjax.errors import BlockShapeError
from mxjax.ops.kernels import KernelWeight, kernel_dot, pack
from mxjax.ops.product import product, quantize_input
from mxjax.ops.qweight import QWeight
from mxjax.ops.specs import names_of, shards_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ShardedWeight:
    """A quantized matrix spread over a mesh; made by :func:`mxjax.sharding.shard_weight`, multiplied by ``qdot``.

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
