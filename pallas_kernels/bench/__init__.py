"""Timing kernels against bf16 XLA: what ``mxjax bench``, ``mxjax tune`` and benchmarks/kernels.py share."""
