"""What this machine can run: platform, architecture, features. The only reader of device attributes in mxjax.

    >>> from mxjax import backend
    >>> backend.target().platform
    'cpu'
    >>> backend.has("fp8_matmul")
    False

A kernel may be lowered for a GPU that is not here: inside ``jax.sharding.use_abstract_mesh`` the abstract device
answers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from mxjax.errors import ConfigError

# Product names of abstract devices, whose architecture cannot be asked for. The first match wins.
_CUDA_NAMES = (
    (r"RTX PRO|RTX 50\d0", 120),
    (r"B300\b", 103),
    (r"B200\b|B100\b", 100),
    (r"H200\b|H100\b|H800\b|H20\b", 90),
    (r"\bL4\b|\bL40S?\b|RTX 40\d0|6000 Ada", 89),
    (r"\bA40\b|\bA10G?\b|A6000|RTX 30\d0", 86),
    (r"\bA100\b|\bA800\b|\bA30\b", 80),
)


@dataclass(frozen=True)
class Target:
    """A device kind, as far as kernels care.

    Attributes:
      platform: "cpu", "cuda", "rocm", "tpu", or another JAX platform.
      arch: "sm_90", "gfx950", ...; None where there is none or it is unknown.
      name: JAX's device kind, the key of tuned configurations.
      cores: multiprocessors, 1 where unknown.
    """

    platform: str
    arch: str | None
    name: str
    cores: int = 1

    @property
    def sm(self) -> int:
        """CUDA compute capability as an integer (90 for sm_90), 0 elsewhere."""
        return int(self.arch.removeprefix("sm_")) if self.arch is not None and self.arch.startswith("sm_") else 0

    @property
    def gfx(self) -> str:
        """AMD architecture ("gfx950"), "" elsewhere."""
        return self.arch if self.arch is not None and self.arch.startswith("gfx") else ""


FEATURES: dict[str, Callable[[Target], bool]] = {
    "triton": lambda t: t.sm >= 80 or t.gfx.startswith(("gfx9", "gfx11", "gfx12")),
    "ptx": lambda t: t.sm >= 80,
    "mosaic_gpu": lambda t: t.sm >= 90 and t.sm // 10 in (9, 10),
    "wgmma": lambda t: t.sm // 10 == 9,
    # matrix units that multiply e4m3 (on gfx942 its fnuz variant, which is another format)
    "fp8_matmul": lambda t: t.sm >= 89 or t.gfx == "gfx950",
    "fp8_fnuz_matmul": lambda t: t.gfx == "gfx942",
    "fp4_matmul": lambda t: t.sm >= 100 or t.gfx == "gfx950",
}


def target(device: jax.Device | None = None) -> Target:
    """The device that a function traced now will run on: the abstract mesh's, JAX's default one, or ``device``."""
    if device is None:
        abstract = jax.sharding.get_abstract_mesh().abstract_device
        if abstract is not None:
            return _from_name(abstract.device_kind, abstract.num_cores)
        device = jax.config.jax_default_device  # type: ignore[attr-defined]
        if not isinstance(device, jax.Device):
            device = jax.devices(device)[0]
    if device.platform != "gpu":
        return Target(device.platform, None, device.device_kind)
    capability = str(device.compute_capability)
    cores = int(getattr(device, "core_count", 1) or 1)
    if capability.startswith("gfx"):
        return Target("rocm", capability.split(":")[0], device.device_kind, cores)
    return Target("cuda", "sm_" + capability.replace(".", ""), device.device_kind, cores)


def _from_name(kind: str, cores: int | None) -> Target:
    if kind.startswith("gfx"):
        return Target("rocm", kind.split(":")[0], kind, cores or 1)
    for pattern, sm in _CUDA_NAMES:
        if re.search(pattern, kind):
            return Target("cuda", f"sm_{sm}", kind, cores or 1)
    return Target("cpu" if kind.lower() == "cpu" else kind, None, kind, cores or 1)


def cache_dir() -> Path:
    """What this machine keeps between runs: $MXJAX_CACHE, or mxjax/ in $XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("MXJAX_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mxjax"


def has(feature: str, on: Target | None = None) -> bool:
    """Whether the target has a feature of :data:`FEATURES`.

    Raises:
      ConfigError: no such feature.
    """
    if feature not in FEATURES:
        raise ConfigError(f"unknown feature {feature!r}; known: {', '.join(FEATURES)}")
    return FEATURES[feature](target() if on is None else on)
