"""Pages made from the code: the reference of public names, from docstrings, and that of the commands, from click."""

import ast
import importlib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
from tables import code

import mxjax
from mxjax.cli.app import main

# Names of mxjax itself, by what they are for.
TOP = {
    "Trees": (
        "quantize", "dequantize", "plan", "summary", "Rule", "QuantConfig", "save_config", "load_config",
    ),
    "Arrays and formats": ("quantize_array", "fake_quantize", "QTensor", "BlockFormat", "FORMATS", "get_format"),
    "Products": ("qdot", "qeinsum", "QWeight", "ActivationFormat", "LowRank"),
    "Calibration and search": ("calibrate", "quantize_sequential", "search_formats", "search_rules"),
    "Kernels and shared inputs": (
        "prepare_kernels", "kernels_used", "fuse_shared_inputs", "unfuse_shared_inputs", "qdot_shared", "qdot_grouped",
    ),
    "Files": ("save", "load", "convert", "quantize_folder"),
}  # fmt: skip
# Page of the reference -> title, a line, and the modules whose public names are on it.
PAGES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "formats": ("Formats and codec", "What codes mean, without blocks; see [Formats](../concepts/formats.md).",
                ("mxjax.core.formats", "mxjax.core.codec", "mxjax.core.packing")),
    "transforms": ("Transforms", "Invertible maps on the contraction axis; [explained](../concepts/transforms.md).",
                   ("mxjax.transforms",)),
    "recipes": ("Recipes", "Functions that make the named recipes; see [which recipe](../recipes/index.md).",
                ("mxjax.recipes",)),
    "calibration": ("Calibration", "Statistics of layer inputs; see [Calibration](../concepts/calibration.md).",
                    ("mxjax.calibration",)),
    "algorithms": ("Algorithms and search", "Arrays in, `QWeight` out; and searches that make configs.",
                   ("mxjax.algorithms", "mxjax.algorithms.gptq_solver", "mxjax.algorithms.loraq", "mxjax.search")),
    "nnx": ("Flax nnx", "See [Flax](../concepts/flax.md).", ("mxjax.nnx",)),
    "linen": ("Flax linen", "See [Flax](../concepts/flax.md).", ("mxjax.linen",)),
    "io": ("Files", "See [Checkpoints](../concepts/interop.md) and [On-disk format](../format.md).", ("mxjax.io",)),
    "eval": ("Evaluation", "How good a quantized model is, and the texts and prompts that ship.",
             ("mxjax.eval", "mxjax.data")),
    "report": ("Report and plots", "See [The report](../report.md).",
               ("mxjax.report", "mxjax.report.plots", "mxjax.report.depth", "mxjax.report.numbers",
                "mxjax.report.arrays", "mxjax.report.steps", "mxjax.report.pictures", "mxjax.report.images",
                "mxjax.report.collectives", "mxjax.report.html")),
    "sharding": ("Sharding", "See [Quantized trees on a mesh](../sharding.md).", ("mxjax.sharding",)),
    "errors": ("Errors", "Every exception that mxjax raises on purpose.", ("mxjax.errors",)),
    "kernels": ("Kernels", "Raw arrays in, raw arrays out; see [Kernels and hardware](../concepts/kernels.md).",
                ("pallas_kernels.transform_quantize", "pallas_kernels.block_scaled_matmul",
                 "pallas_kernels.grouped_matmul", "pallas_kernels.round_columns", "pallas_kernels.linear",
                 "mxjax.backend")),
    "models": ("Models", "Reference models in Flax nnx, installed as `mxjax_models`.",
               ("mxjax_models.llama", "mxjax_models.generate", "mxjax_models.tokenizer", "mxjax_models.params",
                "mxjax_models.quarot", "mxjax_models.stacked", "mxjax_models.pixart", "mxjax_models.flux",
                "mxjax_models.sana", "mxjax_models.samplers", "mxjax_models.diffusers_folder",
                "mxjax_models.diffusers_pipeline", "mxjax_models.diffusers_images", "mxjax_models.image_models",
                "mxjax_models.image_metrics", "mxjax_models.pixart_mini", "mxjax_models.pixart_mini_eval",
                "mxjax_models.partition", "mxjax_models.ulysses")),
}  # fmt: skip


# Of modules whose other names are on another page: a name has one place.
ONLY = {"mxjax.core.formats": ("ElementFormat",), "mxjax.algorithms.loraq": ("optimize", "Optimized")}


def public_names(module: str) -> list[str]:
    """What a module offers: ``__all__``, or its functions, classes and ``import a as a`` without an underscore."""
    if module in ONLY:
        return list(ONLY[module])
    loaded = importlib.import_module(SUBMODULES.get(module, module))
    if hasattr(loaded, "__all__"):
        return list(loaded.__all__)
    found = []
    for node in ast.parse(inspect.getsource(loaded)).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.append(node.name)
        elif isinstance(node, ast.ImportFrom):
            found += [a.name for a in node.names if a.asname == a.name]
    return [name for name in found if not name.startswith("_")]


SUBMODULES: Mapping[str, str] = {f"mxjax.{name}": module for name, module in mxjax._MODULES.items()}


def _directives(module: str, names: Sequence[str]) -> list[str]:
    """mkdocstrings' lines. A name is looked up where it is defined, and headed as users write it."""
    lines = []
    loaded = importlib.import_module(SUBMODULES.get(module, module))
    for name in names:
        defined = getattr(getattr(loaded, name), "__module__", None) or SUBMODULES.get(module, module)
        if not defined.startswith(("mxjax", "pallas_kernels")):
            defined = mxjax._NAMES.get(name, SUBMODULES.get(module, module))
        lines += [f"::: {defined}.{name}", "    options:", f"      heading: {module}.{name}", ""]
    return lines


def reference_pages() -> dict[str, str]:
    """Path below ``docs/`` -> text, for every page of the reference."""
    lines = ["# mxjax", "", "Everything here is imported from `mxjax` itself, on first use.", ""]
    for title, names in TOP.items():
        lines += [f"## {title}", "", *_directives("mxjax", names)]
    lines += ["## Submodules", ""]
    for name in mxjax._MODULES:
        page = next(page for page, (_, _, modules) in PAGES.items() if f"mxjax.{name}" in modules)
        lines.append(f"- [`mxjax.{name}`]({page}.md)")
    pages = {"reference/mxjax.md": "\n".join(lines) + "\n"}
    for page, (title, text, modules) in PAGES.items():
        lines = [f"# {title}", "", text, ""]
        for module in modules:
            lines += [f"## {module}", ""] if len(modules) > 1 else []
            lines += _directives(module, public_names(module))
        pages[f"reference/{page}.md"] = "\n".join(lines).rstrip("\n") + "\n"
    return pages


def command_page() -> str:
    """``reference/cli.md``: every command, argument and option, as ``mxjax --help`` has them."""
    lines = ["# Command line", "", main.help or "", "", "Exit codes: 0 done, 1 an error (one line on stderr; `--debug` "
             "shows the traceback), 2 wrong usage, 130 interrupted. `mxjax COMMAND --help` prints what is below.",
             ""]  # fmt: skip
    context = click.Context(main, info_name="mxjax")
    for name, command in main.commands.items():
        inner = click.Context(command, info_name=name, parent=context)
        lines += [f"## mxjax {name}", "", "```text", command.get_usage(inner).removeprefix("Usage: "), "```", ""]
        lines += [(command.help or "").strip(), ""]
        if command.epilog:
            lines += [command.epilog, ""]
        rows = [record for p in command.params if isinstance(p, click.Option) and (record := p.get_help_record(inner))]
        if rows:
            lines += ["| option | |", "|---|---|"]
            lines += [f"| {code(flags)} | {_cell(text)} |" for flags, text in rows] + [""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def written(folder: Path) -> dict[Path, str]:
    """Every page of this file, by its path."""
    return {folder / path: text for path, text in {**reference_pages(), "reference/cli.md": command_page()}.items()}
