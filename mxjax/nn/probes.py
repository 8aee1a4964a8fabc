"""Running a model block by block, with taps on its weights and quantized weights in their place.

A model takes part if it has ``embed(tokens)``, a list ``layers`` of equal blocks callable as ``x = layer(x)``, and
``head(x)``; the matched weights are kernels of ``nnx.Linear``, or belong to modules that declare ``quantized_params``
(experts). Blocks of equal structure share every compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
from flax import nnx

from mxjax.errors import ConfigError
from mxjax.nn.nnx_graph import declared
from mxjax.ops.qdot import qdot
from mxjax.ops.qweight import QWeight
from mxjax.ops.tap import TappedWeight, tap

_weights: ContextVar[Mapping[str, QWeight]] = ContextVar("mxjax_block_weights", default={})  # noqa: B039


@contextmanager
def weights_in_place(table: Mapping[str, QWeight]):
    """Within the context a probe whose path is in ``table`` multiplies with that weight."""
    token = _weights.set(table)
    try:
        yield
    finally:
        _weights.reset(token)


class Probe(nnx.Module):
    """Stands where an ``nnx.Linear`` was: taps its input, then runs it, or the quantized weight in its place.

    Attributes:
      inner: the linear layer.
      path: path of its kernel inside the block (static).
    """

    def __init__(self, inner: nnx.Linear, path: str):
        self.inner = inner
        self.path = path

    def __call__(self, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        tap(self.path, x)
        table = _weights.get()
        if self.path not in table:
            return self.inner(x, *args, **kwargs)
        y = qdot(x, table[self.path])
        return y if self.inner.bias is None else y + self.inner.bias[...].astype(y.dtype)


class ProbeParam(nnx.Param):
    """Stands where a declared parameter was: read, it is a :class:`TappedWeight`, or the quantized weight in its place.

    Metadata: ``path`` inside the block and the contraction axis ``axis``.
    """

    path: str
    axis: int

    def get_value(self, *, index: Any = ...) -> TappedWeight | QWeight:
        if index is not Ellipsis:
            raise ConfigError(f"{self.path}: a weight that will be quantized is read whole, [...], not [{index!r}]")
        table = _weights.get()
        if self.path in table:
            return table[self.path]
        return TappedWeight(value=super().get_value(), path=self.path, axis=self.axis)


def probe(block: nnx.Module, wanted: Callable[[str], bool]) -> nnx.Module:
    """A copy of ``block`` with a probe on every weight whose path is ``wanted``.

    Raises:
      ConfigError: wanted weights that are neither kernels of ``nnx.Linear`` nor declared in ``quantized_params``.
    """
    found = set()

    def swap(path: tuple, node: Any) -> Any:
        for name, axis in declared(node).items():
            full = "/".join(map(str, (*path, name)))
            if wanted(full):
                found.add(full)
                setattr(node, name, ProbeParam(getattr(node, name).get_value(), path=full, axis=axis))
        kernel = "/".join(map(str, (*path, "kernel")))
        if type(node) is nnx.Linear and wanted(kernel):
            found.add(kernel)
            return Probe(node, kernel)
        return node

    probed = nnx.recursive_map(swap, nnx.clone(block))
    flat = nnx.to_flat_state(nnx.state(block))
    missing = [p for path, _ in flat if wanted(p := "/".join(map(str, path))) and p not in found]
    if missing:
        raise ConfigError(
            f"calibration sees the inputs of nnx.Linear, and of modules that multiply with mxjax.qdot or "
            f"mxjax.qeinsum and declare quantized_params = {{'name': axis}}; these matched weights are something else: "
            f"{', '.join(missing)}; exclude them, or gather their statistics through a function"
        )
    return probed


class Block:
    """One probed block on the device, split into what is static and its arrays.

    Arrays that wait on the host (NumPy, memory maps) are put on the device here, and leave it with this object.
    """

    def __init__(self, module: nnx.Module, wanted: Callable[[str], bool], put: Callable[[Any], Any] = jax.device_put):
        self.graphdef, state = nnx.split(probe(module, wanted))
        self.state = put(state)

    def __call__(self, x: jax.Array, table: Mapping[str, QWeight] | None = None) -> jax.Array:
        """The block's output with the quantized weights of ``table`` (by path inside the block) in place."""
        return forward(self.graphdef, self.state, dict(table or {}), x)

    def weight(self, path: str) -> jax.Array:
        """The float weight at ``path`` inside the block."""
        node: Any = self.state
        *parents, last = path.split("/")
        for part in parents:
            node = node[int(part) if part.isdigit() else part]
        return jax.tree.leaves(node[last] if last in node else node["inner"][last])[0]


def run_block(graphdef: Any, state: Any, table: Mapping[str, QWeight], x: jax.Array) -> jax.Array:
    """A block as a pure function, for use inside ``jit``."""
    with weights_in_place(table):
        return nnx.merge(graphdef, state)(x)


@partial(jax.jit, static_argnums=0)
def forward(graphdef: Any, state: Any, table: dict[str, QWeight], x: jax.Array) -> jax.Array:
    """:func:`run_block`, compiled."""
    return run_block(graphdef, state, table, x)
