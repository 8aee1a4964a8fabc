"""Statistics of layer inputs: taps, running Hessians, calibration by block."""

from mxjax.calibration.accumulate import GramSum as GramSum
from mxjax.calibration.accumulate import stats_of as stats_of
from mxjax.calibration.accumulate import update as update
from mxjax.calibration.options import CalibrationOptions as CalibrationOptions
from mxjax.calibration.sample import RowSample as RowSample
from mxjax.calibration.stats import LayerStats as LayerStats
from mxjax.calibration.stats import transform_gram as transform_gram
from mxjax.calibration.timesteps import calibration_steps as calibration_steps
from mxjax.calibration.timesteps import time_weights as time_weights
from mxjax.ops.tap import TappedWeight as TappedWeight
from mxjax.ops.tap import capture as capture
from mxjax.ops.tap import tap as tap
