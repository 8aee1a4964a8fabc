"""Every exception that mxjax raises on purpose. All derive from :class:`MxjaxError`, so one ``except`` catches them.

Each also derives from the built-in a caller would expect (``ValueError``, ``RuntimeError``), so that code which knows
nothing of mxjax still handles it.
"""

from __future__ import annotations


class MxjaxError(Exception):
    """Base of all mxjax errors."""


class FormatError(MxjaxError, ValueError):
    """An unknown format or scale policy, or a pair that does not go together."""


class BlockShapeError(MxjaxError, ValueError):
    """A contraction axis that the block size does not divide, or arrays whose shapes contradict each other."""


class NonFiniteError(MxjaxError, ValueError):
    """NaN or Inf in values that should be quantized."""


class ConfigError(MxjaxError, ValueError):
    """A rule, recipe or option that cannot mean anything."""


class CheckpointError(MxjaxError, ValueError):
    """A file or folder that is not what it says it is."""


class CalibrationError(MxjaxError, ValueError):
    """Statistics that are missing, or that do not fit the weight they belong to."""


class BackendUnsupported(MxjaxError, NotImplementedError):
    """A kernel implementation that cannot run here; the message says why and what can."""


class MissingExtraError(MxjaxError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""


class MxjaxWarning(UserWarning):
    """Something worth a look that does not stop the work, such as a rule that matched nothing."""
