"""Pages of lists: newest first, an opaque cursor that names the last entry shown."""

from __future__ import annotations

import base64
import binascii
import uuid
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from loraplex_registry.db.column import MAX_INTEGER
from loraplex_registry.errors import InvalidRequestError

T = TypeVar("T")
K = TypeVar("K", int, str, uuid.UUID)
_DEFAULT_LIMIT = 50
_MAX_LIMIT = 200


class Page(msgspec.Struct, Generic[T]):
    """One page; `next_cursor` is None on the last."""

    data: list[T]
    next_cursor: str | None


class PageOrder(msgspec.Struct, frozen=True):
    """What page a client asks for."""

    limit: int = _DEFAULT_LIMIT
    cursor: str | None = None

    def after(self, parse: Callable[[str], K]) -> K | None:
        """Return the key after which the page starts, None for the first page.

        Raises:
            InvalidRequestError: The cursor was not made here.
        """
        if self.cursor is None:
            return None
        try:
            text = base64.urlsafe_b64decode(self.cursor.encode()).decode()
            # the decoder passes over characters that it does not know
            if not text or _write_cursor(text) != self.cursor:
                raise ValueError("another spelling")
            return parse(text)
        except (ValueError, binascii.Error) as error:
            raise InvalidRequestError(
                "The cursor is not one that a list gave; start without it", param="cursor"
            ) from error


def parse_number(text: str) -> int:
    """Return a number that a cursor holds.

    Raises:
        ValueError: No row can have it.
    """
    number = int(text)
    if not 1 <= number <= MAX_INTEGER:
        raise ValueError(f"{number} is not 1 to {MAX_INTEGER}")
    return number


def build_page_order(limit: str | None, cursor: str | None) -> PageOrder:
    """Return the order for `?limit=` and `?cursor=` as the client sent them.

    Raises:
        InvalidRequestError: The limit is not 1 to 200.
    """
    if limit is None:
        return PageOrder(cursor=cursor)
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= _MAX_LIMIT):
        raise InvalidRequestError(f"limit is 1 to {_MAX_LIMIT}", param="limit")
    return PageOrder(int(limit), cursor)


def build_page(rows: Sequence[T], limit: int, key_of: Callable[[T], object]) -> Page[T]:
    """Return the page of `rows`, of which one more than `limit` were read if there are more."""
    shown = list(rows[:limit])
    if len(rows) <= limit:
        return Page(shown, None)
    return Page(shown, _write_cursor(str(key_of(shown[-1]))))


def _write_cursor(key: str) -> str:
    return base64.urlsafe_b64encode(key.encode()).decode()
