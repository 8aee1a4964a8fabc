"""Text generation: one compiled prefill and decode loop for any model with ``hidden``, ``head`` and ``init_cache``."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mxjax.errors import ConfigError


def generate(
    model: Any,
    tokens: Any,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    key: jax.Array | None = None,
    eos_id: int | Sequence[int] | None = None,
) -> jax.Array:
    """Continues prompts.

    Prompts are padded on the left to a power of two (the padding is masked and takes no position), so there is one
    compilation per (batch, prompt bucket, ``max_new_tokens``), and for sampling per ``top_k``. Modules of the model may
    have been replaced by other callables: what is compiled is whatever the model holds now.

    Args:
        model: ``mxjax_models.llama.Llama``, quantized or not.
        tokens: one prompt (S,), prompts of one length (B, S), or a list of prompts of different lengths.
        max_new_tokens: how many to generate.
        temperature: 0 takes the most likely token; above 0 samples from softmax(logits / temperature).
        top_k: sample among the k most likely tokens only.
        key: ``jax.random.key(...)``, needed for sampling.
        eos_id: the token, or tokens, that end a sequence; the loop stops when all sequences have ended. None: never.

    Returns:
        The new tokens without the prompt, int32 (B, max_new_tokens), or (max_new_tokens,) for one prompt (S,). After
        its end a sequence repeats its end token.

    Example::

        new = generate(model, tokenizer.encode("The capital of France is"), 16, eos_id=tokenizer.eos_id)
        print(tokenizer.decode(new))

    Raises:
        ConfigError: empty prompts, tokens outside the vocabulary, or sampling arguments that contradict one another.
    """
    prompts, single = _prompts(tokens)
    vocab = model.config.vocab_size
    if any(p.min() < 0 or p.max() >= vocab for p in prompts):
        raise ConfigError(f"tokens must be in 0..{vocab - 1}")
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if temperature < 0:
        raise ConfigError(f"temperature={temperature} must not be negative")
    if temperature == 0 and (top_k is not None or key is not None):
        raise ConfigError("top_k and key are for sampling: set temperature > 0")
    if temperature > 0 and key is None:
        raise ConfigError("sampling (temperature > 0) needs a key: jax.random.key(seed)")
    if top_k is not None and not 1 <= top_k <= vocab:
        raise ConfigError(f"top_k={top_k} must be in 1..{vocab}")

    bucket = max(16, 1 << (max(map(len, prompts)) - 1).bit_length())
    padded = np.zeros((len(prompts), bucket), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[bucket - len(prompt) :] = prompt
    start = np.array([bucket - len(p) for p in prompts], np.int32)
    eos = np.atleast_1d(np.array([] if eos_id is None else eos_id, np.int32))
    graph, state = nnx.split(model)
    new = _generate(
        graph,
        state,
        padded,
        start,
        eos,
        jax.random.key(0) if key is None else key,
        np.float32(temperature),
        max_new=max_new_tokens,
        top_k=top_k,
        sample=temperature > 0,
    )
    return new[0] if single else new


def _prompts(tokens: Any) -> tuple[list[np.ndarray], bool]:
    """A list of 1-d int arrays, and whether the caller gave a single prompt."""
    single = np.ndim(tokens[0]) == 0 if len(tokens) else True
    prompts = [np.asarray(p) for p in ([tokens] if single else tokens)]
    if not all(p.ndim == 1 and p.size for p in prompts):
        raise ConfigError("tokens must be (S,), (B, S) or a list of prompts, none of them empty")
    if not all(np.issubdtype(p.dtype, np.integer) for p in prompts):
        raise ConfigError("tokens must be integers")
    return prompts, single


@partial(jax.jit, static_argnames=("graph", "max_new", "top_k", "sample"))
def _generate(graph, state, padded, start, eos, key, temperature, *, max_new, top_k, sample):
    model = nnx.merge(graph, state)
    b, bucket = padded.shape

    def pick(x, key):  # (B, 1, E) of the last slot -> (B,) next tokens
        logits = model.head(x)[:, 0]
        if not sample:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits = logits / temperature
        if top_k is not None:
            kth = jax.lax.top_k(logits, top_k)[0][:, -1:]
            logits = jnp.where(logits < kth, -jnp.inf, logits)
        return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)

    def is_eos(token):  # (B,) -> (B,) bool
        return jnp.any(token[:, None] == eos[None, :], axis=-1)

    # The head is V wide: only the last prompt position goes through it.
    x, cache = model.hidden(padded, model.init_cache(b, bucket + max_new, start=start))
    first = pick(x[:, -1:], jax.random.fold_in(key, 0))
    out = jnp.zeros((b, max_new), jnp.int32).at[:, 0].set(first)

    def more(carry):
        i, _, done, _, _ = carry
        return (i < max_new) & ~jnp.all(done)

    def step(carry):
        i, token, done, cache, out = carry
        x, cache = model.hidden(token[:, None], cache)
        token = jnp.where(done, token, pick(x, jax.random.fold_in(key, i)))
        return i + 1, token, done | is_eos(token), cache, out.at[:, i].set(token)

    i, token, _, _, out = jax.lax.while_loop(more, step, (jnp.int32(1), first, is_eos(first), cache, out))
    return jnp.where(jnp.arange(max_new)[None, :] < i, out, token[:, None])
