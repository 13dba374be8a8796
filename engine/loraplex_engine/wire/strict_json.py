"""Reads a request body as strict JSON, one way for gateway and engine: what is ambiguous is refused, never guessed.

Refused: anything but one object, duplicate keys, NaN and infinities, numbers that overflow, lone surrogates, NUL,
invalid UTF-8, a byte order mark, deep nesting.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from loraplex_engine.errors import InvalidJsonError

MAX_DEPTH = 64
_BROKEN_TEXT = re.compile("[\x00\ud800-\udfff]")


def decode_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`.

    Raises:
        InvalidJsonError: The body is not one strict JSON object; the message says where and why.
    """
    try:
        value = _DECODER.decode(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidJsonError(f"The body is not valid UTF-8 (byte {error.start}).") from error
    except json.JSONDecodeError as error:
        raise InvalidJsonError(f"The body is not valid JSON: {error.msg} (character {error.pos}).") from error
    except RecursionError as error:
        raise InvalidJsonError(f"The body is nested deeper than {MAX_DEPTH} levels.") from error
    except ValueError as error:
        raise InvalidJsonError("The body holds a number with too many digits.") from error
    if not isinstance(value, dict):
        raise InvalidJsonError("The body must be a JSON object.")
    _check_value(value, 1)
    return value


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) != len(pairs):
        raise InvalidJsonError("An object in the body has the same key twice.")
    return built


def _read_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise InvalidJsonError("The body holds a number that is too large.")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise InvalidJsonError(f"{text} is not JSON.")


def _check_value(value: Any, depth: int) -> None:
    """Refuse text that cannot be UTF-8 or holds NUL, and nesting beyond `MAX_DEPTH`."""
    if isinstance(value, str):
        if _BROKEN_TEXT.search(value):
            raise InvalidJsonError("A string in the body holds a lone surrogate or a NUL character.")
    elif isinstance(value, dict | list):
        if depth > MAX_DEPTH:
            raise InvalidJsonError(f"The body is nested deeper than {MAX_DEPTH} levels.")
        for item in value:
            _check_value(item, depth + 1)
        if isinstance(value, dict):
            for item in value.values():
                _check_value(item, depth + 1)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_build_object, parse_float=_read_float, parse_constant=_refuse_constant, strict=True
)
