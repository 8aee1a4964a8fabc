"""The sizes and switches of a Llama or Qwen3 model, and how Hugging Face's ``config.json`` spells them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mxjax.errors import ConfigError

MODEL_TYPES = ("llama", "qwen3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Rope:
    """Llama 3.1's RoPE scaling (``rope_type: llama3``): long wavelengths are stretched by ``factor``."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes and switches of one model; field names are Hugging Face's.

    Example::

        config = LlamaConfig.tiny(model_type="qwen3")
        model = Llama(config, rngs=nnx.Rngs(0))

    Raises:
        ConfigError: an unknown ``model_type`` or sizes that do not fit together.
    """

    model_type: str = "llama"  # "llama" | "qwen3"; qwen3 normalizes each query and key head (QK-norm)
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int  # not always hidden_size / num_attention_heads (Qwen3)
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Llama3Rope | None = None
    tie_word_embeddings: bool = False  # True: the head is the embedding transposed, and there is no lm_head
    attention_bias: bool = False  # on q, k, v and o
    mlp_bias: bool = False
    max_position_embeddings: int = 2048  # as trained; nothing here is sized by it
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    def __post_init__(self):
        if self.model_type not in MODEL_TYPES:
            raise ConfigError(f"model_type {self.model_type!r} is not supported; supported: {', '.join(MODEL_TYPES)}")
        sizes = [f.name for f in dataclasses.fields(self) if f.type is int and getattr(self, f.name) < 1]
        if sizes:
            raise ConfigError("sizes must be positive: " + ", ".join(f"{n}={getattr(self, n)}" for n in sizes))
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads={self.num_attention_heads} is no multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} must be even: RoPE rotates pairs")

    @property
    def qk_norm(self) -> bool:
        return self.model_type == "qwen3"

    @classmethod
    def tiny(cls, **overrides: Any) -> "LlamaConfig":
        """A two-layer model of about 80 thousand parameters for tests; every linear size is a multiple of 32."""
        sizes = dict(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16)
        return cls(**{**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, **overrides})

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "LlamaConfig":
        """Reads a Hugging Face ``config.json`` as a dict.

        Both spellings of RoPE are read: ``rope_theta`` + ``rope_scaling`` and transformers 5's ``rope_parameters``.
        Keys that do not change the forward pass (dropout, initializer range, ``quantization_config``) are ignored.

        Raises:
            ConfigError: missing sizes, or a field that asks for something this file does not compute (an unknown
                ``model_type`` or ``rope_type``, another activation, a sliding window, partial rotary); all of them
                are named in one message.
        """
        problems = []
        kind = config.get("model_type")
        if kind not in MODEL_TYPES:
            raise ConfigError(f"model_type {kind!r} is not supported; supported: {', '.join(MODEL_TYPES)}")
        names = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
        names += ["num_key_value_heads", "head_dim"] if kind == "qwen3" else []  # Llama derives both when absent
        if missing := [n for n in names if config.get(n) is None]:
            raise ConfigError(f"config has no {', '.join(missing)}")
        values = {n: config[n] for n in names}
        heads, hidden = values["num_attention_heads"], values["hidden_size"]
        values["num_key_value_heads"] = config.get("num_key_value_heads") or heads
        values["head_dim"] = config.get("head_dim") or hidden // heads

        if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
            problems.append(f"hidden_act={act!r} (only 'silu')")
        # Qwen configs carry a window that use_sliding_window=False switches off; Llama-like ones have no such switch.
        if config.get("use_sliding_window", config.get("sliding_window") is not None):
            problems.append(f"a sliding window (sliding_window={config.get('sliding_window')})")
        if other := set(config.get("layer_types") or ()) - {"full_attention"}:
            problems.append(f"layer_types {sorted(other)} (only 'full_attention')")

        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = rope.get("rope_theta", config.get("rope_theta"))
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        if partial not in (None, 1.0):
            problems.append(f"partial_rotary_factor={partial} (only 1.0)")
        scaling = None
        if rope_type == "llama3":
            fields = [f.name for f in dataclasses.fields(Llama3Rope)]
            if absent := [n for n in fields if n not in rope]:
                problems.append(f"rope_type 'llama3' without {', '.join(absent)}")
            else:
                scaling = Llama3Rope(**{n: rope[n] for n in fields})
        elif rope_type != "default":
            problems.append(f"rope_type={rope_type!r} (only 'default' and 'llama3')")
        if problems:
            raise ConfigError(f"this {kind} config asks for what mxjax_models.llama lacks: " + "; ".join(problems))

        for name in ("rms_norm_eps", "tie_word_embeddings", "attention_bias", "mlp_bias", "max_position_embeddings"):
            if config.get(name) is not None:
                values[name] = config[name]
        eos = config.get("eos_token_id")
        return cls(
            **values,
            model_type=kind,
            rope_theta=float(10000.0 if theta is None else theta),
            rope_scaling=scaling,
            bos_token_id=config.get("bos_token_id"),
            eos_token_id=tuple(eos) if isinstance(eos, list | tuple) else eos,
        )


def hf_config(config: LlamaConfig) -> dict[str, Any]:
    """The ``config.json`` of a model, as a dict; ``LlamaConfig.from_hf(hf_config(c)) == c``.

    RoPE is spelled ``rope_theta`` + ``rope_scaling``, which transformers 4 and 5 and vLLM all read.

    Example::

        (folder / "config.json").write_text(json.dumps(hf_config(model.config) | {"torch_dtype": "bfloat16"}))
    """
    out = {k: v for k, v in dataclasses.asdict(config).items() if k not in ("rope_scaling", "eos_token_id")}
    eos = config.eos_token_id
    out["eos_token_id"] = list(eos) if isinstance(eos, tuple) else eos
    scaling = config.rope_scaling
    out["rope_scaling"] = None if scaling is None else {"rope_type": "llama3", **dataclasses.asdict(scaling)}
    architecture = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[config.model_type]
    return {"architectures": [architecture], **out, "hidden_act": "silu"}
