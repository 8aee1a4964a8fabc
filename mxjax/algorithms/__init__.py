"""Quantization algorithms by name: one file, one paper."""

from mxjax.algorithms.base import Algorithm as Algorithm
from mxjax.algorithms.base import WeightSpec as WeightSpec
from mxjax.algorithms.gptq import gptq as gptq
from mxjax.algorithms.rtn import rtn as rtn

ALGORITHMS: dict[str, Algorithm] = {"rtn": rtn, "gptq": gptq}
