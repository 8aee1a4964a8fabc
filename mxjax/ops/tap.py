"""Seeing the inputs of weights without patching anything: a tap, and a function that gathers what taps saw.

``tap(path, x)`` is the identity on ``x``. Inside :func:`capture` it also records ``x`` under ``path``; the record is an
output of the function, so it works under ``jit`` like any other value::

    def model(params, x):
        h = jnp.tanh(tap("up/kernel", x) @ params["up"]["kernel"])
        return tap("down/kernel", h) @ params["down"]["kernel"]

    out, seen = jax.jit(lambda params, x: capture(model, params, x))(params, x)
    seen.inputs[seen.groups["down/kernel"]]

A weight wrapped as :class:`TappedWeight` does the same from inside ``qdot`` and ``qeinsum``. Paths whose input is the
very same array (q, k and v; gate and up) share one entry: it is accumulated once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import get_opaque_trace_state

from mxjax.errors import CalibrationError


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Captured:
    """What the taps saw.

    Attributes:
      inputs: one array for each distinct input, in the order of appearance.
      group_items: (path, index of its input) pairs (static).
      stacks: for each input the number of its leading axes that are a stack, each with a Hessian of its own (static).
    """

    inputs: tuple[jax.Array, ...]
    group_items: tuple[tuple[str, int], ...] = field(metadata=dict(static=True))
    stacks: tuple[int, ...] = field(metadata=dict(static=True))

    @property
    def groups(self) -> dict[str, int]:
        return dict(self.group_items)

    def members(self) -> list[list[str]]:
        """The paths of each input."""
        out: list[list[str]] = [[] for _ in self.inputs]
        for path, index in self.group_items:
            out[index].append(path)
        return out


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TappedWeight:
    """A float weight that ``qdot`` and ``qeinsum`` multiply with as it is, after a tap on their input.

    Attributes:
      value: the weight.
      path: the path to record under (static).
      axis: contraction axis, negative (static).
    """

    value: jax.Array
    path: str = field(metadata=dict(static=True))
    axis: int = field(metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def ndim(self) -> int:
        return self.value.ndim

    @property
    def dtype(self) -> Any:
        return self.value.dtype

    def __getitem__(self, index: Any) -> Any:
        raise CalibrationError(
            f"{self.path}: calibration sees qdot and qeinsum of a whole weight, not of its part [{index!r}]; give each "
            f"layer a leaf of its own, or call mxjax.calibration.tap on the input"
        )


class _Recorder:
    def __init__(self, wanted: Callable[[str], bool] | None):
        self.wanted = wanted
        self.trace = get_opaque_trace_state(convention="nnx")
        self.inputs: list[jax.Array] = []
        self.stacks: list[int] = []
        self.groups: dict[str, int] = {}

    def see(self, path: str, x: jax.Array, stack: int) -> None:
        if self.wanted is not None and not self.wanted(path):
            return
        if get_opaque_trace_state(convention="nnx") != self.trace:  # the value would not live to be recorded
            raise CalibrationError(
                f"{path} is multiplied inside a jit, vmap, scan, remat or grad of the captured function, which its "
                f"input cannot leave; give calibration the function without it (it compiles what it runs), with layers "
                f"in a Python loop"
            )
        if path in self.groups:
            raise CalibrationError(
                f"{path} was used twice in one call of the captured function; give each use a path of its own, or "
                f"capture one call at a time"
            )
        # By identity: the same Python object is the same value in a trace.
        index = next(
            (i for i, seen in enumerate(self.inputs) if seen is x and self.stacks[i] == stack), len(self.inputs)
        )
        if index == len(self.inputs):
            self.inputs.append(x)
            self.stacks.append(stack)
        self.groups[path] = index


_recorder: ContextVar[_Recorder | None] = ContextVar("mxjax_recorder", default=None)


def tap(path: str, x: jax.Array, stack: int = 0) -> jax.Array:
    """Returns ``x``; inside :func:`capture` it is recorded as the input of the weight ``path``.

    Args:
      path: path of the weight that ``x`` is multiplied with.
      x: [*stack, ..., K], contraction axis last.
      stack: leading axes that number separate weights (experts).
    """
    recorder = _recorder.get()
    if recorder is not None:
        recorder.see(path, x, stack)
    return x


@contextmanager
def _recording(wanted: Callable[[str], bool] | None):
    recorder = _Recorder(wanted)
    token = _recorder.set(recorder)
    try:
        yield recorder
    finally:
        _recorder.reset(token)


def capture(
    fn: Callable[..., Any], *args: Any, wanted: Callable[[str], bool] | None = None, **kwargs: Any
) -> tuple[Any, Captured]:
    """``fn(*args, **kwargs)`` and the inputs that its taps saw.

    Args:
      fn: any function that calls :func:`tap`, directly or through tapped modules.
      wanted: which paths to record; default all.

    Raises:
      CalibrationError: a path that is tapped twice in one call, or inside a transformation (``jit``, ``vmap``,
        ``scan``, ``remat``, ``grad``) within ``fn``.

    Example:
      >>> out, seen = capture(lambda x: tap("a", x) + tap("b", x), jnp.ones(3))
      >>> seen.members()
      [['a', 'b']]
    """
    with _recording(wanted) as recorder:
        out = fn(*args, **kwargs)
    return out, Captured(
        inputs=tuple(recorder.inputs), group_items=tuple(recorder.groups.items()), stacks=tuple(recorder.stacks)
    )
