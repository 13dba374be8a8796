"""Reads management bodies: strict JSON into a typed struct, every refusal naming its field."""

from __future__ import annotations

import unicodedata
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import msgspec
from litestar import Request

from loraplex.errors import InvalidRequestError, UnknownParameterError, UnsupportedMediaTypeError
from loraplex_engine.wire.misfit import Misfit, find_misfit
from loraplex_engine.wire.strict_json import decode_object

_T = TypeVar("_T")
MAX_TEXT_LEN = 200
_DAY_LEN = len("2026-12-31")
_Aware = Annotated[datetime, msgspec.Meta(tz=True)]


async def read_body(request: Request[Any, Any, Any], into: type[_T]) -> _T:
    """Return the request's JSON body as `into`.

    Raises:
        UnsupportedMediaTypeError: The content type says that it is no JSON.
        UnknownParameterError: It has a field that nobody knows.
        InvalidRequestError: A field is missing or of a wrong type.
    """
    check_json_type(request)
    return convert(decode_object(await request.body()), into)


def check_json_type(request: Request[Any, Any, Any]) -> None:
    """Refuse a body that its sender calls something else than plain JSON."""
    content_type = request.headers.get("content-type", "application/json")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedMediaTypeError
    encodings = request.headers.getall("content-encoding", [])
    if any(encoding.strip().lower() not in ("", "identity") for encoding in encodings):
        raise UnsupportedMediaTypeError("Send the body without Content-Encoding")


def convert(fields: dict[str, Any], into: type[_T]) -> _T:
    """Return `fields` as `into`; errors name the field as `param`."""
    try:
        return msgspec.convert(fields, into)
    except msgspec.ValidationError as error:
        raise _explain(find_misfit(error, fields, into)) from error


def check_text(value: str | None, param: str, max_len: int = MAX_TEXT_LEN) -> str | None:
    """Return free text that is fit to be shown and stored.

    Raises:
        InvalidRequestError: It is empty, too long, not NFC or holds control characters.
    """
    if value is None:
        return None
    if not value.strip() or len(value) > max_len:
        raise InvalidRequestError(f"{param} has 1 to {max_len} characters", param=param)
    if not unicodedata.is_normalized("NFC", value):
        raise InvalidRequestError(f"{param} must be in Unicode normal form C (NFC)", param=param)
    if not value.isprintable():
        raise InvalidRequestError(f"{param} holds characters that cannot be shown", param=param)
    return value


def parse_time(text: str, param: str) -> datetime:
    """Return an instant given as RFC 3339, or a UTC day given as YYYY-MM-DD.

    Raises:
        InvalidRequestError: It is neither, or has no time zone.
    """
    try:
        found: datetime = msgspec.convert(f"{text}T00:00:00Z" if len(text) == _DAY_LEN else text, _Aware)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{param} is a time such as 2026-12-31T00:00:00Z", param=param) from error
    return to_utc(found, param)


def to_utc(time: datetime, param: str) -> datetime:
    """Return an aware instant in UTC.

    Raises:
        InvalidRequestError: It lies outside the calendar there.
    """
    try:
        return time.astimezone(UTC)
    except OverflowError as error:
        raise InvalidRequestError(f"{param} lies outside the years 1 to 9999", param=param) from error


def _explain(misfit: Misfit) -> InvalidRequestError:
    name = misfit.path or "The body"
    if misfit.is_unknown:
        return UnknownParameterError(f"{name} is not a field here; check its spelling", param=name)
    return InvalidRequestError(f"{name} {misfit.reason}", param=misfit.path or None)
