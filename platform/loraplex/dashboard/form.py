"""Reads forms of pages: what was left empty is not there, and text of several lines becomes one."""

from __future__ import annotations

import unicodedata
from typing import Any

from litestar import Request


async def read_form(request: Request[Any, Any, Any]) -> dict[str, str]:
    """Return the fields that somebody filled in.

    Lines are joined, as no line break can be stored in a field, and keyboards that compose letters differently are
    brought to one form.
    """
    fields = {name: value for name, value in (await request.form()).items() if isinstance(value, str)}
    joined = {name: " ".join(unicodedata.normalize("NFC", value).split()) for name, value in fields.items()}
    return {name: value for name, value in joined.items() if value}
