"""Numbers: formats, codec, packing, scale policies, QTensor. Imports nothing of mxjax but ``errors``."""
