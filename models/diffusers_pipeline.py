"""Our transformers in diffusers' pipelines: text encoders, VAE and scheduler stay theirs, in torch.

    pipe = FluxPipeline.from_pretrained(folder, transformer=None)
    pipe.transformer = for_pipeline(mxjax.nnx.quantize(flux.load(folder, jnp.bfloat16), "mxfp4"))
    image = pipe("a cat").images[0]

Tensors cross over through NumPy, once each way and step. ``diffusers_images.open_pipeline`` does all of it. Needs
``pip install 'mxjax[diffusers]'``.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from mxjax_models import diffusers_folder
from mxjax_models.flux import Flux
from mxjax_models.pixart import PixArt

from mxjax.errors import ConfigError, MissingExtraError


def for_pipeline(model: Any) -> "PipelineTransformer":
    """A stand-in for the pipeline's ``transformer``; the model is compiled once for each shape.

    Args:
        model: a ``PixArt``, ``Flux`` or ``Sana``, quantized or not.

    Raises:
        MissingExtraError: torch or diffusers is missing.
        ConfigError: another model.
    """
    return PipelineTransformer(model)


class PipelineTransformer:
    """What ``PixArtSigmaPipeline``, ``FluxPipeline`` and ``SanaPipeline`` ask of their transformer.

    Attributes:
        config: diffusers' own kind of config.
        dtype: torch's, of the tensors to be given: the dtype of the model's float parameters.
        device: the host's.
        watch: called with the arguments of each call, JAX arrays, or None.
    """

    def __init__(self, model: Any):
        try:
            import torch
            from diffusers.configuration_utils import FrozenDict
        except ImportError as e:
            raise MissingExtraError("pipelines need torch and diffusers: pip install 'mxjax[diffusers]'") from e
        if type(model) not in {kind.model for kind in diffusers_folder.KINDS.values()}:
            raise ConfigError(f"{type(model).__name__} has no pipeline; PixArt, Flux and Sana have")
        self.config = FrozenDict(diffusers_folder.diffusers_config(model))
        self._dtype = model.proj_out.bias[...].dtype  # a bias stays float where its kernel is quantized
        self.dtype = getattr(torch, self._dtype.name)
        self.device = torch.device("cpu")
        self.watch: Callable[[tuple], None] | None = None
        self._arguments = _ARGUMENTS.get(type(model), _sana_arguments)
        graph, self._state = nnx.split(model)
        self._run = jax.jit(lambda state, args: nnx.merge(graph, state)(*args))

    def cache_context(self, name: str) -> Any:
        """Caches between steps are diffusers' own business: there are none here."""
        return contextlib.nullcontext()

    def __call__(self, hidden_states: Any, return_dict: bool = True, **inputs: Any) -> Any:
        """diffusers' arguments by name, torch tensors in and out.

        Raises:
            ConfigError: an input that the model here does not take (adapters, ControlNet).
        """
        import torch
        from diffusers.models.modeling_outputs import Transformer2DModelOutput

        # Pipelines name what they do not use, as None or as an empty dict.
        used = {k: v for k, v in inputs.items() if v is not None and not (isinstance(v, dict) and not v)}
        inputs = {"hidden_states": hidden_states, **used}
        args = self._arguments(inputs)
        if inputs:
            raise ConfigError(f"this transformer does not take {', '.join(inputs)}")
        arrays = tuple(self._to_jax(x) for x in args)
        if self.watch is not None:
            self.watch(arrays)
        out = self._run(self._state, arrays)
        out = torch.from_numpy(np.array(out.astype(jnp.float32))).to(hidden_states.device, hidden_states.dtype)
        return Transformer2DModelOutput(sample=out) if return_dict else (out,)

    def _to_jax(self, x: Any) -> Any:
        if x is None:
            return None
        if not x.is_floating_point():
            return jnp.asarray(x.detach().cpu().numpy())
        # float32 on the way: NumPy has no bfloat16 of torch's. Times lose nothing before the model turns them.
        x = jnp.asarray(x.detach().cpu().float().numpy())
        return x if x.ndim < 2 else x.astype(self._dtype)


Inputs = dict[str, Any]


def _flux_arguments(inputs: Inputs) -> tuple:
    names = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "img_ids", "txt_ids")
    return (*(inputs.pop(n) for n in names), inputs.pop("guidance", None))


def _pixart_arguments(inputs: Inputs) -> tuple:
    sizes = inputs.pop("added_cond_kwargs", {})
    return (*_sana_arguments(inputs), sizes.get("resolution"), sizes.get("aspect_ratio"))


def _sana_arguments(inputs: Inputs) -> tuple:
    names = ("hidden_states", "timestep", "encoder_hidden_states")
    return (*(inputs.pop(n) for n in names), inputs.pop("encoder_attention_mask", None))


_ARGUMENTS: Mapping[type, Callable[[Inputs], tuple]] = {Flux: _flux_arguments, PixArt: _pixart_arguments}
