"""Checkpoints larger than memory: folders in, folders out, tensor by tensor.

``plan`` decides everything from headers; ``arrays`` quantizes one memory-mapped weight in chunks; ``shards`` is a file
that threads fill; ``journal`` makes a killed run resumable; ``targets`` are the layouts; ``folder`` puts them together.
"""

from mxjax.io.streaming.folder import FolderReport as FolderReport
from mxjax.io.streaming.folder import quantize_folder as quantize_folder
