"""griffe extension: docstrings as they are written in the code, in the dialect that mkdocstrings reads.

``Example:`` with ``>>>`` becomes the section ``Examples:``, Sphinx roles become code, and headings of a line that are
no sections of the Google style (``Paper:``, ``Source of the formats:``) stay text.
"""

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:func|class|mod|meth|attr|data):`(?:[^`<]*<)?~?([\w.]+)>?`")
_EXAMPLE = re.compile(r"^(\s*)Example:[ ]*$", re.M)
_PROMPTLESS = re.compile(r"``([^`]+)``")
_LISTED = re.compile(r"^(Args), raises:", re.M)


class Docstrings(Extension):
    """Rewrites each docstring once, before it is parsed."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is None:
            return
        text = _ROLE.sub(r"`\1`", obj.docstring.value)
        text = _EXAMPLE.sub(r"\1Examples:", text)
        text = _PROMPTLESS.sub(r"`\1`", text)
        obj.docstring.value = _LISTED.sub(r"Arguments and errors:", text)
