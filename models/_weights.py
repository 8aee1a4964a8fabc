"""From a checkpoint's tensors to a model's variables: every name and shape is compared before anything is read."""

import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mxjax.errors import CheckpointError
from mxjax.io import safetensors


class Source(NamedTuple):
    """One tensor of a file. ``shape`` is PyTorch's, (out, in) for a matrix, and so is what ``read`` returns.

    Where a file holds the values as they are, that is a read-only memory map.
    """

    label: str  # the name inside the file
    file: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


class Weights(NamedTuple):
    sources: dict[str, Source]  # by Hugging Face name; tensors nobody knows keep their own
    problems: list[str]
    places: dict[str, str]  # the file an index promises for each tensor


def torch_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in PyTorch: a kernel (in, out) is (out, in), a convolution's (h, w, in, out) is (out, in, h, w)."""
    if not path.endswith("/kernel"):
        return tuple(shape)
    return tuple(shape[::-1]) if len(shape) == 2 else (shape[3], shape[2], shape[0], shape[1])


def from_torch(path: str, value: np.ndarray, ndim: int) -> np.ndarray:
    """A view of PyTorch's tensor in the layout of a parameter of ``ndim`` axes.

    A convolution over patches, or over single pixels, is a matrix here: (out, c, h, w) -> (c * h * w, out).
    """
    if not path.endswith("/kernel"):
        return value
    return value.transpose(2, 3, 1, 0) if ndim == 4 else value.reshape(len(value), math.prod(value.shape[1:])).T


def to_torch(path: str, value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of ``from_torch``; ``shape`` is PyTorch's. Contiguous, as ``safetensors.numpy.save_file`` needs."""
    if path.endswith("/kernel"):
        value = value.transpose(3, 2, 0, 1) if value.ndim == 4 else value.T
    return np.ascontiguousarray(value).reshape(shape)


def abstract(make: Callable[[Any], Any]) -> Any:
    """``make(rngs)`` with shapes in place of arrays (``jax.ShapeDtypeStruct``): nothing is allocated."""
    return nnx.eval_shape(lambda: make(_OneKey()))


class _OneKey:
    """In the place of ``nnx.Rngs`` where nothing is drawn: its counters take a time quadratic in the layers when traced
    (FLUX.1: half a minute)."""

    def params(self) -> jax.Array:
        return jax.random.key(0)


def fill(
    model: Any,
    found: Weights,
    where: Path,
    dtype: np.dtype | None,
    lazy: bool,
    *,
    name_of: Callable[[str], str],
    shape_of: Callable[[str, tuple[int, ...]], tuple[int, ...]] = torch_shape,
) -> Any:
    """The abstract ``model`` with the tensors in it, read, turned and cast one at a time.

    Args:
        model: shapes in place of arrays (``nnx.eval_shape``).
        found: the tensors of the checkpoint.
        where: for messages.
        dtype: of the parameters; None: as each is stored.
        lazy: NumPy arrays, memory maps wherever no cast is needed.
        name_of: path to the checkpoint's name.
        shape_of: path and shape here to the shape there.

    Raises:
        CheckpointError: tensors that are missing, unexpected, or of the wrong shape, all of them in one message.
    """
    graph, state = nnx.split(model)
    variables = {"/".join(map(str, p)): (p, v) for p, v in nnx.to_flat_state(state)}
    problems = list(found.problems) + _problems(
        {name_of(path): shape_of(path, tuple(v.shape)) for path, (_, v) in variables.items()}, found, where
    )
    if problems:
        raise CheckpointError(f"{where} does not fit its config, {len(problems)} problems:\n  " + "\n  ".join(problems))
    filled = {}
    for path, (key, variable) in variables.items():
        value = from_torch(path, found.sources[name_of(path)].read(), len(variable.shape))
        if lazy:
            filled[key] = variable.replace(value.astype(dtype or value.dtype, copy=False))
            continue
        # One copy, whatever the layout and dtype were: the result never aliases the mapped file.
        filled[key] = variable.replace(jnp.asarray(np.array(value, dtype=dtype, order="C")))
    return nnx.merge(graph, nnx.from_flat_state(filled))


def by_path(model: Any, dtype: Any) -> dict[str, np.ndarray]:
    """All variables under their paths in the model, in PyTorch's layout: what ``read_by_path`` reads."""
    out = {}
    for key, variable in nnx.to_flat_state(nnx.state(model)):
        path, value = "/".join(map(str, key)), np.asarray(jax.device_get(variable[...].astype(dtype)))
        out[path] = to_torch(path, value, torch_shape(path, value.shape))
    return out


def read_by_path(model: Any, file: Path, dtype: Any, other: Collection[str] = ()) -> Any:
    """The abstract ``model`` with the tensors of a safetensors file, named by their paths.

    Args:
        other: tensors of the file that are no variables.

    Raises:
        CheckpointError: no such file, or one whose tensors are not the model's.
    """
    sources = {n: Source(n, file.name, e.shape, e.read) for n, e in safetensors.read(file).items() if n not in other}
    return fill(model, Weights(sources, [], {}), file, np.dtype(dtype), False, name_of=lambda path: path)


def _problems(expected: Mapping[str, tuple[int, ...]], found: Weights, where: Path) -> list[str]:
    missing = [n for n in expected if n not in found.sources]
    lines = [f"missing {n} in {found.places.get(n, where.name)}, shape {expected[n]}" for n in missing]
    for name, source in found.sources.items():
        if name not in expected:
            lines.append(f"unexpected {source.label} in {source.file}, shape {source.shape}")
        elif source.shape != (want := expected[name]):
            lines.append(f"{source.label} in {source.file}: shape {source.shape}, but the config asks for {want}")
    return lines
