"""The public door: every name resolves, lazily."""

import subprocess
import sys

import pytest

import mxjax


@pytest.mark.parametrize("name", sorted(mxjax.__all__))
def test_public_names_resolve(name):
    assert getattr(mxjax, name) is not None
    assert name in dir(mxjax)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="has no attribute 'quantise'"):
        mxjax.quantise  # noqa: B018


def test_import_loads_nothing_heavy():
    code = "import sys, mxjax; print([m for m in ('flax', 'jax', 'orbax', 'pallas_kernels') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
