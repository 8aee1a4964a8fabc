"""PixArt-Mini: prompts to ids, drawing, calibration inputs, and its files."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mxjax_models import pixart_mini, pixart_mini_eval, pixart_mini_file
from mxjax_models.pixart_mini_text import Bytes, TextConfig, TextEncoder, WordPieces
from pixart_mini_cases import PIECES, Point, mini, network

import mxjax
from mxjax.errors import CheckpointError, ConfigError
from mxjax.io import safetensors


@pytest.fixture(scope="module")
def model():
    return mini()


# Prompts


def test_word_pieces_are_greedy_and_padded():
    ids, mask = WordPieces(PIECES)(["A red apple, cats", "unable", ""], length=8)
    names = [[PIECES[i] for i in row[m]] for row, m in zip(ids, mask, strict=True)]
    assert names[0] == ["[CLS]", "a", "red", "apple", ",", "cat", "##s", "[SEP]"]
    assert names[1] == ["[CLS]", "[UNK]", "[SEP]"]  # "un", "##a", and then nothing that goes on with "b"
    assert names[2] == ["[CLS]", "[SEP]"]
    assert not ids[~mask].any()


def test_long_prompts_are_cut_before_the_end_token():
    ids, mask = WordPieces(PIECES)(["red " * 50], length=8)
    assert mask.all() and PIECES[ids[0, -1]] == "[SEP]" and PIECES[ids[0, -2]] == "red"


def test_word_pieces_are_those_of_tokenizers():
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers: pip install 'mxjax[tokenizer]'")
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordPiece(
            {p: i for i, p in enumerate(PIECES)}, unk_token="[UNK]", max_input_chars_per_word=100
        )
    )
    backend.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    ours = WordPieces(PIECES)
    rng = np.random.default_rng(0)
    parts = [
        "a",
        "red",
        "apples",
        "Cat",
        "blué",
        "Ünae",
        ",",
        "_",
        "-",
        " ",
        "  ",
        "\t",
        "x1",
        "un",
        "$",
        "s",
        "'",
        "É",
    ]
    texts = ["".join(rng.choice(parts, 9)) for _ in range(300)] + ["a" * 100, "a" * 101]
    assert [ours.pieces(t) for t in texts] == [backend.encode(t, add_special_tokens=False).ids for t in texts]


def test_a_vocabulary_needs_its_special_pieces():
    with pytest.raises(ConfigError, match=r"\[SEP\]"):
        WordPieces([p for p in PIECES if p != "[SEP]"])
    with pytest.raises(ConfigError, match="begins with"):
        WordPieces(PIECES[::-1])


def test_bytes_are_bytes():
    ids, mask = Bytes()(["Aé"], length=6)
    assert ids.tolist() == [[1, ord("a") + 2, 0xC3 + 2, 0xA9 + 2, 0, 0]] and mask.sum() == 4


@pytest.mark.parametrize("kind, rows", [("wordpieces", 15), ("bytes", 258)])
def test_padding_changes_nothing(kind, rows):
    config = TextConfig(kind=kind, vocabulary=rows, features=8, width=32, layers=2, heads=2, length=12)
    encoder = TextEncoder(config, rngs=nnx.Rngs(0))
    tokens = pixart_mini_file.tokenizer(config, PIECES)
    short, long = (tokens(["red cat"], length=n) for n in (8 if kind == "bytes" else 4, 12))
    n = short[1].sum()
    # Masked keys have weight exactly 0; sums over 12 keys in place of 4 or 8 may be ordered in another way: values of a
    # normalized row are below sqrt(32) = 6, right to some 10 ulps each through two layers.
    np.testing.assert_allclose(encoder(*short)[0, :n], encoder(*long)[0, :n], atol=2e-5)


def test_prompts_are_a_list(model):
    for bad in ("a cat", []):
        with pytest.raises(ConfigError, match="list"):
            model.encode(bad)


# Drawing


def test_drawing_ends_at_the_data(model):
    """With the exact velocity of one image every seed ends there, whatever the number of steps."""
    image = np.random.default_rng(0).integers(0, 256, (1, 64, 64, 3)).astype(np.uint8)
    point = Point(pixart_mini.from_pixels(image)[0])
    for steps in (1, 7):
        got = model.images(point, ["a cat", "apple"], seeds=[5, 6], steps=steps)
        np.testing.assert_array_equal(got, np.repeat(image, 2, 0))


def test_an_image_depends_on_its_own_seed_and_prompt(model):
    together = model.images(model.transformer, ["red", "blue cat"], seeds=[3, 4], steps=3)
    alone = model.images(model.transformer, ["blue cat"], seeds=[4], steps=3)
    assert together.shape == (2, 64, 64, 3) and together.dtype == np.uint8
    # The same noise to the bit; products of another batch size may round otherwise, to the next of 256 levels.
    assert np.abs(together[1].astype(int) - alone[0]).max() <= 1
    other = model.images(model.transformer, ["blue cat"], seeds=[5], steps=3)
    assert np.abs(other[0].astype(int) - alone[0]).max() > 10


def test_guidance_goes_beyond_the_prompt():
    def model(x, timestep, caption, mask):
        return jnp.broadcast_to(caption.mean((1, 2))[:, None, None, None], x.shape)

    caption, mask = jnp.stack([jnp.full((4, 2), 1.0), jnp.full((4, 2), 3.0)]), jnp.ones((2, 4), bool)
    nothing = (jnp.full((1, 4, 2), 0.5), jnp.ones((1, 4), bool))
    predict = pixart_mini.guided(model, caption, mask, nothing, 3.0)
    got = predict(jnp.zeros((2, 3, 64, 64)), jnp.float32(500))
    np.testing.assert_array_equal(got[:, 0, 0, 0], [0.5 + 3 * 0.5, 0.5 + 3 * 2.5])


def test_pixels_there_and_back():
    pixels = np.arange(256, dtype=np.uint8).repeat(3).reshape(1, 16, 16, 3)
    np.testing.assert_array_equal(pixart_mini.to_pixels(pixart_mini.from_pixels(pixels)), pixels)


@pytest.mark.parametrize("seeds", [[-1], [2**32], [0.5]])
def test_seeds_are_small_integers(seeds):
    with pytest.raises(ConfigError, match="seeds"):
        pixart_mini.noise(seeds)


def test_seeds_and_prompts_pair(model):
    with pytest.raises(ConfigError, match="2 prompts"):
        model.images(model.transformer, ["a", "red"], seeds=[0])


def test_quantized_transformers_draw(model):
    small = mxjax.nnx.quantize(model.transformer, "mxfp4")
    got = model.images(small, ["a red apple"], seeds=[0], steps=2)
    want = model.images(model.transformer, ["a red apple"], seeds=[0], steps=2)
    assert got.shape == want.shape and (got != want).any()


# Calibration


def test_calibration_sees_every_step_and_both_halves(model):
    batches = model.calibration_batches(["a", "red", "cat", "apple"], steps=8, each=4, batch=8, seed=3)
    latents, timestep, captions, masks = (np.concatenate(x) for x in zip(*batches, strict=True))
    assert latents.shape == (16, 3, 64, 64) and captions.shape == (16, 8, 32) and masks.shape == (16, 8)
    steps, counts = np.unique(timestep, return_counts=True)
    # 4 stretches of 2 steps, 4 runs with offsets that move on by the golden ratio: each step of a stretch comes up.
    np.testing.assert_allclose(steps, 1000 * np.arange(1, 9) / 8)
    assert counts.sum() == 16 and counts.min() >= 1
    free = np.asarray(model.encode([""])[0])
    assert [np.array_equal(c, free[0]) for c in captions] == [True, False] * 8


def test_calibration_draws_in_chunks(model):
    """Five prompts by twos: the last chunk is filled up, and what fills it is left out again."""
    prompts, told = ["a", "red", "cat", "apple", "red cat"], []
    options = dict(steps=4, each=3, batch=5, seed=7)
    whole = model.calibration_batches(prompts, **options)
    parts = model.calibration_batches(prompts, chunk=2, progress=lambda *at: told.append(at), **options)
    assert told == [(0, 5), (2, 5), (4, 5), (5, 5)] and len(parts) == len(whole) == 3
    for a, b in zip(parts, whole, strict=True):
        for x, y in zip(a[1:], b[1:], strict=True):
            np.testing.assert_array_equal(x, y)
        # The same sums for an image, but how a product of matrices is cut into blocks may depend on the batch: float32
        # roundings of values around one, through some twenty products a step and four steps.
        np.testing.assert_allclose(a[0], b[0], rtol=0, atol=4 * 20 * 2.0**-24 * 64)
    with pytest.raises(ConfigError, match="at least 1"):
        model.calibration_batches(prompts, chunk=0)


def test_calibration_begins_with_the_seeds_noise(model):
    (batch,) = model.calibration_batches(["a", "red"], steps=1, each=1, batch=2, seed=11)
    want = np.asarray(pixart_mini.noise([11, 12]))
    assert {x.tobytes() for x in np.asarray(batch[0])} == {x.tobytes() for x in want}
    assert batch[1].tolist() == [1000, 1000]


def test_calibration_feeds_a_recipe(model):
    batches = model.calibration_batches(["a", "red cat"], steps=4, each=None, batch=8)
    stats = mxjax.calibrate(model.transformer, None, batches, "mr_gptq_mxfp4")
    assert any("attn1" in path for path in stats)


def test_few_inputs_make_one_batch(model):
    (batch,) = model.calibration_batches(["a"], steps=4)
    assert len(batch[0]) == 4


# Files


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mini")
    provenance = {"license": "Apache-2.0", "images": ["none"]}
    pixart_mini_file.to_file(network(), folder, provenance, PIECES, calibration_prompts=["a", "red"])
    return folder


def test_what_is_written_is_read(folder):
    loaded, net = pixart_mini.load(folder), network()
    assert loaded.provenance == {"license": "Apache-2.0", "images": ["none"]}
    assert loaded.calibration_prompts == ("a", "red")
    assert loaded.text.config == net.text.config and loaded.transformer.config == net.transformer.config
    for got, want in ((loaded.transformer, net.transformer), (loaded.text, net.text)):
        jax.tree.map(
            lambda x, y: np.testing.assert_array_equal(x, y.astype(jnp.bfloat16)), nnx.state(got), nnx.state(want)
        )
    ids, _ = loaded.tokenizer(["red apples"], 8)
    assert [PIECES[i] for i in ids[0] if i] == ["[CLS]", "red", "apple", "##s", "[SEP]"]
    assert loaded.images(loaded.transformer, ["a cat"], seeds=[0], steps=2).shape == (1, 64, 64, 3)


def test_a_dtype_is_that_of_the_computation(folder):
    loaded = pixart_mini.load(folder, jnp.bfloat16)
    assert {v.dtype for v in jax.tree.leaves(nnx.state(loaded.transformer))} == {jnp.dtype(jnp.bfloat16)}
    assert loaded.encode(["a"])[0].dtype == jnp.bfloat16


def test_files_must_be_there(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"pixart_mini\.json"):
        pixart_mini.load(tmp_path)
    (tmp_path / "pixart_mini.json").write_text((folder / "pixart_mini.json").read_text())
    with pytest.raises(FileNotFoundError, match=r"pixart_mini\.safetensors"):
        pixart_mini.load(tmp_path)


def damaged(folder, tmp_path, change=None, weights=None):
    described = json.loads((folder / "pixart_mini.json").read_text())
    raw = bytearray((folder / "pixart_mini.safetensors").read_bytes())
    if change:
        change(described)
    if weights:
        weights(raw)
    (tmp_path / "pixart_mini.json").write_text(json.dumps(described))
    (tmp_path / "pixart_mini.safetensors").write_bytes(raw)
    return tmp_path


def test_other_weights_are_refused(folder, tmp_path):
    def flip(raw):
        raw[-1] ^= 1

    with pytest.raises(CheckpointError, match="sha256"):
        pixart_mini.load(damaged(folder, tmp_path, weights=flip))


def test_other_sizes_are_refused_with_all_names(folder, tmp_path):
    def wider(described):
        described["text"]["layers"] = 2

    with pytest.raises(
        CheckpointError, match=r"8 problems(.|\n)*missing text/layers/1/ff/net/2/kernel(.|\n)*text/layers/1/qkv"
    ):
        pixart_mini.load(damaged(folder, tmp_path, wider))


@pytest.mark.parametrize("change", [{"version": 2}, {"text": {}}, {"transformer": {"depth": 3}}])
def test_other_descriptions_are_refused(folder, tmp_path, change):
    with pytest.raises(CheckpointError, match=r"version|vocabulary|depth"):
        pixart_mini.load(damaged(folder, tmp_path, lambda described: described.update(change)))


def test_weights_need_a_licence_and_their_words(tmp_path):
    with pytest.raises(ConfigError, match="license"):
        pixart_mini_file.to_file(network(), tmp_path, {}, PIECES)
    with pytest.raises(ConfigError, match="14 word pieces for 15"):
        pixart_mini_file.to_file(network(), tmp_path, {"license": "x"}, PIECES[:-1])


@pytest.fixture(scope="module")
def shipped():
    return pixart_mini.load()


def test_what_ships(shipped):
    """At most 32 MB, every kernel a multiple of 32 for MX blocks, and said where it comes from."""
    files = [pixart_mini.DATA / f"pixart_mini.{end}" for end in ("safetensors", "json")]
    assert sum(file.stat().st_size for file in files) < 32e6
    flat = nnx.to_flat_state(nnx.state((shipped.transformer, shipped.text)))
    assert 12e6 < sum(v.size for _, v in flat) < 16e6
    kernels = {"/".join(map(str, k)): v.shape for k, v in flat if k[-1] == "kernel" and "transformer_blocks" in k}
    assert len(kernels) == 7 * 10 and all(s[0] % 32 == 0 for s in kernels.values())
    assert {"license", "images", "captions", "word_pieces", "training"} <= set(shipped.provenance)
    held = set(pixart_mini_eval.load().prompts)
    assert len(shipped.calibration_prompts) == 128 and not held & set(shipped.calibration_prompts)


def test_what_ships_draws_what_the_prompt_says(shipped):
    """Hearts: the middle has the colour that was asked for, the corners are the white of clip art."""
    colours = ["red", "green", "blue"]
    images = shipped.images(shipped.transformer, [f"{c} heart emoji" for c in colours], seeds=[0, 1, 2], steps=8)
    for channel, image in enumerate(images.astype(int)):
        middle = image[24:40, 24:40].mean((0, 1))
        assert middle.argmax() == channel and middle[channel] - np.delete(middle, channel).mean() > 40, colours[channel]
        assert image[:4, :4].min() > 230


def test_files_hold_what_safetensors_reads(folder):
    assert "pieces" in safetensors.read(folder / "pixart_mini.safetensors")
