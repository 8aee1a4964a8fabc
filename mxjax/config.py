"""What to quantize and how: ordered rules on parameter paths."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mxjax.algorithms import ALGORITHMS, WeightSpec
from mxjax.calibration.options import CalibrationOptions
from mxjax.core.formats import BlockFormat, get_format
from mxjax.core.quantize import NONFINITE_POLICIES
from mxjax.core.scales import DEFAULT_POLICY, check_policy
from mxjax.errors import ConfigError
from mxjax.ops.qweight import ActivationFormat
from mxjax.transforms.base import Transform, TransformFitter, needs_fit

# What published recipes keep in high precision. Searched (not matched whole) in the lower-cased path.
DEFAULT_EXCLUDE: tuple[str, ...] = (
    r"embed|wte|wpe",  # token, position and patch embeddings
    r"lm_head|(^|/)(head|logits|classifier|output_layer)(/|$)",  # output heads
    r"norm(?!al)|(^|/)ln_?\w*(/|$)",  # normalizations, also where they are stacked to two axes
    r"router|(^|/)gat(e|ing)(/|$)",  # expert routers (gate_proj and gating_einsum are none)
    r"(^|/)conv\w*(/|$)",  # convolution kernels: qdot has no window
    r"(^|/)lora(_|/|$)",  # adapters: trained beside the quantized weight
    r"(^|/|_)bias$|(^|/)scale$",  # gate_up_proj_bias of stacked experts is a matrix, too
)

# Weights that inference engines multiply with at once, and so with one tensor scale (NVFP4).
FUSED: tuple[str, ...] = (
    r"(?<=/)[qkv]_proj(?=/)",
    r"(?<=/)(gate|up)_proj(?=/)",  # also of each expert
    r"(?<=/)w[13](?=/)",  # gate and up of Mixtral's experts
    r"(?<=/)to_[qkv](?=/)",  # diffusers
    r"(?<=/)add_[qkv]_proj(?=/)",
)

DATA_FREE = ("rtn", "loraq")  # algorithms that look at the weight alone
ON_UNEVEN = ("error", "skip", "pad")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What to do with the parameters whose path matches ``path``. The first rule that matches wins.

    Attributes:
      path: regular expression, searched in paths such as ``layers/0/mlp/up_proj/kernel``; anchor it with ^ and $.
      weight: format of the weight, or None: leave the parameter as it is.
      activation: format of the layer's input, or None: leave it (W4A16).
      weight_scale, activation_scale: scale policies.
      algorithm: name in ``mxjax.algorithms.ALGORITHMS``.
      transform: map on the contraction axis, or what chooses one from statistics, or None.
      axis: contraction axis; None finds it: the second last, as in Flax kernels (in, out) and expert stacks
        [E, in, out]; for Flax attention kernels (embed, heads, head_dim) named query, key or value the third last;
        the last for torch-style [out, in] arrays named ``weight``, as ``mxjax.load`` gives for Hugging Face folders.
      options: further keyword options of the algorithm.
    """

    path: str = ""
    weight: str | BlockFormat | None = "mxfp4"
    activation: str | BlockFormat | None = None
    weight_scale: str = DEFAULT_POLICY
    activation_scale: str = DEFAULT_POLICY
    algorithm: str = "rtn"
    transform: Transform | TransformFitter | None = None
    axis: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        try:
            re.compile(self.path)
        except re.error as e:
            raise ConfigError(f"rule path {self.path!r} is no regular expression: {e}") from None
        if self.algorithm not in ALGORITHMS:
            raise ConfigError(f"unknown algorithm {self.algorithm!r}; known: {', '.join(ALGORITHMS)}")
        if self.axis is not None and self.axis >= 0:
            raise ConfigError(
                f"axis counts from the end (-1, -2, ...), so that stacked layers keep it; not {self.axis}"
            )
        if self.weight is None:
            if self.activation is not None:
                raise ConfigError(f"rule {self.path!r} quantizes activations but no weight; give a weight format")
            return
        check_policy(self.weight_scale, get_format(self.weight))
        if self.activation is not None:
            check_policy(self.activation_scale, get_format(self.activation))

    def matches(self, path: str) -> bool:
        return re.search(self.path, path) is not None

    def activation_format(self) -> ActivationFormat | None:
        if self.activation is None:
            return None
        return ActivationFormat(format=get_format(self.activation), scale=self.activation_scale)

    def contraction_axis(self, path: str, ndim: int) -> int:
        """:attr:`axis`, or the one that the conventions of Flax and of torch imply."""
        if self.axis is not None:
            return self.axis
        if re.search(r"(^|/)weight$", path):
            return -1
        return -3 if ndim >= 3 and re.search(r"(^|/)(query|key|value)/kernel$", path) else -2

    @property
    def needs_data(self) -> bool:
        """Whether it looks at the inputs of a layer: its algorithm, or a transform yet to be fitted."""
        if self.weight is None:
            return False
        free = self.algorithm in DATA_FREE and self.options.get("residual", "rtn") in DATA_FREE
        free = free and self.options.get("objective", "weight") == "weight"
        return not free or needs_fit(self.transform)

    def spec(self, path: str, ndim: int, *, on_nonfinite: str, on_uneven: str) -> WeightSpec:
        """The rule applied to one parameter."""
        assert self.weight is not None
        return WeightSpec(
            path=path,
            format=get_format(self.weight),
            scale=self.weight_scale,
            axis=self.contraction_axis(path, ndim),
            activation=self.activation_format(),
            transform=self.transform,
            on_nonfinite=on_nonfinite,
            on_uneven="pad" if on_uneven == "pad" else "error",
            options=dict(self.options),
        )


@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """Ordered rules and what holds for all of them.

    Attributes:
      rules: the first that matches a path decides; a parameter that none matches stays as it is.
      exclude: regular expressions, searched in the lower-cased path; such parameters stay as they are whatever the
        rules say. ``()`` excludes nothing.
      on_uneven: a contraction axis that is no multiple of the block: "error" lists all such paths, "skip" leaves them,
        "pad" stores them padded with zeros.
      on_nonfinite: "raise", "nan" or "saturate", as in ``quantize_array``.
      calibration: how statistics are gathered, where an algorithm needs them.
      share_scales: regular expressions for weights that share one tensor scale (NVFP4), the largest of theirs: those
        whose paths are equal once the first match in each is replaced by ``*``. ``mxjax.config.FUSED`` has the groups
        that inference engines fuse (q/k/v, gate/up, ...); ``()``, the default, shares nothing, which is a little more
        exact. It acts when weights are quantized: no scale can be changed later without a change of values.
      name: shown in reports.

    Example:
      >>> cfg = QuantConfig(rules=[Rule(path="mlp", weight="mxfp4", activation="mxfp8_e4m3"), Rule(weight="nvfp4")])
    """

    rules: tuple[Rule, ...] | list[Rule]
    exclude: tuple[str, ...] | list[str] = DEFAULT_EXCLUDE
    on_uneven: str = "error"
    on_nonfinite: str = "raise"
    calibration: CalibrationOptions = field(default_factory=CalibrationOptions)
    share_scales: tuple[str, ...] | list[str] = ()
    name: str = "custom"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", (self.rules,) if isinstance(self.rules, Rule) else tuple(self.rules))
        object.__setattr__(self, "exclude", tuple(self.exclude))
        object.__setattr__(self, "share_scales", tuple(self.share_scales))
        if not all(isinstance(rule, Rule) for rule in self.rules):
            raise ConfigError("QuantConfig.rules holds Rule objects")
        if self.on_uneven not in ON_UNEVEN:
            raise ConfigError(f"on_uneven is one of {ON_UNEVEN}, not {self.on_uneven!r}")
        if self.on_nonfinite not in NONFINITE_POLICIES:
            raise ConfigError(f"on_nonfinite is one of {NONFINITE_POLICIES}, not {self.on_nonfinite!r}")
        for field_name in ("exclude", "share_scales"):
            for pattern in getattr(self, field_name):
                try:
                    re.compile(pattern)
                except re.error as e:
                    raise ConfigError(f"{field_name}: {pattern!r} is no regular expression: {e}") from None

    def excluded_by(self, path: str) -> str | None:
        """The exclude pattern that keeps ``path`` as it is, or None."""
        return next((p for p in self.exclude if re.search(p, path.lower())), None)

    def scale_group(self, path: str) -> str | None:
        """A name that weights with one tensor scale have in common, or None: this weight keeps its own."""
        return scale_group(path, self.share_scales)

    @property
    def needs_data(self) -> bool:
        """Whether a rule looks at the inputs of a layer: its algorithm, or a transform yet to be fitted."""
        return any(rule.needs_data for rule in self.rules)

    def replace(self, **changes: Any) -> QuantConfig:
        """A copy with some fields changed."""
        return replace(self, **changes)


def scale_group(path: str, patterns: tuple[str, ...] | list[str] = FUSED) -> str | None:
    """The path with the first match of the first pattern that occurs in it replaced by ``*``; None if there is none.

    Example:
      >>> scale_group("layers/0/self_attn/q_proj/kernel")
      'layers/0/self_attn/*/kernel'
    """
    for pattern in patterns:
        group, found = re.subn(pattern, "*", path, count=1)
        if found:
            return group
    return None
