"""Reference models in Flax nnx, one file each. Installed as ``mxjax_models``."""

from typing import Any


def __getattr__(name: str) -> Any:
    # On first use, so that importing the package does not import Flax.
    if name == "rotate":
        from mxjax_models.quarot import rotate

        return rotate
    raise AttributeError(f"module 'mxjax_models' has no attribute {name!r}")
