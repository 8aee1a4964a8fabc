"""Packing a stored weight into the layout that the kernels of this machine read."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mxjax import backend
from mxjax.core.formats import MXFP4, BlockFormat, get_format
from mxjax.errors import BlockShapeError, FormatError
from pallas_kernels.block_scaled_matmul import fragments
from pallas_kernels.block_scaled_matmul.layout import LAYOUTS, PackedWeight, tiles
from pallas_kernels.transform_quantize.reference import PAIR_FORMATS


def default_layout(
    fmt: BlockFormat, target: backend.Target | None = None, activation: BlockFormat | None = None
) -> str:
    """The layout that the target's kernels read for a weight of ``fmt`` and inputs of format ``activation``.

    For MXFP4 on Hopper "fp8_fragments" if x is MXFP4 or MXFP6 (the exact-FP8 pair), else "bf16_fragments"; "tiles" on
    other NVIDIA GPUs without FP4 units; else "rows".
    """
    target = backend.target() if target is None else target
    if fmt != MXFP4 or not backend.has("ptx", target) or backend.has("fp4_matmul", target):
        return "rows"
    if not backend.has("wgmma", target):
        return "tiles"
    return "fp8_fragments" if activation in PAIR_FORMATS else "bf16_fragments"


def prepare(
    codes: jax.Array,
    scales: jax.Array,
    fmt: str | BlockFormat,
    tensor_scale: jax.Array | None = None,
    *,
    layout: str | None = None,
    activation: BlockFormat | None = None,
) -> PackedWeight:
    """Pack a weight for the kernels of this machine. Once a weight; not for the inner loop.

    Args:
      codes: uint8 [N, K * bits / 8], as :func:`mxjax.quantize_array` stores them.
      scales: uint8 [N, K / block].
      fmt: their format.
      tensor_scale: float32 scalar, [1] or [N] multiplier, or None.
      layout: "rows" or, for mxfp4, "tiles", "fp8_fragments", "bf16_fragments"; None: what :func:`default_layout` says.
      activation: the format that x will have, which decides between the fragments.

    Raises:
      BlockShapeError: shapes that contradict each other.
      FormatError: an unknown layout, or one that the format does not have.

    Example:
      >>> q = mxjax.quantize_array(jnp.ones((8, 256)), "mxfp4")
      >>> prepare(q.codes, q.scales, "mxfp4", layout="tiles").codes.shape
      (2, 128, 64)
    """
    fmt = get_format(fmt)
    layout = default_layout(fmt, activation=activation) if layout is None else layout
    if layout not in LAYOUTS or (layout != "rows" and fmt != MXFP4):
        raise FormatError(f"{fmt} has no layout {layout!r}: 'rows' for every format, the others for mxfp4")
    if codes.ndim != 2 or scales.ndim != 2:
        raise BlockShapeError(f"a weight is [N, K]; codes are {codes.shape}, scales {scales.shape}")
    n, k = scales.shape[0], scales.shape[1] * fmt.block_size
    if codes.shape != (n, fmt.packed_size(k)):
        raise BlockShapeError(f"codes {codes.shape} do not fit scales {scales.shape} of {fmt}")
    factor = None
    if tensor_scale is not None:
        factor = jnp.broadcast_to(jnp.asarray(tensor_scale, jnp.float32).reshape(-1), (n,))
    if layout == "rows":
        return PackedWeight(codes=codes, scales=scales, row_scale=factor, format=fmt, layout=layout, n=n, k=k)
    if layout != "tiles":
        words, row_scale = fragments.pack(codes, scales, factor, fp8=layout == "fp8_fragments")
        return PackedWeight(codes=words, scales=None, row_scale=row_scale, format=fmt, layout=layout, n=n, k=k)
    packed, relative, row_scale = tiles(codes, scales, factor)
    return PackedWeight(codes=packed, scales=relative, row_scale=row_scale, format=fmt, layout=layout, n=n, k=k)
