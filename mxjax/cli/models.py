"""What MODEL on the command line can be, opened: a float model or a quantized one."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxjax.cli.console import Console
from mxjax.errors import CheckpointError, ConfigError, MissingExtraError

ALIASES = ("smollm2",)


@dataclass
class OpenModel:
    """A model in memory.

    Attributes:
      name: as the user wrote it.
      path: the folder or file it came from.
      model: ``mxjax_models.llama.Llama``; its linear layers are quantized ones if ``quantized``.
      quantized: whether the checkpoint was.
    """

    name: str
    path: Path
    model: Any
    quantized: bool

    @property
    def params(self) -> Any:
        """The parameters under the model's own paths (``layers/0/mlp/up_proj/kernel``)."""
        return params_of(self.model)

    def tokenizer(self) -> Any:
        """The tokenizer beside the weights.

        Raises:
          ConfigError: there is none.
        """
        from mxjax_models.tokenizer import load_tokenizer

        try:
            return load_tokenizer(self.path)
        except FileNotFoundError as e:
            raise ConfigError(f"{self.name} has no tokenizer, so text cannot be used: {e}; give tokens instead") from e


def require(*packages: str, purpose: str, extra: str) -> None:
    """Check optional packages before work or a download is spent on what needs them.

    Raises:
      MissingExtraError: names all that are missing, and the extra that brings them.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"{purpose} needs {', '.join(missing)}, which {'are' if len(missing) > 1 else 'is'} not installed: "
            f"pip install 'mxjax[{extra}]'"
        )


def is_gguf(name: str) -> bool:
    """Whether a MODEL argument stands for a GGUF file."""
    return name in ALIASES or name.endswith(".gguf")


def resolve(name: str, console: Console, *, offline: bool = False) -> Path:
    """The folder or file that a MODEL argument stands for; the demo model is fetched if need be."""
    if name in ALIASES:
        require("gguf", purpose=f"the model {name}", extra="gguf")  # before 93 MB are downloaded
        from mxjax.cli.fetch import fetch

        return fetch(offline=offline, note=console.note)
    path = Path(name)
    if not path.exists():
        raise CheckpointError(f"{name} does not exist (a model is a folder, a .gguf file, or {', '.join(ALIASES)})")
    return path


def open_model(name: str, console: Console, *, offline: bool = False, lazy: bool = False) -> OpenModel:
    """Load a model: a Hugging Face folder, a ``.gguf`` file, a folder that mxjax wrote, or an alias.

    Args:
      name: as the user wrote it.
      console: where notes go.
      offline: fetch nothing.
      lazy: leave the float weights of a folder in its files, as memory maps in the dtype that they are stored in.

    Raises:
      CheckpointError: not one of these, or damaged.
    """
    path = resolve(name, console, offline=offline)

    quantized = is_quantized_folder(path)
    try:
        model = _load_quantized(path) if quantized else _load_float(path, lazy and path.is_dir())
    except (FileNotFoundError, ValueError, json.JSONDecodeError) as e:
        raise e if isinstance(e, CheckpointError) else CheckpointError(f"{name}: {e}") from e
    return OpenModel(name, path, model, quantized)


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a folder as a dict.

    Raises:
      CheckpointError: missing or no JSON object.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no config.json: it is no model folder") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise CheckpointError(f"{file} is no JSON: {e}") from e
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    return config


def is_quantized_folder(folder: Path) -> bool:
    """Whether a folder holds a quantized checkpoint, ours or another library's; False for a file."""
    return folder.is_dir() and (
        (folder / "mxjax.json").exists() or bool(read_config(folder).get("quantization_config"))
    )


def _load_float(path: Path, lazy: bool) -> Any:
    from mxjax_models import llama

    return llama.load(path, None, lazy=True) if lazy else llama.load(path)


def _load_quantized(folder: Path) -> Any:
    import jax
    import jax.numpy as jnp
    from mxjax_models import params
    from mxjax_models._llama_config import LlamaConfig

    import mxjax
    from mxjax.ops.qweight import is_quantized

    config = LlamaConfig.from_hf(read_config(folder))
    own = (folder / "mxjax.json").exists()  # such folders keep our paths; others have Hugging Face names
    tree = mxjax.load(folder) if own else mxjax.load(folder, names=params.path_of)
    # Whatever is stored in 16 bits is computed with in float32, as every model here.
    tree = jax.tree.map(lambda x: x if is_quantized(x) else jnp.asarray(x, jnp.float32), tree, is_leaf=is_quantized)
    return mxjax.nnx.from_params(params.abstract(config), tree)


def params_of(model: Any) -> Any:
    """All parameters of an nnx model, quantized weights included."""
    from flax import nnx

    from mxjax.nn.nnx import QParam

    return nnx.state(model, nnx.Any(nnx.Param, QParam))
