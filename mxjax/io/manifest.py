"""Trees as JSON with named arrays: the part that the "mxjax" and "orbax" formats share. See docs/format.md.

Every node is a JSON object whose first key says what it is: ``dict``, ``list``, ``tuple``, ``value``, ``array``, or
``class`` for a QWeight, a QTensor or a transform, with its static fields in ``static`` and the others in ``data``.
Classes are looked up by name in a fixed table; nothing in a file can name any other code.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import transforms
from mxjax.core.formats import FORMATS, BlockFormat, get_format
from mxjax.core.qtensor import QTensor
from mxjax.core.scales import check_policy
from mxjax.errors import CheckpointError, MxjaxError
from mxjax.io.placement import Key
from mxjax.io.safetensors import checked_shape
from mxjax.ops.low_rank import LowRank
from mxjax.ops.qweight import ActivationFormat, QWeight

_TYPES = {"int": int, "str": str, "bool": bool, "float": float, "BlockFormat": BlockFormat}
_extra: dict[str, type] = {}


def register_transform(cls: type) -> type:
    """Let checkpoints hold a transform that is not part of ``mxjax.transforms``: a registered dataclass.

    Its class name is what the file says; the same call is needed before loading. Usable as a decorator.

    Raises:
      CheckpointError: no dataclass, or a name that is taken.
    """
    if not dataclasses.is_dataclass(cls) or _classes().get(cls.__name__, cls) is not cls:
        raise CheckpointError(f"{cls!r} is no dataclass, or another class has its name already")
    _extra[cls.__name__] = cls
    return cls


def _classes() -> dict[str, type]:
    ours = {k: v for k, v in vars(transforms).items() if isinstance(v, type) and dataclasses.is_dataclass(v)}
    return {"QTensor": QTensor, "QWeight": QWeight, "LowRank": LowRank, **ours, **_extra}


# --- writing ----------------------------------------------------------------------------------------------------------


def encode(tree: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The JSON node of a tree, and its arrays by name. An array object that appears twice is there once.

    Raises:
      CheckpointError: something that is no array, container or number; the message has its path.
    """
    arrays: dict[str, Any] = {}
    return _Encoder(arrays).node(tree, ""), arrays


@dataclasses.dataclass
class _Encoder:
    arrays: dict[str, Any]
    nodes: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)  # by id: arrays seen already

    def node(self, x: Any, path: str) -> dict[str, Any]:
        nnx = sys.modules.get("flax.nnx")  # no Variable can exist before somebody imports it
        if nnx is not None and isinstance(x, nnx.Variable):
            x = x.get_value()
        if isinstance(x, Mapping):
            for key in x:
                if type(key) not in (str, int):
                    raise CheckpointError(f"{path or 'tree'}: dict keys are str or int, not {key!r}")
            return {
                "dict": [[key, self.node(value, f"{path}/{key}" if path else str(key))] for key, value in x.items()]
            }
        if type(x) in (list, tuple):
            kind = "list" if type(x) is list else "tuple"
            return {kind: [self.node(value, f"{path}/{i}" if path else str(i)) for i, value in enumerate(x)]}
        if _classes().get(type(x).__name__) is type(x):
            return self.instance(x, path)
        if x is None or (isinstance(x, (bool, int, float, str)) and not isinstance(x, np.generic)):
            if isinstance(x, float) and not math.isfinite(x):
                raise CheckpointError(f"{path}: JSON has no {x}; store it as an array")
            return {"value": x}
        if isinstance(x, (jax.Array, np.ndarray, np.generic)):
            return self.array(x, path or "array")
        raise CheckpointError(f"{path or 'tree'}: cannot store a {type(x).__name__}; use dicts, lists and arrays")

    def instance(self, x: Any, path: str) -> dict[str, Any]:
        static, data = {}, {}
        for f in dataclasses.fields(x):
            value = getattr(x, f.name)
            if f.metadata.get("static"):
                static[f.name] = _encode_static(value, f"{path}.{f.name}")
            else:
                data[f.name] = self.node(value, f"{path}.{f.name}" if path else f.name)
        return {"class": type(x).__name__, "static": static, "data": data}

    def array(self, x: Any, path: str) -> dict[str, Any]:
        if id(x) in self.nodes:
            return self.nodes[id(x)]
        node: dict[str, Any] = {"array": path}
        stored = x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            node["key"] = _key_name(x)
            stored = jax.random.key_data(x)
        if np.dtype(stored.dtype).hasobject:
            raise CheckpointError(f"{path}: cannot store an array of Python objects")
        while node["array"] in self.arrays or node["array"] == "__metadata__":
            node["array"] += "'"  # a key may hold a slash, so two paths can read the same
        node |= {"dtype": np.dtype(stored.dtype).name, "shape": list(stored.shape)}
        if math.prod(stored.shape):
            self.arrays[node["array"]] = stored
        self.nodes[id(x)] = node
        return node


def _key_name(key: jax.Array) -> str:
    """The name of a key's generator, for ``jax.random.wrap_key_data``."""
    text = str(jax.random.key_impl(key))
    return text.split("'")[1] if "'" in text else text


def _encode_static(value: Any, path: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return [_encode_static(item, path) for item in value]
    if isinstance(value, BlockFormat) and FORMATS.get(value.name) == value:
        return {"format": value.name}
    if isinstance(value, ActivationFormat):
        return {"activation": _encode_static(value.format, path)["format"], "scale": value.scale}
    raise CheckpointError(f"{path}: cannot store {value!r}")


# --- reading ----------------------------------------------------------------------------------------------------------


class Spec(NamedTuple):
    """What a node says about one array, and the keys, indices and attributes that lead to it."""

    dtype: np.dtype
    shape: tuple[int, ...]
    keys: tuple[Key, ...]


def specs(node: Any) -> dict[str, Spec]:
    """The stored arrays that a node refers to, by name. Arrays without values are not stored.

    Raises:
      CheckpointError: a name that is described in two ways, a dtype or a shape that is none.
    """
    found: dict[str, Spec] = {}
    try:
        for spec_node, keys in _array_nodes(node, ()):
            spec = _spec(spec_node, keys)
            if math.prod(spec.shape) and found.setdefault(spec_node["array"], spec)[:2] != spec[:2]:
                raise CheckpointError(f"{_path(keys)}: array {spec_node['array']} is described in two ways")
    except RecursionError:
        raise CheckpointError("the tree is nested too deeply") from None
    return found


def _array_nodes(node: Any, keys: tuple[Key, ...]) -> Iterator[tuple[dict[str, Any], tuple[Key, ...]]]:
    match node:
        case {"array": str()}:
            yield node, keys
        case {"dict": list(items)}:
            for item in items:
                if isinstance(item, list) and len(item) == 2:
                    yield from _array_nodes(item[1], (*keys, item[0]))
        case {"list": list(items)} | {"tuple": list(items)}:
            for i, item in enumerate(items):
                yield from _array_nodes(item, (*keys, i))
        case {"class": str(), "data": dict(data)}:
            for name, item in data.items():
                yield from _array_nodes(item, (*keys, name))


def _spec(node: dict[str, Any], keys: tuple[Key, ...]) -> Spec:
    name = node.get("dtype")
    try:
        dtype = jnp.dtype(name) if isinstance(name, str) else None
    except (TypeError, ValueError):
        dtype = None
    if dtype is None or dtype.hasobject or dtype.names or not dtype.itemsize:
        raise CheckpointError(f"{_path(keys)}: {str(name)[:50]!r} is no dtype")
    return Spec(dtype, checked_shape(node.get("shape"), _path(keys)), keys)


def decode(node: Any, arrays: Mapping[str, Any]) -> Any:
    """The tree of a node, from its arrays by name.

    Raises:
      CheckpointError: anything that :func:`encode` does not write, or that breaks an invariant of what it describes.
    """
    try:
        return _Decoder(arrays).node(node, ())
    except RecursionError:
        raise CheckpointError("the tree is nested too deeply") from None


def _path(keys: tuple[Key, ...]) -> str:
    return "/".join(map(str, keys)) or "tree"


@dataclasses.dataclass
class _Decoder:
    arrays: Mapping[str, Any]

    def node(self, node: Any, keys: tuple[Key, ...]) -> Any:
        match node:
            case {"dict": list(items)} if len(node) == 1:
                return self.mapping(items, keys)
            case {"list": list(items)} if len(node) == 1:
                return [self.node(item, (*keys, i)) for i, item in enumerate(items)]
            case {"tuple": list(items)} if len(node) == 1:
                return tuple(self.node(item, (*keys, i)) for i, item in enumerate(items))
            case {"value": None | bool() | int() | float() | str() as value} if len(node) == 1:
                return value
            case {"class": str(name), "static": dict(static), "data": dict(data)} if len(node) == 3:
                return self.instance(name, static, data, keys)
            case {"array": str(), "dtype": _, "shape": _} if node.keys() <= {"array", "dtype", "shape", "key"}:
                return self.array(node, keys)
        raise CheckpointError(f"{_path(keys)}: {str(node)[:200]} describes no part of a tree")

    def mapping(self, items: list[Any], keys: tuple[Key, ...]) -> dict[Key, Any]:
        out: dict[Key, Any] = {}
        for item in items:
            if not (isinstance(item, list) and len(item) == 2 and type(item[0]) in (str, int)) or item[0] in out:
                raise CheckpointError(f"{_path(keys)}: {str(item)[:200]} is no entry of a dict, or its key comes twice")
            out[item[0]] = self.node(item[1], (*keys, item[0]))
        return out

    def array(self, node: dict[str, Any], keys: tuple[Key, ...]) -> Any:
        spec = _spec(node, keys)
        value = self.arrays[node["array"]] if math.prod(spec.shape) else np.zeros(spec.shape, spec.dtype)
        if "key" not in node:
            return value
        try:
            return jax.random.wrap_key_data(jnp.asarray(value), impl=node["key"])
        except (TypeError, ValueError, LookupError) as e:
            raise CheckpointError(f"{_path(keys)}: no random key: {e}") from None

    def instance(self, name: str, static: Mapping, data: Mapping, keys: tuple[Key, ...]) -> Any:
        cls = _classes().get(name)
        if cls is None:
            raise CheckpointError(f"{_path(keys)}: unknown class {name[:50]!r}; known: {', '.join(_classes())}")
        fields = {f.name: f for f in dataclasses.fields(cls)}
        values = {}
        for key, value in [*static.items(), *data.items()]:
            if key not in fields or bool(fields[key].metadata.get("static")) != (key in static) or key in values:
                raise CheckpointError(f"{_path(keys)}: {name} has no such field {key[:50]!r}; was a newer mxjax here?")
            if key in static:
                values[key] = _decode_static(value, fields[key].type, (*keys, key))
            else:
                values[key] = self.node(value, (*keys, key))
                _check_data(values[key], fields[key].type, (*keys, key))
        # What the constructors make of nonsense out of a file (a size that is a string, ...) is one thing: a bad file.
        try:
            out = cls(**values)
            if isinstance(out, QTensor) and not jnp.issubdtype(out.dtype, jnp.floating):
                raise TypeError(f"dtype_name {out.dtype_name} is no float")
            if isinstance(out, (QTensor, QWeight)):
                out.validate(_path(keys))
        except MxjaxError as e:
            raise CheckpointError(str(e)) from None
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as e:
            raise CheckpointError(f"{_path(keys)}: no valid {name}: {type(e).__name__}: {e}") from None
        return out


def _decode_static(value: Any, annotation: Any, keys: tuple[Key, ...]) -> Any:
    try:
        match value:
            case {"format": str(name)} if len(value) == 1:
                value = get_format(name)
            case {"activation": str(name), "scale": str(scale)} if len(value) == 2:
                value = ActivationFormat(format=get_format(name), scale=scale)
                check_policy(scale, value.format)
            case list():
                value = tuple(_decode_static(item, None, keys) for item in value)
            case dict():
                raise CheckpointError(f"{str(value)[:200]} describes no static field")
    except MxjaxError as e:
        raise CheckpointError(f"{_path(keys)}: {e}") from None
    expected = _TYPES.get(annotation)
    if expected is not None and type(value) is not expected:
        raise CheckpointError(f"{_path(keys)}: {expected.__name__}, not {str(value)[:50]!r}")
    return value


def _check_data(value: Any, annotation: Any, keys: tuple[Key, ...]) -> None:
    """Fields that hold arrays hold arrays (annotations are text, as in every module of mxjax)."""
    optional = str(annotation).endswith("| None")
    if "jax.Array" in str(annotation) and not (optional and value is None) and not hasattr(value, "dtype"):
        raise CheckpointError(f"{_path(keys)}: an array, not a {type(value).__name__}")
