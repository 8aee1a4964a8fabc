"""Which steps of a diffusion model's sampling calibration looks at."""

from __future__ import annotations

import numpy as np

from mxjax.errors import ConfigError

SAMPLING = ("stratified", "random")


def calibration_steps(
    runs: int, steps: int, each: int | None = None, *, sampling: str = "stratified", seed: int = 0
) -> np.ndarray:
    """The steps to keep of each of several sampling runs: int [runs, each], ascending in each run.

    Inputs of a diffusion transformer change their size and their outliers with the timestep, and a model is calibrated
    for all of them with few forward passes. "stratified": each run is cut into ``each`` equal stretches of steps, and
    one step is taken from every stretch; where in the stretch moves on from run to run by the golden ratio, so that
    over the runs every step is taken equally often, as evenly as whole numbers allow. "random": any ``each`` steps of
    a run, from ``seed``, as in calibration sets that were drawn without regard to time.

    Args:
      runs: prompts, or batches of prompts, that are sampled for calibration.
      steps: of each.
      each: how many steps of a run to keep; None: all.
      sampling: "stratified" or "random".
      seed: of the first position and of the random choice.

    Raises:
      ConfigError: a run without steps, more to keep than there are, or another word for sampling.

    Example:
      >>> calibration_steps(3, 20, 4).tolist()
      [[3, 8, 13, 18], [1, 6, 11, 16], [4, 9, 14, 19]]
    """
    each = steps if each is None else each
    if sampling not in SAMPLING or runs < 1 or not 1 <= each <= steps:
        raise ConfigError(
            f"calibration takes 1 to {steps} steps of 1 or more runs, sampling is one of {SAMPLING}; not {each} steps "
            f"of {runs} runs and {sampling!r}"
        )
    rng = np.random.default_rng(seed)
    if sampling == "random":
        return np.sort(np.stack([rng.permutation(steps)[:each] for _ in range(runs)]), axis=1)
    golden = (np.sqrt(5) - 1) / 2
    place = (rng.random() + golden * np.arange(runs)) % 1
    return np.floor((np.arange(each) + place[:, None]) * steps / each).astype(int)
