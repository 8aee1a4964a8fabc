"""Commands, options and exit codes. Nothing heavy is imported before a command runs.

Exit codes: 0 done, 1 an error (one line on stderr; ``--debug`` shows the traceback), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import functools
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import click

from mxjax import __version__
from mxjax.cli import entry
from mxjax.cli.console import Console
from mxjax.cli.sizes import Share, Size

_DEBUG = "mxjax.debug"
_MODEL_HELP = "MODEL is a Hugging Face folder, a .gguf file, a folder that mxjax wrote, or smollm2 (the demo model)."


class _Group(click.Group):
    """Turns what a command raises into an exit code and one line."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As a process: Ctrl-C is handled, wherever it strikes."""
        return entry.run(lambda: self.main(*args, **kwargs))

    def invoke(self, ctx: click.Context) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                result = super().invoke(ctx)
                return _interrupt() if entry.interrupted() else result
            except KeyboardInterrupt:
                _interrupt()
            except (click.exceptions.Exit, click.ClickException, click.Abort):
                raise
            except Exception as e:
                if entry.interrupted():  # libraries turn KeyboardInterrupt into errors of their own
                    _interrupt()
                if ctx.meta.get(_DEBUG):
                    traceback.print_exc()
                click.echo(f"error: {_one_line(e)}", err=True)
                raise SystemExit(1) from None


def _interrupt() -> NoReturn:
    click.echo("interrupted", err=True)
    raise SystemExit(entry.INTERRUPTED) from None


def _one_line(e: Exception) -> str:
    """Our own errors speak for themselves; others are named, so that a bug can be reported."""
    from mxjax.errors import MxjaxError

    text = "; ".join(line.strip() for line in str(e).splitlines() if line.strip())
    if not isinstance(e, (MxjaxError, FileNotFoundError, ValueError, ImportError)):
        text = f"{type(e).__name__}: {text}"
    return text if len(text) <= 600 else text[:600] + " ... (--debug shows all)"


def _show_warning(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    click.echo(f"warning: {message}", err=True)


def _set_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[_DEBUG] = True


_debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, callback=_set_debug, help="Show the traceback of an error."
)


def _output_options(command: Callable[..., None]) -> Callable[..., None]:
    """--json, --quiet and --debug; the command gets a ``console``."""

    @_debug_option
    @click.option("--quiet", "-q", is_flag=True, help="No notes and no progress bars.")
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, all else on stderr.")
    @functools.wraps(command)
    def wrapped(*args: Any, as_json: bool, quiet: bool, **kwargs: Any) -> None:
        command(*args, console=Console(json=as_json, quiet=quiet), **kwargs)

    return wrapped


_FORMATS = ["mxjax", "orbax", "compressed-tensors", "modelopt", "quark", "gpt-oss"]
_recipe_help = "Recipe name (`mxjax recipes` lists them), or FILE.json as mxjax.save_config writes it."
_calib_option = click.option(
    "--calib",
    metavar="FILE.npz:KEY | FILE.txt",
    help="Calibration data for recipes that need it: int32 tokens [sequences, length], or text.",
)


_shard_option = click.option(
    "--shard-size",
    type=Size(),
    default="5GB",
    show_default=True,
    help="Size of the files; more than that is written as shards with an index. Orbax has files of its own.",
)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="mxjax")
@_debug_option
def main() -> None:
    """MXFP4 and NVFP4 quantization of language models in JAX. Start with `mxjax demo`."""


@main.command(epilog=_MODEL_HELP)
@click.argument("src")
@click.argument("dst", type=click.Path())
@click.option("--recipe", required=True, help=_recipe_help)
@_calib_option
@click.option(
    "--resume",
    metavar="FOLDER",
    type=click.Path(),
    help="Keep finished blocks in FOLDER; after an interruption the same command goes on after them.",
)
@click.option(
    "--format",
    "file_format",
    type=click.Choice(_FORMATS),
    default="mxjax",
    show_default=True,
    help="What to write; vLLM reads compressed-tensors, modelopt and quark, transformers the first.",
)
@_shard_option
@click.option("--overwrite", is_flag=True, help="Replace DST if it exists.")
@click.option("--restart", is_flag=True, help="Begin anew where the same DST was interrupted before.")
@click.option(
    "--process",
    type=Share(),
    help="Data-free recipes: this is one of N processes that share the work on one SRC and DST: 0/N, 1/N, ..",
)
@_output_options
def quantize(**options: Any) -> None:
    """Quantize the model SRC and write it to the folder DST."""
    from mxjax.cli.quantize import run

    run(**options)


@main.command()
@click.argument("src", type=click.Path())
@click.argument("dst", type=click.Path())
@click.option("--to", type=click.Choice(_FORMATS), required=True, help="Layout to write.")
@_shard_option
@click.option("--overwrite", is_flag=True, help="Replace DST if it exists.")
@_output_options
def convert(**options: Any) -> None:
    """Write the quantized folder SRC in another layout to DST, without a change of any value."""
    from mxjax.cli.convert import run

    run(**options)


@main.command(epilog=_MODEL_HELP)
@click.argument("model")
@click.option("--verify", is_flag=True, help="First compare every file with its hash in SHA256SUMS.")
@_output_options
def inspect(**options: Any) -> None:
    """Show format, size and bits of every weight of MODEL."""
    from mxjax.cli.inspect import run

    run(**options)


@main.command("eval", epilog=_MODEL_HELP)
@click.argument("model")
@click.option("--recipe", help="Quantize with this recipe first. " + _recipe_help)
@_calib_option
@click.option("--tokens", metavar="FILE.npz:KEY", required=True, help="int32 tokens [sequences, length].")
@click.option("--reference", metavar="MODEL", help="Float model to compare a quantized MODEL with.")
@click.option("--limit", type=click.IntRange(min=1), help="Use the first N sequences only.")
@click.option("--batch-size", type=click.IntRange(min=1), default=4, show_default=True, help="Sequences at a time.")
@click.option(
    "--json-file", metavar="FILE", type=click.Path(dir_okay=False), help="Also write the JSON object to FILE."
)
@click.option(
    "--report", "report_file", metavar="FILE", type=click.Path(dir_okay=False), help="Write an HTML report to FILE."
)
@_output_options
def evaluate(**options: Any) -> None:
    """Perplexity of MODEL: exp of the mean negative log-likelihood of every predicted token.

    With --recipe or --reference also the float model's perplexity, KL(float || quantized) and how often both rank the
    same token first. One standard error follows after +-.
    """
    from mxjax.cli.evaluate import run

    run(**options)


@main.command(
    "lm-eval", epilog=_MODEL_HELP, context_settings={"ignore_unknown_options": True, "help_option_names": ["-h"]}
)
@click.argument("model")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@_debug_option
def lm_eval(**options: Any) -> None:
    """Run tasks of lm_eval on MODEL; ARGUMENTS are those of `lm_eval run`, such as --tasks arc_easy --limit 100.

    Needs pip install 'mxjax[lm-eval]'.
    """
    from mxjax.cli.lm_eval import run

    run(**options)


@main.command()
@_output_options
def recipes(**options: Any) -> None:
    """List the recipes that --recipe takes."""
    from mxjax.cli.recipes import run

    run(**options)


@main.command()
@click.option("--out", type=click.Path(), default="mxjax-demo", show_default=True, help="Folder for the results.")
@click.option("--model", default="smollm2", show_default=True, help="Another model to run the demo on.")
@click.option("--recipe", "recipes", multiple=True, metavar="NAME", help="Compare these instead (repeat the option).")
@_calib_option
@click.option("--prompt", help="What to ask the model.")
@click.option("--offline", is_flag=True, help="Use the cached model only; never download.")
@_output_options
def demo(**options: Any) -> None:
    """Quantize a real language model to MXFP4 and NVFP4 and compare: table, text, checkpoint, HTML report.

    Round-to-nearest, and MR-GPTQ calibrated on a few sequences of text that ships with mxjax (--calib for your own).
    """
    from mxjax.cli.demo import run

    run(**options)


@main.command()
@click.option("--model", required=True, metavar="FOLDER | pixart-mini", help="A diffusers folder, or what ships here.")
@click.option("--recipe", required=True, help=_recipe_help)
@click.option("--prompt", multiple=True, required=True, help="What to draw (repeat the option for more images).")
@click.option("--steps", type=click.IntRange(min=1), help="Sampling steps; default: the model's own.")
@click.option("--guidance", type=float, help="Classifier-free guidance scale; default: the model's own.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the first image's noise; others count up.")
@click.option("--size", metavar="HxW", help="Height and width in pixels; default: the model's own.")
@click.option("--calib-prompts", metavar="FILE", help="Prompts to calibrate on, one a line; default: some that ship.")
@click.option(
    "--calib-steps",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="How many steps of each calibration prompt are looked at.",
)
@click.option(
    "--calib-times",
    type=click.Choice(["uniform", "logit_normal"]),
    default="uniform",
    show_default=True,
    help="Which steps those are, spread over all timesteps: evenly, or fewer at both ends.",
)
@click.option("--keep", multiple=True, metavar="REGEX", help="Also keep matching weights in high precision.")
@click.option(
    "--no-default-keep", is_flag=True, help="Do not keep what the model lists (embedders, adaLN, projection)."
)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Default: bfloat16 on a GPU, else float32.")
@click.option("--out", type=click.Path(file_okay=False), default="mxjax-images", show_default=True, help="For images.")
@click.option("--report", type=click.Path(dir_okay=False), help="HTML report; default: report.html in --out.")
@click.option("--no-float", is_flag=True, help="Do not draw the float model's images to compare with.")
@_output_options
def generate(**options: Any) -> None:
    """Draw images with a quantized diffusion transformer, and the same ones with the float model.

    FLUX.1, PixArt and SANA from diffusers folders (pip install 'mxjax[diffusers]'), or PixArt-Mini. Recipes that need
    data are calibrated on the steps of drawing --calib-prompts.
    """
    from mxjax.cli.generate import run

    run(**options)


_shapes_option = click.option(
    "--shapes", metavar="NxK,...", help="Layers: 8192x8192, or llama-3.1-8b, qwen3-32b, flux.1, pixart-sigma."
)
_rows_option = click.option("--rows", metavar="M,...", help="Rows of the input, such as 1,16,4096.")
_reps_option = click.option("--reps", type=click.IntRange(min=1), default=24, show_default=True, help="Timed calls.")


@main.command()
@_shapes_option
@_rows_option
@_reps_option
@click.option("--out", type=click.Path(dir_okay=False), help="Write the table as JSON, too.")
@_output_options
def bench(**options: Any) -> None:
    """Time 4-bit layers against bf16 XLA on this machine, input quantization included."""
    from mxjax.cli.bench import run

    run(**options)


@main.command()
@_shapes_option
@_rows_option
@_reps_option
@click.option("--out", type=click.Path(dir_okay=False), help="Where to store; default: the cache folder.")
@_output_options
def tune(**options: Any) -> None:
    """Find the fastest kernel configurations for this GPU; mxjax uses them from then on."""
    from mxjax.cli.tune import run

    run(**options)
