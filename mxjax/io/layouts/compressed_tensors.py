"""compressed-tensors (llm-compressor, vLLM, transformers).

For each Linear ``[O, K]``:

======================== ============================ ==================== ==================== ==================
format                   codes                        ``weight_scale``     tensor scale         input scale
======================== ============================ ==================== ==================== ==================
``mxfp4-pack-quantized`` ``weight_packed`` u8 [O,K/2] u8 [O, K/32], E8M0   none                 none (dynamic)
``nvfp4-pack-quantized`` ``weight_packed`` u8 [O,K/2] E4M3 [O, K/16]       weight_global_scale  input_global_scale
``mxfp6-pack-quantized`` ``weight_packed`` u8 [O,3K/4] u8 [O, K/32], E8M0  none                 none (dynamic)
``mxfp8-quantized``      ``weight`` E4M3 [O, K]       u8 [O, K/32], E8M0   none                 none (dynamic)
======================== ============================ ==================== ==================== ==================

Global scales are float32 [1] and *divide*: ``value = code * scale / global``. docs/format.md says how a divisor comes
back after it has been a multiplier here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from mxjax.core.formats import MXFP4, MXFP6_E2M3, MXFP8_E4M3, NVFP4
from mxjax.io.layouts import ct_config
from mxjax.io.layouts.base import Contents, Schemes, model_config
from mxjax.io.layouts.linear import E4M3, LinearLayout, Stored


class CompressedTensors(LinearLayout):
    name = "compressed-tensors"
    method = "compressed-tensors"
    rotates = True
    stored: ClassVar = {
        MXFP4: Stored(codes="weight_packed", activations=(MXFP4,)),
        NVFP4: Stored(
            codes="weight_packed",
            scale_dtype=E4M3,
            global_scale="weight_global_scale",
            input_scale="input_global_scale",
            divisor=True,
            activations=(NVFP4,),
        ),
        MXFP6_E2M3: Stored(codes="weight_packed", activations=(MXFP8_E4M3,)),
        MXFP8_E4M3: Stored(codes_dtype=E4M3, activations=(MXFP8_E4M3,)),
    }

    def schemes(self, config: Mapping[str, Any], folder: Path) -> Schemes:
        return ct_config.read(config.get("quantization_config"))

    def config_of(self, base: Mapping[str, Any], contents: Contents) -> dict[str, dict[str, Any]]:
        config = model_config(base, contents)
        config["quantization_config"] = ct_config.write(contents.schemes, contents.unquantized(config))
        return {"config.json": config}
