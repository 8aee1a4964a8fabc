"""Calibrate and quantize block by block: each block sees the errors of the quantized blocks before it.

The device holds one block's weights, its statistics, and one batch of activations; the activations of all calibration
sequences wait on the host. Memory does not depend on the number of blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from mxjax.calibration.options import CalibrationOptions
from mxjax.errors import ConfigError
from mxjax.nn.devices import Devices, to_host
from mxjax.nn.jobs import Target
from mxjax.nn.memory import expected_bytes
from mxjax.nn.probes import Block
from mxjax.nn.resume import RunFolder, Streams
from mxjax.nn.stages import Work, quantize_stage, stages_of
from mxjax.ops.qweight import QWeight


@dataclass(frozen=True)
class BlockProgress:
    """Where a run by block is; ``str`` of it is a line for people.

    Attributes:
      done, total: blocks.
      text: the line.
    """

    done: int
    total: int
    text: str

    def __str__(self) -> str:
        return self.text


Progress = Callable[[BlockProgress], None]


def quantize_blocks_in_order(
    model: Any,
    tokens: np.ndarray,
    targets: list[dict[str, Target]],
    options: CalibrationOptions,
    *,
    store: RunFolder | None = None,
    devices: Devices | None = None,
    host: bool = False,
    progress: Progress | None = None,
) -> dict[str, QWeight]:
    """Quantize the blocks of ``model`` one after the other. ``mxjax.quantize_sequential`` is the door to this.

    Args:
      model: an nnx module with ``embed``, ``layers`` and ``head``.
      tokens: [sequences, S].
      targets: for each block, its weights by path inside the block.
      options: see :class:`CalibrationOptions`.
      store: keeps what is done, and says where to go on.
      devices: where arrays go; default: one device.
      host: quantized weights leave the device as soon as their block is done.
      progress: called with the expected memory, after each block, and with the memory that it took.

    Returns:
      Quantized weights by full path (``layers/3/mlp/up_proj/kernel``).
    """
    devices = devices or Devices()
    total = len(model.layers)
    batches = [batch.shape for batch in _batches(tokens, options.batch_size)]
    first, out, streams = store.load(total, dict.fromkeys(_stream_names(options), batches)) if store else (0, {}, None)
    out = out if host else jax.device_put(out)
    done = first

    def say(text: str) -> None:
        if progress is not None:
            progress(BlockProgress(done, total, text))

    if first:
        say(f"{first} of {total} blocks were done before")
    begin, ends = time.perf_counter(), list[float]()
    try:
        if streams is None and first < total:
            streams = _embedded(model, tokens, options, devices)
        for i in range(first, total):
            assert streams is not None
            ask = say if i == first and progress is not None else None
            weights = _one_block(model.layers[i], targets[i], streams, options, devices, ask)
            weights = {f"layers/{i}/{path}": w for path, w in weights.items()}
            weights = to_host(weights) if host else weights
            if store is not None:
                store.save(i, weights, streams if i + 1 < total else None)
            out |= weights
            done = i + 1
            ends.append(time.perf_counter() - begin)
            say(f"block {done}/{total}: {ends[-1]:.0f} s, {time_left(ends, total - done):.0f} s left")
        if first < total:
            say(f"done in {time.perf_counter() - begin:.0f} s; {devices.report()}")
    except BaseException:
        if store is not None:
            say(f"stopped: {done} of {total} blocks are kept in {store.folder}; run the same again to go on after them")
        raise
    return out


def time_left(ends: list[float], left: int) -> float:
    """Seconds that ``left`` more blocks take, if each took as long as those before.

    Args:
      ends: when each block was done, in seconds. The first one compiles, so it counts only while there is no other.
    """
    return left * (ends[0] if len(ends) == 1 else (ends[-1] - ends[0]) / (len(ends) - 1))


def _batches(x: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Equal batches of ``size`` sequences (one compilation); a smaller rest at the end."""
    return (x[i : i + size] for i in range(0, len(x), size))


def _embedded(model: Any, tokens: np.ndarray, options: CalibrationOptions, devices: Devices) -> Streams:
    """The inputs of the first block, on the host. Only what lies outside the blocks goes to the device."""
    parts: Any = nnx.split(model, lambda path, _: path[0] == "layers", ...)
    graphdef, layers, rest = parts
    embed = jax.jit(lambda rest, t: nnx.merge(graphdef, layers, rest).embed(t))
    rest = devices.parameters(rest)
    stream = []
    for batch in _batches(tokens, options.batch_size):
        x = embed(rest, devices.batch(batch))
        devices.look()
        stream.append(to_host(x))
    return {name: list(stream) for name in _stream_names(options)}


def _stream_names(options: CalibrationOptions) -> list[str]:
    """The inputs that travel from block to block: through the quantized blocks, through the float ones, or both."""
    names = ["quantized"] if options.upstream else []
    return names + (["float"] if options.mismatch or not options.upstream else [])


def _one_block(
    layer: nnx.Module,
    targets: dict[str, Target],
    streams: Streams,
    options: CalibrationOptions,
    devices: Devices,
    say: Callable[[str], None] | None,
) -> dict[str, QWeight]:
    """The quantized weights of one block; ``streams`` become the inputs of the next one in place.

    A function of its own, so that the block's float weights leave the device before the next block's arrive.
    """
    block = Block(layer, targets.__contains__, devices.parameters)
    inputs = streams["quantized" if options.upstream else "float"]
    work = Work(block, targets, inputs, streams.get("float", inputs), options, devices)
    stages = stages_of(work)
    if say is not None:
        say(f"expecting {expected_bytes(work, stages)}")
    table: dict[str, QWeight] = {}
    for stage in stages:
        table |= quantize_stage(work, table, stage)
    everywhere = devices.whole(table)
    for name, stream in streams.items():
        for j, x in enumerate(stream):
            y = block(devices.batch(x), everywhere if name == "quantized" else {})
            devices.look()
            stream[j] = to_host(y)
    return table


def joined(batches: list[Any]) -> np.ndarray:
    """Token arrays [B, S] as one.

    Raises:
      ConfigError: there are none, their lengths differ, or they are no integers that can be token ids.
    """
    arrays = [np.asarray(batch) for batch in batches]
    if not arrays:
        raise ConfigError("calibration got no batches")
    if any(x.ndim != 2 or x.shape[1] != arrays[0].shape[1] for x in arrays):
        raise ConfigError(f"batches are tokens [B, S] of one length S, not {sorted({x.shape for x in arrays})}")
    if not all(np.issubdtype(x.dtype, np.integer) for x in arrays):
        raise ConfigError(f"batches are tokens, integers, not {', '.join(sorted({str(x.dtype) for x in arrays}))}")
    tokens = np.concatenate(arrays)
    if not tokens.size:
        raise ConfigError(f"calibration got no tokens: batches of shapes {sorted({x.shape for x in arrays})}")
    if wrong := [int(x) for x in (tokens.min(), tokens.max()) if not 0 <= x < 2**31]:
        raise ConfigError(  # an embedding would take them from the end, or modulo 2**32
            f"token ids are at least 0 and below 2**31: found {wrong[0]}; cut padding such as -100 off"
        )
    return tokens
