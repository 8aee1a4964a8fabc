"""Parameter names of whole model families, ours to Hugging Face's and back, and the shapes that a config implies.

No model code is needed for it: a path in a tree and a Hugging Face name are the same words. Three things differ: the
prefix ``model.``, what a leaf is called (kernel, embedding and scale are all ``weight``), and that a kernel is
(in, out) here but (out, in) in PyTorch. gpt-oss keeps the experts of a layer in one parameter (E, in, out) everywhere.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mxjax.errors import CheckpointError, ConfigError

_LINEAR, _NORM, _EMBEDDING, _ITSELF = ("kernel", "bias"), ("scale",), ("embedding",), ("",)


@dataclasses.dataclass(frozen=True)
class Family:
    """The modules of one family: regular expressions of their paths, and the leaves that each may have.

    Attributes:
        name: for messages.
        modules: (pattern, leaves); the leaf ``""`` is a parameter that belongs to no module of its own.
    """

    name: str
    modules: tuple[tuple[str, tuple[str, ...]], ...]

    def hf_name(self, path: str) -> str:
        """The Hugging Face name of a parameter or of a module.

        Example::

            family({"model_type": "mixtral"}).hf_name("layers/0/block_sparse_moe/experts/1/w2/kernel")
            # "model.layers.0.block_sparse_moe.experts.1.w2.weight"

        Raises:
            CheckpointError: no such parameter in this model family.
        """
        module, leaf = (path, "") if self._leaves(path) else path.rpartition("/")[::2]
        leaves = self._leaves(module)
        if not leaves or (leaf and leaf not in leaves):
            raise CheckpointError(f"{path!r} is no parameter of {self.name}")
        name = module.replace("/", ".") if module == "lm_head" else "model." + module.replace("/", ".")
        return name + {"": "", "bias": ".bias"}.get(leaf, ".weight")

    def path_of(self, name: str) -> str:
        """The inverse of ``hf_name``.

        Raises:
            CheckpointError: no such parameter in this model family.
        """
        stem, dot, leaf = name.rpartition(".")
        if leaf not in ("weight", "bias"):
            stem, dot, leaf = name, "", ""
        module = stem.removeprefix("model.").replace(".", "/")
        leaves = self._leaves(module)
        wrong_prefix = stem.startswith("model.") == (module == "lm_head")
        if wrong_prefix or not leaves or (dot and leaves == _ITSELF) or (leaf == "bias" and "bias" not in leaves):
            raise CheckpointError(f"{name!r} is no tensor of {self.name}")
        return module if not dot else f"{module}/{'bias' if leaf == 'bias' else leaves[0]}"

    def _leaves(self, module: str) -> tuple[str, ...]:
        return next((leaves for pattern, leaves in self.modules if re.fullmatch(pattern, module)), ())


def _family(name: str, linear: str, *parameters: str) -> Family:
    norms = r"input_layernorm|post_attention_layernorm|self_attn/[qk]_norm"
    return Family(
        name,
        (
            (rf"layers/\d+/(?:self_attn/[qkvo]_proj|{linear})|lm_head", _LINEAR),
            (rf"layers/\d+/(?:{norms})|norm", _NORM),
            ("embed_tokens", _EMBEDDING),
            *((rf"layers/\d+/{parameter}", _ITSELF) for parameter in parameters),
        ),
    )


_MLP = r"mlp/(?:gate|up|down)_proj"
LLAMA = _family("mxjax_models.llama", _MLP)  # Llama 3 and Qwen3
MIXTRAL = _family("Mixtral", r"block_sparse_moe/(?:gate|experts/\d+/w[123])")
QWEN3_MOE = _family("Qwen3-MoE", rf"{_MLP}|mlp/gate|mlp/experts/\d+/(?:gate|up|down)_proj")
GPT_OSS = _family("gpt-oss", "mlp/router", r"mlp/experts/(?:gate_up|down)_proj(?:_bias)?", "self_attn/sinks")
FAMILIES = {"llama": LLAMA, "qwen3": LLAMA, "mixtral": MIXTRAL, "qwen3_moe": QWEN3_MOE, "gpt_oss": GPT_OSS}


def family(config: Mapping[str, Any]) -> Family:
    """The family of a Hugging Face config.

    Raises:
        ConfigError: a ``model_type`` that is not known here.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ConfigError(f"model_type {kind!r} has no names here; known: {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Path -> shape of every parameter of a model of that config, as they are here: kernels (in, out).

    Example::

        sum(math.prod(s) for s in names.shapes(json.load(open("config.json"))).values())  # the number of parameters

    Raises:
        ConfigError: a ``model_type`` that is not known here, or a size that is missing.
    """
    family(config)
    try:
        return dict(_model(config))
    except KeyError as e:
        raise ConfigError(f"config has no {e.args[0]}") from None


def hf_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a parameter in Hugging Face's files."""
    return tuple(shape[::-1]) if path.endswith("/kernel") else tuple(shape)


Shapes = Iterator[tuple[str, tuple[int, ...]]]


def _model(c: Mapping[str, Any]) -> Shapes:
    hidden, vocabulary = c["hidden_size"], c["vocab_size"]
    yield "embed_tokens/embedding", (vocabulary, hidden)
    for i in range(c["num_hidden_layers"]):
        for path, shape in _block(c, i):
            yield f"layers/{i}/{path}", shape
    yield "norm/scale", (hidden,)
    if not c.get("tie_word_embeddings", False):
        yield "lm_head/kernel", (hidden, vocabulary)


def _block(c: Mapping[str, Any], layer: int) -> Shapes:
    kind, hidden = c["model_type"], c["hidden_size"]
    heads = c["num_attention_heads"]
    kv_heads, size = c.get("num_key_value_heads") or heads, c.get("head_dim") or hidden // heads
    bias = c.get("attention_bias", kind == "gpt_oss")
    for name, n_in, n_out in (
        ("q_proj", hidden, heads * size),
        ("k_proj", hidden, kv_heads * size),
        ("v_proj", hidden, kv_heads * size),
        ("o_proj", heads * size, hidden),
    ):
        yield from _linear(f"self_attn/{name}", n_in, n_out, bias)
    if kind.startswith("qwen3"):
        yield "self_attn/q_norm/scale", (size,)
        yield "self_attn/k_norm/scale", (size,)
    if kind == "gpt_oss":
        yield "self_attn/sinks", (heads,)
    yield "input_layernorm/scale", (hidden,)
    yield "post_attention_layernorm/scale", (hidden,)
    yield from {"mixtral": _mixtral, "gpt_oss": _gpt_oss}.get(kind, _mlp)(c, layer)


def _linear(name: str, n_in: int, n_out: int, bias: bool) -> Shapes:
    yield f"{name}/kernel", (n_in, n_out)
    if bias:
        yield f"{name}/bias", (n_out,)


def _gated(prefix: str, hidden: int, inner: int, bias: bool = False) -> Shapes:
    yield from _linear(f"{prefix}/gate_proj", hidden, inner, bias)
    yield from _linear(f"{prefix}/up_proj", hidden, inner, bias)
    yield from _linear(f"{prefix}/down_proj", inner, hidden, bias)


def _mlp(c: Mapping[str, Any], layer: int) -> Shapes:
    hidden, experts = c["hidden_size"], c["num_experts"] if c["model_type"] == "qwen3_moe" else 0
    dense = layer in (c.get("mlp_only_layers") or ()) or (layer + 1) % c.get("decoder_sparse_step", 1)
    if not experts or dense:
        yield from _gated("mlp", hidden, c["intermediate_size"], c.get("mlp_bias", False))
        return
    yield "mlp/gate/kernel", (hidden, experts)
    for e in range(experts):
        yield from _gated(f"mlp/experts/{e}", hidden, c["moe_intermediate_size"])


def _mixtral(c: Mapping[str, Any], layer: int) -> Shapes:
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    yield "block_sparse_moe/gate/kernel", (hidden, c["num_local_experts"])
    for e in range(c["num_local_experts"]):
        for name, shape in (("w1", (hidden, inner)), ("w2", (inner, hidden)), ("w3", (hidden, inner))):
            yield f"block_sparse_moe/experts/{e}/{name}/kernel", shape


def _gpt_oss(c: Mapping[str, Any], layer: int) -> Shapes:
    hidden, inner, experts = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    yield from _linear("mlp/router", hidden, experts, True)
    yield "mlp/experts/gate_up_proj", (experts, hidden, 2 * inner)
    yield "mlp/experts/gate_up_proj_bias", (experts, 2 * inner)
    yield "mlp/experts/down_proj", (experts, inner, hidden)
    yield "mlp/experts/down_proj_bias", (experts, hidden)
