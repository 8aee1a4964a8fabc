"""Several processes that run one program on one mesh (``jax.distributed``): what of an array each can see.

With one process everything here is the identity, or nothing. Every function is called by all processes, in the same
order, with the same arguments but for what the docstring says.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np

T = TypeVar("T")


def several() -> bool:
    """Whether there is more than one. Starts no backend where ``jax.distributed`` was never initialized."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def first() -> bool:
    """Whether this is the first process, or the only one."""
    return not several() or jax.process_index() == 0


def on_host(x: Any) -> np.ndarray:
    """An array on the host of every process, shards of others included: one array at a time, and all of it."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)


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
    digits = np.array(divmod(len(answer), 1 << 30), np.int32)  # int64 would become int32 on the way
    high, low = np.asarray(multihost_utils.broadcast_one_to_all(digits, is_source=mine)).tolist()
    length = (high << 30) + low
    data = np.frombuffer(answer, np.uint8) if mine else np.zeros(length, np.uint8)
    good, value = pickle.loads(np.asarray(multihost_utils.broadcast_one_to_all(data, is_source=mine)).tobytes())
    if not good:
        raise value from failure
    return value


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """A block that fails everywhere if it fails anywhere. No communication may be left half done by a failure in it.

    Raises:
      what the block raises; in processes where it did not, RuntimeError.
    """
    failure = None
    try:
        yield
    except Exception as e:
        failure = e
    if several():
        from jax.experimental import multihost_utils

        good = np.asarray(multihost_utils.process_allgather(np.int32(failure is None))).reshape(-1)
        if failure is None and not good.all():
            raise RuntimeError(f"process {int(good.argmin())} of {good.size} failed; its own error says why")
    if failure is not None:
        raise failure


def _sendable(e: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(e))
    except Exception:
        return RuntimeError(f"{type(e).__name__}: {e}")
    return e


__all__ = ["all_or_none", "first", "on_host", "one_for_all", "several"]
