"""Layouts that store each Linear ``[out, in]`` by itself: what they share is a table of names and conventions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mxjax.core.formats import BlockFormat
from mxjax.core.qtensor import QTensor
from mxjax.errors import CheckpointError, MxjaxError
from mxjax.io.layouts.base import Layout, Scheme, Target, quantization_of
from mxjax.io.layouts.scales import LARGEST, ONE, SMALLEST, UNCALIBRATED, divisor, multiplier, zero_blocks
from mxjax.io.safetensors import DTYPES, Entry
from mxjax.ops.qweight import ActivationFormat, QWeight
from mxjax.transforms import Hadamard

Parts = dict[str, tuple[np.dtype, tuple[int, ...]]]  # part -> dtype, shape
U8, F32, E4M3 = DTYPES["U8"], DTYPES["F32"], DTYPES["F8_E4M3"]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The tensors of one format in one layout. Codes are ``[out, in * bits / 8]``, scales ``[out, in / block]``.

    Attributes:
      codes, scale: names of the last part.
      codes_dtype, scale_dtype: bytes of the same bits, whatever they are called.
      global_scale: name of the tensor scale, or None: the format has none.
      input_scale: name of the tensor scale of activations, there if these are quantized.
      divisor: global scales divide, and are arrays of one element; else they multiply, and are scalars.
      activations: formats that inputs may be quantized to beside "not at all".
    """

    codes: str = "weight"
    scale: str = "weight_scale"
    codes_dtype: np.dtype = U8
    scale_dtype: np.dtype = U8
    global_scale: str | None = None
    input_scale: str | None = None
    divisor: bool = False
    activations: tuple[BlockFormat, ...] = ()

    def parts(self, fmt: BlockFormat, activation: bool, shape: tuple[int, ...]) -> Parts:
        """dtype and shape of every part of a weight ``[out, in]``."""
        rows, size = shape
        out: Parts = {
            self.codes: (self.codes_dtype, (rows, fmt.packed_size(size))),
            self.scale: (self.scale_dtype, (rows, size // fmt.block_size)),
        }
        for name in (self.global_scale, self.input_scale if activation else None):
            if name is not None:
                out[name] = (F32, (1,) if self.divisor else ())
        return out


class LinearLayout(Layout):
    """The part of a layout that its table decides; a layout adds its config.

    Attributes:
      method: ``quant_method`` in config.json.
      stored: format -> its tensors.
      rotates: the config can say that inputs go through a block Hadamard rotation.
    """

    name: str
    method: str
    writes = True
    stored: ClassVar[Mapping[BlockFormat, Stored]]
    rotates = False

    def detect(self, config: Mapping[str, Any], names: Iterable[str] = ()) -> bool:
        return quantization_of(config).get("quant_method") == self.method

    def weight_name(self, module: str) -> str:
        return f"{module}.weight"

    def split(self, entry: Entry) -> tuple[str, str] | None:
        module, _, part = entry.name.rpartition(".")
        if part == "weight":
            return (module, part) if entry.dtype.itemsize == 1 else None
        return (module, part) if any(part in _names(s) for s in self.stored.values()) else None

    # --- reading ------------------------------------------------------------------------------------------------------

    def read_weight(self, module: str, tensors: Mapping[str, Entry], scheme: Scheme, target: Target) -> QWeight:
        fmt, stored = scheme.format, self.stored[scheme.format]
        codes, size = read_codes(module, tensors, fmt, stored)
        expected = stored.parts(fmt, scheme.activation is not None, (codes.shape[0], size))
        check_parts(tensors, expected, scheme)
        raw, scales = codes.read().view(np.uint8), tensors[stored.scale].read().view(np.uint8)
        if fmt.scale == "e4m3":
            if ((scales & 0x80 != 0) & (scales != 0xFF)).any():
                raise CheckpointError(f"{tensors[stored.scale].name} in {codes.file}: negative block scales")
            scales = zero_blocks(scales, raw, ONE, 0)
        global_scale = input_scale = None
        if stored.global_scale is not None:
            global_scale = target.put(self._multiplier(tensors[stored.global_scale], target), "qtensor", "global_scale")
        if stored.input_scale is not None and scheme.activation is not None:
            value = self._multiplier(tensors[stored.input_scale], target)
            if value != UNCALIBRATED:  # else: a scale for each token
                input_scale = target.put(value, "input_scale")
        q = QTensor(
            codes=target.put(raw, "qtensor", "codes"),
            scales=target.put(scales, "qtensor", "scales"),
            global_scale=global_scale,
            format=fmt,
            axis=target.axis,
            size=size,
            dtype_name=target.dtype_name,
        )
        return QWeight(
            qtensor=q,
            input_scale=input_scale,
            activation=None if scheme.activation is None else ActivationFormat(format=scheme.activation),
            transform=None if scheme.rotation is None else Hadamard(scheme.rotation),
        )

    def _multiplier(self, entry: Entry, target: Target) -> np.ndarray:
        value = np.float32(entry.read().reshape(-1)[0])
        if not (np.isfinite(value) and SMALLEST <= value <= LARGEST):
            raise CheckpointError(f"{entry.name} in {entry.file}: {value} is no global scale: positive and finite")
        if not self._divides(entry.name):
            return np.asarray(value)
        exact = target.exact.get(entry.name)
        return np.asarray(multiplier(value) if exact is None or divisor(exact) != value else exact)

    def _divides(self, name: str) -> bool:
        part = name.rpartition(".")[2]
        return any(s.divisor and part in (s.global_scale, s.input_scale) for s in self.stored.values())

    # --- writing ------------------------------------------------------------------------------------------------------

    def why_not(self, name: str, weight: QWeight) -> str | None:
        q = weight.qtensor
        if not name.endswith(".weight"):
            return f"its name is {name!r}, not one that ends in .weight"
        if q.format not in self.stored:
            return f"format {q.format}"
        stored = self.stored[q.format]
        if weight.transform is not None and not (self.rotates and isinstance(weight.transform, Hadamard)):
            return f"its inputs go through a transform ({type(weight.transform).__name__})"
        if weight.branch is not None:
            return "a low-rank branch"
        if q.ndim != 2:
            return f"{q.ndim} axes {q.shape}; a Linear has two: save the layers or experts one by one"
        if q.size != q.padded_size:
            return f"a contraction axis of {q.size} padded to {q.padded_size}"
        if stored.global_scale is None and q.global_scale is not None:
            return f"a global factor on {q.format.name.upper()} (scale policy 'third')"
        if weight.activation is not None and weight.activation.format not in stored.activations:
            return f"activations in {weight.activation.format}"
        for what, scale in (("global_scale", q.global_scale), ("input_scale", weight.input_scale)):
            value = np.asarray([] if scale is None else scale, np.float32)
            if scale is not None and (value.size != 1 or not SMALLEST <= value.min() <= LARGEST):
                return f"{what} is {value.tolist()}; a Linear has one, positive and finite"
        try:
            weight.validate()
        except MxjaxError as e:
            return str(e)
        return None

    def scheme_of(self, weight: QWeight) -> Scheme:
        activation = None if weight.activation is None else weight.activation.format
        rotation = weight.transform.size if isinstance(weight.transform, Hadamard) else None
        return Scheme(weight.format, activation, rotation)

    def shapes_of(
        self, name: str, scheme: Scheme, shape: tuple[int, ...]
    ) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        module = name.removesuffix(".weight")
        parts = self.stored[scheme.format].parts(scheme.format, scheme.activation is not None, shape)
        return {f"{module}.{part}": value for part, value in parts.items()}

    def tensors_of(self, name: str, weight: QWeight, stored: Mapping[str, np.float32] | None = None) -> dict[str, Any]:
        q, table, module = weight.qtensor, self.stored[weight.format], name.removesuffix(".weight")
        codes, scales = np.asarray(q.codes), np.asarray(q.scales)
        if q.format.scale == "e4m3":
            scales = zero_blocks(scales, codes, 0, ONE)
        out: dict[str, Any] = {
            f"{module}.{table.codes}": codes.view(table.codes_dtype),
            f"{module}.{table.scale}": scales.view(table.scale_dtype),
        }
        for tensor, value in self._multipliers(module, weight).items():
            if table.divisor:
                out[tensor] = np.array([divisor(value, (stored or {}).get(tensor))], np.float32)
            else:
                out[tensor] = np.array(value, np.float32)
        return out

    def divisors_of(self, name: str, weight: QWeight) -> dict[str, np.float32]:
        divides = self.stored[weight.format].divisor
        return self._multipliers(name.removesuffix(".weight"), weight) if divides else {}

    def _multipliers(self, module: str, weight: QWeight) -> dict[str, np.float32]:
        table = self.stored[weight.format]
        given = {table.global_scale: weight.qtensor.global_scale}
        if weight.activation is not None:
            given[table.input_scale] = weight.input_scale
        return {
            f"{module}.{part}": UNCALIBRATED if scale is None else np.float32(np.asarray(scale).reshape(-1)[0])
            for part, scale in given.items()
            if part is not None
        }


def _names(stored: Stored) -> tuple[str | None, ...]:
    return (stored.codes, stored.scale, stored.global_scale, stored.input_scale)


def read_codes(module: str, tensors: Mapping[str, Entry], fmt: BlockFormat, stored: Stored) -> tuple[Entry, int]:
    """The packed codes ``[out, in * bits / 8]`` of a module, and ``in``."""
    if stored.codes not in tensors:
        there = next(iter(tensors.values()))
        raise CheckpointError(f"{module}: {stored.codes} is missing (there is {there.name} in {there.file})")
    codes = tensors[stored.codes]
    rows, width = codes.shape if len(codes.shape) == 2 else (0, 0)
    size = width * 8 // fmt.element.bits
    if codes.dtype != stored.codes_dtype or rows == 0 or size == 0 or size % fmt.block_size:
        raise CheckpointError(
            f"{codes.name} in {codes.file}: {codes.dtype} {codes.shape}; {fmt} weights are {stored.codes_dtype} "
            f"[out, in * {fmt.element.bits} / 8], in a multiple of {fmt.block_size}"
        )
    return codes, size


def check_parts(tensors: Mapping[str, Entry], expected: Parts, scheme: Scheme) -> None:
    """Every expected part is there with its dtype and shape, and no other."""
    known, there = next(iter(tensors.items()))
    for part, (dtype, shape) in expected.items():
        if part not in tensors:
            raise CheckpointError(f"{there.name.removesuffix(known)}{part} is missing from {there.file.parent}")
        entry = tensors[part]
        if (entry.dtype, entry.shape) != (dtype, shape):
            raise CheckpointError(f"{entry.name} in {entry.file}: {entry.dtype} {entry.shape}, not {dtype} {shape}")
    if extra := sorted(set(tensors) - set(expected)):
        kind = f"{scheme.format} with {'quantized' if scheme.activation else 'float'} inputs"
        raise CheckpointError(f"{tensors[extra[0]].name} in {tensors[extra[0]].file}: {kind} has no such tensor")
