"""Reads a request body as one strict JSON object, the same way in gateway and engine.

What counts as strict is said once, in `loraplex_registry.peft.strict_json`. Values are counted before they are read:
a body of millions of tiny ones would hold everybody up while Python makes them.
"""

from __future__ import annotations

import re
from typing import Any

from loraplex_engine.errors import InvalidJsonError, PayloadTooLargeError
from loraplex_registry.peft.errors import JsonError
from loraplex_registry.peft.strict_json import parse_json

MAX_VALUES = 1 << 18
# one that does not end goes to the end, or each quote in it would be tried anew
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_SHORTEST_STRING = len('""')
# a pair of an object takes as long to make as so many numbers
_PAIR_VALUES = 4


def decode_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`.

    Raises:
        InvalidJsonError: The body is not one strict JSON object; the message says where and why.
        PayloadTooLargeError: It holds more than `MAX_VALUES` values.
    """
    if _count_values(body) > MAX_VALUES and _count_values(_drop_strings(body)) > MAX_VALUES:
        raise PayloadTooLargeError(f"A body may hold {MAX_VALUES} JSON values.")
    try:
        value = parse_json(body)
    except JsonError as error:
        raise InvalidJsonError(f"The body is not strict JSON: {error}.") from error
    if not isinstance(value, dict):
        raise InvalidJsonError("The body must be a JSON object.")
    return value


def _count_values(body: bytes) -> int:
    """Return an upper bound: each value but the first of its list stands behind a comma, each first in brackets."""
    num_values = body.count(b",") + body.count(b"[") + body.count(b"{") + 1
    return num_values + (_PAIR_VALUES - 1) * body.count(b":")


def _drop_strings(body: bytes) -> bytes:
    """Return the body without what its strings hold, unless it has so many that their number says enough."""
    num_strings = (body.count(b'"') - body.count(b'\\"')) // _SHORTEST_STRING
    return body if num_strings > 2 * MAX_VALUES else _STRING.sub(b"", body)
