"""Products with block-scaled weights: W4A16, W4A4 and the mixed pairs."""

from pallas_kernels.block_scaled_matmul.api import block_scaled_matmul as block_scaled_matmul
from pallas_kernels.block_scaled_matmul.epilogue import FUNCTIONS as FUNCTIONS
from pallas_kernels.block_scaled_matmul.epilogue import Epilogue as Epilogue
from pallas_kernels.block_scaled_matmul.layout import PackedWeight as PackedWeight
from pallas_kernels.block_scaled_matmul.layout import inexact_blocks as inexact_blocks
from pallas_kernels.block_scaled_matmul.pack import default_layout as default_layout
from pallas_kernels.block_scaled_matmul.pack import prepare as prepare
