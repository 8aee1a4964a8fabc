"""Several processes that run one program on one mesh (``jax.distributed``): what of an array each can see.

With one process everything here is the identity, or nothing. Every function is called by all processes, in the same
order, with the same arguments but for what the docstring says.
"""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

T = TypeVar("T")


def several() -> bool:
    """Whether there is more than one. Starts no backend where ``jax.distributed`` was never initialized."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def on_host(x: Any) -> np.ndarray:
    """An array on the host of every process, shards of others included: one array at a time, and all of it."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)


def wait_for_all(name: str) -> None:
    """Return when every process has come here."""
    if several():
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def one_for_all(make: Callable[[], T], owner: int = 0) -> T:
    """What ``make()`` gives in the process ``owner``, in every process; what it raises there, everywhere.

    Values travel as pickles between the processes of this one program, never from or to a file.
    """
    if not several():
        return make()
    from jax.experimental import multihost_utils

    mine = jax.process_index() == owner
    answer, failure = b"", None
    if mine:
        try:
            answer = pickle.dumps((True, make()))
        except Exception as e:
            failure = e
            answer = pickle.dumps((False, _sendable(e)))
    length = int(multihost_utils.broadcast_one_to_all(np.int64(len(answer)).astype(np.int32), is_source=mine))
    data = np.frombuffer(answer, np.uint8) if mine else np.zeros(length, np.uint8)
    good, value = pickle.loads(np.asarray(multihost_utils.broadcast_one_to_all(data, is_source=mine)).tobytes())
    if not good:
        raise value from failure
    return value


def _sendable(e: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(e))
    except Exception:
        return RuntimeError(f"{type(e).__name__}: {e}")
    return e


def token() -> str:
    """A random word, the same in every process: for names of temporary folders."""
    return one_for_all(lambda: secrets.token_hex(4))


__all__ = ["on_host", "one_for_all", "several", "token", "wait_for_all"]
