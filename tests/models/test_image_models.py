"""Image models: a comparison of float and quantized, and diffusers' pipelines as such models."""

import sys

import jax
import numpy as np
import pytest
from flax import nnx
from image_cases import TinyImages
from mxjax_models.image_models import ImageModel, compare, open_image_model

import mxjax
from mxjax.errors import CheckpointError, ConfigError, MissingExtraError
from mxjax.nn.nnx import QParam


@pytest.fixture(scope="module")
def source():
    return TinyImages()


def weights_of(model):
    return {"/".join(map(str, p)): v for p, v in nnx.iter_graph(model) if isinstance(v, QParam)}


def test_compare(source, tmp_path):
    said = []
    found = compare(source, "mxfp4", ["a cat", "red"], seeds=7, steps=2, progress=lambda *at: said.append(at))
    assert isinstance(source, ImageModel) and found.seeds == (7, 8)
    assert found.images.shape == found.reference.shape == (2, 16, 16, 3)
    assert (found.images != found.reference).any()
    np.testing.assert_array_equal(
        found.reference, source.images(source.transformer, ["a cat", "red"], seeds=[7, 8], steps=2)
    )
    assert found.psnr == [mxjax.eval.psnr(a, b) for a, b in zip(found.reference, found.images, strict=True)]
    assert min(found.psnr) > 10 and all(-1 <= s <= 1 for s in found.ssim)
    assert set(found.seconds) == {"quantize", "images", "reference"} and said[-1][1:] == (2, 2)
    assert found.float_nbytes > found.summary.nbytes
    page = found.report(tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 6 and "http" not in page and "patch embedder" in page
    alone = compare(source, "mxfp4", ["a cat"], reference=False, steps=2)
    assert alone.reference is None and alone.psnr == alone.ssim == []
    with pytest.raises(ConfigError, match="2 prompts and 1 seeds"):
        compare(source, "mxfp4", ["a", "b"], seeds=[1])


def test_the_page_says_where_the_error_sits_and_why(source, tmp_path, monkeypatch):
    """The parts of mxjax.report: recipe and why, errors by depth, outliers of the inputs, use of the scales."""
    pytest.importorskip("matplotlib", reason="pip install 'mxjax[plot]'")
    found = compare(source, "mxfp4", ["a cat"], steps=2, reference=False, inputs=True, calibration_options={"each": 1})
    path = "transformer_blocks/0/attn1/to_q/kernel"
    assert int(found.stats[path].n_tokens) > 0
    page = found.report(tmp_path / "report.html").read_text()
    for part in ("Which recipe each weight got", "rtn, the rule for all", "Where the error sits", "Weights and scales",
                 "Inputs and their outliers", "input peak / rms", "Kept in high precision"):  # fmt: skip
        assert part in page
    assert page.count("data:image/svg+xml") == 5  # weights, outputs, inputs, distribution, codes and scales
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = found.report(tmp_path / "report.html").read_text()
    assert "mxjax[plot]" in page and "data:image/svg+xml" not in page
    assert "input peak / rms" in page, "tables need no plots"


def test_calibration_is_that_of_the_given_prompts(source):
    """The statistics are those that mxjax.calibrate gathers, so weights that share no transform are the same, too."""
    cfg = mxjax.recipes.get("smoothquant_mxfp4")
    options = {"each": 3, "times": "logit_normal"}
    found = compare(source, cfg, ["x"], calibration=["a dog"], calibration_options=options, reference=False, steps=3)
    batches = source.calibration_batches(["a dog"], each=3, steps=3, times="logit_normal")
    stats = mxjax.calibrate(source.transformer, None, batches, cfg)
    want = weights_of(mxjax.nnx.quantize(source.transformer, cfg, stats))
    got = weights_of(found.model)
    assert want.keys() == got.keys() and len(got) == 10
    alone = [path for path in want if "to_out" in path or "ff" in path or path.endswith("attn2/to_q/kernel")]
    assert len(alone) == 5
    for path in alone:
        jax.tree.map(np.testing.assert_array_equal, got[path].get_value(), want[path].get_value())
    q, k = (got[f"transformer_blocks/0/attn1/to_{n}/kernel"].get_value().transform.scale for n in "qk")
    np.testing.assert_array_equal(q, k)


def test_in_parts_and_together(source):
    """Statistics of every input alone give the same weights as all at once; a data-free rule needs none."""
    rules = [mxjax.Rule(path="to_out", weight="mxfp4"), *mxjax.recipes.get("smoothquant_nvfp4").rules]
    cfg = mxjax.QuantConfig(rules=rules)
    batches = source.calibration_batches(["a dog"], each=1)
    seen = []
    one = mxjax.nnx.calibrate_and_quantize(
        source.transformer, batches, cfg, statistics_bytes=1, host=True, progress=lambda at: seen.append(at.done)
    )
    all_at_once = mxjax.nnx.calibrate_and_quantize(source.transformer, batches, cfg)
    a, b = weights_of(one), weights_of(all_at_once)
    assert a.keys() == b.keys() and seen[-1] == len(a) and len(seen) == 7  # q, k, v together; k, v of the caption
    for path, w in a.items():
        assert isinstance(w.get_value().qtensor.codes, np.ndarray)
        jax.tree.map(np.testing.assert_array_equal, w.get_value(), b[path].get_value())
    assert a["transformer_blocks/0/attn1/to_out/0/kernel"].get_value().transform is None
    shared = [a[f"transformer_blocks/0/attn1/to_{n}/kernel"].get_value().qtensor.global_scale for n in "qkv"]
    assert shared[0] == shared[1] == shared[2]


def test_what_is_kept_and_why(source):
    kept = {k.path: k.reason for k in mxjax.nnx.kept(source.transformer, "mxfp4")}
    assert kept["proj_out/kernel"] == "final projection" and kept["pos_embed/proj/kernel"] == "patch embedder"
    assert not any("attn" in path for path in kept)
    more = mxjax.QuantConfig(rules=[mxjax.Rule(path="attn2", weight=None), mxjax.Rule()])
    kept = {k.path: k.reason for k in mxjax.nnx.kept(source.transformer, more)}
    assert kept["transformer_blocks/0/attn2/to_q/kernel"] == "rule 'attn2' leaves it"
    assert "proj_out/kernel" in kept
    less = mxjax.recipes.get("mxfp4").replace(exclude=["table$"], on_uneven="skip")
    kept = {k.path: k.reason for k in mxjax.nnx.kept(source.transformer, less)}
    assert "proj_out/kernel" not in kept and "multiple of 32" in kept["pos_embed/proj/kernel"]


def test_a_model_that_is_none(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="pixart-mini"):
        open_image_model(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="height"):
        open_image_model("pixart-mini", height=32)
    pytest.importorskip("diffusers", reason="needs diffusers: pip install 'mxjax[diffusers]'")
    with pytest.raises(CheckpointError, match=r"model_index\.json"):
        open_image_model(tmp_path)
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    with pytest.raises(CheckpointError, match="is a StableDiffusionPipeline; supported: FluxPipeline"):
        open_image_model(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"mxjax\[diffusers\]"):
        open_image_model(tmp_path)
