"""x -> optional transform -> block-scaled codes and scales, or the exact-FP8 pair, in one pass over x."""

from pallas_kernels.transform_quantize.api import kronecker_matrix as kronecker_matrix
from pallas_kernels.transform_quantize.api import transform_quantize as transform_quantize
from pallas_kernels.transform_quantize.api import transform_quantize_fp8 as transform_quantize_fp8
from pallas_kernels.transform_quantize.branch import quantized_down_projection as quantized_down_projection
from pallas_kernels.transform_quantize.low_rank import down_projection as down_projection
from pallas_kernels.transform_quantize.low_rank import transform_quantize_low_rank as transform_quantize_low_rank
from pallas_kernels.transform_quantize.reference import Transform as Transform
