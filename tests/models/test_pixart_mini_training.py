"""Training of PixArt-Mini: data, objective, resume, export; tiny sizes, the code of benchmarks/pixart_mini."""

import json
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mxjax_models import pixart_mini
from mxjax_models.pixart_mini_text import Bytes, WordPieces
from pixart_mini_cases import PIECES

from mxjax.io import safetensors

FOLDER = Path(__file__).parents[2] / "benchmarks" / "pixart_mini"
MODULES = ("captions", "classifier", "data", "export", "kit", "objective", "prompts", "train", "trainer", "vocabulary")
COLOURS = {"red": (255, 0, 0), "blue": (0, 0, 255), "a": (0, 0, 0), "cat": (255, 255, 0)}
TINY = dict(width=32, heads=2, layers=1, patch=16, batch=16, rate=1e-2, warmup=5, ema=0.9, dtype="float32")


@pytest.fixture(scope="module")
def code():
    """The scripts as modules; their names are too plain to stay in ``sys.modules``."""
    import importlib

    sys.path.insert(0, str(FOLDER))
    taken = {m: sys.modules.pop(m) for m in MODULES if m in sys.modules}
    try:
        modules = type("code", (), {m: importlib.import_module(m) for m in MODULES})
        del modules.prompts.PROMPTS[2:]  # enough for a sheet
        yield modules
    finally:
        sys.path.remove(str(FOLDER))
        for m in MODULES:
            sys.modules.pop(m, None)
        sys.modules.update(taken)


@pytest.fixture(scope="module")
def files(code, tmp_path_factory):
    """A data set of squares of four colours, 12 of them trained, and a vocabulary."""
    folder = tmp_path_factory.mktemp("data")
    names, pixels = [], []
    for word, colour in COLOURS.items():
        for i in range(4):
            image = np.full((64, 64, 3), 255, np.uint8)
            image[16 : 40 + 4 * i, 16:48] = colour
            names.append(word), pixels.append(image)
    full = [f"emoji/{w}{i}" for i, w in enumerate(names)]
    data = code.data.Data(np.stack(pixels), [[w] * 4 for w in names], full, names, np.zeros(16, bool),
                          np.ones(16, np.float32), np.arange(16) % 4 == 3)  # fmt: skip
    code.data.save(folder / "data.npz", data)
    table = np.random.default_rng(0).normal(size=(len(PIECES), 8)).astype(np.float16)
    np.savez(folder / "words.npz", pieces=np.frombuffer("\n".join(PIECES).encode(), np.uint8), table=table)
    return folder, data, table.astype(np.float32)


def command(code, monkeypatch, script, *args):
    monkeypatch.setattr(sys, "argv", [script, *map(str, args)])
    if script == "train":
        code.train.Run(code.train.arguments()).go()
    else:
        getattr(code, script).main()


def train(code, monkeypatch, folder, out, *args):
    tiny = [x for k, v in TINY.items() for x in (f"--{k}", v)]
    command(code, monkeypatch, "train", "--data", folder / "data.npz", "--words", folder / "words.npz", "--out", out,
            "--chunk", 5, "--sheets", 1, *tiny, *args)  # fmt: skip


def log(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


# Data and captions


def test_data_there_and_back(code, files):
    folder, data, _ = files
    for got, want in zip(code.data.load(folder / "data.npz"), data, strict=True):
        np.testing.assert_array_equal(got, want)


def test_pictures_are_cut_and_centred(code):
    image = pytest.importorskip("PIL.Image", reason="needs pillow, which mxjax[plot] brings")
    drawing = image.new("RGBA", (400, 300), (0, 0, 0, 0))
    drawing.paste((200, 30, 30, 255), (10, 20, 110, 70))  # 100 x 50 in a corner
    got = code.data.square(drawing, framed=False)
    rows, columns = np.nonzero(got.min(-1) < 255)
    assert (columns.min(), columns.max(), rows.min(), rows.max()) == (2, 61, 17, 46)
    assert got[32, 32].tolist() == [200, 30, 30]
    white = image.new("RGBA", (60, 60), (255, 255, 255, 255))
    white.paste((200, 30, 30, 255), (20, 20, 40, 40))
    assert (code.data.square(white, framed=True)[2:12] == 255).all()  # a flag keeps its field
    assert code.data.square(image.new("RGBA", (60, 60)), framed=False) is None
    assert code.data.square(white.crop((0, 0, 60, 15)), framed=False) is None


def test_repeated_pictures_are_dropped(code):
    image = pytest.importorskip("PIL.Image", reason="needs pillow, which mxjax[plot] brings")

    def item(name, colour):
        picture = image.new("RGBA", (64, 64), (*colour, 255))
        return types.SimpleNamespace(name=name, image=picture, title=name, keywords=[], style="clip art",
                                     group="g", mirror=False, framed=True, weight=1.0)  # fmt: skip

    data = code.data.build(
        [item("emoji/red", (255, 0, 0)), item("emoji/also", (255, 1, 0)), item("emoji/blue", (0, 0, 255))]
    )
    assert data.names == ["emoji/red", "emoji/blue"]


def test_captions_from_metadata(code):
    svg = (
        '<cc:Work rdf:about=""><dc:title>Celtic Harp 2</dc:title><dc:creator><cc:Agent><dc:title>Ann</dc:title>'
        "</cc:Agent></dc:creator><rdf:li>music</rdf:li><rdf:li>hash(0x1)</rdf:li></cc:Work>"
    )
    found = code.captions.clip_art("recreation/music/harp_ann_01", svg, generic=set())
    assert found == ("celtic harp", ["music", "recreation"], "clip art")
    title, _, style = code.captions.clip_art("signs_and_symbols/flags/asia/japan", svg, generic={"Celtic Harp 2"})
    assert (title, style) == ("flag of japan", "flag")
    title, _, style = code.captions.clip_art("recreation/games/cards/white/white_h_q", svg, generic=set())
    assert (title, style) == ("queen of hearts", "playing card")


def test_variants_are_one_family(code):
    names = (
        "emoji/cook: dark skin tone",
        "emoji/cook",
        "clipart/food/x/cat_01",
        "clipart/food/cats",
        "emoji/flag: Chad",
    )
    assert [code.captions.family(n) for n in names] == ["emoji/cook"] * 2 + ["food/cat"] * 2 + ["emoji/flag: Chad"]


def test_captions_have_four_forms(code):
    got = code.captions.variants("apple", ["fruit", "red"], "emoji")
    assert got == ["apple emoji", "apple", "apple, fruit, red, emoji", "fruit, red, emoji"]
    assert code.captions.variants("apple", [], "emoji")[3] == "apple emoji"
    assert all(code.captions.variants("", ["music"], "icon"))


# The objective


def test_moved_pictures_let_white_in(code):
    pixels = np.random.default_rng(0).integers(0, 255, (2, 64, 64, 3)).astype(np.uint8)
    got = np.asarray(code.objective.moved(jnp.asarray(pixels), jnp.asarray([[2, -1], [0, 0]]), 2))
    want = np.full_like(pixels[0], 255)
    want[:-2, 1:] = pixels[0, 2:, :-1]
    np.testing.assert_array_equal(got, np.stack([want, pixels[1]]))


@pytest.mark.parametrize("drop", [0.0, 1.0])
def test_a_batch_pairs_pictures_with_their_captions(code, files, drop):
    _, data, _ = files
    data = data._replace(mirror=np.arange(16) >= 8)
    arrays = code.objective.arrays(data, WordPieces(PIECES), 8)
    augment = code.objective.Augment(shift=0, drop=drop)
    image, ids, mask = code.objective.batch(arrays, jax.random.key(0), 64, augment)
    pixels = np.asarray(pixart_mini.to_pixels(image))
    seen = set()
    for picture, row, m in zip(pixels, np.asarray(ids), np.asarray(mask), strict=True):
        match = [i for i, p in enumerate(data.pixels) if (p == picture).all() or (p[:, ::-1] == picture).all()]
        assert match
        seen.update(match)
        words = [PIECES[i] for i in row[m]][1:-1]
        assert words == ([] if drop else [data.groups[match[0]]])
    assert len(seen) > 12


def test_pictures_are_drawn_by_weight(code, files):
    _, data, _ = files
    weight = np.where(np.arange(16) == 5, 1.0, 0.0).astype(np.float32)
    arrays = code.objective.arrays(data._replace(weight=weight), WordPieces(PIECES), 8)
    image, _, _ = code.objective.batch(arrays, jax.random.key(0), 8, code.objective.Augment(shift=0))
    assert (np.asarray(pixart_mini.to_pixels(image)) == data.pixels[5]).all()


def test_the_exact_velocity_has_no_loss(code):
    image, noise = (jax.random.normal(jax.random.key(i), (4, 3, 8, 8)) for i in (0, 1))
    t = jnp.asarray([0.25, 0.5, 0.75, 1.0])

    class Exact:
        def text(self, ids, mask):
            return None

        def transformer(self, x, timestep, caption, mask):
            return (x - image) / (timestep / 1000)[:, None, None, None]

    loss = code.objective.velocity_loss(Exact(), image, None, None, noise, t, jnp.float32)
    # x is off by 2 ulps of 4 at most, over t >= 1/4: 2^-21 x 4 = 2e-6, and squared.
    assert (np.asarray(loss) < 1e-11).all()

    class Nothing(Exact):
        def transformer(self, x, timestep, caption, mask):
            return jnp.zeros_like(x)

    loss = code.objective.velocity_loss(Nothing(), image, None, None, noise, t, jnp.float32)
    np.testing.assert_allclose(loss, jnp.square(noise - image).mean((1, 2, 3)), rtol=1e-5)


def test_the_learning_rate_ends_at_zero(code):
    settings = code.trainer.Settings(rate=2.0, warmup=10)
    rate = [
        float(code.trainer.learning_rate(settings, jnp.int32(i), jnp.float32(110))) for i in (0, 9, 10, 60, 110, 200)
    ]
    np.testing.assert_allclose(rate, [0.2, 2.0, 2.0, 1.0, 0, 0], atol=1e-6)


# Runs


def test_the_loss_falls_and_the_files_are_made(code, files, monkeypatch, tmp_path):
    folder, _, _ = files
    out = tmp_path / "out"
    train(code, monkeypatch, folder, out, "--steps", 60)
    lines = log(out)
    losses = [x["loss"] for x in lines if "loss" in x]
    assert len(losses) == 12 and lines[-1]["event"] == "done"
    # Zero at first: 1 of the noise, 1 of the pictures, which are white (1) and pure colours (-1 or 1). A width of 32
    # has no room for the noise of a patch, 768 numbers, so 1 is where it ends.
    assert losses[0] > 1.4 and losses[-1] < 1.2
    held = next(x for x in lines if x.get("event") == "held_out")
    assert held["held_out"] < 1.5 and len(held["by_time"]) == 8
    assert (out / "sheet_000060.png").stat().st_size > 1000

    inputs = ("--data", folder / "data.npz", "--words", folder / "words.npz")
    command(code, monkeypatch, "export", *inputs, "--run", out, "--out", tmp_path / "model")
    mini = pixart_mini.load(tmp_path / "model")
    assert set(mini.calibration_prompts) <= set(COLOURS) and mini.calibration_prompts
    assert mini.provenance["training"]["steps"] == 60 and "Apache-2.0" in mini.provenance["license"]
    settings = code.trainer.Settings(**TINY)
    trainer = code.trainer.Trainer(settings, code.vocabulary.load(folder / "words.npz")[1], 5)
    state, _ = code.trainer.restore(out / "state.safetensors", trainer.start())
    want = nnx.state(trainer.network(state.ema).transformer)
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(x, y.astype(jnp.bfloat16)), nnx.state(mini.transformer), want
    )


def test_a_resumed_run_is_the_same_run(code, files, monkeypatch, tmp_path):
    folder, _, _ = files
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(code, monkeypatch, folder, whole, "--steps", 10)
    with pytest.raises(SystemExit):  # each process stops after its first chunk
        train(code, monkeypatch, folder, parts, "--steps", 10, "--stop-after", 0)
    with pytest.raises(SystemExit, match="other settings"):
        train(code, monkeypatch, folder, parts, "--steps", 10, "--rate", 0.5)
    train(code, monkeypatch, folder, parts, "--steps", 10, "--stop-after", 0)
    states = [{k: e.read() for k, e in safetensors.read(out / "state.safetensors").items()} for out in (whole, parts)]
    jax.tree.map(np.testing.assert_array_equal, *states)
    steps = [[(x["step"], x["loss"]) for x in log(out) if "loss" in x] for out in (whole, parts)]
    assert steps[0] == steps[1] and len(steps[0]) == 2


def test_minutes_fix_the_number_of_steps(code, files, monkeypatch, tmp_path):
    folder, _, _ = files
    train(code, monkeypatch, folder, tmp_path, "--minutes", 0.005)
    lines = log(tmp_path)
    length = next(x for x in lines if x.get("event") == "length")
    assert lines[-1]["event"] == "done" and lines[-1]["step"] == length["steps"]


def test_bytes_train_their_own_table(code, files):
    _, data, table = files
    trainer = code.trainer.Trainer(code.trainer.Settings(**TINY, text="bytes"), table, 5)
    assert not jax.tree.leaves(trainer.frozen) and trainer.initial["text"]["table"].shape == (258, 96)
    arrays = code.objective.arrays(data, Bytes(), 64)
    args = (trainer.start(), trainer.frozen, arrays, jnp.float32(10))
    state, losses = jax.eval_shape(trainer.run, *args)
    assert losses.shape == (5,) and jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, args[0])


# The other scripts


def test_a_vocabulary_keeps_neighbours(code):
    rng = np.random.default_rng(0)
    base = rng.normal(size=(6, 40))
    embeddings = np.repeat(base, 5, 0) + 0.05 * rng.normal(size=(30, 40))  # six families of five
    table = code.vocabulary.reduce(embeddings, 8)
    np.testing.assert_allclose((table**2).mean(1), 1)
    nearest = np.argsort(-table @ table.T, axis=1)[:, :5] // 5
    assert (nearest == np.arange(30)[:, None] // 5).all()


def test_the_kit_has_one_picture_a_family(code):
    names = ["emoji/cook: dark skin tone", "emoji/cook", "clipart/a/cat_01", "clipart/a/cat_02", "clipart/a/dog"]
    held_out = np.array([True, True, True, True, False])
    assert sorted(code.kit.chosen(names, held_out)) == [0, 2]


def test_the_classifier_learns(code, files, monkeypatch, tmp_path, capsys):
    _, data, _ = files
    many = data._replace(
        pixels=np.tile(data.pixels, (8, 1, 1, 1)), captions=data.captions * 8, names=data.names * 8,
        groups=data.groups * 8, mirror=np.tile(data.mirror, 8), weight=np.tile(data.weight, 8),
        held_out=np.tile(data.held_out, 8),
    )  # fmt: skip
    code.data.save(tmp_path / "many.npz", many)
    command(code, monkeypatch, "classifier", "--data", tmp_path / "many.npz", "--out", tmp_path, "--steps", 60,
            "--batch", 8)  # fmt: skip
    assert "4 classes, 100.0% of 32 held-out" in capsys.readouterr().out
