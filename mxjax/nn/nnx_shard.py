"""Flax nnx models on a mesh: ``mxjax.nnx.shard``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mxjax.errors import BlockShapeError, ConfigError
from mxjax.nn.nnx_graph import variables_of
from mxjax.nn.nnx_layers import QParam
from mxjax.ops.qweight import QWeight
from mxjax.ops.shard_weight import shard_weight
from mxjax.ops.specs import check_even, entries_of


def shard(
    model: Any,
    mesh: Mesh,
    specs: Callable[[str], P | None],
    *,
    gather: Sequence[str] = (),
    batch: Sequence[str] = (),
    kernels: bool = False,
    reduce_dtype: Any = "float32",
) -> Any:
    """A copy of the model on a mesh, float or quantized; run it under ``jit``.

    Float parameters become arrays with a NamedSharding, and XLA partitions what they are used in. A quantized layer
    multiplies inside a ``shard_map`` (:class:`mxjax.ops.sharded.ShardedWeight`): each device runs the product on its
    own part, on its own kernel where ``kernels`` says so, and adds the collective that the layer's spec asks for.

    Args:
      model: an nnx Module.
      mesh: the mesh.
      specs: from a path such as ``layers/0/mlp/up_proj/kernel`` to the PartitionSpec of the float parameter; None:
        replicated. ``mxjax_models.partition.rules`` has them for the models there.
      gather, batch, kernels, reduce_dtype: of quantized weights, as in :func:`mxjax.sharding.shard_weight`.

    Raises:
      BlockShapeError: parameters that a spec does not cut evenly; every one of them is named with its shape and spec.
      ConfigError: fused layers: shard first.

    Example:
      >>> mesh = jax.make_mesh((1,), ("model",))
      >>> layer = mxjax.nnx.quantize(flax.nnx.Linear(64, 8, rngs=flax.nnx.Rngs(0)), "mxfp4")
      >>> layer = shard(layer, mesh, lambda path: P(None, "model") if path == "kernel" else None)
      >>> layer(jnp.ones((2, 64))).shape
      (2, 8)
    """
    model, problems = nnx.clone(model), []
    options: dict[str, Any] = dict(gather=gather, batch=batch, kernels=kernels, reduce_dtype=reduce_dtype)
    for path, variable in variables_of(model).items():
        value = variable.get_value()
        spec = specs(path) or P()
        if isinstance(value, QWeight):
            try:
                variable.set_value(shard_weight(value, mesh, spec, path=path, **options))
            except BlockShapeError as e:
                problems.append(str(e))
        elif isinstance(variable, QParam):
            raise ConfigError(f"{path}: {value!r} was fused or packed; shard the model as mxjax.nnx.quantize made it")
        elif isinstance(value, jax.Array):
            try:
                check_even(entries_of(spec, value.ndim, path), value.shape, mesh, path)
            except BlockShapeError as e:
                problems.append(str(e))
            else:
                variable.set_value(jax.device_put(value, NamedSharding(mesh, spec)))
    if problems:
        raise BlockShapeError("the specs do not fit the model:\n  " + "\n  ".join(problems))
    return model
