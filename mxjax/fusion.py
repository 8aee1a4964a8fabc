"""``fuse_shared_inputs`` and ``unfuse_shared_inputs`` on trees: weights that multiply the same input become one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from mxjax.api import path_str
from mxjax.errors import ConfigError
from mxjax.ops.fused import FusedPart, FusedWeight, fuse
from mxjax.ops.qweight import QWeight, is_quantized

# Llama, Qwen, Mistral, Gemma and most others by their Hugging Face names.
DEFAULT_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def fuse_shared_inputs(params: Any, groups: Sequence[Sequence[str]] = DEFAULT_GROUPS) -> Any:
    """Fuse weights that multiply the same input, so that it is transformed and quantized once.

    In the result the first weight of a group holds all of them (:class:`mxjax.ops.fused.FusedWeight`) and the others
    hold where they went. Multiply with :func:`mxjax.qdot_shared`, which takes fused and unfused weights alike; in nnx
    models ``mxjax.nnx.fuse_shared_inputs`` and ``mxjax.nnx.shared_input`` do the same. Results do not change.
    :func:`unfuse_shared_inputs` gives the tree back, bit for bit: do that before saving.

    Only weights that are quantized alike can be fused; siblings that are all left unquantized stay as they are.

    Args:
      params: a quantized tree.
      groups: names that share an input. A name is one key of a path, or several joined by ``/``: ``("q_proj",
        "k_proj")`` fuses ``layers/0/q_proj/kernel`` with ``layers/0/k_proj/kernel``.

    Raises:
      ConfigError: weights of a group that differ in format, transform or input scale, a group of which one member is
        quantized and another is missing or not, or groups that match nothing.
      BlockShapeError: weights of a group with contraction axes of different lengths.

    Example:
      >>> p = mxjax.quantize({"q": {"kernel": jnp.ones((64, 8))}, "k": {"kernel": jnp.ones((64, 4))}}, "mxfp4")
      >>> fused = fuse_shared_inputs(p, [("q", "k")])
      >>> fused["k"]["kernel"]
      FusedPart(name='k', head='q', index=1)
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_leaf)
    leaves = {path_str(path): leaf for path, leaf in flat}
    swaps = fuse_leaves(leaves, groups)
    return jax.tree_util.tree_unflatten(treedef, [swaps.get(path, leaf) for path, leaf in leaves.items()])


def fuse_leaves(leaves: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> dict[str, FusedWeight | FusedPart]:
    """What takes the place of which path."""
    swaps: dict[str, FusedWeight | FusedPart] = {}
    for group in groups:
        for head in [p for p in leaves if _matches(p, group[0])]:
            paths = [_replace(head, group[0], name) for name in group]
            found = [leaves.get(p) for p in paths]
            if not any(isinstance(w, QWeight) for w in found):
                continue
            odd = [p for p, w in zip(paths, found, strict=True) if not isinstance(w, QWeight)]
            if odd:
                raise ConfigError(
                    f"{', '.join(odd)}: not quantized or not there, while others of the group ({', '.join(group)}) "
                    f"are; give the whole group one rule, or leave it out of groups"
                )
            if taken := [p for p in paths if p in swaps]:
                raise ConfigError(f"{', '.join(taken)}: in two groups")
            swaps[head] = fuse([w for w in found if isinstance(w, QWeight)], paths)
            swaps |= {p: FusedPart(group[i], group[0], i) for i, p in enumerate(paths) if i}
    if not swaps:
        names = "; ".join(", ".join(group) for group in groups)
        raise ConfigError(f"no quantized weights are called {names}; name the weights that share an input in groups")
    return swaps


def unfuse_shared_inputs(params: Any) -> Any:
    """The tree before :func:`fuse_shared_inputs`, bit for bit. A tree without fused weights comes back as it is.

    Raises:
      ConfigError: fused weights that are packed for kernels, or a part whose FusedWeight is not in the tree.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_leaf)
    leaves = {path_str(path): leaf for path, leaf in flat}
    swaps = unfuse_leaves(leaves)
    return jax.tree_util.tree_unflatten(treedef, [swaps.get(path, leaf) for path, leaf in leaves.items()])


def unfuse_leaves(leaves: Mapping[str, Any]) -> dict[str, QWeight]:
    """The weight of each path that holds a fused one or a part."""
    parts = {path: leaf.parts() for path, leaf in leaves.items() if isinstance(leaf, FusedWeight)}
    swaps = {path: weights[0] for path, weights in parts.items()}
    for path, leaf in leaves.items():
        if isinstance(leaf, FusedPart):
            head = _replace(path, leaf.name, leaf.head)
            if head not in parts:
                raise ConfigError(f"{path} was fused into {head}, which is not in the tree")
            swaps[path] = parts[head][leaf.index]
    return swaps


def _is_leaf(x: Any) -> bool:
    return is_quantized(x) or isinstance(x, (FusedWeight, FusedPart))


def _matches(path: str, name: str) -> bool:
    return re.search(rf"(^|/){re.escape(name)}(/|$)", path) is not None


def _replace(path: str, name: str, other: str) -> str:
    """The path with its last ``name`` exchanged."""
    return re.sub(rf"(^|.*/){re.escape(name)}(?=/|$)", lambda m: m[1] + other, path, count=1)
