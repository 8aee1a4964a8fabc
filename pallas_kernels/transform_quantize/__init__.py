"""x -> optional transform -> block-scaled codes and scales, or the exact-FP8 pair, in one pass over x."""

from pallas_kernels.transform_quantize.api import kronecker_matrix as kronecker_matrix
from pallas_kernels.transform_quantize.api import transform_quantize as transform_quantize
from pallas_kernels.transform_quantize.api import transform_quantize_fp8 as transform_quantize_fp8
from pallas_kernels.transform_quantize.reference import Transform as Transform
