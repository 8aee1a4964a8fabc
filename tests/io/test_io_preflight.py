"""A recipe that a layout cannot carry is refused before it is run."""

import jax
import jax.numpy as jnp
import pytest

import mxjax
from mxjax.errors import CheckpointError
from mxjax.io import check_recipe

TREE = {
    "layers": {"0": {"up": {"kernel": jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)}}},
    "embed": {"embedding": jax.ShapeDtypeStruct((10, 64), jnp.bfloat16)},
}
LAYOUTS = ("compressed-tensors", "modelopt", "quark", "gpt-oss")

# recipe -> for each layout None (it can) or the reason.
TABLE = {
    "mxfp4": (None, "format mxfp4", None, "only mlp.experts"),
    "nvfp4_a16": (None, None, None, "only mlp.experts"),
    "mxfp4_a8": ("activations in mxfp8_e4m3", "activations in mxfp8_e4m3", "activations in mxfp8_e4m3", "only"),
    "mxfp8_e4m3": (None, None, "format mxfp8_e4m3", "only"),
    "mxint8": ("format mxint8",) * 3 + ("only",),
    "hadamard_mxfp4": (None, r"transform \(Hadamard\)", r"transform \(Hadamard\)", "only"),
    "mr_gptq_nvfp4": (None, r"transform \(Hadamard\)", r"transform \(Hadamard\)", "only"),
    "mr_gptq_mxfp4": ("scale policy 'third'", r"transform \(Hadamard\)", r"transform \(Hadamard\)", "only"),
    "wush_nvfp4": (r"transform \(Wush\)",) * 3 + ("only",),
    "smoothquant_nvfp4": (r"transform \(SmoothQuant\)",) * 3 + ("only",),
    "gptq_nvfp4": (None, None, None, "only"),
}


@pytest.mark.parametrize("recipe", TABLE)
def test_recipes_and_layouts(recipe):
    for layout, reason in zip(LAYOUTS, TABLE[recipe], strict=True):
        if reason is None:
            check_recipe(TREE, recipe, layout)
        else:
            with pytest.raises(CheckpointError, match=rf"{layout} cannot carry 1(.|\n)*layers/0/up/kernel: .*{reason}"):
                check_recipe(TREE, recipe, layout)
    for own in ("mxjax", "orbax"):
        check_recipe(TREE, recipe, own)


@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4_a16", "mxfp4_a8", "mxfp8_e4m3", "mxint8", "hadamard_mxfp4"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.filterwarnings("ignore:.*must rotate:mxjax.errors.MxjaxWarning")
def test_save_agrees(tmp_path, recipe, layout):
    """The same verdict with the same words, for real weights."""
    q = mxjax.quantize(jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), TREE), recipe)
    verdicts = []
    for run in (lambda: check_recipe(TREE, recipe, layout), lambda: mxjax.save(tmp_path / "out", q, layout)):
        try:
            run()
            verdicts.append("fine")
        except CheckpointError as e:
            verdicts.append(str(e))
    assert verdicts[0] == verdicts[1]


def test_shapes_and_names():
    stacked = {"up": {"kernel": jax.ShapeDtypeStruct((4, 64, 32), jnp.float32)}}
    with pytest.raises(CheckpointError, match=r"3 axes \(4, 64, 32\)"):
        check_recipe(stacked, "mxfp4", "quark")
    experts = {"mlp": {"experts": {"down_proj": jax.ShapeDtypeStruct((4, 64, 32), jnp.float32)}}}
    check_recipe(experts, "mxfp4_a16", "gpt-oss")
    with pytest.raises(CheckpointError, match="its name is 'x'"):
        check_recipe(TREE, "mxfp4", "quark", names=lambda path: "x")


def test_no_memory_is_touched():
    """A matrix of 8 TB is a matter of shapes."""
    big = {"up": {"kernel": jax.ShapeDtypeStruct((1 << 21, 1 << 21), jnp.bfloat16)}}
    check_recipe(big, "nvfp4_a16", "modelopt")
