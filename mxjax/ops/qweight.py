"""QWeight: all that a linear layer needs in place of its kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.core.formats import BlockFormat
from mxjax.core.qtensor import QTensor
from mxjax.errors import FormatError
from mxjax.ops.activation import ActivationFormat as ActivationFormat
from mxjax.ops.low_rank import LowRank
from mxjax.transforms.base import Transform


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class QWeight:
    """A quantized weight and how to multiply with it: ``y = Q_act(x T) W_q^T + branch(x)``.

    Invariants: the contraction axis of ``qtensor`` is the axis that ``x`` is multiplied along; ``transform`` acts on
    it; the branch maps it to the output axes of ``qtensor``, whose codes are ``[*out, K/2]``. Arrays are data, formats
    are static, so the tree works under jit, grad, vmap, scan, device_put and Orbax.

    Attributes:
      qtensor: the weight in the transformed space, contraction axis last in memory.
      transform: map applied to ``x`` online (its inverse is in ``qtensor`` already), or None.
      branch: low-rank branch ``(x A^T) B^T`` on the untransformed x, or None.
      input_scale: fixed float32 tensor scale of the activations (NVFP4, from calibration), or None: per token.
      activation: how x is quantized, or None: not at all (W4A16) (static).
    """

    qtensor: QTensor
    transform: Transform | None = None
    branch: LowRank | None = None
    input_scale: jax.Array | None = None
    activation: ActivationFormat | None = field(default=None, metadata=dict(static=True))

    def __repr__(self) -> str:
        parts = [repr(self.qtensor), f"activation={self.activation.format if self.activation else None}"]
        if self.transform is not None:
            parts.append(f"transform={self.transform!r}")
        if self.branch is not None:
            try:
                parts.append(f"rank={self.branch.rank}")
            except (AttributeError, TypeError):  # leaves that are no arrays, as in a tree of PartitionSpecs
                parts.append(f"branch={self.branch!r}")
        return f"QWeight({', '.join(parts)})"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.qtensor.shape

    @property
    def ndim(self) -> int:
        return self.qtensor.ndim

    @property
    def dtype(self) -> np.dtype:
        return self.qtensor.dtype

    @property
    def format(self) -> BlockFormat:
        return self.qtensor.format

    @property
    def nbytes(self) -> int:
        """Stored bytes of everything in it."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def dequantize(self, dtype: Any = None) -> jax.Array:
        """The weight in its own space and shape: transform undone, low-rank branch added."""
        dtype = self.dtype if dtype is None else jnp.dtype(dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise FormatError(f"dequantize to a float dtype, not {dtype}")
        return _dequantize(self, dtype=dtype)

    def validate(self, path: str = "QWeight") -> QWeight:
        """Check the invariants; returns self.

        Raises:
          BlockShapeError, FormatError: what does not hold, with ``path``.
        """
        self.qtensor.validate(path)
        if self.branch is not None:
            self.branch.check(self.qtensor.codes.shape[:-1], self.qtensor.size, path)
        if self.transform is not None:
            self.transform.check(self.qtensor.size, path)
        return self


@partial(jax.jit, static_argnames=("dtype",))
def _dequantize(w: QWeight, *, dtype: Any) -> jax.Array:
    if w.transform is None and w.branch is None:
        return w.qtensor.dequantize(dtype)
    axis = w.qtensor.axis
    values = jnp.moveaxis(w.qtensor.dequantize(jnp.float32), axis, -1)
    if w.transform is not None:
        values = w.transform.undo_weight(values)
    if w.branch is not None:
        values = values + w.branch.product()
    return jnp.moveaxis(values, -1, axis).astype(dtype)


def is_quantized(x: Any) -> bool:
    """Whether ``x`` is a quantized leaf: the ``is_leaf`` for walks over quantized trees."""
    return isinstance(x, (QWeight, QTensor))
