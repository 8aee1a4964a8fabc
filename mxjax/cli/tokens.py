"""Token files: ``FILE.npz:KEY``, or text that a tokenizer cuts into sequences."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from mxjax.errors import ConfigError
from mxjax.eval import check_tokens

TEXT_LENGTH = 512


def read_tokens(spec: str) -> np.ndarray:
    """``FILE.npz:KEY`` as int32 [sequences, length].

    Raises:
      ConfigError: another spelling, no such file or key, or an array that holds no tokens.
    """
    file, colon, key = spec.rpartition(":")
    if not colon or not file.endswith(".npz"):
        raise ConfigError(f"tokens are named FILE.npz:KEY, not {spec!r}")
    if not Path(file).is_file():
        raise ConfigError(f"{file} does not exist")
    try:
        return check_tokens(_array(file, key))
    except ConfigError as e:
        raise ConfigError(f"{file}: {e}") from e


def _array(file: str, key: str) -> np.ndarray:
    try:
        with open(file, "rb") as f:  # ours to close: NumPy leaves a damaged archive open
            arrays = np.load(f, allow_pickle=False)
            if not isinstance(arrays, np.lib.npyio.NpzFile):
                raise ConfigError("it is a .npy file, whatever its name; np.savez writes .npz files")
            if key not in arrays:
                raise ConfigError(f"no array {key!r}; it has: {', '.join(arrays.files)}")
            return arrays[key]
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError) as e:  # empty, cut off, or something else
        raise e if isinstance(e, ConfigError) else ConfigError(f"it is no .npz file, or damaged: {e}") from e


def text_tokens(text: str, tokenizer: Any, length: int = TEXT_LENGTH) -> np.ndarray:
    """Text as int32 [sequences, length]; what does not fill the last sequence is dropped.

    A text of less than ``length`` tokens is one sequence.
    """
    ids = np.asarray(tokenizer.encode(text), np.int32)
    length = min(length, len(ids))
    if length < 2:
        raise ConfigError(f"the text has {len(ids)} tokens; at least 2 are needed")
    return check_tokens(ids[: len(ids) // length * length].reshape(-1, length))


def read_calibration(spec: str, tokenizer: Any) -> np.ndarray:
    """``FILE.npz:KEY`` or ``FILE.txt`` as tokens; ``tokenizer()`` is called for text only."""
    if not spec.endswith(".txt"):
        return read_tokens(spec)
    return text_tokens(_text(spec), tokenizer())


def check_calibration(spec: str | None) -> None:
    """Raise ConfigError where :func:`read_calibration` would for the file, before a model is loaded.

    Also for recipes that use no data: who names a file that is not there has made a mistake.
    """
    if spec is None:
        return
    if spec.endswith(".txt"):
        _text(spec)
    else:
        read_tokens(spec)


def _text(file: str) -> str:
    if not Path(file).is_file():
        raise ConfigError(f"{file} does not exist")
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ConfigError(f"{file} is not UTF-8 text: {e}") from e
