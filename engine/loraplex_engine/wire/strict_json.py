"""Reads a request body as one strict JSON object, the same way in gateway and engine.

What counts as strict is said once, in `loraplex_registry.peft.strict_json`.
"""

from __future__ import annotations

from typing import Any

from loraplex_engine.errors import InvalidJsonError
from loraplex_registry.peft.errors import JsonError
from loraplex_registry.peft.strict_json import parse_json


def decode_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`.

    Raises:
        InvalidJsonError: The body is not one strict JSON object; the message says where and why.
    """
    try:
        value = parse_json(body)
    except JsonError as error:
        raise InvalidJsonError(f"The body is not strict JSON: {error}.") from error
    if not isinstance(value, dict):
        raise InvalidJsonError("The body must be a JSON object.")
    return value
