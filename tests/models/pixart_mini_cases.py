"""A PixArt-Mini of two small layers and a vocabulary of a few words, for the tests."""

import jax.numpy as jnp
from flax import nnx
from mxjax_models import pixart_mini, pixart_mini_file
from mxjax_models.pixart_mini_text import TextConfig

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "red", "apple", "##s", "cat", "blue", ",", "##e", "un", "##a", "ble"]


def network(**options):
    text = TextConfig(vocabulary=len(PIECES), features=8, width=32, layers=1, heads=2, length=8)
    sizes = dict(num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32, num_layers=2)
    config = pixart_mini.config(**sizes, patch_size=16, caption_channels=32)
    return pixart_mini.Network(config, text, rngs=nnx.Rngs(0), **options)


def mini(net=None):
    net = network() if net is None else net
    tokenizer = pixart_mini_file.tokenizer(net.text.config, PIECES)
    return pixart_mini.PixArtMini(net.transformer, net.text, tokenizer)


class Point(nnx.Module):
    """The exact velocity where all data are one image: x_t = t noise + (1 - t) image, so v = (x_t - image) / t."""

    def __init__(self, image):
        self.image = nnx.Param(jnp.asarray(image))

    def __call__(self, x, timestep, caption, mask):
        return (x - self.image[...]) / (timestep / 1000)[:, None, None, None]
