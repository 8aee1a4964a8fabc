"""Products of rows sorted by expert with a stack of block-scaled weights (mixture of experts)."""

from pallas_kernels.grouped_matmul.api import expert_stack as expert_stack
from pallas_kernels.grouped_matmul.api import grouped_matmul as grouped_matmul
