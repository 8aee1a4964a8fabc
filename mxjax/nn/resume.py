"""What a run by block has done so far, on disk, so that it can stop at any moment and go on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from mxjax import __version__
from mxjax.errors import CheckpointError, MxjaxWarning
from mxjax.io import load, safetensors, save
from mxjax.io.atomic import atomic_folder
from mxjax.nn.devices import to_host
from mxjax.ops.qweight import QWeight

RUN = "run.json"
STREAMS = "streams.safetensors"

Streams = dict[str, list[np.ndarray]]
Shapes = Mapping[str, Sequence[tuple[int, ...]]]


class RunFolder:
    """A folder that holds the finished blocks of one run::

        run.json         what the run was begun with: versions, and hashes of the model, the tokens and the config
        block-0000/      the quantized weights of block 0 by path: a checkpoint of its own (``mxjax.load``)
        streams-0001/    the inputs of block 1; those of block 0 are removed once these are there

    Each of these appears whole or not at all, and the inputs of the next block are there before the block they come
    from counts as finished. So whenever the process dies, the run can go on after the last block whose folder exists.

    Args:
      folder: absent, empty, or begun by an earlier run.
      begun_with: from :func:`fingerprint`.

    Raises:
      CheckpointError: the folder belongs to something else: another model, tokens, config or version.
    """

    def __init__(self, folder: str | os.PathLike[str], begun_with: Mapping[str, Any]):
        self.folder = Path(folder)
        file = self.folder / RUN
        if not file.exists():
            if self.folder.is_dir() and (others := sorted(p.name for p in self.folder.iterdir())):
                raise CheckpointError(
                    f"{folder} holds {others[0]!r} and no {RUN}: give resume a folder of its own (new or empty)"
                )
            with atomic_folder(self.folder) as temporary:
                (temporary / RUN).write_text(json.dumps(begun_with, indent=1) + "\n", encoding="utf-8")
            return
        before = safetensors.read_json(file)
        if different := [key for key in begun_with if before.get(key) != begun_with[key]]:
            listing = "; ".join(f"{k}: {_short(before.get(k))} then, {_short(begun_with[k])} now" for k in different)
            raise CheckpointError(
                f"{folder} was begun with another {', '.join(different)} ({listing}); go on with the same, or give "
                f"resume another folder"
            )
        for left in self.folder.glob(".*.tmp"):  # unfinished folders of a process that died
            shutil.rmtree(left, ignore_errors=True)

    def load(self, blocks: int, shapes: Shapes) -> tuple[int, dict[str, QWeight], Streams | None]:
        """How many blocks are done, their weights on the host by path, and the inputs of the next block.

        Args:
          blocks: how many the model has.
          shapes: of the streams that the run has: for each its batches, first axes [sequences, S].

        Warns:
          MxjaxWarning: files that are damaged; the run then goes on before them, or begins again.
        """
        weights: list[dict[str, QWeight]] = []
        try:
            while len(weights) < blocks and self._block(len(weights)).is_dir():
                weights.append(self._read_block(len(weights)))
        except CheckpointError as e:
            warnings.warn(f"a finished block is damaged and will be done again: {e}", MxjaxWarning, stacklevel=2)
        for done in range(len(weights), 0, -1):
            merged = {path: w for block in weights[:done] for path, w in block.items()}
            if done == blocks:
                return done, merged, None
            if not self._streams(done).is_dir():  # removed since: only a later block's inputs were kept
                continue
            try:
                return done, merged, self._read_streams(done, shapes)
            except CheckpointError as e:
                warnings.warn(f"the inputs of block {done} are damaged: {e}", MxjaxWarning, stacklevel=2)
        return 0, {}, None

    def save(self, block: int, weights: dict[str, QWeight], streams: Streams | None) -> None:
        """Store block number ``block`` (full paths) and the inputs of the next one (None after the last)."""
        if streams is not None:
            with atomic_folder(self._streams(block + 1), overwrite=True) as temporary:
                named = {f"{name}/{i}": x for name, stream in streams.items() for i, x in enumerate(stream)}
                safetensors.write(temporary / STREAMS, named)
        save(self._block(block), weights, overwrite=True)
        shutil.rmtree(self._streams(block), ignore_errors=True)

    def _block(self, i: int) -> Path:
        return self.folder / f"block-{i:04d}"

    def _streams(self, i: int) -> Path:
        return self.folder / f"streams-{i:04d}"

    def _read_block(self, i: int) -> dict[str, QWeight]:
        weights = to_host(load(self._block(i)))
        if others := [path for path in weights if not path.startswith(f"layers/{i}/")]:
            raise CheckpointError(f"{self._block(i)} holds {others[0]!r}, which is no weight of block {i}")
        return weights

    def _read_streams(self, i: int, shapes: Shapes) -> Streams:
        file = self._streams(i) / STREAMS
        entries = safetensors.read(file)
        wanted = {f"{name}/{j}": tuple(shape) for name, batches in shapes.items() for j, shape in enumerate(batches)}
        found = {name: tuple(entry.shape[:2]) for name, entry in entries.items()}
        if found != wanted:
            raise CheckpointError(f"{file} holds {_short(found)}, not the batches of this run, {_short(wanted)}")
        return {name: [np.array(entries[f"{name}/{j}"].read()) for j in range(len(s))] for name, s in shapes.items()}


def fingerprint(model: nnx.Module, tokens: Iterable[np.ndarray], *configs: Any, dtype: Any = None) -> dict[str, Any]:
    """What two runs must have in common so that one can go on with what the other did: JSON, for :class:`RunFolder`.

    Args:
      model: every array of it is read, and its static attributes.
      tokens: the calibration data.
      *configs: dataclasses; their fields are compared by value.
      dtype: of the computation, where it is not the model's own.
    """
    graphdef, state = nnx.split(model)
    arrays = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(state))[0]
    return {
        "mxjax": __version__,
        "jax": f"{jax.__version__} on {jax.default_backend()}",
        "model": _digest(_stable(graphdef), *(part for path, x in arrays for part in (_stable(path), x))),
        "tokens": _digest(*tokens),
        "config": [_plain(config) for config in configs],
        "dtype": None if dtype is None else np.dtype(dtype).name,
    }


def _digest(*parts: Any) -> str:
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            total.update(part.encode())
            continue
        x = np.asarray(jax.random.key_data(part) if jax.dtypes.issubdtype(part.dtype, jax.dtypes.prng_key) else part)
        total.update(f"{x.dtype}{x.shape}".encode())
        total.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def _plain(x: Any) -> Any:
    """A config as JSON."""
    if dataclasses.is_dataclass(x):
        return {type(x).__name__: {f.name: _plain(getattr(x, f.name)) for f in dataclasses.fields(x)}}
    if isinstance(x, Mapping):
        return {str(key): _plain(x[key]) for key in sorted(x, key=str)}
    if isinstance(x, (list, tuple)):
        return [_plain(item) for item in x]
    if isinstance(x, (jax.Array, np.ndarray)):
        return _digest(x)
    return x if x is None or isinstance(x, (bool, int, float, str)) else _stable(x)


def _stable(x: Any) -> str:
    """``repr`` without the addresses of functions, which differ from process to process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(x))


def _short(x: Any) -> str:
    text = str(x)
    return text if len(text) <= 24 else f"{text[:12]}..."
