"""The evaluation kit: what it says of equal, of slightly changed, and of other transformers; what ships with it."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mxjax_models import pixart_mini_eval
from mxjax_models.pixart_mini_eval import CHANNELS, TIMES, Classifier, load_classifier, save_classifier
from pixart_mini_cases import mini

import mxjax
from mxjax.errors import CheckpointError, ConfigError

RUN = dict(count=4, batch=2)


@pytest.fixture(scope="module")
def model():
    return mini()


@pytest.fixture(scope="module")
def kit():
    return pixart_mini_eval.load()


def test_what_ships(kit):
    assert kit.pixels.shape == (len(kit.prompts), 64, 64, 3) and len(kit.prompts) % 32 == 0
    assert len(set(kit.prompts)) > 0.9 * len(kit.prompts)
    assert len({p.tobytes() for p in kit.pixels}) == len(kit.pixels)
    folder = pixart_mini_eval.DATA
    assert (folder / pixart_mini_eval.PICTURES).stat().st_size < 1.0e6
    assert (folder / pixart_mini_eval.CLASSIFIER).stat().st_size < 1.5e6


def test_the_classifier_knows_its_classes(kit):
    """Flags and icons that it was not trained on: features that tell nothing would measure nothing."""
    model, classes = load_classifier(pixart_mini_eval.DATA / pixart_mini_eval.CLASSIFIER)
    named = {"flag of": ("flag", "emoji Flags"), "gray icon": ("gray icon",)}
    answers = np.asarray(jnp.argmax(jax.jit(model.__call__)(kit.pixels), -1))
    for word, right in named.items():
        rows = [i for i, p in enumerate(kit.prompts) if word in p]
        assert len(rows) >= 3, word
        hits = sum(classes[answers[i]] in right for i in rows)
        assert hits > 0.6 * len(rows), (word, hits, len(rows))


def test_the_float_transformer_is_itself(model, kit):
    found = kit.compare(model, model.transformer, steps=2, **RUN)
    assert found["velocity_error"] == 0 and found["velocity_by_time"] == [0] * TIMES
    assert found["psnr"] == np.inf and found["feature_distance"] == 0
    assert found["ssim"] == pytest.approx(1, abs=1e-6)
    # Rounding leaves 30 ulps of the traces (test_image_metrics), which are below 1 here.
    assert abs(found["frechet"]) < 1e-5 < found["frechet_held_out"]
    assert found["images"].shape == (4, 64, 64, 3)


def test_velocity_error_is_its_definition(model, kit):
    """All velocities 1 + e times as large: the error is e^2 at all times."""
    louder = copy.deepcopy(model.transformer)
    for name in ("kernel", "bias"):
        leaf = getattr(louder.proj_out, name)
        leaf[...] = leaf[...] * 1.125
    # 1.125 x rounds once: 2^-24 of a value of which 1/8 is the difference, so 2^-21 of that, twice for a square; and
    # sums over 50000 squares in float32.
    np.testing.assert_allclose(kit.velocity_error(model, louder, **RUN), 0.125**2, rtol=1e-4)


def test_four_bits_are_between(model, kit):
    found = kit.compare(model, mxjax.nnx.quantize(model.transformer, "mxfp4"), steps=2, **RUN)
    assert 0 < found["velocity_error"] < 1 and 0 < found["feature_distance"] < 2 and 0 < found["ssim"] < 1
    assert np.isfinite(found["psnr"]) and found["frechet"] > 0


def test_a_given_reference_is_used(model, kit):
    reference = kit.samples(model, model.transformer, steps=2, **RUN)
    found = kit.compare(model, model.transformer, reference=255 - reference, steps=2, **RUN)
    assert found["psnr"] < 60 and found["velocity_error"] == 0


def test_samples_are_those_of_the_prompts_and_seeds(model, kit):
    got = kit.samples(model, model.transformer, steps=2, **RUN)
    want = model.images(model.transformer, kit.prompts[2:4], seeds=[2, 3], steps=2)
    np.testing.assert_array_equal(got[2:], want)


@pytest.mark.parametrize("count, batch", [(3, 2), (0, 2), (10_000, 2)])
def test_counts_are_full_batches(model, kit, count, batch):
    with pytest.raises(ConfigError, match="multiple"):
        kit.samples(model, model.transformer, count=count, batch=batch)


def test_a_classifier_there_and_back(tmp_path):
    first = Classifier(5, rngs=nnx.Rngs(1))
    save_classifier(tmp_path / "c.safetensors", first, list("abcde"))
    second, classes = load_classifier(tmp_path / "c.safetensors")
    assert classes == list("abcde")
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(x.astype(jnp.bfloat16), y), nnx.state(first), nnx.state(second)
    )
    features = second.features(np.zeros((2, 64, 64, 3), np.uint8))
    assert [f.shape for f in features] == [(2, 64 >> i, 64 >> i, c) for i, c in enumerate(CHANNELS, 1)]


def test_other_files_are_refused(tmp_path):
    from mxjax.io import safetensors

    safetensors.write(tmp_path / "c.safetensors", {"x": np.zeros(3, np.float32)}, {"classes": '["a"]'})
    with pytest.raises(CheckpointError, match="stages/0"):
        load_classifier(tmp_path / "c.safetensors")
    with pytest.raises(FileNotFoundError):
        pixart_mini_eval.load(tmp_path / "nowhere")
