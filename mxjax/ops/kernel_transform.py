"""Which transforms of the library run inside the kernel that quantizes x, and as what."""

from __future__ import annotations

from mxjax.transforms import BlockMatrix, ChannelScale, Hadamard, Kronecker
from mxjax.transforms.base import Chain, Transform
from pallas_kernels.transform_quantize import Transform as KernelTransform
from pallas_kernels.transform_quantize import kronecker_matrix
from pallas_kernels.transform_quantize.reference import HADAMARD_SIZES, MATRIX_SIZE


def kernel_transform(transform: Transform | None) -> KernelTransform | None:
    """The kernels' form of ``transform``; None where it has none and runs in XLA before them.

    A channel scale, then a Hadamard matrix, Kronecker factors or 32 x 32 blocks: each alone, or both as a Chain.
    Scales of Kronecker blocks go into factors of each block's own, which cost the kernel no more than shared ones.
    """
    scale: ChannelScale | None = None
    parts = transform.parts if isinstance(transform, Chain) else () if transform is None else (transform,)
    if parts and isinstance(parts[0], ChannelScale):
        scale, parts = parts[0], parts[1:]
    if len(parts) > 1:
        return None
    channel = None if scale is None else 1.0 / scale.scale
    if not parts:
        return KernelTransform(channel_scale=channel)
    (part,) = parts
    if isinstance(part, Hadamard) and part.size in HADAMARD_SIZES:
        return KernelTransform(channel_scale=channel, hadamard=part.size)
    if isinstance(part, Kronecker) and part.block == MATRIX_SIZE:
        part = part.without_scales()
        if part.left.shape[0] == part.right.shape[0] == 1:  # one matrix for all: the matrix units take it
            return KernelTransform(channel_scale=channel, matrix=kronecker_matrix(part.left[0], part.right[0]))
        return KernelTransform(channel_scale=channel, left=part.left, right=part.right)
    if isinstance(part, BlockMatrix) and part.matrices.shape[-1] == MATRIX_SIZE:
        return KernelTransform(channel_scale=channel, matrix=part.matrices)
    return None
