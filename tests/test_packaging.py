"""The wheel: what is in it, and that it works in a fresh environment."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _packages_in_tree() -> set[str]:
    """Every folder with an __init__.py below the three package roots, by the name it is installed under."""
    found = set()
    for name, folder in PYPROJECT["tool"]["setuptools"]["package-dir"].items():
        for init in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join([name, *init.parent.relative_to(ROOT / folder).parts]))
    return found


def test_every_package_is_listed():
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == _packages_in_tree()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source")
    # From a copy: a build leaves folders behind in the tree it builds from.
    for name in ["pyproject.toml", "README.md", "LICENSE", "mxjax", "pallas_kernels", "models"]:
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    subprocess.run([sys.executable, "-m", "build", "--wheel", "-o", str(out), str(source)], check=True,
                   capture_output=True, text=True)  # fmt: skip
    (path,) = out.glob("*.whl")
    return path


def test_wheel_holds_the_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {n.split("/")[0] for n in names if ".dist-info" not in n}
    assert top == {"mxjax", "pallas_kernels", "mxjax_models"}
    for package in top:
        assert f"{package}/py.typed" in names
    assert any(re.match(r"mxjax/data/.*\.txt$", n) for n in names), "the demo's text is missing"
    for name in ("pixart_mini.safetensors", "pixart_mini.json", "pixart_mini_eval.npz", "NOTICE.txt"):
        assert f"mxjax_models/data/{name}" in names
    metadata = next(n for n in names if n.endswith("/METADATA"))
    assert b"License-Expression: Apache-2.0" in zipfile.ZipFile(wheel).read(metadata)


def test_wheel_works_in_a_fresh_environment(wheel, tmp_path):
    """Installs the wheel alone; the dependencies come from this environment, as a read-only second site folder."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel], check=True)
    site = Path(subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                                        text=True).strip())  # fmt: skip
    here = [p for p in sys.path if p.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(here))  # appended after the fresh site folder
    code = (
        "import jax.numpy as jnp, mxjax, mxjax_models, pallas_kernels, os\n"
        "q = mxjax.quantize({'layer': {'kernel': jnp.ones((64, 8))}}, 'mxfp4')\n"
        "y = mxjax.qdot(jnp.ones((2, 64)), q['layer']['kernel'])\n"
        "assert (y == 64).all()\n"
        "print(os.path.dirname(mxjax.__file__), mxjax.__version__)\n"
    )
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    out = subprocess.run([python, "-c", code], cwd=tmp_path, env=env, check=True, capture_output=True, text=True)
    folder, version = out.stdout.split()
    assert Path(folder).is_relative_to(tmp_path), f"imported {folder}, not the installed wheel"
    assert version == PYPROJECT["project"]["version"]
    script = subprocess.run([tmp_path / "env" / "bin" / "mxjax", "--help"], env=env, capture_output=True, text=True)
    assert script.returncode == 0 and "quantize" in script.stdout


def test_version_is_stated_once():
    import mxjax

    assert mxjax.__version__ == PYPROJECT["project"]["version"]
    try:
        assert importlib.metadata.version("mxjax") == mxjax.__version__
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("mxjax is run from the source tree here; an installed one is checked in CI")


def test_import_pulls_in_nothing_heavy():
    """`import mxjax` must not import jax's users (flax, optax, orbax) or optional packages."""
    code = (
        "import sys, mxjax\n"
        "heavy = ('jax', 'flax', 'optax', 'orbax', 'matplotlib', 'rich', 'click', 'torch')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "[]"


def test_base_requirements_stay_small():
    base = {re.match(r"[A-Za-z0-9-]+", r).group() for r in PYPROJECT["project"]["dependencies"]}
    assert base == {"jax", "flax", "optax", "numpy", "ml-dtypes", "orbax-checkpoint", "safetensors", "rich", "click"}
