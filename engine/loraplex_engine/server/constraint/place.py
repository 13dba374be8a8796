"""A place in a request's body as people write it: `response_format.json_schema.schema.properties.x`."""

from __future__ import annotations

import json
import re

_PLAIN = re.compile(r"[A-Za-z0-9_$-]{1,64}")
_MAX_NAME_CHARS, _MAX_PLACE_CHARS = 64, 300


def join(where: str, *names: str | int) -> str:
    """Return the place of a child; names that are not plain are quoted, long ones and long places are cut."""
    for name in names:
        if isinstance(name, int):
            where += f"[{name}]"
        elif _PLAIN.fullmatch(name):
            where += f".{name}"
        else:
            where += f"[{json.dumps(name[:_MAX_NAME_CHARS])}]"
    return where if len(where) <= _MAX_PLACE_CHARS else f"{where[:_MAX_PLACE_CHARS]}…"
