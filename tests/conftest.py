"""Eight simulated CPU devices, so that sharding is tested on any machine. Must run before jax is imported.

And a bound on compiled code: XLA maps each compiled program into memory several times, Linux allows a process 65530
mappings, and a process that runs out of them crashes inside the compiler. The whole suite compiles more than that.
"""

import gc
import os
from pathlib import Path

import pytest

FLAG = "--xla_force_host_platform_device_count"
if FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}=8".strip()

# Folders whose tests compile much and compute little, and check no rounding rule of XLA's own.
QUICK = ("algorithms", "calibration", "cli", "docs", "eval", "models", "nn", "report", "search", "transforms")
MOST_MAPPINGS = 20_000
_MAPPINGS = Path("/proc/self/maps")


@pytest.fixture(autouse=True, scope="module")
def bounded_code():
    """Forget compiled programs after a module that leaves many."""
    yield
    if _MAPPINGS.exists() and _MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        import jax

        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True, scope="module")
def compile_quickly(request):
    """Without LLVM's optimizations programs compile in half the time, in folders of QUICK."""
    import jax

    jax.config.update("jax_disable_most_optimizations", request.path.parent.name in QUICK)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def unoptimized():
    """Programs compile in half the time without LLVM's optimizations."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
