"""Running a model block by block, with taps on its linear layers and quantized weights in their place.

A model takes part if it has ``embed(tokens)``, a list ``layers`` of equal blocks callable as ``x = layer(x)``, and
``head(x)``; the matched weights are kernels of ``nnx.Linear``. Blocks of equal structure share every compilation.
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
from mxjax.ops.qdot import qdot
from mxjax.ops.qweight import QWeight
from mxjax.ops.tap import tap

_weights: ContextVar[Mapping[str, QWeight]] = ContextVar("mxjax_block_weights", default={})  # noqa: B039


@contextmanager
def weights_in_place(table: Mapping[str, QWeight]):
    """Within the context a :class:`Probe` whose path is in ``table`` multiplies with that weight."""
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


def probe(block: nnx.Module, wanted: Callable[[str], bool]) -> nnx.Module:
    """A copy of ``block`` with a :class:`Probe` around every ``nnx.Linear`` whose kernel path is ``wanted``.

    Raises:
      ConfigError: wanted kernels in modules that are no ``nnx.Linear``.
    """
    found = set()

    def swap(path: tuple, node: Any) -> Any:
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
            f"calibration by block sees the inputs of nnx.Linear only; these matched weights are something else: "
            f"{', '.join(missing)}; exclude them, or gather their statistics with mxjax.calibrate"
        )
    return probed


class Block:
    """One probed block, split into what is static and its arrays."""

    def __init__(self, module: nnx.Module, wanted: Callable[[str], bool]):
        self.graphdef, self.state = nnx.split(probe(module, wanted))

    def __call__(self, x: jax.Array, table: Mapping[str, QWeight] | None = None) -> jax.Array:
        """The block's output with the quantized weights of ``table`` (by path inside the block) in place."""
        return _forward(self.graphdef, self.state, dict(table or {}), x)


def run_block(graphdef: Any, state: Any, table: Mapping[str, QWeight], x: jax.Array) -> jax.Array:
    """A block as a pure function, for use inside ``jit``."""
    with weights_in_place(table):
        return nnx.merge(graphdef, state)(x)


@partial(jax.jit, static_argnums=0)
def _forward(graphdef: Any, state: Any, table: dict[str, QWeight], x: jax.Array) -> jax.Array:
    return run_block(graphdef, state, table, x)
