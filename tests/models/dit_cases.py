"""What the tests of the diffusion transformers share: random diffusers models, tolerances, both directions of names."""

import math

import numpy as np
import pytest
from flax import nnx
from mxjax_models import diffusers_folder

import mxjax

torch = pytest.importorskip("torch", reason="needs torch: pip install 'mxjax[test]'")
diffusers = pytest.importorskip("diffusers", reason="needs diffusers: pip install 'mxjax[test]'")


def randomize(reference, seed=0):
    """Every parameter random, biases, norms and tables too; matrices keep the size of what they multiply."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in reference.parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.ndim == 1:
                p.add_(noise * 0.2)
            else:
                p.copy_(noise * (0.3 if p.shape[0] in (2, 6) else math.prod(p.shape[1:]) ** -0.5))
    return reference.eval()


def tolerance(sums: list[int], scale: float) -> float:
    """Two orders of the same sums: every dot product of length K adds about eps * sqrt(K), relative to its scale.

    ``sums`` are the lengths along the longest path; independent errors add as squares, and 4 covers the maximum over
    all outputs (about 4 sigma for tens of thousands).
    """
    return 4 * 2.0**-23 * math.sqrt(sum(sums)) * scale


@nnx.jit
def run(model, *args):
    return model(*args)


def arrays(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


def in_torch(reference, **inputs):
    with torch.no_grad():
        return reference(**inputs, return_dict=False)[0].numpy()


def check_names(reference_class, arguments, model_class, config):
    """Every key of diffusers' model, on the meta device, is one of ours with the same shape, and the other way."""
    with torch.device("meta"):
        reference = reference_class(**arguments)
    theirs = {name: tuple(p.shape) for name, p in reference.state_dict().items()}
    ours = diffusers_folder.diffusers_shapes(diffusers_folder.abstract(model_class, config))
    assert ours == theirs
    return reference


def check_round_trip(reference, model):
    """Our names, shapes and config go back into diffusers and give the very same parameters."""
    config = diffusers_folder.diffusers_config(model)
    again = type(reference).from_config(config)
    again.load_state_dict({k: torch.tensor(v) for k, v in diffusers_folder.to_diffusers(model).items()}, strict=True)
    want = dict(reference.named_parameters())
    for name, p in again.named_parameters():
        assert torch.equal(p, want[name]), name
    assert type(model.config).from_diffusers(config) == model.config


def linear_paths(model):
    return {"/".join(map(str, p)) for p, node in nnx.iter_graph(model) if isinstance(node, nnx.Linear)}


def check_quantized(model, inputs, kept):
    """By default everything but ``kept`` is quantized, and outputs stay near.

    A W4A4 product is off by about 0.11 * sqrt(2) of its size (E2M1 with a shared power of two rounds to 2^-3.2 rms);
    a handful of them in sequence, behind residuals that are exact, stays below 0.5 of the output.
    """
    quantized = mxjax.nnx.quantize(model, "mxfp4")
    swapped = linear_paths(model) - linear_paths(quantized)
    assert linear_paths(quantized) == kept
    assert swapped and all("blocks/" in path for path in swapped)
    want, got = (np.asarray(run(m, *inputs), np.float64) for m in (model, quantized))
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert np.isfinite(got).all() and 0 < error < 0.5, error
    return swapped
