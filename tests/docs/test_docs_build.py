"""The site builds under --strict, and its pages load nothing from another host."""

import os
import re
import subprocess
import sys

import pytest
from doc_pages import DOCS, PAGES, ROOT

pytest.importorskip("mkdocs", reason="pip install 'mxjax[docs]'")
pytest.importorskip("mkdocstrings", reason="pip install 'mxjax[docs]'")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_built(site):
    for path in PAGES:
        assert (site / path.relative_to(DOCS).with_suffix(".html")).is_file()
    assert not list(site.rglob("*.py"))


def test_docstrings_are_rendered(site):
    page = (site / "reference" / "mxjax.html").read_text(encoding="utf-8")
    assert "contraction axis" in page and "Raises" in page
    assert '<span class="gp">&gt;&gt;&gt; </span>' in page, "examples are code"
    assert ":func:" not in page and ":class:" not in page


def test_nothing_is_loaded_from_outside(site):
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r'<(?:script|img|iframe)\b[^>]*\bsrc="(?:https?:)?//', text), path.name
        assert not re.search(r'<link\b[^>]*rel="(?:stylesheet|icon|preconnect)"[^>]*href="(?:https?:)?//', text)
        assert "/work/" not in text and "/root/" not in text


def test_the_hook_refuses_other_hosts():
    sys.path.insert(0, str(DOCS / "tools"))
    import hooks
    from mkdocs.exceptions import PluginError

    class Page:
        class file:
            src_uri = "x.md"

    assert hooks.on_post_page('<script src="a.js"></script>', Page, None)
    for text in ('<script src="https://x/y.js">', '<img src="//x/y.png">', '<link rel="stylesheet" href="http://x">'):
        with pytest.raises(PluginError, match=r"x\.md"):
            hooks.on_post_page(text, Page, None)
