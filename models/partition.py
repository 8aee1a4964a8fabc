"""How the models are spread over a mesh: rules from parameter paths to PartitionSpecs, and what follows from them.

    mesh = jax.make_mesh((2,), ("model",))
    model = partition.shard(qmodel, mesh)                     # float or quantized
    cache = partition.shard_cache(model.init_cache(B, 1024), mesh)
    logits, cache = nnx.jit(lambda m, t, c: m(t, c))(model, tokens, cache)

Tensor parallelism (Megatron-LM, arXiv:1909.08053). What a block does to one head, or to one channel of its MLP, stays
on one device: matrices into heads and channels (q, k, v; gate, up) are cut by columns, ``P(None, "model")``, those back
to the hidden size (o; down) by rows, ``P("model", None)``. So attention and MLP cost one sum over devices each, and
everything between blocks is replicated. The cache is cut by its heads.

=====================================  ====================  =========================================================
parameters                             kernel [in, out]      why
=====================================  ====================  =========================================================
q, k, v; gate, up; a DiT's MLP in      ``P(None, "model")``  each device has its own heads and channels
o; down; a DiT's attention and MLP     ``P("model", None)``  each device adds what its heads and channels say
out
adaLN of FLUX.1 (a quarter of it all)  ``P("model", None)``  B rows only: their sum is small, their weights are not
``proj_out`` of FLUX.1's single        ``P("model", None)``  its input is attention and MLP side by side, so XLA moves
blocks                                                       a part of it: E of 5 E values a token
embedding, head                        by vocabulary         each device knows its own tokens; the logits are cut
experts ``experts/*`` [X, ..]          ``P("model")``        each device has its own experts
embedders, norms, the rest             replicated            small
=====================================  ====================  =========================================================

With ``fsdp``, a second mesh axis, the other side of every matrix is cut too, for memory alone: codes and scales are
gathered just before a product, and the batch is cut along that axis.

Column-parallel products equal those of one device bit for bit. Row-parallel ones add float32 partial results: equal up
to the order of that sum. For many tokens of one sequence see ``ulysses``, which cuts the tokens instead.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mxjax
from mxjax.errors import ConfigError

# A pattern, searched in the path, and what its kernel [in, out] is cut by; the first match wins.
COLUMNS, ROWS, EXPERTS, VOCABULARY = "columns", "rows", "experts", "vocabulary"
RULES: tuple[tuple[str, str], ...] = (
    (r"(^|/)experts/", EXPERTS),
    # Llama, Qwen3
    (r"(^|/)([qkv]|gate|up)_proj/", COLUMNS),
    (r"(^|/)(o|down)_proj/", ROWS),
    (r"(^|/)lm_head/", COLUMNS),
    (r"(^|/)embed_tokens/", VOCABULARY),
    # the DiTs
    (r"(^|/)(to_[qkv]|add_[qkv]_proj|proj_mlp)/", COLUMNS),
    (r"(^|/)(to_out/\d+|to_add_out)/", ROWS),
    (r"(^|/)ff(_context)?/net/0/proj/", COLUMNS),
    (r"(^|/)ff(_context)?/net/2/", ROWS),
    (r"^single_transformer_blocks/\d+/proj_out/", ROWS),
    (r"^(single_)?transformer_blocks/\d+/norm\w*/linear/", ROWS),
)


def rules(axis: str = "model", fsdp: str | None = None) -> Callable[[str], P]:
    """The function from a parameter's path to its PartitionSpec: what ``mxjax.nnx.shard`` and ``mxjax.sharding`` take.

    Args:
        axis: mesh axis of tensor parallelism.
        fsdp: mesh axis along which the other side of every matrix is cut, or None.

    Example::

        rules()("layers/0/mlp/up_proj/kernel")        # P(None, "model")
        rules(fsdp="data")("layers/0/mlp/up_proj/kernel")        # P("data", "model")
    """

    def spec(path: str) -> P:
        kind = next((kind for pattern, kind in RULES if re.search(pattern, path)), None)
        name = path.rsplit("/", 1)[-1]
        if kind == EXPERTS:
            return P(axis)
        if kind == VOCABULARY:
            return P(axis, None)
        if name == "bias":
            return P(axis) if kind == COLUMNS else P()
        if name != "kernel" or kind is None:
            return P()
        return P(fsdp, axis) if kind == COLUMNS else P(axis, fsdp)

    return spec


def shard(model: Any, mesh: Mesh, *, axis: str = "model", fsdp: str | None = None, **options: Any) -> Any:
    """A copy of a model on a mesh, float or quantized, by ``rules``. Call it under ``jit``.

    Args:
        model: a Llama, Flux, PixArt or Sana, or any model with the same names.
        mesh: has ``axis``, and ``fsdp`` if that is given.
        axis, fsdp: as in ``rules``. With ``fsdp`` the batch is a multiple of that mesh axis.
        options: ``kernels`` and ``reduce_dtype``, as in ``mxjax.nnx.shard``.

    Raises:
        ConfigError: heads that the mesh axis does not divide.
        BlockShapeError: parameters that it does not cut evenly.
    """
    check_heads(model.config, mesh, axis)
    if fsdp is not None:
        options = {"gather": (fsdp,), "batch": (fsdp,), **options}
    return mxjax.nnx.shard(model, mesh, rules(axis, fsdp), **options)


def check_heads(config: Any, mesh: Mesh, axis: str) -> None:
    """Raise ConfigError unless every device gets whole heads."""
    if axis not in mesh.shape:
        raise ConfigError(f"the mesh has axes {dict(mesh.shape)}, none named {axis!r}")
    for name in ("num_attention_heads", "num_key_value_heads", "num_cross_attention_heads"):
        heads = getattr(config, name, None)
        if heads is not None and heads % mesh.shape[axis]:
            raise ConfigError(
                f"{name}={heads} is no multiple of the {mesh.shape[axis]} devices of {axis!r}: each device has whole "
                f"heads; use a mesh axis of a divisor of {heads}"
            )


def shard_cache(cache: Any, mesh: Mesh, *, axis: str = "model", batch: str | None = None) -> Any:
    """A key/value cache (``init_cache``) on the mesh: cut by heads, and by sequences along ``batch``."""

    def put(x: jax.Array) -> jax.Array:
        if x.ndim < 4:  # lengths and starts
            return jax.device_put(x, NamedSharding(mesh, P()))
        stack = [None] * (x.ndim - 4)  # layers of a stacked model
        return jax.device_put(x, NamedSharding(mesh, P(*stack, batch, axis, None, None)))

    return jax.tree.map(put, cache)


def specs_of(model: Any) -> dict[str, P]:
    """Path and PartitionSpec of every parameter, by what ``rules()`` says: to look at before it is done."""
    spec = rules()
    paths = ["/".join(map(str, path)) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Variable)]
    return {path: spec(path) for path in paths}
