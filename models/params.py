"""Weights in and out: Hugging Face safetensors folders and GGUF files -> model -> Hugging Face names.

A path inside the model and a Hugging Face name are the same words; only three things differ: the prefix ``model.``,
what a leaf is called (kernel, embedding and scale are all ``weight``), and that a kernel is (in, out) here but
(out, in) in PyTorch.
"""

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from mxjax_models import _sources
from mxjax_models._llama_config import LlamaConfig
from mxjax_models._llama_config import hf_config as hf_config
from mxjax_models._weights import abstract as weights_abstract
from mxjax_models._weights import fill, to_torch, torch_shape
from mxjax_models.llama import Llama
from mxjax_models.names import LLAMA

from mxjax.errors import CheckpointError, MxjaxError


def hf_name(path: str) -> str:
    """The Hugging Face name of a parameter or of a module.

    Example::

        hf_name("layers/0/self_attn/q_proj/kernel")   # "model.layers.0.self_attn.q_proj.weight"
        hf_name("layers/0/self_attn/q_proj")          # "model.layers.0.self_attn.q_proj"

    Raises:
        CheckpointError: no such parameter in this model family.
    """
    return LLAMA.hf_name(path)


def path_of(name: str) -> str:
    """The inverse of ``hf_name``: ``model.layers.0.self_attn.q_proj.weight`` -> ``layers/0/self_attn/q_proj/kernel``.

    Raises:
        CheckpointError: no such parameter in this model family.
    """
    return LLAMA.path_of(name)


def load(folder_or_gguf: str | os.PathLike, dtype: Any = jnp.float32, *, lazy: bool = False) -> Llama:
    """Loads a model.

    Args:
        folder_or_gguf: a folder with ``config.json`` and ``model.safetensors`` (or shards and their index), or a
            ``.gguf`` file of architecture llama or qwen3, dequantized as it is read.
        dtype: of all parameters, and so of the computation; None: as each is stored.
        lazy: leave the weights in the file. Parameters are NumPy arrays then, read-only memory maps wherever the file
            holds ``dtype`` (kernels as transposed views), so that loading takes no time and no memory: for
            ``mxjax.quantize_sequential``, which needs one block at a time. Others are read and cast, on the host.

    Returns:
        A ``Llama``. Tensors are read, transposed and cast one at a time into a model that was never initialized, so
        memory stays near the parameters' own size.

    Example::

        model = load("Llama-3.2-1B", jnp.bfloat16)
        logits = model(jnp.array([[1, 2, 3]]))
        model = load("Llama-3.1-70B", None, lazy=True)

    Raises:
        FileNotFoundError: no such file, no config, no weights.
        MissingExtraError: a GGUF file without the package ``gguf`` (``pip install 'mxjax[gguf]'``).
        CheckpointError: an unsupported config; or tensors that are missing, unexpected, or of the wrong shape or
            dtype, all of them in one message.
    """
    path = Path(folder_or_gguf)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise CheckpointError(f"dtype {jnp.dtype(dtype).name} is not a float type")
    if not path.is_dir() and path.suffix != ".gguf":
        raise CheckpointError(f"{path} is neither a folder nor a .gguf file")
    try:
        found = _sources.open_folder(path) if path.is_dir() else _sources.open_gguf(path)
        return _fill(found, path, None if dtype is None else jnp.dtype(dtype), lazy)
    except (MxjaxError, OSError):
        raise
    except Exception as e:  # whatever a config of nonsense or gguf make of a damaged file
        raise CheckpointError(f"{path} is damaged or no model: {type(e).__name__}: {e}") from e


def abstract(config: LlamaConfig, dtype: Any = jnp.float32) -> Llama:
    """The model with shapes in place of arrays (``jax.ShapeDtypeStruct``): nothing is allocated."""
    return weights_abstract(lambda rngs: Llama(config, dtype=dtype, rngs=rngs))


def _fill(found: _sources.Checkpoint, path: Path, dtype: np.dtype | None, lazy: bool) -> Llama:
    weights, config = found.weights, found.config
    sources = {n: s for n, s in weights.sources.items() if not n.endswith("rotary_emb.inv_freq")}  # old Llama exports
    problems = list(weights.problems)
    if config.tie_word_embeddings and "lm_head.weight" in sources:
        head, embedding = sources.pop("lm_head.weight"), sources.get("model.embed_tokens.weight")
        if embedding and not (head.shape == embedding.shape and np.array_equal(head.read(), embedding.read())):
            problems.append(f"{head.label} in {head.file} differs from the embedding, but the config ties them")
    weights = weights._replace(sources=sources, problems=problems)
    return fill(abstract(config, dtype or jnp.float32), weights, path, dtype, lazy, name_of=hf_name)


def to_hf(model: Llama) -> dict[str, np.ndarray]:
    """All parameters under their Hugging Face names, kernels transposed to (out, in), dtypes kept.

    A tied head is not repeated. The arrays are contiguous, as ``safetensors.numpy.save_file`` needs.

    Example::

        safetensors.numpy.save_file(to_hf(model), folder / "model.safetensors", metadata={"format": "pt"})

    Raises:
        CheckpointError: the model holds parameters that are not this family's (a quantized layer, for example).
    """
    out = {}
    for key, variable in nnx.to_flat_state(nnx.state(model)):
        path, value = "/".join(map(str, key)), np.asarray(jax.device_get(variable[...]))
        out[hf_name(path)] = to_torch(path, value, torch_shape(path, value.shape))
    return out
