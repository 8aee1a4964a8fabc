"""mkdocs hooks: the built site loads nothing from another host, and says so by failing."""

import re
from typing import Any

from mkdocs.exceptions import PluginError

_OUTSIDE = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//|<link\b[^>]*rel="?(?:stylesheet|
preconnect|icon|preload)[^>]*href=["']?(?:https?:)?//""".replace("\n", "")
)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Refuse a page whose scripts, styles, pictures or fonts come from elsewhere."""
    if found := _OUTSIDE.search(output):
        raise PluginError(f"{page.file.src_uri} loads something from another host: {found[0]}")
    return output
