"""Every code block of the documentation runs: Python as written, with the output shown; commands as far as parsing.

A ``text`` block right after a Python block is what that block prints. The blocks of a page share one namespace; what
examples take for granted (a model, some tokens) is made in a ``<!-- setup`` comment, which runs and is not shown.
"""

import contextlib
import io
import re
import shlex
import tomllib

import click
import pytest
from doc_pages import DOCS, LANGUAGES, PAGES, ROOT, blocks

from mxjax.cli.app import main

every_page = pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(DOCS)))
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"])


@every_page
def test_python_blocks_run_and_print_what_is_shown(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace, printed, before = {"__name__": "__main__"}, "", None
    for block in blocks(path.read_text(encoding="utf-8")):
        if block.language == "python":
            out = io.StringIO()
            code = compile("\n" * block.line + block.text, str(path), "exec")
            with contextlib.redirect_stdout(out):
                exec(code, namespace)
            printed = out.getvalue()
        elif block.language == "text" and before == "python" and block.follows:
            assert printed == block.text, f"{path}:{block.line}"
            printed = ""
        before = block.language


@every_page
def test_output_is_shown_where_something_is_printed(path):
    """A block that prints is followed by its output, so that no call of print goes unchecked."""
    found = blocks(path.read_text(encoding="utf-8"))
    for block, after in zip(found, [*found, None][1:], strict=True):
        if block.language == "python" and re.search(r"^\s*print\(", block.text, re.M):
            assert after is not None and after.language == "text" and after.follows, f"{path}:{block.line}"


def test_blocks_are_found():
    text = "a\n```python\nx = 1\n```\n\n```text\nout\n```\nb\n<!-- setup\ny = 2\n-->\n```sh\nls\n```\n"
    assert [(b.language, b.text, b.follows) for b in blocks(text)] == [
        ("python", "x = 1\n", False),
        ("text", "out\n", True),
        ("python", "y = 2\n", False),
        ("sh", "ls\n", True),
    ]


@every_page
def test_blocks_are_of_known_languages(path):
    text = path.read_text(encoding="utf-8")
    assert {block.language for block in blocks(text)} <= LANGUAGES
    assert not re.search(r"^ +```", text, re.M), "an indented block would not be found by these tests"


def parse(line):
    """Whether a line of a shell block means something: commands are parsed by click, files and extras looked up."""
    words = shlex.split(line, comments=True)
    program = words[0].rsplit("/", 1)[-1] if words else ""
    if program == "mxjax":
        context = click.Context(main, info_name="mxjax")
        if words[1:] == ["--version"]:
            return
        name, command, rest = main.resolve_command(context, words[1:])
        command.make_context(name, rest, parent=context)
    elif program == "pip":
        for extras in re.findall(r"\[([\w,-]+)\]", line):
            assert set(extras.split(",")) <= EXTRAS
    elif program in ("python", "python3"):
        for word in words[1:]:
            assert not word.endswith(".py") or (ROOT / word).is_file()
    else:
        assert program in ("", "pytest", "mkdocs", "ruff", "jupytext", "jupyter", "sha256sum"), line


@every_page
def test_commands_exist_and_take_these_options(path):
    for block in blocks(path.read_text(encoding="utf-8")):
        for line in block.text.splitlines() if block.language == "sh" else ():
            parse(line)


def test_the_parser_refuses_what_is_wrong():
    for line in ("mxjax quantise a b", "mxjax quantize a b --recipe mxfp4 --nope", "mxjax quantize a"):
        with pytest.raises(click.UsageError):
            parse(line)
    for line in ("pip install 'mxjax[nope]'", "python benchmarks/nope.py", "curl x"):
        with pytest.raises(AssertionError):
            parse(line)
