"""The command line: ``mxjax quantize | inspect | eval | recipes | demo``."""

from mxjax.cli.app import main as main
