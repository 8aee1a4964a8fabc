"""Flax nnx layers that hold a QWeight: what ``mxjax.nnx.quantize`` puts in the place of the float ones."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from mxjax.errors import ConfigError
from mxjax.nn import products
from mxjax.ops.fused import FusedPart, FusedWeight
from mxjax.ops.qweight import QWeight
from mxjax.ops.sharded import ShardedWeight

# So that a module of one's own can keep one as a plain attribute.
for data_type in (QWeight, FusedWeight, FusedPart, ShardedWeight):
    nnx.register_data_type(data_type)


class QParam(nnx.Variable):
    """The Variable that holds a QWeight. Not an ``nnx.Param``: its codes are integers, which no gradient reaches.

    So ``nnx.grad`` and ``nnx.Optimizer`` with their usual filter ``nnx.Param`` see norms, biases and LoRA factors only,
    and ``nnx.state(model, (nnx.Param, QParam))`` is all that a checkpoint needs. Read it with ``variable[...]`` or
    ``variable.get_value()``; ``variable.shape`` is the shape of the float weight.
    """

    def get_value(self, *, index: Any = ...) -> QWeight:
        if index is not Ellipsis:
            raise ConfigError(f"a QWeight has no parts: read it with [...], not [{index!r}]")
        return super().get_value()


class _QLayer(nnx.Module):
    """What the layers share: the weight, the bias, and the options of the float layer it came from.

    Attributes:
      kernel: QParam.
      bias: nnx.Param, or None.
      options: attributes of the float layer, by name.
    """

    option_names: tuple[str, ...] = ("dtype", "precision", "promote_dtype", "preferred_element_type")
    dtype: Any
    precision: Any
    promote_dtype: Any
    preferred_element_type: Any

    def __init__(self, kernel: QWeight | QParam, bias: nnx.Param | None, **options: Any):
        self.kernel = kernel if isinstance(kernel, QParam) else QParam(kernel)
        self.bias = nnx.data(None) if bias is None else bias
        for name in self.option_names:
            setattr(self, name, options.pop(name, None))
        if options:
            raise ConfigError(f"{type(self).__name__} has no option {', '.join(options)}")
        if self.promote_dtype is None:
            self.promote_dtype = nnx.nn.dtypes.promote_dtype

    @classmethod
    def from_layer(cls, layer: Any, kernel: QWeight | QParam) -> Any:
        """The quantized twin of ``layer``; its bias Variable is taken over."""
        return cls(kernel, layer.bias, **{name: getattr(layer, name) for name in cls.option_names})

    def operands(self, x: jax.Array) -> tuple[jax.Array, QWeight, jax.Array | None]:
        w: Any = self.kernel.get_value()
        if isinstance(w, (FusedWeight, FusedPart)):
            raise ConfigError(
                "this layer's weight was fused with those of its siblings: the model calls them together, "
                "mxjax.nnx.shared_input(x, self.q_proj, ...), or stays unfused (mxjax.nnx.unfuse_shared_inputs)"
            )
        bias = None if self.bias is None else self.bias[...]
        x, bias = products.promote(self.promote, x, w, bias)
        return x, w, bias

    def promote(self, *arrays: Any) -> Any:
        return self.promote_dtype(arrays, dtype=self.dtype)

    @property
    def dot_options(self) -> dict[str, Any]:
        return dict(precision=self.precision, preferred_element_type=self.preferred_element_type)

    def to_layer(self, float_layer: type[nnx.Module], kernel: nnx.Param) -> Any:
        """The float layer again, with ``kernel`` in it."""
        options = {name: getattr(self, name) for name in _QLayer.option_names}
        options |= dict(param_dtype=kernel.get_value().dtype)
        layer: Any = nnx.eval_shape(lambda: self.float_twin(float_layer, rngs=nnx.Rngs(0), **options))
        layer.kernel = kernel
        layer.bias = nnx.data(None) if self.bias is None else self.bias
        return layer

    def float_twin(self, float_layer: Any, **options: Any) -> Any:
        """A float layer of the right sizes; its values are not used."""
        raise NotImplementedError


class QLinear(_QLayer):
    """``nnx.Linear`` with a QWeight: ``y = qdot(x, kernel) + bias``.

    Example:
      >>> layer = mxjax.nnx.quantize(flax.nnx.Linear(64, 8, rngs=flax.nnx.Rngs(0)), "mxfp4")
      >>> layer(jnp.ones((2, 64))).shape
      (2, 8)
    """

    def __call__(self, x: jax.Array, out_sharding: Any = None) -> jax.Array:
        _no_sharding(out_sharding)
        return products.linear(*self.operands(x), **self.dot_options)

    def float_twin(self, float_layer: Any, **options: Any) -> Any:
        size, out = self.kernel.shape[-2:]
        return float_layer(size, out, use_bias=self.bias is not None, **options)


class QLoRALinear(QLinear):
    """``nnx.LoRALinear`` with a quantized base: the low-rank factors stay ``nnx.LoRAParam``, ready to be trained."""

    lora: nnx.LoRA

    @classmethod
    def from_layer(cls, layer: Any, kernel: QWeight | QParam) -> QLoRALinear:
        new = super().from_layer(layer, kernel)
        new.lora = layer.lora
        return new

    def __call__(self, x: jax.Array, out_sharding: Any = None) -> jax.Array:
        return super().__call__(x, out_sharding) + self.lora(x)

    def to_layer(self, float_layer: type[nnx.Module], kernel: nnx.Param) -> Any:
        layer = super().to_layer(float_layer, kernel)
        layer.lora = self.lora
        return layer

    def float_twin(self, float_layer: Any, **options: Any) -> Any:
        return super().float_twin(float_layer, lora_rank=1, **options)


class QLinearGeneral(_QLayer):
    """``nnx.LinearGeneral`` with a QWeight; also the projections of ``nnx.MultiHeadAttention``."""

    option_names = (*_QLayer.option_names, "in_features", "out_features", "axis", "batch_axis")
    in_features: Any
    out_features: Any
    axis: Any
    batch_axis: Any

    def __call__(self, x: jax.Array, out_sharding: Any = None) -> jax.Array:
        _no_sharding(out_sharding)
        return products.linear_general(*self.operands(x), self.axis, tuple(self.batch_axis), **self.dot_options)

    def float_twin(self, float_layer: Any, **options: Any) -> Any:
        sizes = dict(axis=self.axis, batch_axis=self.batch_axis, use_bias=self.bias is not None)
        return float_layer(self.in_features, self.out_features, **sizes, **options)


class QEinsum(_QLayer):
    """``nnx.Einsum`` with a QWeight."""

    option_names = (*_QLayer.option_names, "einsum_str", "kernel_shape", "bias_shape")
    einsum_str: str
    kernel_shape: Any
    bias_shape: Any

    def __call__(self, x: jax.Array, einsum_str: str | None = None, out_sharding: Any = None) -> jax.Array:
        _no_sharding(out_sharding)
        return products.einsum(einsum_str or self.einsum_str, *self.operands(x), **self.dot_options)

    def float_twin(self, float_layer: Any, **options: Any) -> Any:
        return float_layer(self.einsum_str, self.kernel_shape, self.bias_shape, **options)


def _no_sharding(out_sharding: Any) -> None:
    if out_sharding is not None:
        raise ConfigError("quantized layers take no out_sharding; use jax.lax.with_sharding_constraint on the result")
