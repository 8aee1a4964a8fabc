"""``mxjax lm-eval``: a model folder under lm_eval's tasks.

From Python::

    import lm_eval
    from mxjax.cli.lm_eval import FolderLM

    lm_eval.simple_evaluate(FolderLM("out4"), tasks=["arc_easy"])
    lm_eval.simple_evaluate("mxjax", "path=out4,batch_size=4", tasks=["arc_easy"])

The import registers the name ``mxjax`` for the second form.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

from mxjax.cli.console import Console
from mxjax.cli.models import open_model
from mxjax.errors import ConfigError
from mxjax.eval.lm_eval_adapter import MxjaxLM  # first: says which extra is missing

from lm_eval.api.registry import register_model  # isort: skip


@register_model("mxjax")
class FolderLM(MxjaxLM):
    """Any MODEL of the command line, quantized or not, for lm_eval.

    Args:
      path: a folder that mxjax wrote, a Hugging Face folder, a ``.gguf`` file, or an alias; with its tokenizer.
      batch_size: sequences at a time; "auto" is 8.
      max_length: how many tokens the model may see; default: its configuration's, at most 2048.
      max_gen_toks: how many tokens are generated where a task does not say.
      device, max_batch_size: taken because lm_eval passes them, and not used: JAX has chosen its devices.
    """

    def __init__(
        self,
        path: str,
        batch_size: int | str = 8,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        device: Any = None,
        max_batch_size: Any = None,
    ):
        from mxjax_models.generate import generate
        from mxjax_models.stacked import stack

        opened = open_model(str(path), Console(quiet=True))
        stacked = cache(lambda: stack(opened.model))  # copies the blocks: only if something is generated
        super().__init__(
            opened.model,
            opened.tokenizer(),
            lambda *args, **options: generate(stacked(), *args, **options),
            max_length=max_length or min(opened.model.config.max_position_embeddings, 2048),
            batch_size=8 if str(batch_size).startswith("auto") else int(batch_size),
            max_gen_toks=max_gen_toks,
        )
        self.path = str(path)

    @property
    def tokenizer_name(self) -> str:
        """Of the folder: lm_eval's cache of requests must not mix up two models."""
        return str(Path(self.path).resolve())


def run(*, model: str, arguments: tuple[str, ...]) -> None:
    """lm_eval's own command line, on this model."""
    if any(mark in model for mark in ",="):
        raise ConfigError(f"lm_eval splits its arguments at commas and equals signs: rename {model}")
    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["lm_eval", "run", "--model", "mxjax", "--model_args", f"path={model}", *arguments]
    cli_evaluate()
