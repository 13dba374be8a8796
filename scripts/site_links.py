"""A hook of MkDocs: what a page says of files outside the site stays as text, since the site does not have them."""

from __future__ import annotations

import re

_FOLDERS = "adapters_registry|compose|engine|examples|helm|images|platform|tests"
_OUTSIDE = re.compile(rf"\[([^\]]+)\]\((?:\.\./)+(?:{_FOLDERS}|[A-Z]+\.md)[^)]*\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the page without links that leave the site."""
    return _OUTSIDE.sub(r"\1", markdown)
