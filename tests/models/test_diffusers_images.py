"""Tiny random pipelines of diffusers as image models: images, and what calibration sees of the transformer."""

import numpy as np
import pytest
from mxjax_models import diffusers_folder
from mxjax_models.diffusers_images import DiffusersImages
from mxjax_models.image_models import ImageModel
from test_diffusers_pipeline import PIPELINES, images

import mxjax


@pytest.mark.parametrize("name", PIPELINES)
def test_images_and_calibration_of_a_pipeline(name, tmp_path):
    pipe, options = PIPELINES[name]()
    pipe.transformer.save_pretrained(tmp_path / "transformer")
    want = np.round(255 * images(pipe, options)).astype(int)
    model = diffusers_folder.load(tmp_path)
    source = DiffusersImages(pipe, model, conditions=lambda prompt: options, steps=3)
    assert isinstance(source, ImageModel)
    got = source.images(model, ["a prompt"], seeds=[0])
    assert got.dtype == np.uint8 and got.shape == want.shape
    # Pixels equal to some 1e-3 of a level (test_diffusers_pipeline.py): the next level only where one is halfway.
    assert np.abs(got.astype(int) - want).max() <= 1
    batches = source.calibration_batches(["a prompt", "another"], each=2, seed=1)
    assert len(batches) == 4 and all(len(args) == len(batches[0]) for args in batches)
    # Each run is called at 3 steps; "stratified" keeps the first or second and the third, from noise to data.
    at = {"flux": 3, "pixart": 1, "sana": 1}[name]
    times = [float(args[at].reshape(-1)[0]) for args in batches]
    assert times[0] > times[1] and times[2] > times[3] and len(set(times)) >= 2
    q = mxjax.nnx.calibrate_and_quantize(model, batches, mxjax.recipes.get("smoothquant_mxfp4"))
    assert np.isfinite(source.images(q, ["a prompt"], seeds=[0])).all()
    every = source.calibration_batches(["a prompt"], each=None)
    assert len(every) == 3
