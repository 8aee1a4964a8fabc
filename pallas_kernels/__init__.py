"""GPU kernels for block-scaled formats: raw arrays in, raw arrays out, an XLA reference beside each.

Every operation takes ``implementation``: None chooses, a name ("xla", "triton", "mosaic_gpu") forces; a forced one that
cannot run raises :class:`mxjax.errors.BackendUnsupported` and says why.
"""
