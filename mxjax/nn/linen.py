"""Run Flax linen models whose kernels are QWeights, through the public ``nn.intercept_methods``. ``mxjax.linen``.

    qparams = mxjax.quantize(params, "mxfp4")
    y = mxjax.linen.apply(module, {"params": qparams}, x)

``nn.Dense``, ``nn.DenseGeneral`` (so the projections of ``nn.MultiHeadDotProductAttention`` too) and ``nn.Einsum`` run
``mxjax.qdot`` and ``mxjax.qeinsum`` when their kernel is a QWeight; every other module runs as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.errors import ScopeParamShapeError
from flax.linen.module import InterceptorContext

from mxjax.errors import ConfigError
from mxjax.nn import products
from mxjax.ops.qweight import QWeight, is_quantized


@contextmanager
def quantized() -> Iterator[None]:
    """Within the context linen layers run with QWeight kernels.

    Works inside ``jit``, ``grad``, ``nn.scan`` over layers (kernels stacked on axis 0), ``nn.remat`` and ``nn.vmap``.
    Layers with float kernels are left to Flax.

    Raises:
      ConfigError: (where the module is applied) a QWeight in a module that cannot run it, with the module's path.

    Example:
      >>> module = flax.linen.Dense(8)
      >>> params = module.init(jax.random.key(0), jnp.ones((2, 64)))["params"]
      >>> with quantized():
      ...     module.apply({"params": mxjax.quantize(params, "mxfp4")}, jnp.ones((2, 64))).shape
      (2, 8)
    """
    with nn.intercept_methods(_interceptor):
        yield


def apply(module: nn.Module, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """``module.apply(variables, *args, **kwargs)`` inside :func:`quantized`.

    Args:
      module: a linen Module.
      variables: collections, with ``mxjax.quantize(params, cfg)`` as ``"params"``.
      *args, **kwargs: as of ``module.apply`` (``method``, ``rngs``, ``mutable``, ...).

    Example:
      >>> module = flax.linen.Dense(8)
      >>> variables = module.init(jax.random.key(0), jnp.ones((2, 64)))
      >>> apply(module, mxjax.quantize(variables, "nvfp4_a16"), jnp.ones((2, 64))).shape
      (2, 8)
    """
    with quantized():
        return module.apply(variables, *args, **kwargs)


def _interceptor(next_fun: Callable[..., Any], args: tuple, kwargs: dict, context: InterceptorContext) -> Any:
    module = context.module
    if module.scope is None:
        return next_fun(*args, **kwargs)
    held = [name for name, value in module.variables.get("params", {}).items() if is_quantized(_unbox(value))]
    if not held:
        return next_fun(*args, **kwargs)
    # By the function that is about to run, not by the class: subclasses and the classes that nn.scan or nn.remat make
    # get here with functions of their own first, and with the layer's when they call it.
    run = _LAYERS.get(getattr(context.orig_method, "func", None))
    if run is not None and held == ["kernel"]:
        kernel = _unbox(module.get_variable("params", "kernel"))
        if not isinstance(kernel, QWeight):
            kernel = QWeight(qtensor=kernel)
        return run(module, kernel, *args, **kwargs)
    try:
        return next_fun(*args, **kwargs)
    except (ScopeParamShapeError, TypeError) as e:
        path = "/".join(module.path) or "the module"
        raise ConfigError(
            f"{path} ({type(module).__name__}) cannot run with quantized {', '.join(held)}; exclude it "
            f"(QuantConfig.exclude, or Rule(path=..., weight=None) before the others), or read the parameter with "
            f"self.get_variable and multiply with mxjax.qdot"
        ) from e


def _unbox(value: Any) -> Any:
    """The value in a box of metadata (``nn.with_partitioning``), without its sharding: a QWeight has other axes."""
    return value.value if isinstance(value, nn.meta.AxisMetadata) and hasattr(value, "value") else value


def _operands(module: Any, x: jax.Array, w: QWeight) -> tuple[jax.Array, QWeight, jax.Array | None]:
    for name in ("dot_general", "dot_general_cls"):
        if getattr(module, name, None) not in (None, jax.lax.dot_general):
            raise ConfigError(f"{'/'.join(module.path)} ({type(module).__name__}) has a {name} of its own; exclude it")
    bias = _unbox(module.get_variable("params", "bias")) if module.use_bias else None
    if module.use_bias and bias is None:
        raise ConfigError(f"{'/'.join(module.path)} ({type(module).__name__}) has use_bias=True and no bias in params")

    def promote_dtype(*arrays: Any) -> Any:
        return module.promote_dtype(*arrays, dtype=module.dtype)

    x, bias = products.promote(promote_dtype, jnp.asarray(x), w, bias)
    return x, w, bias


def _dense(module: nn.Dense, w: QWeight, inputs: jax.Array) -> jax.Array:
    return products.linear(*_operands(module, inputs, w), precision=module.precision)


def _dense_general(module: nn.DenseGeneral, w: QWeight, inputs: jax.Array) -> jax.Array:
    operands = _operands(module, inputs, w)
    return products.linear_general(*operands, module.axis, module.batch_dims, precision=module.precision)


def _einsum(module: nn.Einsum, w: QWeight, inputs: jax.Array, einsum_str: str | None = None) -> jax.Array:
    spec = nn.merge_param("einsum_str", module.einsum_str, einsum_str)
    dot: dict[str, Any] = dict(precision=module.precision, preferred_element_type=module.preferred_element_type)
    return products.einsum(spec, *_operands(module, inputs, w), **dot)


# The functions that Flax's layers run, without the wrapper that Flax puts around each method.
_LAYERS: dict[Any, Callable[..., jax.Array]] = {
    inspect.unwrap(nn.Dense.__call__): _dense,
    inspect.unwrap(nn.DenseGeneral.__call__): _dense_general,
    inspect.unwrap(nn.Einsum.__call__): _einsum,
}
