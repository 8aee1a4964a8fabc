"""Quantization algorithms by name: one file, one paper."""

from mxjax.algorithms.base import Algorithm as Algorithm
from mxjax.algorithms.base import WeightSpec as WeightSpec
from mxjax.algorithms.gptq import gptq as gptq
from mxjax.algorithms.loraq import loraq as loraq
from mxjax.algorithms.rtn import rtn as rtn
from mxjax.algorithms.svdquant import svdquant as svdquant
from mxjax.algorithms.wush_gptq import wush_gptq as wush_gptq

ALGORITHMS: dict[str, Algorithm] = {
    "rtn": rtn,
    "gptq": gptq,
    "wush_gptq": wush_gptq,
    "svdquant": svdquant,
    "loraq": loraq,
}
