"""Token files: ``FILE.npz:KEY``, or text that a tokenizer cuts into sequences."""

from __future__ import annotations

import zipfile
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
        with np.load(file, allow_pickle=False) as arrays:
            if key not in arrays:
                raise ConfigError(f"{file} has no array {key!r}; it has: {', '.join(arrays.files)}")
            return check_tokens(arrays[key])
    except (zipfile.BadZipFile, ValueError) as e:
        raise e if isinstance(e, ConfigError) else ConfigError(f"{file} is no .npz file: {e}") from e


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
    if not Path(spec).is_file():
        raise ConfigError(f"{spec} does not exist")
    return text_tokens(Path(spec).read_text(encoding="utf-8"), tokenizer())
