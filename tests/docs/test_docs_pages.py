"""The documentation is complete and current: public names, generated parts, navigation, and nothing of a machine."""

import ast
import importlib
import inspect
import re
import sys
import tomllib

import pytest
from doc_pages import DOCS, PAGES, ROOT, blocks

import mxjax
from mxjax.cli.app import main

sys.path.insert(0, str(DOCS / "tools"))
import generate
import reference
import tables

REFERENCE = "".join(p.read_text(encoding="utf-8") for p in (DOCS / "reference").glob("*.md"))
HEADINGS = set(re.findall(r"^      heading: (\S+)$", REFERENCE, re.M))
MODULES = sorted({m for _, _, modules in reference.PAGES.values() for m in modules})


def test_generated_parts_are_current():
    """After a change of code, docstrings' names, or results: ``python docs/tools/generate.py``."""
    assert not [str(p.relative_to(ROOT)) for p in generate.stale()]


def test_a_change_of_a_table_would_be_seen():
    page = DOCS / "recipes" / "index.md"
    text = page.read_text(encoding="utf-8")
    assert generate.filled(text) == text and generate.filled(text.replace("16.78", "16.87")) == text
    assert "16.78" in text


def test_every_public_name_is_in_the_reference():
    listed = {f"mxjax.{name}" for name in mxjax._NAMES}
    assert listed <= HEADINGS, listed - HEADINGS
    assert {name for names in reference.TOP.values() for name in names} == set(mxjax._NAMES)
    documented = {m for _, _, modules in reference.PAGES.values() for m in modules}
    assert {f"mxjax.{name}" for name in mxjax._MODULES} <= documented


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_of_a_module_is_in_the_reference(module):
    names = reference.public_names(module)
    assert names, "a module without public names has no place in the reference"
    assert {f"{module}.{name}" for name in names} <= HEADINGS


def imported(text):
    """(module, name) of what a text in Python imports from mxjax and its models."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and re.match(r"mxjax(_models)?\b", node.module or ""):
            yield from ((node.module, alias.name) for alias in node.names)


def test_what_pages_and_notebooks_import_is_in_the_reference():
    """Functions, classes and modules; a constant stands beside the function that takes it."""
    loaded = {m: importlib.import_module(reference.SUBMODULES.get(m, m)) for m in MODULES}
    known = [getattr(module, name) for m, module in loaded.items() for name in reference.public_names(m)]
    known += [getattr(mxjax, name) for name in mxjax._NAMES]
    known = {id(o) for o in [*known, *loaded.values()]}
    texts = [b.text for p in PAGES for b in blocks(p.read_text(encoding="utf-8")) if b.language == "python"]
    texts += [p.read_text(encoding="utf-8") for p in (ROOT / "notebooks").glob("*.py")]
    missing = set()
    for text in texts:
        for module, name in imported(text):
            found = getattr(importlib.import_module(module), name, None)
            found = importlib.import_module(f"{module}.{name}") if found is None else found
            if (callable(found) or inspect.ismodule(found)) and id(found) not in known:
                missing.add(f"{module}.{name}")
    assert len(texts) > 20 and not missing


def test_public_names_are_found():
    """The rule itself, on modules whose names are known."""
    assert "Hadamard" in reference.public_names("mxjax.transforms")
    assert {"quantize", "QLinear"} <= set(reference.public_names("mxjax.nnx"))
    assert "load" in reference.public_names("mxjax.io") and "Path" not in reference.public_names("mxjax.io")


def undocumented(name, value):
    """Without a docstring; a dataclass is given one, its signature, which says nothing."""
    return not (value.__doc__ or "").strip() or value.__doc__.startswith(f"{name}(")


def test_every_public_name_has_a_docstring():
    missing = []
    for module in ["mxjax", *MODULES]:
        loaded = importlib.import_module(reference.SUBMODULES.get(module, module))
        names = mxjax._NAMES if module == "mxjax" else reference.public_names(module)
        objects = {name: getattr(loaded, name) for name in names}
        missing += [f"{module}.{n}" for n, o in objects.items() if callable(o) and undocumented(n, o)]
    assert not missing


def test_every_command_and_option_is_in_the_reference():
    text = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    for name, command in main.commands.items():
        assert f"## mxjax {name}\n" in text
        for option in (o for p in command.params for o in p.opts if o.startswith("--")):
            assert option in text


def test_every_recipe_has_a_page():
    for name in mxjax.recipes.RECIPES:
        assert f"| `{name}`" in (DOCS / "recipes" / f"{tables.family_of(name)}.md").read_text(encoding="utf-8")


def test_every_notebook_and_every_extra_has_a_row():
    """Both lists are written by hand; each was once a row short."""
    notebooks = {p.stem for p in (ROOT / "notebooks").glob("*.py")}
    assert set(re.findall(r"^\| `(\d\d_\w+)` \|", (DOCS / "index.md").read_text(encoding="utf-8"), re.M)) == notebooks
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    table = (DOCS / "installation.md").read_text(encoding="utf-8").split("## Extras")[1].split("```")[0]
    assert set(extras) <= set(re.findall(r"`([\w-]+)`", table))


def test_what_was_measured_of_a_recipe_is_on_its_page():
    """A page once said "not measured" of rows that a later run had measured."""
    for row in tables.results(tables.QUALITY)["rows"]:
        recipe = {"rtn": row["format"], "rtn_third": row["format"], "rtn_hadamard": f"hadamard_{row['format']}"}.get(
            row["recipe"], f"{row['recipe']}_{row['format']}"
        )
        page = (DOCS / "recipes" / f"{tables.family_of(recipe)}.md").read_text(encoding="utf-8")
        assert f" {row['perplexity']:.2f} |" in page, (page[:30], row["recipe"])
        assert "Not measured end to end" not in page


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    assert sorted(listed) == sorted(str(p.relative_to(DOCS)) for p in PAGES)


@pytest.mark.parametrize("path", [*PAGES, ROOT / "mkdocs.yml"], ids=lambda p: p.name)
def test_no_paths_of_a_machine_and_no_hosts(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"/home/|/root/|/work/|/tmp/|/Users/|https?://", text)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(DOCS)))
def test_links_lead_somewhere(path):
    """Also where mkdocs is not installed; it checks the anchors as well."""
    for target in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).resolve().is_file(), target


def test_numbers_of_quality_come_from_files():
    """Outside generated parts no page states a perplexity or a ratio to bfloat16."""
    for path in PAGES:
        text = re.sub(r"<!-- table:.*?<!-- end -->", "", path.read_text(encoding="utf-8"), flags=re.S)
        assert not re.search(r"perplexity (of )?\d|\d\.\d+x\b", text), path.name
