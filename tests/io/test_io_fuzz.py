"""Whatever a checkpoint holds, reading it gives a valid tree or an error of ours. More: benchmarks/fuzz.py."""

import shutil

import fuzz_cases
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

CASES = 50


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """One undamaged folder for each reader."""
    base = tmp_path_factory.mktemp("good")
    for name, make in fuzz_cases.FOLDERS.items():
        make(base / name)
    return base


@pytest.mark.parametrize("name", fuzz_cases.FOLDERS)
def test_undamaged_folders_are_read(good, name):
    assert fuzz_cases.read(good / name) == "read"


@pytest.mark.parametrize("name", fuzz_cases.FOLDERS)
def test_damaged_folders(good, tmp_path, name):
    outcomes = {"read": 0, "refused": 0}

    @settings(
        max_examples=CASES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data):
        shutil.rmtree(tmp_path / "case", ignore_errors=True)
        shutil.copytree(good / name, tmp_path / "case" / "folder")
        fuzz_cases.damage(data.draw, tmp_path / "case" / "folder")
        outcomes[fuzz_cases.read(tmp_path / "case" / "folder")] += 1

    run()
    assert outcomes["refused"] > CASES // 4  # the damage is real
