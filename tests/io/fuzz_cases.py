"""Damage of every kind to good checkpoints, and what may come of reading them: a valid tree, or an error of ours.

``draw`` is Hypothesis' or anything with its two methods used here, so that failures shrink. Run at length by
benchmarks/fuzz.py, in short by test_io_fuzz.py.
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from hypothesis import strategies as st

import mxjax
from mxjax.errors import ConfigError, MxjaxError, MxjaxWarning
from mxjax.io import safetensors
from mxjax.ops.qweight import QWeight, is_quantized

LINEAR = "model.layers.0.mlp.up_proj"


def dense() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    out = {LINEAR: rng.standard_normal((4, 64)), "model.norm": np.ones(8), "lm_head": np.eye(4)}
    return {f"{module}.weight": x.astype(ml_dtypes.bfloat16) for module, x in out.items()}


def write_json(file: Path, value) -> None:
    file.write_text(json.dumps(value))


def float_folder(folder: Path, shards: int = 2) -> None:
    folder.mkdir()
    write_json(folder / "config.json", {"model_type": "x", "dtype": "bfloat16"})
    names, places = list(dense()), {}
    for i in range(shards):
        part = {name: dense()[name] for name in names[i::shards]}
        safetensors.write(folder / f"model-{i}.safetensors", part)
        places |= dict.fromkeys(part, f"model-{i}.safetensors")
    write_json(folder / "model.safetensors.index.json", {"weight_map": places})


def streamed(format: str, recipe: str, shard_size: int = 10**9) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        float_folder(folder.with_name(folder.name + ".source"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MxjaxWarning)
            source = folder.with_name(folder.name + ".source")
            mxjax.quantize_folder(source, folder, recipe, format=format, shard_size=shard_size)

    return make


def gpt_oss(folder: Path) -> None:
    folder.mkdir()
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    write_json(folder / "config.json", {"model_type": "gpt_oss", "dtype": "bfloat16", "quantization_config": method})
    rng, tensors = np.random.default_rng(0), {"lm_head.weight": np.ones((8, 4), np.float32)}
    for name, n, k in (("gate_up_proj", 4, 64), ("down_proj", 64, 32)):
        head = f"model.layers.0.mlp.experts.{name}"
        tensors[f"{head}_blocks"] = rng.integers(0, 256, (2, n, k // 32, 16), np.uint8)
        tensors[f"{head}_scales"] = rng.integers(110, 130, (2, n, k // 32), np.uint8)
        tensors[f"{head}_bias"] = rng.random((2, n), np.float32)
    safetensors.write(folder / "model.safetensors", tensors)


def fp_quant(folder: Path) -> None:
    folder.mkdir()
    method = {
        "quant_method": "fp_quant", "forward_dtype": "mxfp4", "forward_method": "abs_max", "backward_dtype": "bf16",
        "hadamard_group_size": 32, "pseudoquantization": False, "store_master_weights": False,
        "transform_init": "hadamard", "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    write_json(folder / "config.json", {"model_type": "x", "dtype": "bfloat16", "quantization_config": method})
    rng = np.random.default_rng(0)
    hadamard = mxjax.transforms.hadamard_matrix(32).astype(ml_dtypes.bfloat16)
    tensors = {
        f"{LINEAR}.qweight": rng.integers(0, 256, (4, 32), np.uint8),
        f"{LINEAR}.scales": rng.integers(110, 130, (4, 2), np.uint8),
        f"{LINEAR}.weight_global_scale": np.array([3.0], np.float32),
        f"{LINEAR}.act_global_scale": np.array([3.0], np.float32),
        f"{LINEAR}.forward_hadamard_matrix": hadamard,
        f"{LINEAR}.backward_hadamard_matrix": hadamard,
        "model.norm.weight": np.ones(4, np.float32),
    }
    safetensors.write(folder / "model.safetensors", tensors)


# Readers by name: how a good folder of theirs is made.
FOLDERS: dict[str, Callable[[Path], None]] = {
    "float": float_folder,
    "mxjax": streamed("mxjax", "nvfp4"),
    "mxjax sharded": streamed("mxjax", "hadamard_mxfp4", 100),
    "compressed-tensors mxfp4": streamed("compressed-tensors", "hadamard_mxfp4"),
    "compressed-tensors nvfp4": streamed("compressed-tensors", "nvfp4", 200),
    "quark mxfp4": streamed("quark", "mxfp4"),
    "quark nvfp4": streamed("quark", "nvfp4"),
    "modelopt nvfp4": streamed("modelopt", "nvfp4"),
    "gpt-oss": gpt_oss,
    "fp-quant": fp_quant,
}

# --- damage -----------------------------------------------------------------------------------------------------------

NASTY = [
    None, True, False, 0, 1, -1, 3, 16, 2**31, 2**53, 2**63, 2**64, 10**40, -(2**63), 0.5, 1e308, float("nan"),
    float("inf"), "", "x", "F4", "BF16", "uint8", "float32", "mxfp4", "nvfp4", "../x", "/etc/passwd", "re:(", "re:.*",
    "a" * 5000, "\x00", "é\ud800", [], {}, [[]], [0, 0], [2**62, 2**62], {"": None},
]  # fmt: skip
scalars = st.sampled_from(NASTY) | st.integers() | st.floats() | st.text(max_size=8)
values = scalars | st.recursive(
    scalars, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3)
)
RAW = [
    b"[" * 100_000, b'{"a":' * 50_000, b"9" * 5000, b"-", b"nan", b'"\\ud800"', b"\xff\xfe", b"\x00", b"1e999999",
    b'{"a":1,"a":2}', b"//", b"'",
]  # fmt: skip


def nodes(value, path=()) -> list[tuple]:
    """The paths of all parts of a JSON value."""
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += nodes(item, (*path, key))
    return found


def at(value, path):
    for key in path:
        value = value[key]
    return value


def damage_json(draw, value):
    """A JSON value with one part replaced, removed, renamed, copied from elsewhere, or wrapped."""
    paths = [p for p in nodes(value) if p]
    if not paths:
        return draw(values)
    path = draw(st.sampled_from(paths))
    parent, key = at(value, path[:-1]), path[-1]
    match draw(st.integers(0, 5)):
        case 0:
            parent[key] = draw(values)
        case 1:
            del parent[key]
        case 2:
            parent[key] = json.loads(json.dumps(at(value, draw(st.sampled_from(paths)))))
        case 3 if isinstance(parent, dict):
            parent[str(draw(scalars))] = parent.pop(key)
        case 4:
            parent[key] = [parent[key]]
        case _:
            old = parent[key]
            small = st.integers(-3, 3)
            parent[key] = old + draw(small) if type(old) in (int, float) else str(old)[: draw(st.integers(0, 5))]
    return value


def damage_bytes(draw, data: bytes) -> bytes:
    """Bytes changed, inserted, removed, repeated, or nonsense put in."""
    if not data:
        return draw(st.binary(max_size=20))
    # Half of the time near the beginning, where headers are.
    where = draw(st.integers(0, min(len(data) - 1, 600)) | st.integers(0, len(data) - 1))
    match draw(st.integers(0, 5)):
        case 0:
            return data[:where] + bytes([draw(st.integers(0, 255))]) + data[where + 1 :]
        case 1:
            return data[:where] + draw(st.binary(min_size=1, max_size=9)) + data[where:]
        case 2:
            return data[:where] + data[where + draw(st.integers(1, 50)) :]
        case 3:
            return data[:where]
        case 4:
            return data[:where] + RAW[draw(st.integers(0, len(RAW) - 1))] + data[where:]
        case _:
            return data + data[where:]


def split(data: bytes) -> tuple[dict, bytes]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def join(draw, header, body: bytes) -> bytes:
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    lie = draw(st.just(0) | st.just(0) | st.sampled_from([-1, 1, 8, 2**31, 2**62, 10**8]))
    return min(max(len(text) + lie, 0), 2**64 - 1).to_bytes(8, "little") + text + body


def damage_header(draw, data: bytes) -> bytes:
    header, body = split(data)
    for _ in range(draw(st.integers(1, 2))):
        header = damage_json(draw, header)
    return join(draw, header, body)


def damage_tensors(draw, data: bytes) -> bytes:
    """A file that is right in itself, with a tensor that is missing, renamed, of another dtype, shape or value."""
    header, body = split(data)
    tensors = {
        name: np.frombuffer(body[slice(*t["data_offsets"])], safetensors.DTYPES[t["dtype"]]).reshape(t["shape"])
        for name, t in header.items()
        if name != "__metadata__"
    }
    name = draw(st.sampled_from(sorted(tensors)))
    x = tensors.pop(name)
    match draw(st.integers(0, 6)):
        case 0:
            pass
        case 1:
            tensors[
                draw(st.sampled_from([f"{name}_x", "model", "weight", "", f"{LINEAR}.weight_packed", name.upper()]))
            ] = x
        case 2:
            same = [d for d in safetensors.DTYPES.values() if d.itemsize == x.dtype.itemsize]
            tensors[name] = x.view(draw(st.sampled_from(same)))
        case 3:
            kind = draw(st.sampled_from(list(safetensors.DTYPES.values())))
            tensors[name] = np.resize(np.frombuffer(x.tobytes() * kind.itemsize, kind), x.shape)
        case 4:
            shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 16, 32, 33]), max_size=4))
            tensors[name] = np.resize(x, shape)
        case 5:
            tensors[name] = np.ascontiguousarray(x.T)
        case _:
            pattern = draw(st.sampled_from([0, 0x7F, 0x80, 0xFF]))
            tensors[name] = np.frombuffer(bytes([pattern]) * x.nbytes, x.dtype).reshape(x.shape)
    start, offsets = safetensors.layout({n: safetensors.Spec.of(t) for n, t in tensors.items()})
    return start + b"".join(tensors[n].tobytes() for n in offsets)


def damage_file(draw, folder: Path, file: Path) -> None:
    """The file itself: gone, empty, a folder, a link that leads out, a pipe, or one that an index places elsewhere."""
    match draw(st.integers(0, 5)):
        case 0:
            file.unlink()
        case 1:
            file.write_bytes(b"")
        case 2:
            file.unlink()
            file.mkdir()
        case 3:
            file.rename(folder.with_name("outside"))
            file.symlink_to(folder.with_name("outside"))
        case 4:
            file.unlink()
            os.mkfifo(file)
        case _:
            target = draw(
                st.sampled_from(["../outside", "/etc/passwd", ".", "", "a/b", "x" * 300, "\x00", "no.safetensors"])
            )
            index = {
                "weight_map": dict.fromkeys(safetensors.read(file) if file.suffix == ".safetensors" else ["a"], target)
            }
            write_json(folder / "model.safetensors.index.json", index)


def damage(draw, folder: Path) -> None:
    """One or two kinds of damage to a folder."""
    for _ in range(draw(st.integers(1, 2))):
        files = sorted(p for p in folder.iterdir() if p.is_file() and p.name != "SHA256SUMS")
        if not files:
            return
        file = draw(st.sampled_from(files))
        kind = draw(st.integers(0, 9))
        data = file.read_bytes()
        try:
            if kind == 0:
                damage_file(draw, folder, file)
            elif kind <= 2:
                file.write_bytes(damage_bytes(draw, data))
            elif file.suffix == ".safetensors":
                file.write_bytes((damage_header if kind <= 5 else damage_tensors)(draw, data))
            else:
                text = json.dumps(damage_json(draw, json.loads(data)))
                file.write_text(text, encoding="utf-8", errors="surrogatepass")
        except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError, MxjaxError):
            continue  # the first damage left nothing that the second could parse


# --- outcome ----------------------------------------------------------------------------------------------------------


class Unnamed(AssertionError):
    """A message that says neither file nor tensor."""


def read(folder: Path) -> str:
    """Read a folder in every way that there is; "read" or "refused". Anything else that happens is raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", MxjaxWarning)
        outcome = _attempt(folder, lambda: check_tree(mxjax.load(folder)))
        _attempt(folder, lambda: mxjax.load(folder, verify=True))
        if not (folder / "mxjax.json").exists():
            out = folder.with_name("requantized")
            _attempt(
                folder, lambda: mxjax.quantize_folder(folder, out, "mxfp4_a16", format="compressed-tensors", workers=1)
            )
            for left in (out, out.with_name(".requantized.partial")):
                shutil.rmtree(left, ignore_errors=True)
    return outcome


def _attempt(folder: Path, act: Callable[[], object]) -> str:
    try:
        act()
    except MxjaxError as e:
        known = (folder.name, ".safetensors", ".json", "model.", "model/", "lm_head", "SHA256SUMS")
        if not any(word in str(e) for word in known) and not isinstance(e, ConfigError):
            raise Unnamed(str(e)) from e
        return "refused"
    return "read"


def check_tree(tree) -> None:
    """What was read keeps the invariants of its classes."""
    for leaf in jax.tree.leaves(tree, is_leaf=is_quantized):
        if isinstance(leaf, QWeight):
            leaf.validate()
