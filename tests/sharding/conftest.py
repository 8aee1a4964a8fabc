"""What the tests of this folder share."""

import jax
import pytest


@pytest.fixture
def unoptimized():
    """Programs compile in half the time without LLVM's optimizations."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
