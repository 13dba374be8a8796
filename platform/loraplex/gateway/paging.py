"""Lists: `?limit=` 1 to 200 (50), an opaque `?cursor=`, newest first; unknown query parameters are refused."""

from __future__ import annotations

import base64
import binascii
import uuid
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
from litestar import Request

from loraplex.errors import InvalidRequestError, UnknownParameterError

_DEFAULT_LIMIT = 50
_MAX_LIMIT = 200
_T = TypeVar("_T")


class Page(msgspec.Struct, frozen=True):
    """Which part of a list is asked for: `limit` rows older than the row `before`."""

    limit: int
    before: uuid.UUID | None


def read_query(request: Request[Any, Any, Any], known: Collection[str]) -> dict[str, str]:
    """Return the query parameters, each at most once.

    Raises:
        UnknownParameterError: One is not in `known`.
        InvalidRequestError: One is given twice.
    """
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in known:
            raise UnknownParameterError(f"{name} is not a parameter here; check its spelling", param=name)
        if name in found:
            raise InvalidRequestError(f"{name} is given twice", param=name)
        found[name] = value
    return found


def read_page(request: Request[Any, Any, Any], known: Collection[str] = ()) -> tuple[Page, dict[str, str]]:
    """Return the page asked for and the other query parameters, which must be among `known`."""
    query = read_query(request, {"limit", "cursor", *known})
    return take_page(query), query


def take_page(query: dict[str, str]) -> Page:
    """Return the page asked for, and take what says so out of the query parameters."""
    return Page(read_limit(query.pop("limit", None)), _read_cursor(query.pop("cursor", None)))


def build_list(rows: list[dict[str, Any]], page: Page, show: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Return `{"data", "next_cursor"}` of rows that were read with one row beyond the page."""
    has_more = len(rows) > page.limit
    rows = rows[: page.limit]
    return {
        "data": [show(row) for row in rows],
        "next_cursor": _write_cursor(rows[-1]["id"]) if has_more else None,
    }


def show_time(instant: datetime | None) -> str | None:
    """RFC 3339 in UTC."""
    return (
        None if instant is None else instant.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


def read_limit(text: str | None) -> int:
    """Return the length of a page.

    Raises:
        InvalidRequestError: It is no number in range.
    """
    if text is None:
        return _DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) < 4 and 1 <= int(text) <= _MAX_LIMIT):
        raise InvalidRequestError(f"limit is a number from 1 to {_MAX_LIMIT}", param="limit")
    return int(text)


def write_mark(last: Any) -> str:
    """Return a cursor for a list that is not by id: `last`, a struct, says where its page ended."""
    return base64.urlsafe_b64encode(msgspec.json.encode(last)).decode().rstrip("=")


def read_mark(text: str, type_: type[_T]) -> _T:
    """Return what `write_mark` was given.

    Raises:
        InvalidRequestError: It is no cursor of that list.
    """
    try:
        last = msgspec.json.decode(base64.urlsafe_b64decode(text + "=="), type=type_)
    except (ValueError, RecursionError, binascii.Error) as error:
        raise InvalidRequestError("cursor is not one that a list gave", param="cursor") from error
    # the decoder passes over characters that it does not know
    if write_mark(last) != text:
        raise InvalidRequestError("cursor is not one that a list gave", param="cursor")
    return last


def _read_cursor(text: str | None) -> uuid.UUID | None:
    if text is None:
        return None
    try:
        found = uuid.UUID(bytes=base64.urlsafe_b64decode(text + "=="))
    except (ValueError, RecursionError, binascii.Error) as error:
        raise InvalidRequestError("cursor is not one that a list gave", param="cursor") from error
    # the decoder passes over characters that it does not know
    if _write_cursor(found) != text:
        raise InvalidRequestError("cursor is not one that a list gave", param="cursor")
    return found


def _write_cursor(key: uuid.UUID) -> str:
    return base64.urlsafe_b64encode(key.bytes).decode().rstrip("=")
