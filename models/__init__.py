"""Reference models in Flax nnx, one file each. Installed as ``mxjax_models``."""
