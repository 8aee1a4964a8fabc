"""Tensors in several files with an index, as ``transformers`` writes them: who goes where, names, the index."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mxjax.errors import ConfigError
from mxjax.io import hf, safetensors
from mxjax.io.safetensors import Spec

SHARD_SIZE = 5_000_000_000  # bytes of tensors in a file, unless something else is asked for

Group = Mapping[str, Spec]


def check_size(shard_size: int) -> int:
    """A number of bytes.

    Raises:
      ConfigError: none, or less than 1.
    """
    if type(shard_size) is not int or shard_size < 1:
        raise ConfigError(f"shard_size is a number of bytes, not {shard_size!r}")
    return shard_size


def split(groups: Sequence[Group], weights: str, limit: int) -> list[tuple[str, range]]:
    """The files that hold groups of tensors: at most ``limit`` bytes each, filled in order; a group stays together.

    Args:
      groups: dtypes and shapes by name; one group is what one weight becomes.
      weights: name of a single file, such as ``model.safetensors``.
      limit: bytes; a larger group has a file of its own.

    Returns:
      For each file its name and which groups it holds: ``weights`` alone, or ``model-00001-of-00004.safetensors`` ...

    Example:
      >>> one = {"a": Spec(np.dtype("float32"), (10,))}
      >>> split([one, one, one], "model.safetensors", 80)
      [('model-00001-of-00002.safetensors', range(0, 2)), ('model-00002-of-00002.safetensors', range(2, 3))]
    """
    starts, filled = [0], 0
    for i, group in enumerate(groups):
        nbytes = sum(spec.nbytes for spec in group.values())
        if nbytes and filled and filled + nbytes > limit:
            starts.append(i)
            filled = 0
        filled += nbytes
    ends = [*starts[1:], len(groups)]
    if len(starts) == 1:
        return [(weights, range(len(groups)))]
    stem = weights.removesuffix(".safetensors")
    names = [f"{stem}-{i:05}-of-{len(starts):05}.safetensors" for i in range(1, len(starts) + 1)]
    return [(name, range(a, b)) for name, a, b in zip(names, starts, ends, strict=True)]


def write_index(folder: Path, weights: str, files: Iterable[tuple[str, Group]]) -> None:
    """``model.safetensors.index.json`` for files and their tensors; nothing where there is one file."""
    files = list(files)
    if len(files) == 1:
        return
    total = sum(spec.nbytes for _, specs in files for spec in specs.values())
    places = {tensor: name for name, specs in files for tensor in specs}
    hf.write_json(folder / f"{weights}.index.json", {"metadata": {"total_size": total}, "weight_map": places})


def write(
    folder: Path,
    weights: str,
    groups: Sequence[Mapping[str, Any]],
    limit: int,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write groups of arrays (NumPy or JAX, one at a time on the host) to one file, or to several and an index.

    Args:
      folder: where.
      weights, limit: as in :func:`split`.
      groups: arrays by tensor name.
      metadata: texts for the header of every file.
    """
    specs = [{name: Spec.of(x) for name, x in group.items()} for group in groups]
    files = []
    for name, members in split(specs, weights, limit):
        tensors = {tensor: x for i in members for tensor, x in groups[i].items()}
        safetensors.write(folder / name, tensors, metadata)
        files.append((name, {tensor: spec for i in members for tensor, spec in specs[i].items()}))
    write_index(folder, weights, files)
