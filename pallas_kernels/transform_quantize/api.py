"""transform_quantize and transform_quantize_fp8: arguments, checks, and the choice of an implementation."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from mxjax import backend
from mxjax.core.formats import MXFP4, BlockFormat, get_format
from mxjax.core.scales import DEFAULT_POLICY, check_policy
from mxjax.errors import BlockShapeError, FormatError
from pallas_kernels import _dispatch
from pallas_kernels.transform_quantize import mosaic_gpu, mosaic_kronecker, reference, triton
from pallas_kernels.transform_quantize.pair import pair_of_codes
from pallas_kernels.transform_quantize.reference import Transform

NONE = Transform()


def kronecker_matrix(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a (x) b`` as the 32 x 32 matrix that a kernel takes: block value i*len(b)+j meets ``a[i, .] * b[j, .]``.

    Raises:
      BlockShapeError: square factors whose sizes do not multiply to 32.

    Source: KroQuant's block transform.
    """
    m = jnp.kron(a.astype(jnp.float32), b.astype(jnp.float32))
    if m.shape != (reference.MATRIX_SIZE, reference.MATRIX_SIZE):
        raise BlockShapeError(f"Kronecker factors {a.shape} and {b.shape} make {m.shape}, not a 32 x 32 matrix")
    return m


def transform_quantize(
    x: jax.Array,
    fmt: str | BlockFormat,
    *,
    policy: str = DEFAULT_POLICY,
    transform: Transform = NONE,
    tensor_scale: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Transform x and quantize it in blocks along its last axis, in one pass (MXFP6 and MXINT8: by XLA).

    ``y = (x * channel_scale) T`` in float32, then ``code = RNE(y / scale)`` with one scale a block; see
    :mod:`mxjax.core.scales` for the policies. Every implementation returns the same bytes for the same ``y``; the sums
    of a transform are float32, in an order of the implementation's own. No code depends on a division, whose last bits
    do depend on the compiler (:func:`mxjax.core.codec.encode_quotient`).

    Args:
      x: [.., K] bfloat16, float16 or float32.
      fmt: any format of ``mxjax.FORMATS``.
      policy: scale policy. Under "third" the dequantized values are to be multiplied by 1/3 (its global scale).
      transform: what to do before; nothing by default.
      tensor_scale: float32 [..], NVFP4's scale of each row (required there, not taken elsewhere).
      implementation: None chooses; "xla", "triton".

    Returns:
      uint8 codes [.., K * bits / 8] (4 bit: low nibble first) and uint8 scale bytes [.., K / block]. A block with NaN
      or Inf has scale byte 255 and codes 0.

    Raises:
      FormatError, BlockShapeError, ConfigError: arguments that do not fit.
      BackendUnsupported: a forced implementation that cannot run.

    Example:
      >>> codes, scales = transform_quantize(jnp.ones((2, 64)), "mxfp4", transform=Transform(hadamard=32))
      >>> codes.shape, scales.shape
      ((2, 32), (2, 2))
    """
    fmt = get_format(fmt)
    x = check(x, fmt, policy, transform, tensor_scale)
    target = backend.target()
    args = (x, transform.dense(x.shape[-1]), tensor_scale, fmt, policy)
    rounding = "casts" if target.sm >= 89 else "floats"
    chosen = _dispatch.pick(
        "transform_quantize",
        implementation,
        [
            _dispatch.Candidate(
                "triton",
                partial(triton.quantize, *args, rounding=rounding),
                obstacle_of(target, x, fmt, policy, transform),
            ),
            _dispatch.Candidate("xla", partial(_quantize_xla, *args)),
        ],
    )
    return chosen.run()


def transform_quantize_fp8(
    x: jax.Array,
    *,
    fmt: str | BlockFormat = MXFP4,
    policy: str = DEFAULT_POLICY,
    transform: Transform = NONE,
    dtype: Any = jnp.float8_e4m3fn,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Transform x, quantize it, and return the quantized values as float8: ``values * row_scale[.., None]``.

    An E2M1 value times a power of two is an E4M3 number, so a row becomes e4m3 times one power of two without any
    error, unless its block scales spread over more than 15 binades: values of blocks below that are rounded to e4m3,
    an error under 2**-15 of the row's largest value. MXFP6's elements are E4M3 numbers too, over 12 (E2M3) and 10
    binades (E3M2). A row with NaN or Inf has row scale NaN; its values mean nothing.

    Args, raises: as :func:`transform_quantize`, for MXFP4 and MXFP6; ``dtype`` is float8_e4m3fn; or float8_e4m3fnuz,
      which gfx942 multiplies, the same bytes for half the value; or bfloat16, which is exact down to 100 binades and
      what a product with bfloat16 operands takes.

    Returns:
      values [.., K] of ``dtype`` and float32 row scales [..] (under "third" the factor 1/3 is in them).
    """
    fmt = get_format(fmt)
    if fmt not in reference.PAIR_FORMATS:
        raise FormatError(f"the exact-FP8 pair holds {', '.join(map(str, reference.PAIR_FORMATS))}, not {fmt}")
    check_policy(policy, fmt)
    x = _check(x, fmt, transform)
    target = backend.target()
    obstacle = obstacle_of(target, x, MXFP4, policy, transform)  # whatever the format: it is not packed here
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.float8_e4m3fn, jnp.float8_e4m3fnuz, jnp.bfloat16):
        raise FormatError(f"the pair's values are float8_e4m3fn, float8_e4m3fnuz or bfloat16, not {dtype}")
    feature = {"float8_e4m3fn": "fp8_matmul", "float8_e4m3fnuz": "fp8_fnuz_matmul"}.get(dtype.name)
    if obstacle is None and feature is not None and not backend.has(feature, target):
        obstacle = f"{target.name} has no {dtype.name.removeprefix('float8_')} arithmetic"
    common = obstacle
    passes = obstacle if transform.per_block else "one pass does it"
    if dtype == jnp.float8_e4m3fnuz or fmt != MXFP4:
        passes = passes or "the second pass writes MXFP4 as float8_e4m3fn or bfloat16"
    if obstacle is None and transform.per_block:
        obstacle = "one matrix a block needs column tiles, the row maximum needs whole rows"
    if obstacle is None and x.shape[-1] > triton.MAX_ROW:
        obstacle = f"a row of {x.shape[-1]} values does not stay in registers (at most {triton.MAX_ROW})"
    k, rounding = x.shape[-1], "casts" if target.sm >= 89 else "floats"
    hopper = common or _dispatch.mosaic_obstacle(target, "wgmma")
    registers = hopper or mosaic_gpu.obstacle(x, transform, policy, dtype)
    kronecker = hopper or mosaic_kronecker.obstacle(x, transform, policy, dtype)
    config = mosaic_gpu.row_config(x.size // max(k, 1), k, transform, target.cores)
    chosen = _dispatch.pick(
        "transform_quantize_fp8",
        implementation,
        [
            _dispatch.Candidate(
                "mosaic_gpu",
                partial(mosaic_gpu.quantize_fp8, x, transform, policy, config, target.cores, fmt),
                registers,
            ),
            _dispatch.Candidate(
                "mosaic_gpu", partial(mosaic_kronecker.quantize_fp8, x, transform, policy, target.cores, fmt), kronecker
            ),
            _dispatch.Candidate("triton", partial(triton.quantize_fp8, x, transform, policy, dtype, fmt), obstacle),
            _dispatch.Candidate("triton", partial(_two_passes, x, transform.dense(k), policy, dtype, rounding), passes),
            _dispatch.Candidate("xla", partial(_quantize_fp8_xla, x, transform, policy, dtype, fmt)),
        ],
    )
    return chosen.run()


def _two_passes(x: jax.Array, t: Transform, policy: str, dtype: Any, rounding: str) -> tuple[jax.Array, jax.Array]:
    """Codes, then the pair of them: for one matrix a block."""
    values, scale = pair_of_codes(*triton.quantize(x, t, None, MXFP4, policy, rounding=rounding), dtype)
    return values, scale * jnp.float32(1 / 3) if policy == "third" else scale


_quantize_xla = jax.jit(reference.quantize, static_argnums=(3, 4))
_quantize_fp8_xla = jax.jit(reference.quantize_fp8, static_argnums=(2, 3, 4))


def check(
    x: jax.Array, fmt: BlockFormat, policy: str, transform: Transform, tensor_scale: jax.Array | None
) -> jax.Array:
    """x as an array, after the checks of :func:`transform_quantize`."""
    check_policy(policy, fmt)
    x = _check(x, fmt, transform)
    if fmt.has_tensor_scale != (tensor_scale is not None):
        raise FormatError(f"transform_quantize: tensor_scale is for nvfp4, and required there; the format is {fmt}")
    if tensor_scale is not None and tensor_scale.shape != x.shape[:-1]:
        raise BlockShapeError(f"tensor_scale {tensor_scale.shape} is not one a row of x {x.shape}")
    return x


def _check(x: jax.Array, fmt: BlockFormat, transform: Transform) -> jax.Array:
    x = jnp.asarray(x)
    if x.ndim == 0 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise FormatError(f"transform_quantize takes a float array [.., K], not {x.dtype} {x.shape}")
    if x.shape[-1] % fmt.block_size:
        raise BlockShapeError(f"the {fmt} block of {fmt.block_size} does not divide the last axis of x {x.shape}")
    transform.check(x.shape[-1])
    return x


def obstacle_of(target: backend.Target, x: jax.Array, fmt: BlockFormat, policy: str, t: Transform) -> str | None:
    """Why the Triton kernels cannot do it, or None."""
    if policy not in triton.POLICIES:
        return f"scale policy {policy!r} compares errors; the kernels know {', '.join(triton.POLICIES)}"
    if fmt.element.bits not in (4, 8) or fmt.element.twos_complement:
        return f"{fmt} is not packed by the kernels (mxfp4, mxfp8_e4m3, mxfp8_e5m2, nvfp4 are)"
    if x.size == 0:
        return "x is empty"
    if x.size >= 2**31:
        return f"{x.size} values are beyond the 32-bit offsets of Pallas Triton"
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"x is {x.dtype}"
    return _dispatch.triton_obstacle(target)
