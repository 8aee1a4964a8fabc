"""Block-diagonal Hadamard rotation (MR-GPTQ, arXiv 2509.23202, section 4)."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.errors import BlockShapeError, ConfigError


def hadamard_matrix(size: int) -> np.ndarray:
    """The Sylvester Hadamard matrix over ``sqrt(size)``: symmetric, orthogonal, float32; ``size`` a power of two.

    Example:
      >>> float(abs(hadamard_matrix(32) @ hadamard_matrix(32) - np.eye(32)).max()) < 1e-6
      True
    """
    if size < 1 or size & (size - 1):
        raise ConfigError(f"a Sylvester Hadamard matrix has a power-of-two size, not {size}")
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return (h / np.sqrt(size)).astype(np.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Hadamard:
    """``T = diag(H, H, ...)`` with blocks of ``size``. ``H`` is its own inverse, so weight and activation turn alike.

    Attributes:
      size: 16, 32, 64 or 128 (any power of two that divides the contraction axis).
    """

    size: int = field(default=32, metadata=dict(static=True))

    def activation(self, x: jax.Array) -> jax.Array:
        h = jnp.asarray(hadamard_matrix(self.size), x.dtype)
        groups = x.reshape(*x.shape[:-1], x.shape[-1] // self.size, self.size)
        # HIGHEST: a rotation by TF32 or bf16 would lose more than the quantization that follows keeps.
        return jnp.matmul(groups, h, precision=jax.lax.Precision.HIGHEST).reshape(x.shape)

    def weight(self, w: jax.Array) -> jax.Array:
        return self.activation(w)

    def undo_weight(self, w: jax.Array) -> jax.Array:
        return self.activation(w)

    def describe(self) -> str:
        return f"hadamard {self.size}"

    def check(self, size: int, path: str = "") -> None:
        if self.size > size or size % self.size:  # first: a size out of a file may be too large to build
            raise BlockShapeError(f"{path}: Hadamard blocks of {self.size} do not divide a contraction axis of {size}")
        hadamard_matrix(self.size)
