"""A quantized tree as one HTML page: ``mxjax.report(params, qparams, stats)``. The plots are functions of their own.

The package is callable, so that ``mxjax.report(...)`` means the same whether or not somebody imported
``mxjax.report.plots`` first (an import binds the name ``mxjax.report`` to this module).
"""

import sys
import types
from typing import Any

from mxjax.report.page import report as report
from mxjax.report.sections import Result as Result


class _CallableModule(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return report(*args, **kwargs)

    __call__.__doc__ = report.__doc__


sys.modules[__name__].__class__ = _CallableModule
