"""Compressed-tensors folders to quantized trees. The layouts: :mod:`mxjax.io.ct_scales`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from mxjax.core.formats import NVFP4
from mxjax.core.qtensor import QTensor
from mxjax.errors import CheckpointError
from mxjax.io import hf, safetensors
from mxjax.io.ct_config import Scheme, Schemes
from mxjax.io.ct_scales import GLOBAL, INPUT, ONE, PACKED, SCALE, SCALE_DTYPE, UNCALIBRATED, multiplier, zero_blocks
from mxjax.io.placement import place, sharding_of
from mxjax.ops.qweight import ActivationFormat, QWeight


def read(folder: Path, config: dict[str, Any], *, shardings: Any = None, names: hf.Names | None = None) -> Any:
    """The tree of a compressed-tensors folder.

    Raises:
      CheckpointError: a scheme that is not one of the two, or any tensor that is missing, unknown, or not of the dtype
        and shape that the config implies.
    """
    try:
        schemes = Schemes(config.get("quantization_config"))
        dtype_name = _dtype_name(config)
    except CheckpointError as e:
        raise CheckpointError(f"{folder / hf.CONFIG}: {e}") from None
    names = names or hf.default_paths
    modules: dict[str, dict[str, safetensors.Entry]] = {}
    dense: list[safetensors.Entry] = []
    for name, entry in hf.read_entries(folder).items():
        module, _, tensor = name.rpartition(".")
        if tensor in (PACKED, SCALE, GLOBAL, INPUT):
            modules.setdefault(module, {})[tensor] = entry
        else:
            dense.append(entry)
    leaves = []
    for module, tensors in modules.items():
        path = hf.apply_names(names, f"{module}.weight")
        leaves.append((path, _read_weight(module, tensors, schemes.of(module), path, dtype_name, shardings)))
    for entry in dense:
        module, _, tensor = entry.name.rpartition(".")
        if module in modules and tensor != "bias":
            raise CheckpointError(f"{entry.name} in {entry.file}: no tensor that a quantized Linear has")
        if tensor == "weight" and schemes.named(module) is not None:
            raise CheckpointError(f"{module} in {entry.file}: the config quantizes it, but {PACKED} is missing")
        path = hf.apply_names(names, entry.name)
        leaves.append((path, hf.read_dense(entry, path, shardings)))
    return hf.nest(leaves)


def _dtype_name(config: Mapping[str, Any]) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    try:
        dtype = jnp.dtype(str(name).removeprefix("torch."))
    except TypeError:
        dtype = np.dtype(bool)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise CheckpointError(f"dtype {str(name)[:50]!r} is no float")
    return dtype.name


def _read_weight(
    module: str,
    tensors: Mapping[str, safetensors.Entry],
    scheme: Scheme | None,
    path: str,
    dtype_name: str,
    shardings: Any,
) -> QWeight:
    if scheme is None:
        entry = next(iter(tensors.values()))
        raise CheckpointError(f"{entry.name} in {entry.file}: the config does not quantize {module}")
    fmt = scheme.format
    if PACKED not in tensors:
        raise CheckpointError(f"{module}: {PACKED} is missing")
    packed = tensors[PACKED]
    rows, width = packed.shape if len(packed.shape) == 2 else (0, 0)
    size = 2 * width
    if packed.dtype != np.uint8 or size == 0 or rows == 0 or size % fmt.block_size:
        raise CheckpointError(
            f"{packed.name} in {packed.file}: {packed.dtype} {packed.shape}; {fmt} weights are uint8 [out, in / 2], "
            f"in a multiple of {fmt.block_size}"
        )
    expected: dict[str, tuple[np.dtype, tuple[int, ...]]] = {
        PACKED: (packed.dtype, packed.shape),
        SCALE: (SCALE_DTYPE[fmt], (rows, size // fmt.block_size)),
    }
    if fmt == NVFP4:
        expected[GLOBAL] = (np.dtype(np.float32), (1,))
        if scheme.activation:
            expected[INPUT] = (np.dtype(np.float32), (1,))
    for tensor, (dtype, shape) in expected.items():
        if tensor not in tensors:
            raise CheckpointError(f"{module}.{tensor} is missing from {packed.file.parent}")
        entry = tensors[tensor]
        if (entry.dtype, entry.shape) != (dtype, shape):
            raise CheckpointError(f"{entry.name} in {entry.file}: {entry.dtype} {entry.shape}, not {dtype} {shape}")
    if extra := sorted(set(tensors) - set(expected)):
        raise CheckpointError(
            f"{module}.{extra[0]}: {fmt} {'W4A4' if scheme.activation else 'W4A16'} has no such tensor"
        )

    def put(x: np.ndarray, *keys: str) -> Any:
        name = ".".join((path, *keys))
        return place(x, sharding_of(shardings, (*path.split("/"), *keys), name, x.shape))

    codes, scales = packed.read(), tensors[SCALE].read().view(np.uint8)
    global_scale = input_scale = None
    if fmt == NVFP4:
        if ((scales & 0x80 != 0) & (scales != 0xFF)).any():
            raise CheckpointError(f"{tensors[SCALE].name} in {tensors[SCALE].file}: negative block scales")
        scales = zero_blocks(scales, codes, ONE, 0)
        global_scale = put(_read_divisor(tensors[GLOBAL]), "qtensor", "global_scale")
        if scheme.activation and _read_divisor(tensors[INPUT]) != UNCALIBRATED:  # else: a scale for each token
            input_scale = put(_read_divisor(tensors[INPUT]), "input_scale")
    q = QTensor(
        codes=put(codes, "qtensor", "codes"),
        scales=put(scales, "qtensor", "scales"),
        global_scale=global_scale,
        format=fmt,
        axis=-2 if hf.is_flax_kernel(path) else -1,
        size=size,
        dtype_name=dtype_name,
    )
    activation = ActivationFormat(format=fmt) if scheme.activation else None
    return QWeight(qtensor=q, input_scale=input_scale, activation=activation).validate(path)


def _read_divisor(entry: safetensors.Entry) -> np.ndarray:
    d = entry.read()[0]
    if not (np.isfinite(d) and 2.0**-126 <= d <= 2.0**126):
        raise CheckpointError(f"{entry.name} in {entry.file}: {d} is no global scale: positive and finite")
    return np.asarray(multiplier(d))
