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
from mxjax.core.quantize import fake_quantize
from mxjax.core.scales import DEFAULT_POLICY
from mxjax.errors import BlockShapeError, FormatError
from mxjax.transforms.base import Transform


@dataclass(frozen=True, kw_only=True)
class ActivationFormat:
    """How the input of a layer is quantized on the fly. Static.

    Attributes:
      format: block format; its blocks run along the contraction axis.
      scale: scale policy.
    """

    format: BlockFormat
    scale: str = DEFAULT_POLICY

    def quantize(self, x: jax.Array, axis: int = -1, input_scale: jax.Array | None = None) -> jax.Array:
        """The values of ``x`` after quantization, straight-through gradient.

        NVFP4's tensor scale is taken over each row of the contraction axis (each token), so that a result never
        depends on what else is in the batch, unless a fixed ``input_scale`` is given.
        """
        batch_axes = 0 if input_scale is not None else x.ndim - 1
        if axis not in (-1, x.ndim - 1):
            moved = jnp.moveaxis(x, axis, -1)
            return jnp.moveaxis(self.quantize(moved, -1, input_scale), -1, axis)
        return fake_quantize(x, self.format, -1, self.scale, batch_axes=batch_axes, global_scale=input_scale)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class QWeight:
    """A quantized weight and how to multiply with it: ``y = Q_act(x T) W_q^T + (x A^T) B^T``.

    Invariants: the contraction axis of ``qtensor`` is the axis that ``x`` is multiplied along; ``transform`` acts on
    it; ``a`` is ``[*batch, r, K]`` and ``b`` is ``[*out, r]`` for ``qtensor`` codes ``[*out, K/2]``; both or none.
    Arrays are data, formats are static, so the tree works under jit, grad, vmap, scan, device_put and Orbax.

    Attributes:
      qtensor: the weight in the transformed space, contraction axis last in memory.
      transform: map applied to ``x`` online (its inverse is in ``qtensor`` already), or None.
      a, b: low-rank branch, arrays or QTensors, in the untransformed space, or None.
      input_scale: fixed float32 tensor scale of the activations (NVFP4, from calibration), or None: per token.
      activation: how x is quantized, or None: not at all (W4A16) (static).
    """

    qtensor: QTensor
    transform: Transform | None = None
    a: jax.Array | QTensor | None = None
    b: jax.Array | QTensor | None = None
    input_scale: jax.Array | None = None
    activation: ActivationFormat | None = field(default=None, metadata=dict(static=True))

    def __repr__(self) -> str:
        parts = [repr(self.qtensor), f"activation={self.activation.format if self.activation else None}"]
        if self.transform is not None:
            parts.append(f"transform={self.transform!r}")
        if self.a is not None:
            parts.append(f"a={getattr(self.a, 'shape', self.a)}")
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
        if (self.a is None) != (self.b is None):
            raise BlockShapeError(f"{path}: a low-rank branch has both factors or none")
        if self.a is not None and self.b is not None:
            if self.a.shape[-1] != self.qtensor.size or self.a.shape[-2] != self.b.shape[-1]:
                raise BlockShapeError(
                    f"{path}: low-rank factors {self.a.shape} and {self.b.shape} do not fit a weight {self.shape} "
                    f"with contraction axis {self.qtensor.axis}"
                )
        if self.transform is not None:
            self.transform.check(self.qtensor.size, path)
        return self


@partial(jax.jit, static_argnames=("dtype",))
def _dequantize(w: QWeight, *, dtype: Any) -> jax.Array:
    if w.transform is None and w.a is None:
        return w.qtensor.dequantize(dtype)
    axis = w.qtensor.axis
    values = jnp.moveaxis(w.qtensor.dequantize(jnp.float32), axis, -1)
    if w.transform is not None:
        values = w.transform.undo_weight(values)
    if w.a is not None:
        values = values + jnp.matmul(dense(w.b, jnp.float32), dense(w.a, jnp.float32))
    return jnp.moveaxis(values, -1, axis).astype(dtype)


def dense(x: jax.Array | QTensor | None, dtype: Any) -> jax.Array:
    """An array or a QTensor as an array of ``dtype``."""
    assert x is not None
    return x.dequantize(dtype) if isinstance(x, QTensor) else x.astype(dtype)


def is_quantized(x: Any) -> bool:
    """Whether ``x`` is a quantized leaf: the ``is_leaf`` for walks over quantized trees."""
    return isinstance(x, (QWeight, QTensor))
