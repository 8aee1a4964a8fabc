"""Weights of diffusion transformers in and out: diffusers' safetensors folders -> model -> diffusers' names.

A path inside the model and diffusers' name are the same words: ``/`` for ``.``, and a kernel or scale is a ``weight``.
Kernels are (in, out) here, (out, in) there, and convolutions over patches or single pixels are matrices here.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from mxjax_models import _dit_config, _sources, _weights, flux, pixart, sana

from mxjax.errors import CheckpointError, MxjaxError
from mxjax.io import hf

WEIGHTS = "diffusion_pytorch_model.safetensors"


class Kind(NamedTuple):
    """How one class of diffusers transformers is read: our model, its config, and what the config must say."""

    model: Any
    config: Any
    only: Any  # config keys with the values that the model computes


KINDS = {
    "PixArtTransformer2DModel": Kind(pixart.PixArt, pixart.PixArtConfig, pixart.ONLY),
    "FluxTransformer2DModel": Kind(flux.Flux, flux.FluxConfig, flux.ONLY),
    "SanaTransformer2DModel": Kind(sana.Sana, sana.SanaConfig, sana.ONLY),
}
_OLD_NAMES = {"Transformer2DModel": "PixArtTransformer2DModel"}  # told from others by norm_type, which ONLY checks


def load(
    folder: str | os.PathLike,
    dtype: Any = jnp.float32,
    *,
    lazy: bool = False,
    attention: str | None = None,
    expect: Any = None,
) -> Any:
    """Loads a diffusion transformer.

    Args:
        folder: a pipeline's folder, with ``transformer/`` in it, or that folder itself: ``config.json`` and
            ``diffusion_pytorch_model.safetensors``, or shards and their index.
        dtype: of all parameters, and so of the computation; None: as each is stored.
        lazy: leave the weights in the file, as NumPy memory maps wherever it holds ``dtype``.
        attention: ``implementation`` of ``jax.nn.dot_product_attention``: "cudnn" in 16 bits on an NVIDIA GPU.
        expect: the model class that it must be; default: any of ``KINDS``.

    Returns:
        A ``PixArt``, ``Flux`` or ``Sana``, as ``_class_name`` in the config says.

    Example::

        model = load("PixArt-Sigma-XL-2-1024-MS", jnp.bfloat16)

    Raises:
        FileNotFoundError: no such folder, no config, no weights.
        CheckpointError, ConfigError: another model; a config that it cannot honour; tensors that are missing,
            unexpected, or of the wrong shape or dtype, all of them in one message.
    """
    path = Path(folder)
    if (path / "transformer" / hf.CONFIG).is_file():
        path = path / "transformer"
    if not (path / hf.CONFIG).is_file():
        raise FileNotFoundError(f"{path} has no {hf.CONFIG}, nor transformer/{hf.CONFIG}")
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise CheckpointError(f"dtype {jnp.dtype(dtype).name} is not a float type")
    raw = hf.read_config(path)
    kind = kind_of(raw, path)
    if expect is not None and kind.model is not expect:
        raise CheckpointError(f"{path} is a {kind.model.__name__}, not a {expect.__name__}")
    if raw.get("quantization_config"):
        raise CheckpointError(f"{path} is a quantized checkpoint; this loads float weights only")
    try:
        config = kind.config.from_diffusers(raw)
        model = abstract(kind.model, config, dtype or jnp.float32, attention=attention)
        found = _sources.open_weights(path, WEIGHTS)
        dtype = None if dtype is None else jnp.dtype(dtype)
        shape_of = lambda name, shape: torch_shape(model, name, shape)  # noqa: E731
        return _weights.fill(model, found, path, dtype, lazy, name_of=hf.default_names, shape_of=shape_of)
    except (MxjaxError, OSError):
        raise
    except Exception as e:  # whatever a config of nonsense makes of it
        raise CheckpointError(f"{path} is damaged or no model: {type(e).__name__}: {e}") from e


def kind_of(raw: Any, where: Any) -> Kind:
    """The classes for a config, by its ``_class_name``.

    Raises:
        CheckpointError: another class.
    """
    name = raw.get("_class_name")
    kind = KINDS.get(_OLD_NAMES.get(name, name)) if isinstance(name, str) else None
    if kind is None:
        raise CheckpointError(f"{where}: _class_name {name!r} is not supported; supported: {', '.join(KINDS)}")
    return kind


def abstract(model: Any, config: Any, dtype: Any = jnp.float32, **options: Any) -> Any:
    """The model with shapes in place of arrays (``jax.ShapeDtypeStruct``): nothing is allocated.

    Example::

        abstract(Flux, FluxConfig.dev())
    """
    return _weights.abstract(lambda rngs: model(config, dtype=dtype, rngs=rngs, **options))


def torch_shape(model: Any, path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a parameter in diffusers' files."""
    return model.torch_shape(path, shape) or _weights.torch_shape(path, shape)


def diffusers_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """diffusers' name -> shape of every parameter; an abstract model is enough.

    Example::

        diffusers_shapes(abstract(PixArt, PixArtConfig.sigma()))["pos_embed.proj.weight"]   # (1152, 4, 2, 2)
    """
    flat = {"/".join(map(str, key)): v for key, v in nnx.to_flat_state(nnx.state(model))}
    return {hf.default_names(path): torch_shape(model, path, tuple(v.shape)) for path, v in flat.items()}


def to_diffusers(model: Any) -> dict[str, np.ndarray]:
    """All parameters under their diffusers names and in diffusers' shapes, dtypes kept.

    Example::

        safetensors.numpy.save_file(to_diffusers(model), folder / WEIGHTS, metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(diffusers_config(model)))

    Raises:
        CheckpointError: the model holds quantized layers.
    """
    out = {}
    for key, variable in nnx.to_flat_state(nnx.state(model)):
        path = "/".join(map(str, key))
        if not isinstance(variable, nnx.Param):
            raise CheckpointError(f"{path} is quantized: save quantized models with mxjax.save")
        value = np.asarray(jax.device_get(variable[...]))
        out[hf.default_names(path)] = _weights.to_torch(path, value, torch_shape(model, path, value.shape))
    return out


def diffusers_config(model: Any) -> dict[str, Any]:
    """The ``config.json`` of a model, as a dict."""
    name, kind = next((n, k) for n, k in KINDS.items() if type(model) is k.model)
    return _dit_config.to_diffusers(model.config, kind.only, name)
