"""How calibration looks at a model."""

from __future__ import annotations

from dataclasses import dataclass

from mxjax.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """Static options of calibration by block.

    Attributes:
      inputs: "float": statistics of a layer's input as it arrives (GPTQ, MR-GPTQ). "quantized": after transform and
        activation quantization, so that the weight also compensates what rounding the activations does.
      upstream: inputs come through the quantized blocks before this one (True), or through the float model.
      mismatch: asymmetric calibration (GPTAQ, arXiv 2504.02692; Qronos, arXiv 2505.11695): also gather
        ``sum x_float^T x`` with the float model's input. The weights aim at the float model's outputs as far as gptq's
        option ``correction`` (0 to 1) says; without it nothing changes. Needs a second run of each block.
      true_sequential: layers of one block are quantized in order of use, and the inputs of later ones come through the
        quantized earlier ones; otherwise all inputs of a block are gathered in one pass with its float weights.
      static_input_scale: freeze the tensor scale of NVFP4 activations at what calibration saw; otherwise each token has
        its own.
      fuse: weights with one input and equal rules are quantized as one wide weight: one factorization for all, and one
        tensor scale (NVFP4), as inference engines that fuse q/k/v and gate/up want it.
      batch_size: sequences on the device at a time.
    """

    inputs: str = "float"
    upstream: bool = True
    mismatch: bool = False
    true_sequential: bool = False
    static_input_scale: bool = False
    fuse: bool = True
    batch_size: int = 8

    def __post_init__(self) -> None:
        if self.inputs not in ("float", "quantized"):
            raise ConfigError(f"CalibrationOptions.inputs is 'float' or 'quantized', not {self.inputs!r}")
        if self.batch_size < 1:
            raise ConfigError(f"CalibrationOptions.batch_size is positive, not {self.batch_size}")

    def beyond_one_pass(self) -> list[str]:
        """What of this needs quantized blocks, or the float model beside them: more than one pass can see."""
        asked = {"mismatch": self.mismatch, "true_sequential": self.true_sequential}
        asked |= {"static_input_scale": self.static_input_scale, "inputs='quantized'": self.inputs == "quantized"}
        return [name for name, wanted in asked.items() if wanted]
