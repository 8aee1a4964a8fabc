"""Block-diagonal transforms with matrices of their own, and WUSH, which finds them in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.errors import BlockShapeError, CalibrationError, ConfigError
from mxjax.transforms.base import NO_STACK, Rounding, need_values, read_scalar
from mxjax.transforms.hadamard import hadamard_matrix


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockMatrix:
    """``T = diag(M_1, M_2, ...)`` with an invertible matrix for each block of the contraction axis.

    Attributes:
      matrices: float32 [K / b, b, b]; activations are multiplied by ``M`` from the right, weights by ``M^-T``.
      strength: float32 [], the ``l`` that WUSH found it with, or None. A remark for reports; no product uses it.
    """

    matrices: jax.Array
    strength: jax.Array | None = None

    def activation(self, x: jax.Array) -> jax.Array:
        return self._apply(x, self.matrices)

    def weight(self, w: jax.Array) -> jax.Array:
        return self._apply(w, jnp.swapaxes(jnp.linalg.inv(self.matrices), -1, -2))

    def undo_weight(self, w: jax.Array) -> jax.Array:
        return self._apply(w, jnp.swapaxes(self.matrices, -1, -2))

    def check(self, size: int, path: str = "") -> None:
        blocks, b = self.matrices.shape[-3:-1]
        if blocks * b != size:
            raise BlockShapeError(f"{path}: {blocks} matrices of {b} do not cover a contraction axis of {size}")

    def describe(self) -> str:
        size = self.matrices.shape[-1]
        return f"block matrix {size}" if self.strength is None else f"wush {read_scalar(self.strength)}, {size}"

    def _apply(self, x: jax.Array, m: jax.Array) -> jax.Array:
        grouped = x.reshape(*x.shape[:-1], m.shape[0], m.shape[1])
        # HIGHEST: a transform by TF32 or bf16 would lose more than the quantization that follows keeps.
        out = jnp.einsum("...gi,gij->...gj", grouped, m.astype(x.dtype), precision=jax.lax.Precision.HIGHEST)
        return out.reshape(x.shape)


@dataclass(frozen=True, kw_only=True)
class Wush:
    """Finds the block transform that balances weights and activations best (WUSH, arXiv 2512.00956). Needs statistics.

    With ``A A^T = X^T X / n`` and ``B B^T = W^T W / m`` of one block (Cholesky) and ``B^T A = U S V^T``::

        M = B U S^(-l/2) H           activations x M, weights W M^-T

    For l = 1 both sides then have the same second moments ``H S H``. l < 1 is KBBQ's brake: the weights keep
    ``H S^l H``, the activations ``H S^(2-l) H``, up to weights that are white at l = 0 (for weights that are white
    already ``M`` is then orthogonal). ``H`` is the Hadamard matrix, which spreads the spectrum S evenly over the block.

    Attributes:
      size: block length (32 fits MXFP4; any power of two that divides the contraction axis).
      strength: l, 0 to 1.
      damping: relative to the mean diagonal of either moment matrix.
    """

    size: int = 32
    strength: float = 1.0
    damping: float = 0.01

    def __post_init__(self) -> None:
        hadamard_matrix(self.size)
        if not 0 <= self.strength <= 1 or self.damping <= 0:
            raise ConfigError(f"Wush has strength within 0 and 1 and positive damping, not {self}")

    def check(self, size: int, path: str = "") -> None:
        if size % self.size:
            raise BlockShapeError(f"{path}: WUSH blocks of {self.size} do not divide a contraction axis of {size}")

    def describe(self) -> str:
        return f"wush {self.strength:g}, {self.size}"

    def fit(
        self, stats: Any, weights: list[jax.Array], path: str = "", rounding: Rounding | None = None
    ) -> BlockMatrix:
        """The transform of one input, for all weights that share it.

        Args:
          stats: LayerStats of the input, ``hessian [K, K]``.
          weights: float [..., K] each, contraction axis last.
          path: for messages.
          rounding: not looked at.

        Raises:
          CalibrationError: moments that no damping makes positive definite (NaN), or stacked statistics.
        """
        if stats.hessian.ndim != 2:
            raise CalibrationError(
                f"{path}: WUSH takes one input, not a stack of Hessians {stats.hessian.shape}{NO_STACK}"
            )
        need_values("WUSH", stats, weights, path)
        k = stats.hessian.shape[-1]
        self.check(k, path)
        # float64 on the host: a few thousand small matrices, once for each layer.
        h, size = np.asarray(stats.hessian, np.float64), self.size
        x_moment = self._damped(np.stack([h[i : i + size, i : i + size] for i in range(0, k, size)]))
        w_moment = self._damped(np.sum([_block_grams(w, size) for w in weights], axis=0))
        try:
            a, b = np.linalg.cholesky(x_moment), np.linalg.cholesky(w_moment)
        except np.linalg.LinAlgError:
            raise CalibrationError(f"{path}: second moments of a block are not positive definite") from None
        u, s, _ = np.linalg.svd(np.swapaxes(b, -1, -2) @ a)
        s = s + self.damping * s.mean(-1, keepdims=True)
        m = b @ u * s[:, None, :] ** (-self.strength / 2) @ hadamard_matrix(self.size).astype(np.float64)
        # The scale of M is free; keep the activations' second moment, so that fixed input scales stay meaningful.
        before = np.trace(x_moment, axis1=-2, axis2=-1)
        after = np.trace(np.swapaxes(m, -1, -2) @ x_moment @ m, axis1=-2, axis2=-1)
        m = m * np.sqrt(before / after)[:, None, None]
        return BlockMatrix(jnp.asarray(m, jnp.float32), jnp.float32(self.strength))

    def _damped(self, blocks: np.ndarray) -> np.ndarray:
        mean = np.trace(blocks, axis1=-2, axis2=-1) / self.size
        mean = np.where(mean > 0, mean, 1.0)  # a block that is all zero gets the identity
        return blocks + self.damping * mean[:, None, None] * np.eye(self.size)


def _block_grams(w: jax.Array, size: int) -> np.ndarray:
    """``W_b^T W_b`` of every block of columns, float64 [K / size, size, size]."""
    blocks = np.asarray(w, np.float64).reshape(-1, w.shape[-1] // size, size).transpose(1, 0, 2)
    return blocks.transpose(0, 2, 1) @ blocks
