"""Which steps of a diffusion model's sampling calibration looks at."""

from __future__ import annotations

from typing import Any

import numpy as np

from mxjax.errors import ConfigError

TIMES = ("uniform", "logit_normal")


def calibration_steps(
    runs: int, steps: int, each: int | None = None, *, weights: Any = None, seed: int = 0
) -> np.ndarray:
    """The steps to keep of each of several sampling runs: int [runs, each], ascending in each run.

    Inputs of a diffusion transformer change their size and their outliers with the timestep, and a model is calibrated
    for all of them with few forward passes. So the choice is stratified: each run is cut into ``each`` stretches of
    equal weight, and one step is taken from every stretch; where in the stretch moves on from run to run by the golden
    ratio, so that over the runs every step comes up in proportion to its weight, as evenly as whole numbers allow.

    Args:
      runs: prompts that are sampled for calibration.
      steps: of each.
      each: how many steps of a run to keep; None: all.
      weights: one for each step, none negative; None: all alike (:func:`time_weights` has others). A step that weighs
        more than a stretch may be taken twice.
      seed: of the first position.

    Raises:
      ConfigError: a run without steps, more to keep than there are, or weights that are none.

    Example:
      >>> calibration_steps(3, 20, 4).tolist()
      [[3, 8, 13, 18], [1, 6, 11, 16], [4, 9, 14, 19]]
    """
    each = steps if each is None else each
    if runs < 1 or not 1 <= each <= steps:
        raise ConfigError(f"calibration takes 1 to {steps} steps of 1 or more runs, not {each} steps of {runs} runs")
    share = np.ones(steps) if weights is None else np.asarray(weights, np.float64)
    if share.shape != (steps,) or not (share >= 0).all() or not 0 < share.sum() < np.inf:
        raise ConfigError(f"calibration has a weight for each of {steps} steps, none negative, not {weights!r}")
    place = (np.random.default_rng(seed).random() + (np.sqrt(5) - 1) / 2 * np.arange(runs)) % 1
    quantiles = (np.arange(each) + place[:, None]) / each
    return np.minimum(np.searchsorted(np.cumsum(share) / share.sum(), quantiles, side="right"), steps - 1)


def time_weights(t: Any, times: str = "uniform") -> np.ndarray:
    """Weights for :func:`calibration_steps` from the times of the steps, float64 [steps].

    Args:
      t: noise levels, 1 (noise) to 0 (data).
      times: "uniform": each step as often as any other, as sampling has it; "logit_normal": as often as training saw
        its time where that was drawn from a logit-normal distribution (arXiv 2403.03206): fewer at both ends.

    Raises:
      ConfigError: another word.

    Example:
      >>> time_weights([0.9, 0.5, 0.1], "logit_normal").round(2).tolist()
      [0.99, 4.0, 0.99]
    """
    t = np.clip(np.asarray(t, np.float64), 1e-3, 1 - 1e-3)
    if times == "uniform":
        return np.ones(len(t))
    if times == "logit_normal":
        return np.exp(-np.square(np.log(t / (1 - t))) / 2) / (t * (1 - t))
    raise ConfigError(f"calibration times are one of {TIMES}, not {times!r}")
