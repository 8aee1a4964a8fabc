"""PixArt-Mini on disk: ``pixart_mini.safetensors`` and ``pixart_mini.json`` beside it.

The JSON has the sizes of both networks, the hash of the weights, and the provenance: what the model was trained on,
how, and under which licence it comes. The safetensors file has every parameter under its path in the network
(``transformer/...``, ``text/...``) in bfloat16, kernels (out, in), and the vocabulary as compressed text.
"""

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from mxjax_models import _weights
from mxjax_models.pixart import PixArtConfig
from mxjax_models.pixart_mini import DATA, Network, PixArtMini
from mxjax_models.pixart_mini_text import Bytes, TextConfig, WordPieces

from mxjax.errors import CheckpointError, ConfigError
from mxjax.io import hashes, safetensors

NAME = "pixart_mini"
_PIECES = "pieces"


def tokenizer(config: TextConfig, pieces: Sequence[str] | None = None) -> WordPieces | Bytes:
    """The tokenizer that a text encoder was made for.

    Raises:
        ConfigError: word pieces without their list, or one of another length than the table.
    """
    if config.kind == "bytes":
        return Bytes()
    if pieces is None or len(pieces) != config.vocabulary:
        raise ConfigError(
            f"{0 if pieces is None else len(pieces)} word pieces for {config.vocabulary} rows of the table"
        )
    return WordPieces(pieces)


def to_file(network: Network, folder: str | os.PathLike, provenance: Mapping[str, Any],
            pieces: Sequence[str] | None = None, dtype: Any = jnp.bfloat16,
            calibration_prompts: Sequence[str] = ()) -> Path:  # fmt: skip
    """Writes both files and returns the path of the weights.

    Args:
        network: what was trained.
        folder: made if it is not there.
        provenance: goes into the JSON as it is; "license" is asked for.
        pieces: the vocabulary of a word-piece encoder.
        dtype: of the file.
        calibration_prompts: for ``PixArtMini.calibration_batches``.

    Raises:
        ConfigError: no licence, or no vocabulary where one is needed.
    """
    if "license" not in provenance:
        raise ConfigError("provenance needs a license: what the training data allow")
    tokenizer(network.text.config, pieces)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _weights.by_path(network, dtype)
    if pieces is not None:
        tensors[_PIECES] = np.frombuffer(zlib.compress("\n".join(pieces).encode(), 9), np.uint8)
    path = folder / f"{NAME}.safetensors"
    safetensors.write(path, tensors)
    sizes = {"transformer": vars(network.transformer.config), "text": vars(network.text.config)}
    sizes |= {"provenance": dict(provenance), "calibration_prompts": list(calibration_prompts)}
    text = json.dumps({"version": 1, "sha256": hashes.sha256(path), **sizes}, indent=1)
    (folder / f"{NAME}.json").write_text(text + "\n", encoding="utf-8")
    return path


def load(folder: str | os.PathLike = DATA, dtype: Any = jnp.float32, *, attention: str | None = None) -> PixArtMini:
    """Loads PixArt-Mini.

    Args:
        folder: holds ``pixart_mini.json`` and ``pixart_mini.safetensors``; the ones that ship if left out.
        dtype: of all parameters, and so of the computation.
        attention: ``implementation`` of ``jax.nn.dot_product_attention``: "cudnn" in 16 bits on an NVIDIA GPU.

    Example::

        mini = load(dtype=jnp.bfloat16)
        images = mini.images(mini.transformer, ["a red apple", "a sleeping cat"], seeds=[0, 1])

    Raises:
        FileNotFoundError: a file is missing.
        CheckpointError: weights that are not those of the JSON (their hash says so), or do not fit its sizes.
    """
    folder = Path(folder)
    described, path = folder / f"{NAME}.json", folder / f"{NAME}.safetensors"
    for file in (described, path):
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing: PixArt-Mini is {NAME}.json and {NAME}.safetensors")
    raw = safetensors.read_json(described)
    if raw.get("version") != 1:
        raise CheckpointError(f"{described}: version {raw.get('version')!r}; this reads version 1")
    if (found := hashes.sha256(path)) != raw.get("sha256"):
        raise CheckpointError(f"{path}: sha256 is {found}, {described.name} says {raw.get('sha256')}")
    try:
        config, text = PixArtConfig(**raw["transformer"]), TextConfig(**raw["text"])
    except (TypeError, KeyError) as e:
        raise CheckpointError(f"{described}: {e}") from e
    network = _weights.abstract(lambda rngs: Network(config, text, rngs=rngs, dtype=dtype, attention=attention))
    pieces = None
    if packed := safetensors.read(path).get(_PIECES):
        pieces = zlib.decompress(packed.read().tobytes()).decode().split("\n")
    network = _weights.read_by_path(network, path, dtype, other=(_PIECES,))
    more = raw.get("provenance", {}), tuple(raw.get("calibration_prompts", ()))
    return PixArtMini(network.transformer, network.text, tokenizer(text, pieces), *more)
