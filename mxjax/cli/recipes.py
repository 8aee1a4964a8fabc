"""``mxjax recipes``: the names that --recipe takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mxjax.cli.console import Console

if TYPE_CHECKING:
    from mxjax.config import QuantConfig


def recipe_config(recipe: str) -> QuantConfig:
    """What ``--recipe`` stands for: a named recipe, or a file that ``mxjax.save_config`` wrote.

    Raises:
      ConfigError: no recipe has that name; a file that holds no config.
    """
    import mxjax

    return mxjax.load_config(recipe) if recipe.endswith(".json") else mxjax.recipes.get(recipe)


def run(*, console: Console) -> None:
    from rich.table import Table

    import mxjax

    table = Table("recipe", "weights", "activations", "algorithm", "transform", "needs --calib", "use it for", box=None)
    rows = []
    for name in mxjax.recipes.RECIPES:
        cfg = mxjax.recipes.get(name)
        rule = cfg.rules[0]
        activation = rule.activation_format()
        transform = type(rule.transform).__name__.lower() if rule.transform is not None else None
        when = mxjax.recipes.when_to_use(name)
        row = {
            "recipe": name,
            "weight": str(rule.weight),
            "activation": activation.format.name if activation else None,
            "algorithm": rule.algorithm,
            "transform": transform,
            "needs_calibration": cfg.needs_data,
            "use": when,
        }
        rows.append(row)
        acts = activation.format.name if activation else "float"
        needs = "yes" if cfg.needs_data else "no"
        table.add_row(name, str(rule.weight), acts, rule.algorithm, transform or "-", needs, when)
    console.result({"recipes": rows}, table)
