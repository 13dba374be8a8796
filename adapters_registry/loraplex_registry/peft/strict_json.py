"""JSON with one meaning for every reader: the one way in which configs, headers and request bodies are read.

Duplicate keys, byte order marks, NaN and Infinity, lone surrogates, NUL characters and deep nesting are refused, since
readers differ on each of them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

from loraplex_registry.peft.errors import JsonError

MAX_DEPTH = 64
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")


def parse_json(data: bytes) -> Any:
    """Parse a small document, strictly.

    Raises:
        JsonError: the bytes are not strict JSON; the message says what and where.
    """
    value = parse_objects(data)
    # UTF-8 has no half pairs, and JSON no NUL but an escaped one; to look at all values takes longer than to read them
    if b"\\u" in data or data.count(b"[") + data.count(b"{") >= MAX_DEPTH:
        check_values(value)
    return value


def parse_objects(data: bytes, parse_int: Callable[[str], int] | None = None) -> Any:
    """Parse as `parse_json` does, but leave nesting, the content of strings and integers (`parse_int`) to the caller.

    Raises:
        JsonError: the bytes are not JSON, or an object has one key twice.
    """
    if data.startswith(_BYTE_ORDER_MARKS):
        raise JsonError("it starts with a byte order mark; write UTF-8 without one")
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_build_object,
            parse_constant=_refuse_constant,
            parse_float=_parse_float,
            parse_int=parse_int,
        )
    except UnicodeDecodeError as error:
        raise JsonError(f"byte {error.start} is not UTF-8; write UTF-8") from None
    except json.JSONDecodeError as error:
        raise JsonError(f"{error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise JsonError(f"values nest deeper than {MAX_DEPTH} levels; flatten them") from None
    except ValueError:
        raise JsonError("a number has too many digits; write it shorter") from None


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise JsonError(f"the key {ascii(twice)[:80]} appears twice; keep one of them")
    return built


def _refuse_constant(name: str) -> NoReturn:
    raise JsonError(f"{name} is not JSON; write a finite number")


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise JsonError("a number is too large for a float; write a smaller one")
    return value


def check_values(value: Any) -> None:
    """Refuse deep nesting, and strings by `check_text`.

    Raises:
        JsonError: there is one of those.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return
    raise JsonError(f"values nest deeper than {MAX_DEPTH} levels; flatten them")


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, str):
        check_text(value)
    return value if isinstance(value, list) else []


def check_text(text: str) -> None:
    """Refuse text that databases, terminals and other JSON readers treat differently.

    Raises:
        JsonError: the text holds a NUL character or half of a surrogate pair.
    """
    if "\0" in text:
        raise JsonError("a string holds a NUL character; remove it")
    if _HALF_PAIR.search(text):
        raise JsonError("a string holds half of a surrogate pair; write the whole character")
