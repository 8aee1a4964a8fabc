"""Which implementation of an operation runs, and why not the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from mxjax import backend
from mxjax.errors import BackendUnsupported, ConfigError
from pallas_kernels import _compat

IMPLEMENTATIONS = ("xla", "triton", "mosaic_gpu")


@dataclass(frozen=True)
class Candidate:
    """One implementation of an operation for the arguments at hand.

    Attributes:
      name: one of :data:`IMPLEMENTATIONS`.
      run: takes no argument, returns the result.
      obstacle: why it cannot run here, or None.
      slow: why it should not be chosen although it can run (another one is faster), or None.
    """

    name: str
    run: Callable[[], Any]
    obstacle: str | None = None
    slow: str | None = None


def pick(operation: str, implementation: str | None, candidates: Sequence[Candidate]) -> Candidate:
    """The forced candidate, or the first that can run and is not slow.

    Args:
      operation: name for messages.
      implementation: None, or one of :data:`IMPLEMENTATIONS`.
      candidates: best first; the last one ("xla") always runs.

    Raises:
      ConfigError: an unknown name.
      BackendUnsupported: the forced implementation cannot run; the message says why and what can.
    """
    if implementation is None:
        return next(c for c in candidates if c.obstacle is None and (c.slow is None or c is candidates[-1]))
    if implementation not in IMPLEMENTATIONS:
        raise ConfigError(f"implementation is None or one of {', '.join(IMPLEMENTATIONS)}, not {implementation!r}")
    named = [c for c in candidates if c.name == implementation]
    for candidate in named:
        if candidate.obstacle is None:
            return candidate
    reason = "; ".join(str(c.obstacle) for c in named) or "there is no such implementation of it"
    able = dict.fromkeys(c.name for c in candidates if c.obstacle is None)
    raise BackendUnsupported(f"{operation}: {implementation} cannot run here: {reason}. What can: {', '.join(able)}")


def triton_obstacle(target: backend.Target) -> str | None:
    """Why Pallas Triton cannot run on the target, or None."""
    if _compat.TRITON_MISSING is not None:
        return _compat.TRITON_MISSING
    if not backend.has("triton", target):
        return f"Pallas Triton needs an NVIDIA GPU from sm_80 or an AMD GPU; this is {target.name} ({target.platform})"
    return None


def mosaic_obstacle(target: backend.Target, feature: str = "mosaic_gpu") -> str | None:
    """Why Mosaic GPU cannot run on the target, or None."""
    if not backend.has(feature, target):
        need = "an NVIDIA Hopper GPU (wgmma)" if feature == "wgmma" else "an NVIDIA GPU of sm_90 or sm_100"
        return f"this Mosaic GPU kernel needs {need}; this is {target.name} ({target.arch or target.platform})"
    return None


def kernels_used(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, ...]:
    """Names of the Pallas kernels that ``fn(*args, **kwargs)`` contains, in order of first appearance.

    Traces only; nothing runs. An empty tuple means plain XLA.

    Example:
      >>> kernels_used(lambda x: x + 1, jnp.ones(3))
      ()
    """
    found: dict[str, None] = {}
    _walk(jax.make_jaxpr(fn)(*args, **kwargs).jaxpr, found)
    return tuple(found)


def _walk(jaxpr: Any, found: dict[str, None]) -> None:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("pallas_call", "mpmd_map"):  # Triton, Mosaic GPU
            name = eqn.params.get("name") or getattr(eqn.params.get("name_and_src_info"), "name", None)
            found.setdefault(str(name))
            continue
        for value in eqn.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(item, "jaxpr", item)
                if hasattr(inner, "eqns"):
                    _walk(inner, found)
