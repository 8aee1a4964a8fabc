"""What follows the sums of a product, one definition for every route: low-rank branch, bias, activation function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.errors import BlockShapeError, ConfigError

_RSQRT2 = 0.7071067811865476
_GELU_TANH = 0.7978845608028654  # sqrt(2 / pi)


def _silu(y: jax.Array) -> jax.Array:
    return y / (1.0 + jnp.exp(-y))


# erfc(x) = t exp(-x^2 + P(t)) with t = 1 / (1 + x / 2), x >= 0: relative error below 1.2e-7 = 2 * 2**-24 (Numerical
# Recipes, erfcc). Pallas Triton has no erf, and 1 + erf would cancel on the negative side.
_ERFC = (0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196, 1.00002368)


def _gelu(y: jax.Array) -> jax.Array:
    x = jnp.abs(y) * _RSQRT2
    t = 1.0 / (1.0 + 0.5 * x)
    p = jnp.full_like(t, _ERFC[0])
    for coefficient in _ERFC[1:]:
        p = p * t + coefficient
    erfc = t * jnp.exp(-x * x - 1.26551223 + t * p)
    return 0.5 * y * jnp.where(y < 0, erfc, 2.0 - erfc)


def _gelu_tanh(y: jax.Array) -> jax.Array:
    return 0.5 * y * (1.0 + jnp.tanh(_GELU_TANH * (y + 0.044715 * y * y * y)))


def _relu(y: jax.Array) -> jax.Array:
    return jnp.where(y < 0, 0.0, y)  # NaN stays NaN, as in jax.nn.relu


FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Epilogue:
    """``f(y + down @ up^T + bias)`` in float32, where y is the scaled product [M, N].

    Attributes:
      bias: [N], or None.
      down, up: low-rank branch ``(x A^T) B^T``: x A^T as [M, r] and B as [N, r], or None.
      function: a name of :data:`FUNCTIONS`, or None (static).
      parts: where ``up`` is block-diagonal, the rows at which the second block begins, the third, ... The blocks have
        the same rank. Nothing depends on it: a kernel may leave out what is zero (static).
    """

    bias: jax.Array | None = None
    down: jax.Array | None = None
    up: jax.Array | None = None
    function: str | None = field(default=None, metadata=dict(static=True))
    parts: tuple[int, ...] = field(default=(), metadata=dict(static=True))

    def check(self, m: int, n: int) -> Epilogue:
        """Raise ConfigError or BlockShapeError where it does not fit a product [m, n]; returns self."""
        if self.function is not None and self.function not in FUNCTIONS:
            raise ConfigError(f"activation functions are {', '.join(FUNCTIONS)}, not {self.function!r}")
        if self.bias is not None and self.bias.shape != (n,):
            raise BlockShapeError(f"bias {self.bias.shape} is not [{n}]")
        if (self.down is None) != (self.up is None):
            raise ConfigError("a low-rank branch has x A^T and B, or neither")
        if self.down is not None and self.up is not None:
            if self.down.shape != (m, self.down.shape[-1]) or self.up.shape != (n, self.down.shape[-1]):
                raise BlockShapeError(
                    f"low-rank x A^T {self.down.shape} and B {self.up.shape} do not fit a product [{m}, {n}]"
                )
        return self

    @property
    def is_bias_only(self) -> bool:
        return self.down is None and self.function is None

    def apply(self, y: jax.Array) -> jax.Array:
        """On float32 [M, N], in plain JAX."""
        if self.down is not None and self.up is not None:
            contract = partial(lax.dot_general, dimension_numbers=(((1,), (1,)), ((), ())))
            high = lax.Precision.HIGHEST if self.down.dtype == jnp.float32 else None
            y = y + contract(self.down, self.up.astype(self.down.dtype), precision=high,
                             preferred_element_type=jnp.float32)  # fmt: skip
        if self.bias is not None:
            y = y + self.bias.astype(jnp.float32)
        return y if self.function is None else FUNCTIONS[self.function](y)


def split(epilogue: Epilogue, out_dtype: Any, run: Callable[[jax.Array | None, Any], jax.Array]) -> jax.Array:
    """``run(bias, dtype)`` of a kernel that knows no more of an epilogue than the bias, and the rest after it."""
    if epilogue.is_bias_only:
        return run(epilogue.bias, out_dtype)
    return _rest(epilogue, run(None, jnp.dtype(jnp.float32)), out_dtype)


@partial(jax.jit, static_argnums=2)
def _rest(epilogue: Epilogue, y: jax.Array, out_dtype: Any) -> jax.Array:
    return epilogue.apply(y).astype(out_dtype)
