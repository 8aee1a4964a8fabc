"""Quantized weights and products with them. The only importer of ``pallas_kernels``."""

from mxjax.ops.kernels import KernelWeight as KernelWeight
from mxjax.ops.kernels import kernels_used as kernels_used
from mxjax.ops.kernels import prepare_kernels as prepare_kernels
from mxjax.ops.low_rank import LowRank as LowRank
from mxjax.ops.product import quantize_input as quantize_input
from mxjax.ops.qdot import qdot as qdot
from mxjax.ops.qdot import qeinsum as qeinsum
from mxjax.ops.qweight import ActivationFormat as ActivationFormat
from mxjax.ops.qweight import QWeight as QWeight
from mxjax.ops.qweight import is_quantized as is_quantized
from mxjax.ops.shard_weight import shard_weight as shard_weight
from mxjax.ops.sharded import ShardedWeight as ShardedWeight
