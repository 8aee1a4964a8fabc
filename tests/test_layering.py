"""Imports go one way. Read with ``ast``, so that imports inside functions count too."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = {
    "mxjax.errors": 0,
    "mxjax.backend": 0,
    "mxjax.text": 0,
    "mxjax.core": 1,
    "mxjax.transforms": 2,
    "mxjax.ops": 3,
    "mxjax.calibration": 4,
    "mxjax.algorithms": 5,
    "mxjax.config": 6,
    "mxjax.recipes": 6,
    "mxjax.api": 7,
    "mxjax.fusion": 7,
    "mxjax.nn": 8,
    "mxjax.io": 8,
    "mxjax.eval": 8,
    "mxjax.search": 8,
    "mxjax.sharding": 8,
    "mxjax.report": 9,
    "mxjax.cli": 10,
}
USERS_OF_KERNELS = ("mxjax.ops", "mxjax.algorithms", "mxjax.cli.bench", "mxjax.cli.tune")
# What pallas_kernels may know of mxjax.
KERNELS_KNOW = ("mxjax.errors", "mxjax.backend", "mxjax.core")
# The lazy door knows every layer, and a command may start from `python -m`.
DOOR = {"mxjax", "mxjax.__main__"}
PACKAGES = {"mxjax": ROOT / "mxjax", "pallas_kernels": ROOT / "pallas_kernels", "mxjax_models": ROOT / "models"}


def modules():
    for package, folder in PACKAGES.items():
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            yield ".".join((package, *(p for p in parts if p != "__init__"))), file


MODULES = dict(modules())


def imports(source):
    """Names of the modules that a source imports, as written."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name, *packages):
    return any(name == p or name.startswith(p + ".") for p in packages)


def layer(name):
    return next((n for package, n in LAYERS.items() if within(name, package)), None)


def problems(module, source):
    """What this module imports and should not."""
    found = []
    for name in imports(source):
        upward = within(name, "mxjax") and layer(name) is not None and layer(name) > (layer(module) or 0)
        if within(module, "mxjax") and module not in DOOR:
            if upward:
                found.append(f"{name} is a higher layer")
            if within(name, "pallas_kernels") and not within(module, *USERS_OF_KERNELS):
                found.append(f"{name}: only {' and '.join(USERS_OF_KERNELS)} import pallas_kernels")
            if within(name, "mxjax_models") and not within(module, "mxjax.cli"):
                found.append(f"{name}: only the command line knows models")
            if within(name, "flax") and not within(module, "mxjax.nn", "mxjax.io", "mxjax.eval", "mxjax.cli"):
                found.append(f"{name}: only nn and io know Flax")
        if within(module, "mxjax.core") and within(name, "mxjax") and layer(name) not in (0, 1, None):
            found.append(f"{name}: core imports only errors")
        if within(module, "pallas_kernels") and layer(name) is not None and not within(name, *KERNELS_KNOW):
            found.append(f"{name}: kernels know errors, backend and core")
        if within(name, "jax._src", "jax.experimental.pallas", "jaxlib") and module != "pallas_kernels._compat":
            found.append(f"{name}: only pallas_kernels/_compat.py may import it")
    return found


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_one_way(module):
    assert problems(module, MODULES[module].read_text()) == []


def test_every_module_of_mxjax_has_a_layer():
    unknown = [m for m in MODULES if within(m, "mxjax") and m not in DOOR and layer(m) is None]
    assert unknown in ([], ["mxjax.data"]), "put it into LAYERS"


@pytest.mark.parametrize(
    "module, source",
    [
        ("mxjax.core.codec", "from mxjax.ops import qdot"),
        ("mxjax.core.codec", "def f():\n    import mxjax.transforms"),
        ("mxjax.algorithms.rtn", "from mxjax import api"),
        ("mxjax.api", "import pallas_kernels"),
        ("mxjax.ops.qdot", "from jax._src import core"),
        ("mxjax.ops.qdot", "from jax.experimental import pallas"),
        ("mxjax.ops.qdot", "from flax import nnx"),
        ("pallas_kernels.matmul.api", "from mxjax.ops.qweight import QWeight"),
        ("pallas_kernels.matmul.api", "from mxjax.transforms import Hadamard"),
    ],
)
def test_the_check_can_fail(module, source):
    assert problems(module, source)


@pytest.mark.parametrize("name", ["mxjax", "mxjax.core.codec", "pallas_kernels", "mxjax.ops", "mxjax_models"])
def test_imports_alone_in_a_fresh_interpreter(name):
    done = subprocess.run([sys.executable, "-W", "error", "-c", f"import {name}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


IMPORT_ALL = """
import importlib, pkgutil, jax, mxjax, mxjax.errors, mxjax_models, pallas_kernels
for package in (mxjax, mxjax_models, pallas_kernels):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name.rpartition(".")[2] == "__main__":
            continue
        try:
            importlib.import_module(module.name)
        except mxjax.errors.MissingExtraError:  # an adapter to a package that is not here
            pass
jax.config.update("jax_num_cpu_devices", 3)  # an error once a backend has started
assert len(jax.local_devices(backend="cpu")) == 3
"""


def test_imports_start_no_backend():
    """A program may still choose devices, start its distributed runtime or fork after ``import mxjax``."""
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
