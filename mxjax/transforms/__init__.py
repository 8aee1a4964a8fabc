"""Invertible maps on the contraction axis that make weights and activations easier to quantize."""

from mxjax.transforms.awq import Awq as Awq
from mxjax.transforms.base import Chain as Chain
from mxjax.transforms.base import Rounding as Rounding
from mxjax.transforms.base import Transform as Transform
from mxjax.transforms.base import TransformFitter as TransformFitter
from mxjax.transforms.base import describe as describe
from mxjax.transforms.base import fit as fit
from mxjax.transforms.base import needs_fit as needs_fit
from mxjax.transforms.block_matrix import BlockMatrix as BlockMatrix
from mxjax.transforms.block_matrix import Wush as Wush
from mxjax.transforms.branch_smooth import BranchSmooth as BranchSmooth
from mxjax.transforms.choose import Choose as Choose
from mxjax.transforms.hadamard import Hadamard as Hadamard
from mxjax.transforms.hadamard import hadamard_matrix as hadamard_matrix
from mxjax.transforms.kronecker import Kronecker as Kronecker
from mxjax.transforms.kroquant import KroQuant as KroQuant
from mxjax.transforms.smooth import ChannelScale as ChannelScale
from mxjax.transforms.smooth import SmoothQuant as SmoothQuant
