"""Llama and the diffusion transformers on simulated devices: as on one, float and quantized."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from mxjax_models import flux, llama, partition, pixart, sana, ulysses
from mxjax_models.stacked import stack

import mxjax
from mxjax.errors import BlockShapeError, ConfigError
from mxjax.report.collectives import collective_bytes

B, S = 2, 16


def mesh_of(devices, name="model"):
    return jax.make_mesh((devices,), (name,), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def llama_of(recipe, **overrides):
    sizes = dict(num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=1, intermediate_size=256)
    model = llama.Llama(llama.LlamaConfig.tiny(**{**sizes, **overrides}), rngs=nnx.Rngs(0))
    return model if recipe == "float" else mxjax.nnx.quantize(model, recipe)


def tokens(s=S):
    return np.random.default_rng(0).integers(0, 128, (B, s))


@jax.jit
def forward(model, *args):
    return model(*args)


def close(got, want, sums):
    """float32 sums in another order: 2**-24 sqrt(length) of the result's size each; 8 for the largest of all."""
    scale = float(np.max(np.abs(want)))
    error = float(np.max(np.abs(np.asarray(got) - np.asarray(want))))
    assert error <= 8 * 2.0**-24 * np.sqrt(sum(sums)) * scale, error / scale


LENGTHS = (64, 64, 128, 256, 64)  # of the sums on the way: q, attention, o, down, head


@pytest.mark.parametrize("recipe, devices", [("float", 4), ("mxfp4", 4)])
def test_llama_logits_prefill_and_decode(recipe, devices):
    model, mesh = llama_of(recipe), mesh_of(devices)
    parts = partition.shard(model, mesh)
    want = forward(model, tokens())
    close(forward(parts, tokens()), want, LENGTHS)
    cache = partition.shard_cache(parts.init_cache(B, 32), mesh)
    assert tuple(cache.layers[0].k.sharding.spec)[:2] == (None, "model")  # (B, heads, slots, D)
    logits, cache = forward(parts, tokens()[:, :-1], cache)
    close(logits, want[:, :-1], LENGTHS)
    logits, cache = forward(parts, tokens()[:, -1:], cache)  # one step of decoding
    close(logits, want[:, -1:], LENGTHS)
    assert cache.layers[0].k.sharding.spec[1] == "model", "the cache stays where its heads are"


def test_llama_sends_two_sums_a_block_and_one_for_the_embedding():
    """Prefill: o and down give [B, S, E] in float32 each; the embedding is looked up by vocabulary and added up."""
    mesh = mesh_of(4)
    parts = partition.shard(llama_of("mxfp4"), mesh)
    moved = collective_bytes(forward.lower(parts, tokens()).compile())
    assert moved == {"all-reduce": 3 * round(2 * 3 / 4 * 4 * B * S * 64)}


def test_llama_on_two_axes_in_a_scan_with_gathered_codes():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    model = llama_of("mxfp4_a16", num_hidden_layers=2)
    parts = stack(partition.shard(model, mesh, fsdp="data"))
    assert hasattr(parts, "blocks")
    x = jax.device_put(tokens(), jax.NamedSharding(mesh, P("data")))
    close(forward(parts, x), forward(model, tokens()), LENGTHS * 2)
    program = forward.lower(parts, x).compile().as_text()
    gathered = set(re.findall(r"= (\w+)\[[\d,]*\]\S* all-gather\(", program))
    assert "u8" in gathered
    assert partition.rules(fsdp="data")("layers/0/self_attn/o_proj/kernel") == P("model", "data")


FLUX = (48, 64, 64, 320, 64, 64, 256, 64)


def flux_case(recipe, image=(5, 5), text=7, heads=8):
    config = flux.FluxConfig.tiny(num_attention_heads=heads, num_layers=1, num_single_layers=1)
    model = flux.Flux(config, rngs=nnx.Rngs(0))
    r = np.random.default_rng(0)
    x, words, pooled = (r.standard_normal(s).astype(np.float32) for s in ((B, image[0] * image[1], 32), (B, text, 32),
                                                                         (B, 32)))  # fmt: skip
    t, guidance = np.array([0.5, 0.3], np.float32), np.array([3.5, 2.0], np.float32)
    args = (x, words, pooled, t, flux.image_ids(*image), jnp.zeros((text, 3)), guidance)
    return (model if recipe == "float" else mxjax.nnx.quantize(model, recipe)), args


@pytest.mark.parametrize("recipe, devices, image, text", [
    ("float", 2, (4, 8), 16), ("float", 4, (5, 5), 7), ("mxfp4_a16", 8, (5, 5), 7),
])  # fmt: skip
def test_flux_by_tokens(recipe, devices, image, text):
    """Ulysses, odd numbers of tokens among them."""
    model, args = flux_case(recipe, image, text)
    mesh = mesh_of(devices, "seq")
    run = jax.jit(ulysses.sequence_parallel(mesh))
    placed = ulysses.replicate(model, mesh)
    got, want = run(placed, *args), forward(model, *args)
    assert got.shape == want.shape
    close(got, want, FLUX)
    moved = collective_bytes(run.lower(placed, *args).compile())
    length = sum(n + -n % devices for n in (image[0] * image[1], text))
    # two attentions, q k v and the result each, of which every device has its part
    each = B * length // devices * model.config.hidden_size * 4
    assert moved["all-to-all"] == pytest.approx(2 * 4 * each * (devices - 1) / devices)


def test_padding_is_seen_by_nobody():
    """With the mask left out, the result is another: the comparison above can fail."""
    seen = ulysses.Ulysses("seq", 4, None, (7, 25)).seen()
    assert seen.sum() == 32 and len(seen) == 8 + 28
    assert not seen[-1] and not seen[28]  # the last device holds the padding of both: its 2nd text and 7th image token


def test_flux_by_heads():
    """Tensor parallelism of a DiT, adaLN by rows, proj_out over the concatenation."""
    model, args = flux_case("float")
    parts = partition.shard(model, mesh_of(4))
    close(forward(parts, *args), forward(model, *args), FLUX)


@pytest.mark.parametrize("make, config", [
    (llama.Llama, llama.LlamaConfig.tiny()), (flux.Flux, flux.FluxConfig.tiny()),
    (pixart.PixArt, pixart.PixArtConfig.tiny()), (sana.Sana, sana.SanaConfig.tiny()),
])  # fmt: skip
def test_rules_cut_every_matrix_of_a_block(make, config):
    model = nnx.eval_shape(lambda: make(config, rngs=nnx.Rngs(0)))
    specs = partition.specs_of(model)
    whole = {p for p, spec in specs.items() if p.endswith("kernel") and spec == P() and "blocks/" in p}
    # SANA's mix-FFN: its depthwise convolution ties channels to their neighbours in space, not to each other
    assert all("/ff/conv_" in p for p in whole), whole
    assert {spec for p, spec in specs.items() if p.endswith("kernel")} >= {P(None, "model"), P("model", None)}


def test_errors():
    with pytest.raises(ConfigError, match=r"num_key_value_heads=4 is no multiple of the 8 devices of 'model'"):
        partition.shard(llama_of("float"), mesh_of(8))
    with pytest.raises(ConfigError, match="none named 'model'"):
        partition.shard(llama_of("float"), mesh_of(2, "seq"))
    model, args = flux_case("float", heads=2)
    with pytest.raises(ConfigError, match="num_attention_heads=2 is no multiple of the 4 devices of 'seq'"):
        ulysses.sequence_parallel(mesh_of(4, "seq"))(model, *args)
    odd = llama_of("float", vocab_size=129)
    with pytest.raises(BlockShapeError, match=r"embed_tokens/embedding: axis 0 of shape \(129, 64\) is not cut evenly"):
        partition.shard(odd, mesh_of(2))
    fused = mxjax.nnx.fuse_shared_inputs(llama_of("mxfp4"))
    with pytest.raises(ConfigError, match="fused or packed"):
        partition.shard(fused, mesh_of(2))


def test_the_module_imports_alone():
    run = subprocess.run([sys.executable, "-c", "import mxjax_models.ulysses"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
