"""Invertible maps on the contraction axis that make weights and activations easier to quantize."""

from mxjax.transforms.base import Chain as Chain
from mxjax.transforms.base import Transform as Transform
from mxjax.transforms.hadamard import Hadamard as Hadamard
from mxjax.transforms.hadamard import hadamard_matrix as hadamard_matrix
