"""block_scaled_matmul: arguments, checks, and the choice of a route."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from mxjax import backend
from mxjax.core.formats import BlockFormat, get_format
from mxjax.errors import BlockShapeError, FormatError
from pallas_kernels import _dispatch, _tuning
from pallas_kernels.block_scaled_matmul import mosaic_fp4, reference, triton_generic
from pallas_kernels.block_scaled_matmul.epilogue import Epilogue
from pallas_kernels.block_scaled_matmul.layout import PackedWeight
from pallas_kernels.block_scaled_matmul.product import Product
from pallas_kernels.block_scaled_matmul.routes import of_fragments, of_rows, of_tiles
from pallas_kernels.transform_quantize.reference import PAIR_FORMATS

# Rows up to which the generic kernel, which decodes W once for every row tile, beats XLA's dequantize and product.
GENERIC_ROWS = 64


def block_scaled_matmul(
    x: jax.Array,
    w: PackedWeight,
    *,
    x_scales: jax.Array | None = None,
    x_format: str | BlockFormat | None = None,
    x_scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    low_rank: tuple[jax.Array, jax.Array] | None = None,
    low_rank_parts: tuple[int, ...] = (),
    activation_function: str | None = None,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """``f(x @ W^T + down @ up^T + bias)`` for a packed block-scaled weight.

    Accumulated in float32, with one rounding to the output dtype after the epilogue.

    Args:
      x: one of: float [.., K] (W4A16 and the like); float8 or bfloat16 [.., K] with ``x_scale``, the exact-FP8 pair of
        ``transform_quantize_fp8`` (W4A4; float8_e4m3fnuz for "rows" weights only); uint8 codes
        [.., K * bits / 8] with ``x_scales`` and ``x_format``.
      w: from :func:`prepare`.
      x_scales: uint8 scale bytes of the codes, [.., K / block].
      x_format: format of the codes.
      x_scale: float32 [..], a factor of each row.
      bias: [N].
      low_rank: ``(down, up)``, the branch ``down @ up^T`` of float [.., r] and [N, r].
      low_rank_parts: where ``up`` is block-diagonal, as in :class:`Epilogue`: a kernel then skips what is zero.
      activation_function: f: None, or "silu", "gelu" (by erf), "gelu_tanh", "relu".
      out_dtype: default: x's dtype if that is a float of 16 bits or more, else bfloat16.
      implementation: None chooses; "xla", "triton", "mosaic_gpu".

    Returns:
      [.., N].

    Raises:
      BlockShapeError, FormatError, ConfigError: arguments that do not fit.
      BackendUnsupported: a forced implementation that cannot run.

    MXINT8, as codes or as weights, is dequantized by XLA: no kernel reads it.

    Example:
      >>> q = mxjax.quantize_array(jnp.ones((8, 64)), "mxfp4")
      >>> from pallas_kernels.block_scaled_matmul import prepare
      >>> block_scaled_matmul(jnp.ones((2, 64), jnp.bfloat16), prepare(q.codes, q.scales, "mxfp4")).shape
      (2, 8)
    """
    fmt = None if x_format is None else get_format(x_format)
    x = jnp.asarray(x)
    if (fmt is None) != (x_scales is None) or (fmt is None) != (x.dtype != jnp.uint8):
        raise FormatError("quantized x is uint8 codes with x_scales and x_format; float x has neither")
    width = w.k if fmt is None else fmt.packed_size(w.k)
    if x.ndim == 0 or x.shape[-1] != width:
        raise BlockShapeError(f"x {x.shape} does not end in {width}, as a weight [{w.n}, {w.k}] takes it")
    if out_dtype is None:
        out_dtype = x.dtype if x.dtype in (jnp.bfloat16, jnp.float16, jnp.float32) else jnp.bfloat16
    out_dtype = jnp.dtype(out_dtype)
    lead = x.shape[:-1]
    x = x.reshape(-1, width)
    m = x.shape[0]
    if x_scales is not None:
        x_scales = x_scales.reshape(m, x_scales.shape[-1])  # not -1: there may be no rows
    if x_scale is not None:
        x_scale = x_scale.reshape(m).astype(jnp.float32)
    down, up = (None, None) if low_rank is None else low_rank
    down = None if down is None else down.reshape(m, down.shape[-1])
    epilogue = Epilogue(bias=bias, down=down, up=up, function=activation_function, parts=low_rank_parts)
    epilogue.check(m, w.n)
    product = Product(x, w, epilogue, out_dtype, backend.target(), x_scale, x_scales, fmt)
    y = _dispatch.pick("block_scaled_matmul", implementation, _candidates(product)).run()
    return y.reshape(*lead, w.n)


_matmul_xla = jax.jit(reference.matmul, static_argnums=(5, 6))


def _candidates(p: Product) -> list[_dispatch.Candidate]:
    """Every route for these arguments, best first; :mod:`routes` knows those of each layout."""
    m, w = p.m, p.w
    xla = partial(_matmul_xla, p.x, p.x_scales, p.x_scale, w, p.epilogue, p.x_format, p.out_dtype)
    if m == 0:
        p = p.unless("x has no rows")
    elif max(m * max(w.n, w.k), w.n * w.k) >= 2**31:
        p = p.unless(f"[{m}, {w.k}] x [{w.n}, {w.k}] is beyond the 32-bit offsets of the kernels")
    return [*_kernels(p), _dispatch.Candidate("xla", xla)]


def _kernels(p: Product) -> list[_dispatch.Candidate]:
    triton = p.unless(_dispatch.triton_obstacle(p.target))
    if p.w.layout == "rows":
        if p.x.dtype == jnp.float8_e4m3fn and p.w.format in PAIR_FORMATS:
            return [*of_rows(triton), _generic(triton)]
        return [_generic(triton), _native_fp4(p)]
    p = triton
    if p.x.dtype == jnp.float8_e4m3fnuz:
        p = p.unless("x is float8_e4m3fnuz, which goes with a weight in rows")
    if p.x_format is not None:
        p = p.unless(f"x is codes; a weight in {p.w.layout} takes the exact-FP8 pair (transform_quantize_fp8)")
    return of_tiles(p) if p.w.layout == "tiles" else of_fragments(p)


def _native_fp4(p: Product) -> _dispatch.Candidate:
    def run() -> jax.Array:
        assert p.x_scales is not None  # x is codes
        config = mosaic_fp4.fp4_config(p.w.n)
        part = partial(mosaic_fp4.fp4_matmul, p.x, p.x_scales, p.x_scale, p.w)
        return p.split(lambda bias, dtype: part(bias, dtype, config))

    obstacle = p.unless(mosaic_fp4.obstacle(p.x_format, p.w, p.target)).obstacle
    return _dispatch.Candidate("mosaic_gpu", run, obstacle, "nobody has measured it")


def _generic(p: Product) -> _dispatch.Candidate:
    x, w, fmt = p.x, p.w, p.x_format
    native = native_pair(fmt, w.format, p.target)
    config = generic_config(p.m, w, fmt or x.dtype, native, p.target)
    args = (x, p.x_scales, p.x_scale, w, p.epilogue, fmt, p.out_dtype, config)
    return _dispatch.Candidate(
        "triton",
        partial(triton_generic.generic, *args, native=native),
        p.unless(rows_obstacle(x, fmt, w.format, p.target)).obstacle,
        f"{p.m} rows: XLA's dequantize and product is faster"
        if p.m > GENERIC_ROWS and not native and x.dtype != jnp.float8_e4m3fnuz
        else None,
    )


def generic_config(
    m: int, w: PackedWeight, x: BlockFormat | Any, native: bool, target: backend.Target
) -> triton_generic.GenericConfig:
    """Tuned for this device, shape and number of rows, or the heuristic's, for weights in "rows".

    ``x`` is the format or the dtype of the other operand.
    """
    operation = f"matmul_{x}_{w.format}" + ("_native" if native else "")
    tuned = _tuning.lookup(operation, triton_generic.GenericConfig, target.name, m, w.n, w.k)
    return tuned or triton_generic.generic_config(m, w.n, native)


def rows_obstacle(x: jax.Array, fmt: BlockFormat | None, w_format: BlockFormat, target: backend.Target) -> str | None:
    """Why the kernels for weights in "rows" cannot take these operands, or None."""
    for f in (fmt, w_format):
        if f is not None and f.element.twos_complement:
            return f"{f} is not decoded by the kernels; XLA dequantizes it"
    if fmt is None and x.dtype in triton_generic.FP8_DTYPES:
        feature = "fp8_fnuz_matmul" if x.dtype == jnp.float8_e4m3fnuz else "fp8_matmul"
        if w_format not in PAIR_FORMATS:
            return f"the exact-FP8 pair goes with weights of {', '.join(map(str, PAIR_FORMATS))}, not {w_format}"
        if not backend.has(feature, target):
            return f"{target.name} has no {x.dtype.name.removeprefix('float8_')} arithmetic"
    return None


def native_pair(x_format: BlockFormat | None, w_format: BlockFormat, target: backend.Target) -> bool:
    """Whether the matrix units of the target multiply the two formats as they are."""
    if x_format is None or not backend.has("fp4_matmul", target):
        return False
    return all(f.scale == "e8m0" and f.element.name in ("e2m1", "e4m3", "e5m2") for f in (x_format, w_format))
