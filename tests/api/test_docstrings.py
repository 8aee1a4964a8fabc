"""Every example in a docstring runs, with ``jnp``, ``np``, ``jax``, ``flax``, ``mxjax`` and the formats at hand."""

import doctest
import importlib
import pkgutil
import tempfile

import flax
import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
import pallas_kernels
from mxjax.core import formats
from mxjax.errors import MissingExtraError


def module_names():
    for package in (mxjax, pallas_kernels):
        yield package.__name__
        for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not info.name.endswith("__main__"):
                yield info.name


@pytest.mark.parametrize("name", sorted(module_names()))
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # what examples write goes away with the test
    monkeypatch.chdir(tmp_path)
    try:
        module = importlib.import_module(name)
    except MissingExtraError as e:
        pytest.skip(str(e))
    given = dict(jax=jax, jnp=jnp, np=np, flax=flax, mxjax=mxjax, **vars(formats))
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    report: list[str] = []
    for test in finder.find(module, name, globs={**given, **vars(module)}):
        runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


def test_the_runner_finds_examples_and_failures():
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(verbose=False)
    tests = finder.find(importlib.import_module("mxjax.api"), "mxjax.api")
    assert sum(len(t.examples) for t in tests) >= 3
    wrong = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert runner.run(wrong, out=lambda text: None).failed == 1
