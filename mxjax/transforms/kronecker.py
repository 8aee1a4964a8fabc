"""A Kronecker product for each block of the contraction axis: small factors, shared by groups of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from mxjax.errors import BlockShapeError
from mxjax.transforms.block_matrix import BlockMatrix

_einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Kronecker:
    """``T = diag(D_1 (L_1 (x) R_1), D_2 (L_2 (x) R_2), ...)``: ``L^T X R`` for each block X of p x q channels.

    The transform of KroQuant (arXiv 2607.21446). A factor may serve several blocks: the blocks are cut into
    ``left.shape[0]`` runs of equal length with one L each, and into ``right.shape[0]`` runs with one R each. 4 x 4 and
    8 x 8 factors take ``2 (p + q)`` operations a value instead of the ``2 p q`` of a dense block, and a few numbers
    instead of 1024. D is a scale of each channel made of p + q numbers for a block, ``1 / (l_i r_j)`` for row i and
    column j of X; with it ``D (L (x) R) = (diag(1 / l) L) (x) (diag(1 / r) R)`` is a Kronecker product whose factors
    are private to the block but for p + q numbers shared by all.

    Attributes:
      left: float32 [groups, p, p], invertible.
      right: float32 [groups, q, q], invertible.
      left_scale: float32 [blocks, p], positive, or None: ones.
      right_scale: float32 [blocks, q], positive, or None: ones.

    Example:
      >>> t = Kronecker(2 * jnp.eye(4)[None], jnp.eye(8)[None])
      >>> t.activation(jnp.ones((1, 64)))[0, 0], t.weight(jnp.ones((1, 64)))[0, 0]
      (Array(2., dtype=float32), Array(0.5, dtype=float32))
    """

    left: jax.Array
    right: jax.Array
    left_scale: jax.Array | None = None
    right_scale: jax.Array | None = None

    @property
    def block(self) -> int:
        """Channels of one block."""
        return self.left.shape[-1] * self.right.shape[-1]

    @property
    def parameters(self) -> int:
        """Numbers that it holds."""
        return sum(leaf.size for leaf in jax.tree.leaves(self))

    # jit: outside of one, each of their dozen operations would be compiled by itself.
    @jax.jit
    def activation(self, x: jax.Array) -> jax.Array:
        return self._apply(self._scaled(x, -1), self.left, self.right)

    @jax.jit
    def weight(self, w: jax.Array) -> jax.Array:
        return self._apply(self._scaled(w, 1), _inverse_transpose(self.left), _inverse_transpose(self.right))

    @jax.jit
    def undo_weight(self, w: jax.Array) -> jax.Array:
        return self._scaled(self._apply(w, jnp.swapaxes(self.left, -1, -2), jnp.swapaxes(self.right, -1, -2)), -1)

    def check(self, size: int, path: str = "") -> None:
        blocks = size // self.block
        if size % self.block or not blocks or blocks % self.left.shape[-3] or blocks % self.right.shape[-3]:
            raise BlockShapeError(
                f"{path}: Kronecker factors {self.left.shape} and {self.right.shape} do not cover a contraction axis "
                f"of {size}: it is a multiple of {self.block}, and the groups divide the number of blocks"
            )
        for scale in (self.left_scale, self.right_scale):
            if scale is not None and scale.shape[-2] != blocks:
                raise BlockShapeError(f"{path}: {blocks} Kronecker blocks have as many scales, not {scale.shape}")

    def describe(self) -> str:
        p, q = self.left.shape[-1], self.right.shape[-1]
        scaled = sum(s.shape[-1] for s in (self.left_scale, self.right_scale) if s is not None)
        text = f"kronecker {p}x{q}, {self.left.shape[-3]}+{self.right.shape[-3]} factors"
        return text + (f", {scaled} scales a block" if scaled else "")

    def dense(self, size: int) -> BlockMatrix:
        """The same map on an axis of ``size`` as a matrix for each block, which the quantization kernels take."""
        self.check(size)
        blocks = size // self.block
        left, right = _spread(self.left, blocks), _spread(self.right, blocks)
        product = left[:, :, None, :, None] * right[:, None, :, None, :]
        matrices = product.reshape(blocks, self.block, self.block)
        return BlockMatrix(matrices * self._scaled(jnp.ones(size), -1).reshape(blocks, -1, 1))

    def without_scales(self) -> Kronecker:
        """The same map as factors alone: where there are scales, ``diag(1 / l) L`` and ``diag(1 / r) R`` of each block.

        Example:
          >>> t = Kronecker(jnp.eye(4)[None], jnp.eye(8)[None], 2 * jnp.ones((2, 4)))
          >>> t.without_scales().left[:, 0, 0], t.without_scales().right.shape
          (Array([0.5, 0.5], dtype=float32), (1, 8, 8))
        """
        left, right = self.left, self.right
        if self.left_scale is not None:
            left = _spread(left, self.left_scale.shape[-2]) / self.left_scale[..., None]
        if self.right_scale is not None:
            right = _spread(right, self.right_scale.shape[-2]) / self.right_scale[..., None]
        return Kronecker(left, right)

    def _scaled(self, x: jax.Array, power: int) -> jax.Array:
        p, q, shape = self.left.shape[-1], self.right.shape[-1], x.shape
        x = x.reshape(*shape[:-1], shape[-1] // self.block, p, q)
        if self.left_scale is not None:
            x = x * (self.left_scale**power).astype(x.dtype)[:, :, None]
        if self.right_scale is not None:
            x = x * (self.right_scale**power).astype(x.dtype)[:, None, :]
        return x.reshape(shape)

    def _apply(self, x: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
        blocks = x.shape[-1] // self.block
        grouped = x.reshape(*x.shape[:-1], blocks, left.shape[-1], right.shape[-1])
        left, right = _spread(left, blocks).astype(x.dtype), _spread(right, blocks).astype(x.dtype)
        return _einsum("...gpj,gpi->...gij", _einsum("...gpq,gqj->...gpj", grouped, right), left).reshape(x.shape)


def _spread(factors: jax.Array, blocks: int) -> jax.Array:
    """The factor of each block: [groups, p, p] to [blocks, p, p]."""
    return jnp.repeat(factors, blocks // factors.shape[0], axis=0)


def _inverse_transpose(m: jax.Array) -> jax.Array:
    return jnp.swapaxes(jnp.linalg.inv(m), -1, -2)
