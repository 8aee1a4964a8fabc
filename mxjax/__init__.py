"""mxjax: FP4 microscaling quantization for JAX.

    qparams = mxjax.quantize(params, "mxfp4")
    y = mxjax.qdot(x, qparams["layer"]["kernel"])

This module is the only public door. Names are resolved on first use (PEP 562): ``import mxjax`` costs nothing beyond
``import jax``, and ``pallas_kernels`` can import ``mxjax.core`` without a cycle.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# public name -> module that defines it; a name mapped to itself as "module" is a submodule
_NAMES = {
    "quantize_array": "mxjax.core.quantize",
    "fake_quantize": "mxjax.core.quantize",
    "QTensor": "mxjax.core.qtensor",
    "BlockFormat": "mxjax.core.formats",
    "FORMATS": "mxjax.core.formats",
    "get_format": "mxjax.core.formats",
    "QWeight": "mxjax.ops.qweight",
    "ActivationFormat": "mxjax.ops.qweight",
    "LowRank": "mxjax.ops.low_rank",
    "kernels_used": "mxjax.ops.kernels",
    "prepare_kernels": "mxjax.ops.kernels",
    "qdot": "mxjax.ops.qdot",
    "qeinsum": "mxjax.ops.qdot",
    "qdot_shared": "mxjax.ops.fused",
    "qdot_grouped": "mxjax.ops.grouped",
    "fuse_shared_inputs": "mxjax.fusion",
    "unfuse_shared_inputs": "mxjax.fusion",
    "Rule": "mxjax.config",
    "QuantConfig": "mxjax.config",
    "plan": "mxjax.api",
    "quantize": "mxjax.api",
    "dequantize": "mxjax.api",
    "summary": "mxjax.api",
    "calibrate": "mxjax.nn.calibrate",
    "quantize_sequential": "mxjax.nn.calibrate",
    "save": "mxjax.io",
    "load": "mxjax.io",
    "convert": "mxjax.io",
    "save_config": "mxjax.io.config_file",
    "load_config": "mxjax.io.config_file",
    "search_formats": "mxjax.search",
    "search_rules": "mxjax.search",
    "quantize_folder": "mxjax.io",
}
_MODULES = {
    "calibration": "mxjax.calibration",
    "errors": "mxjax.errors",
    "eval": "mxjax.eval",
    "io": "mxjax.io",
    "recipes": "mxjax.recipes",
    "report": "mxjax.report",  # callable: mxjax.report(params, qparams)
    "sharding": "mxjax.sharding",
    "transforms": "mxjax.transforms",
    "nnx": "mxjax.nn.nnx",
    "linen": "mxjax.nn.linen",
}

__all__ = sorted([*_NAMES, *_MODULES])

if TYPE_CHECKING:
    from mxjax import calibration as calibration
    from mxjax import errors as errors
    from mxjax import eval as eval
    from mxjax import io as io
    from mxjax import recipes as recipes
    from mxjax import report as report
    from mxjax import sharding as sharding
    from mxjax import transforms as transforms
    from mxjax.api import dequantize as dequantize
    from mxjax.api import plan as plan
    from mxjax.api import quantize as quantize
    from mxjax.api import summary as summary
    from mxjax.config import QuantConfig as QuantConfig
    from mxjax.config import Rule as Rule
    from mxjax.core.formats import FORMATS as FORMATS
    from mxjax.core.formats import BlockFormat as BlockFormat
    from mxjax.core.formats import get_format as get_format
    from mxjax.core.qtensor import QTensor as QTensor
    from mxjax.core.quantize import fake_quantize as fake_quantize
    from mxjax.core.quantize import quantize_array as quantize_array
    from mxjax.fusion import fuse_shared_inputs as fuse_shared_inputs
    from mxjax.fusion import unfuse_shared_inputs as unfuse_shared_inputs
    from mxjax.io import convert as convert
    from mxjax.io import load as load
    from mxjax.io import quantize_folder as quantize_folder
    from mxjax.io import save as save
    from mxjax.io.config_file import load_config as load_config
    from mxjax.io.config_file import save_config as save_config
    from mxjax.nn import linen as linen
    from mxjax.nn import nnx as nnx
    from mxjax.nn.calibrate import calibrate as calibrate
    from mxjax.nn.calibrate import quantize_sequential as quantize_sequential
    from mxjax.ops.fused import qdot_shared as qdot_shared
    from mxjax.ops.grouped import qdot_grouped as qdot_grouped
    from mxjax.ops.kernels import kernels_used as kernels_used
    from mxjax.ops.kernels import prepare_kernels as prepare_kernels
    from mxjax.ops.low_rank import LowRank as LowRank
    from mxjax.ops.qdot import qdot as qdot
    from mxjax.ops.qdot import qeinsum as qeinsum
    from mxjax.ops.qweight import ActivationFormat as ActivationFormat
    from mxjax.ops.qweight import QWeight as QWeight
    from mxjax.search import search_formats as search_formats
    from mxjax.search import search_rules as search_rules


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(importlib.import_module(_NAMES[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    else:
        raise AttributeError(f"module 'mxjax' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
