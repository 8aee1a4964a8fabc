"""Flax models with quantized weights: ``mxjax.nnx`` and ``mxjax.linen``. Neither patches Flax."""
