"""These tests compile much and compute little."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def compile_quickly():
    """Fewer optimizations make the compilations of this folder cheaper and change no rounding rule."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
