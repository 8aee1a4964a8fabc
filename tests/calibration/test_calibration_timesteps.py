"""Which steps of a diffusion model calibration looks at."""

import numpy as np
import pytest

from mxjax.calibration import calibration_steps, time_weights
from mxjax.errors import ConfigError


def test_every_stretch_of_every_run_and_every_step_alike():
    steps = calibration_steps(40, 20, 4, seed=3)
    assert steps.shape == (40, 4) and (steps // 5 == np.arange(4)).all()
    counts = np.bincount(steps.ravel(), minlength=20)
    # 8 each; points that move on by the golden ratio leave no gap, so counts differ from that by less than 2.
    assert counts.min() >= 7 and counts.max() <= 9
    assert (calibration_steps(5, 6) == np.arange(6)).all()
    np.testing.assert_array_equal(calibration_steps(40, 20, 4, seed=3), steps)
    assert (calibration_steps(40, 20, 4, seed=4) != steps).any()


def test_in_proportion_to_weights():
    t = (np.arange(20)[::-1] + 0.5) / 20
    weights = time_weights(t, "logit_normal")
    counts = np.bincount(calibration_steps(100, 20, 4, weights=weights).ravel(), minlength=20)
    np.testing.assert_allclose(counts, 400 * weights / weights.sum(), atol=2)
    assert counts[0] < 0.2 * counts[10]
    only = calibration_steps(3, 4, 2, weights=[0, 1, 0, 1])
    assert (only == [1, 3]).all()


@pytest.mark.parametrize(
    "arguments", [(0, 4), (1, 4, 5), (1, 4, 0), (1, 4, 2, [1, 1]), (1, 2, 1, [-1, 2]), (1, 2, 1, [0, 0])]
)
def test_what_cannot_be(arguments):
    runs, steps, *rest = arguments
    each, weights = (*rest, None, None)[:2]
    with pytest.raises(ConfigError):
        calibration_steps(runs, steps, each, weights=weights)
    with pytest.raises(ConfigError, match="logit_normal"):
        time_weights([0.5], "cosine")
