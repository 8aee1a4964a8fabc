"""Arrays to QTensor and back: ``quantize_array``, ``fake_quantize``."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.core import codec, packing, scales
from mxjax.core.formats import E4M3, E8M0_BIAS, NAN_BYTE, BlockFormat, get_format
from mxjax.core.qtensor import QTensor, dequantize_blocks
from mxjax.errors import BlockShapeError, FormatError, NonFiniteError

NONFINITE_POLICIES = ("raise", "nan", "saturate")


def quantize_array(
    x: jax.Array,
    fmt: str | BlockFormat,
    axis: int = -1,
    scale: str = scales.DEFAULT_POLICY,
    on_nonfinite: str = "raise",
    *,
    on_uneven: str = "error",
    batch_axes: int = 0,
    global_scale: jax.Array | None = None,
    axis_name: str | tuple[str, ...] = (),
    path: str = "x",
) -> QTensor:
    """Quantize an array in blocks along one axis.

    ``code = RNE(x / (scale * global_scale))`` with the block scale chosen by the policy ``scale`` (see
    :mod:`mxjax.core.scales`). An all-zero block has scale byte 0 and codes 0. No finite input yields NaN.

    Args:
      x: float array of any shape; computed in float32 (bfloat16 and float16 are exact in it).
      fmt: "mxfp4", "nvfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2", "mxint8", or a BlockFormat.
      axis: the contraction axis: blocks run along it.
      scale: "even" (default), "floor", "ceil", "rceil", "mse", "third" (mxfp4), "four_over_six" (nvfp4).
      on_nonfinite: what NaN and Inf do. "raise": an error on concrete arrays; inside a transformation, where values
        are unknown, the same as "nan". "nan": their block gets scale byte 255 and dequantizes to NaN. "saturate": as
        ``jnp.nan_to_num`` first (NaN to 0, Inf to the largest float32).
      on_uneven: "error", or "pad" with zeros, when the block does not divide the axis.
      batch_axes: that many leading axes each get tensor scales of their own (NVFP4): 1 for [expert, out, in].
      global_scale: a given float32 tensor scale, shape ``x.shape[:batch_axes]``, in place of the computed one; for
        formats without one it is an extra multiplier.
      axis_name: inside ``shard_map``, the mesh axes over which one tensor is spread: a computed tensor scale (NVFP4) is
        that of all its shards. Shards hold whole blocks.
      path: name of the array in error messages.

    Returns:
      A :class:`~mxjax.core.qtensor.QTensor`.

    Raises:
      FormatError: unknown format or policy, a pair that does not fit, a dtype that is not float, or a given
        global_scale that is not positive and finite.
      BlockShapeError: the block does not divide the axis.
      NonFiniteError: NaN or Inf under "raise".

    Example:
      >>> q = quantize_array(jnp.arange(64.0).reshape(2, 32), "mxfp4")
      >>> q.codes.shape, q.scales.tolist()
      ((2, 16), [[130], [131]])
    """
    fmt = get_format(fmt)
    scales.check_policy(scale, fmt)
    if on_nonfinite not in NONFINITE_POLICIES:
        raise FormatError(f"on_nonfinite is one of {NONFINITE_POLICIES}, not {on_nonfinite!r}")
    if on_uneven not in ("error", "pad"):
        raise FormatError(f"on_uneven is 'error' or 'pad' for one array, not {on_uneven!r}")
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise FormatError(f"{path}: only float arrays can be quantized, not {x.dtype} {x.shape}")
    if x.ndim == 0:
        raise BlockShapeError(f"{path}: a scalar has no axis to quantize along")
    if not -x.ndim <= axis < x.ndim:
        raise BlockShapeError(f"{path}: axis {axis} is outside shape {x.shape}")
    axis = axis % x.ndim - x.ndim
    if not 0 <= batch_axes <= x.ndim + axis:
        raise BlockShapeError(f"{path}: {batch_axes} batch axes do not lie before axis {axis} of shape {x.shape}")
    if x.shape[axis] % fmt.block_size and on_uneven == "error":
        raise BlockShapeError(
            f"{path}: axis {axis} of shape {x.shape} is no multiple of the {fmt} block of {fmt.block_size}; "
            f"pass on_uneven='pad', or leave this array unquantized"
        )
    if global_scale is not None:
        global_scale = jnp.asarray(global_scale, jnp.float32)
        if global_scale.shape != x.shape[:batch_axes]:
            raise BlockShapeError(
                f"{path}: global_scale {global_scale.shape} is not one scale for each of the {batch_axes} batch axes "
                f"of {x.shape}"
            )
        if (
            not isinstance(global_scale, jax.core.Tracer)
            and not ((global_scale > 0) & jnp.isfinite(global_scale)).all()
        ):
            raise FormatError(f"{path}: global_scale is positive and finite, not {global_scale}")
    options = dict(fmt=fmt, axis=axis, policy=scale, batch_axes=batch_axes, axis_name=axis_name)
    q, nonfinite = _quantize(x, global_scale, saturate=on_nonfinite == "saturate", **options)
    if on_nonfinite == "raise" and not isinstance(nonfinite, jax.core.Tracer) and nonfinite:
        count = int(jnp.sum(~jnp.isfinite(x.astype(jnp.float32))))
        raise NonFiniteError(
            f"{path}: {count} of {x.size} values are NaN or Inf (shape {x.shape}), as float32; "
            f"on_nonfinite='nan' marks their blocks, 'saturate' clamps them"
        )
    return q


@partial(jax.jit, static_argnames=("fmt", "axis", "policy", "batch_axes", "axis_name", "saturate"))
def _quantize(
    x: jax.Array,
    global_scale: jax.Array | None,
    *,
    fmt: BlockFormat,
    axis: int,
    policy: str,
    batch_axes: int,
    axis_name: str | tuple[str, ...],
    saturate: bool,
) -> tuple[QTensor, jax.Array]:
    """The QTensor, and whether any value was NaN or Inf. One compilation a distinct shape.

    Blocks stay where they are in ``x``; only the packed result, an eighth of the bytes, is transposed.
    """
    dtype_name, size = x.dtype.name, x.shape[axis]
    x = x.astype(jnp.float32)
    if saturate:
        x = jnp.nan_to_num(x)
    if pad := -size % fmt.block_size:
        x = jnp.pad(x, [(0, pad if i == x.ndim + axis else 0) for i in range(x.ndim)])
    at = x.ndim + axis
    blocks = x.reshape(*x.shape[:at], x.shape[at] // fmt.block_size, fmt.block_size, *x.shape[at + 1 :])
    if axis_name and global_scale is None and fmt.has_tensor_scale:
        global_scale = tensor_scale_of(blocks, policy, batch_axes, axis, axis_name)
    codes, scale_bytes, global_scale = quantize_blocks(blocks, fmt, policy, batch_axes, global_scale, axis=axis)
    codes, bits = codes.reshape(x.shape), fmt.element.bits
    if axis == -1 or bits == 6:
        codes = packing.pack(jnp.moveaxis(codes, axis, -1), bits)
    else:
        codes = packing.bytes_of_words(packing.pack_words(codes, bits, axis))
    q = QTensor(
        codes=codes,
        scales=jnp.moveaxis(scale_bytes, axis, -1),
        global_scale=global_scale,
        format=fmt,
        axis=axis,
        size=size,
        dtype_name=dtype_name,
    )
    return q, jnp.any(scale_bytes == NAN_BYTE)


def quantize_blocks(
    blocks: jax.Array,
    fmt: BlockFormat,
    policy: str = scales.DEFAULT_POLICY,
    batch_axes: int = 0,
    global_scale: jax.Array | None = None,
    axis: int = -1,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Codes, scale bytes and global scale of blocks whose elements lie on one axis of their own.

    Args:
      blocks: float32 [*lead, blocks, block_size, *trail].
      fmt: block format.
      policy: scale policy.
      batch_axes: leading axes with a tensor scale each.
      global_scale: given tensor scale, float32 ``lead[:batch_axes]``, or None.
      axis: the axis of length block_size, negative.

    Returns:
      uint8 codes of ``blocks``' shape (one a byte), uint8 scales [*lead, blocks, *trail], global scale or None. Blocks
      with NaN or Inf have scale byte 255 and codes 0.
    """
    amax_bits, bad = _finite_amax(blocks, axis)
    quantizer = _quantize_e4m3 if fmt.scale == "e4m3" else _quantize_e8m0
    codes, byte, global_scale = quantizer(blocks, amax_bits, fmt, policy, batch_axes, global_scale, axis)
    # A mask, since XLA's CPU code turns a select by block into a branch by element. It drops the sign of -0, too.
    keep = jnp.where(amax_bits == 0, 0, 255).astype(jnp.uint8)
    byte = jnp.where(bad, NAN_BYTE, jnp.where(amax_bits == 0, 0, byte)).astype(jnp.uint8)
    return codes & jnp.expand_dims(keep, axis), byte, global_scale


def tensor_scale_of(
    blocks: jax.Array, policy: str, batch_axes: int, axis: int, axis_name: str | tuple[str, ...] = ()
) -> jax.Array:
    """NVFP4's tensor scales of blocks that may be spread over mesh axes (inside ``shard_map``): float32
    ``lead[:batch_axes]``. A maximum does not depend on the order, so it is the same number as on one device."""
    return _tensor_scale(_finite_amax(blocks, axis)[0], policy, batch_axes, axis_name)


def _tensor_scale(
    amax_bits: jax.Array, policy: str, batch_axes: int, axis_name: str | tuple[str, ...] = ()
) -> jax.Array:
    tensor_amax = jnp.max(amax_bits, axis=tuple(range(batch_axes, amax_bits.ndim)), initial=0)
    if axis_name:
        tensor_amax = lax.pmax(tensor_amax, axis_name)
    return scales.tensor_scale(tensor_amax, policy)


def _finite_amax(blocks: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Bits of the largest magnitude of each block, 0 where it has NaN or Inf, and where it has."""
    amax_bits = _block_amax(blocks, axis)
    bad = amax_bits >= codec.INF_BITS
    return jnp.where(bad, 0, amax_bits), bad


def _block_amax(blocks: jax.Array, axis: int) -> jax.Array:
    """Bits of the largest magnitude along ``axis``: as integers subnormals count, and NaN sorts above Inf."""
    magnitude = codec.bits_of(blocks) & codec.MAGNITUDE_MASK
    while axis == -1 and magnitude.shape[-1] % 2 == 0 and magnitude.shape[-1] > 4:
        # XLA's CPU backend vectorizes halving by elementwise maxima, but no reduction of the innermost axis.
        half = magnitude.shape[-1] // 2
        magnitude = jnp.maximum(magnitude[..., :half], magnitude[..., half:])
    return jnp.max(magnitude, axis=axis, initial=0)


def _quantize_e8m0(
    blocks: jax.Array,
    amax_bits: jax.Array,
    fmt: BlockFormat,
    policy: str,
    batch_axes: int,
    global_scale: jax.Array | None,
    axis: int,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    exponent: jax.Array | int = 0  # what is rounded below are blocks * 2**exponent
    if global_scale is not None:
        # x / global_scale may be subnormal, so each block is divided at the exponent 0 of its largest magnitude.
        global_exponent, significand = _split_global(global_scale, amax_bits.ndim)
        amax_exponent = jnp.where(amax_bits == 0, 0, codec.split(amax_bits)[0])
        blocks = scales.scale_by_power(blocks, -jnp.expand_dims(amax_exponent, axis))
        blocks = blocks / jnp.expand_dims(significand, axis)
        amax_bits = _block_amax(blocks, axis)
        exponent = amax_exponent - global_exponent
    if policy == "mse":
        byte = scales.mse_bytes(blocks, amax_bits, fmt.element, exponent, axis)
    else:
        byte = scales.e8m0_bytes(amax_bits, fmt.element, policy, exponent)
    shift = jnp.expand_dims(byte - E8M0_BIAS - exponent, axis)
    if policy != "third":
        return codec.encode(blocks, fmt.element, shift), byte, global_scale
    # x / (2**E / 3): three times a number of [1, 2) at the most, so nothing overflows.
    third = jnp.full(blocks.shape[:batch_axes], 1 / 3, jnp.float32)
    codes = codec.encode(3.0 * scales.scale_by_power(blocks, -shift), fmt.element)
    return codes, byte, third if global_scale is None else third * global_scale


def _quantize_e4m3(
    blocks: jax.Array,
    amax_bits: jax.Array,
    fmt: BlockFormat,
    policy: str,
    batch_axes: int,
    global_scale: jax.Array | None,
    axis: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    if global_scale is None:
        global_scale = _tensor_scale(amax_bits, policy, batch_axes)
    exponent, significand = _split_global(global_scale, amax_bits.ndim)
    amax = scales.scale_by_power(codec.float_of(amax_bits), -exponent)
    blocks = scales.scale_by_power(blocks, -jnp.expand_dims(exponent, axis))
    unit = blocks / jnp.expand_dims(significand, axis) if policy in scales.BY_ERROR else None
    byte = scales.e4m3_bytes(unit, amax, significand, fmt, policy, axis)
    scale, significand = (jnp.expand_dims(a, axis) for a in (codec.decode(byte, E4M3), significand))
    return codec.encode_quotient(blocks, scale, significand, fmt.element), byte, global_scale


def _split_global(global_scale: jax.Array, ndim: int) -> tuple[jax.Array, jax.Array]:
    """Exponent and significand in [1, 2) of a positive float32 scale, broadcastable against rank ``ndim``."""
    g = global_scale.astype(jnp.float32)
    exponent, significand = codec.split(codec.bits_of(g.reshape(g.shape + (1,) * (ndim - g.ndim))))
    return exponent, codec.unit_of(significand)


def fake_quantize(
    x: jax.Array,
    fmt: str | BlockFormat,
    axis: int = -1,
    scale: str = scales.DEFAULT_POLICY,
    on_nonfinite: str = "nan",
    *,
    batch_axes: int = 0,
    global_scale: jax.Array | None = None,
) -> jax.Array:
    """Quantize and dequantize in one step: the values a quantized array would have, in x's own dtype.

    The gradient is straight-through: ``d fake_quantize(x) / dx = 1``. The contraction axis may have any length: a last
    partial block is quantized as if padded with zeros.

    Args:
      x, fmt, axis, scale, on_nonfinite, batch_axes, global_scale: as in :func:`quantize_array`; NaN and Inf poison
        their block by default.

    Example:
      >>> fake_quantize(jnp.array([0.3, 1.2, 5.1, 6.0]), "mxfp4").tolist()
      [0.5, 1.0, 6.0, 6.0]
    """
    options = (get_format(fmt), axis, scale, on_nonfinite, batch_axes)
    return _straight_through(options, jnp.asarray(x), global_scale)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _straight_through(options: tuple, x: jax.Array, global_scale: jax.Array | None) -> jax.Array:
    fmt, axis, scale, on_nonfinite, batch_axes = options
    q = quantize_array(
        x, fmt, axis, scale, on_nonfinite, on_uneven="pad", batch_axes=batch_axes, global_scale=global_scale
    )
    return q.dequantize(x.dtype)


@_straight_through.defjvp
def _straight_through_jvp(options: tuple, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    return _straight_through(options, *primals), tangents[0]


__all__ = ["QTensor", "dequantize_blocks", "fake_quantize", "quantize_array", "quantize_blocks"]
