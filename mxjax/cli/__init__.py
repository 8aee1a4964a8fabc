"""The command line: ``mxjax quantize | inspect | eval | lm-eval | recipes | demo``.

``main`` is resolved on first use: the script's ``mxjax.cli.entry`` must be able to handle Ctrl-C before click is there.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mxjax.cli.app import main as main


def __getattr__(name: str) -> Any:
    if name != "main":
        raise AttributeError(f"module 'mxjax.cli' has no attribute {name!r}")
    from mxjax.cli.app import main

    globals()[name] = main
    return main
