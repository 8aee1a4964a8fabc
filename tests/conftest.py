"""Eight simulated CPU devices, so that sharding is tested on any machine. Must run before jax is imported.

And a bound on compiled code: XLA maps each compiled program into memory several times, Linux allows a process 65530
mappings, and a process that runs out of them crashes inside the compiler. The whole suite compiles more than that.

And a folder of compiled programs for this run, common to its test processes and to what they start: most of the suite's
time is compilation, and tests trace the same program again and again. Tests that count compilations count these too: a
program that comes from the folder is reported as compiled, only sooner.
"""

import atexit
import gc
import os
import shutil
import tempfile
from pathlib import Path

import pytest

FLAG = "--xla_force_host_platform_device_count"
if FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}=8".strip()

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # a process of pytest-xdist has its parent's
    compiled = tempfile.mkdtemp(prefix="mxjax-tests-compiled-")
    atexit.register(shutil.rmtree, compiled, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

# Folders whose tests compile much and compute little, and check no rounding rule of XLA's own.
QUICK = (
    "algorithms", "api", "calibration", "cli", "docs", "eval", "io", "kernels", "models", "nn", "notebooks", "report",
    "search", "transforms",
)  # fmt: skip
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
    """Without LLVM's optimizations programs compile in half the time, in folders of QUICK and processes they start."""
    import jax

    if request.path.parent.name not in QUICK:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def unoptimized():
    """Programs compile in half the time without LLVM's optimizations."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
