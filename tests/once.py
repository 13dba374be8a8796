"""What every gateway and every client of a test makes anew though it never differs is made once in a process.

Reading the signatures of all routes and the machine's certificates is a third of the time that a gateway needs.
"""

from __future__ import annotations

import functools
from typing import Any

import httpx._transports.default as httpx_transport
from litestar.utils.signature import ParsedSignature

_parse = ParsedSignature.from_fn
_parsed: dict[tuple[object, ...], ParsedSignature] = {}


def remember() -> None:
    """Change Litestar and httpx in this process."""
    ParsedSignature.from_fn = _parse_once  # type: ignore[method-assign, assignment]
    httpx_transport.create_ssl_context = functools.cache(httpx_transport.create_ssl_context)


def _parse_once(function: Any, names: dict[str, Any]) -> ParsedSignature:
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__"):
        return _parse(function, names)
    # closures of the same code: routes are functions within functions
    key = (code, function.__defaults__, tuple(sorted(names)))
    if key not in _parsed:
        _parsed[key] = _parse(function, names)
    return _parsed[key]
