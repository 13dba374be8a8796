"""Reads what clients send: query parameters, JSON bodies, preconditions. Refuses what nobody knows."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from litestar import Request

from loraplex_registry.adapters.page import PageOrder, build_page_order
from loraplex_registry.aliases import Precondition
from loraplex_registry.errors import (
    InvalidJsonError,
    InvalidRequestError,
    NotFoundError,
    UnknownParameterError,
    UnsupportedMediaTypeError,
)
from loraplex_registry.peft.errors import JsonError
from loraplex_registry.peft.strict_json import parse_json

T = TypeVar("T")
_NUMBER = re.compile(r"[1-9][0-9]{0,18}")
_ETAG = re.compile(r'\s*(W/)?"([^"]*)"\s*')
_UNKNOWN_FIELD = re.compile(r"unknown field `([^`]*)`")
_MISSING_FIELD = re.compile(r"missing required field `([^`]*)`")
_AT_PATH = re.compile(r"at `\$\.?([^`]*)`")


def read_query(request: Request[Any, Any, Any], *known: str) -> dict[str, str]:
    """Return the query parameters.

    Raises:
        UnknownParameterError: One is not among `known`.
        InvalidRequestError: One is there twice.
    """
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in known:
            raise UnknownParameterError(f"The parameter {name} is not known here", param=name)
        if name in found:
            raise InvalidRequestError(f"The parameter {name} is there twice", param=name)
        found[name] = value
    return found


def read_page_order(request: Request[Any, Any, Any]) -> PageOrder:
    """Return which page of a list is asked for."""
    query = read_query(request, "limit", "cursor")
    return build_page_order(query.get("limit"), query.get("cursor"))


def read_flag(query: dict[str, str], name: str) -> bool:
    """Return a parameter that is `true` or `false`.

    Raises:
        InvalidRequestError: It is something else.
    """
    value = query.get(name, "false")
    if value not in ("true", "false"):
        raise InvalidRequestError(f"{name} is true or false", param=name)
    return value == "true"


def read_number(text: str) -> int:
    """Return the number of a version as a path spells it: each version has one path.

    Raises:
        NotFoundError: It is no number from 1 on, written plainly in ASCII.
    """
    if _NUMBER.fullmatch(text) is None:
        raise NotFoundError("There is no such version: its number is 1 or more, in plain digits", param="version")
    return int(text)


def check_plain(request: Request[Any, Any, Any]) -> None:
    """Return if the body's bytes are meant as they are.

    Raises:
        UnsupportedMediaTypeError: A Content-Encoding says otherwise.
    """
    encodings = request.headers.getall("content-encoding", [])
    if any(encoding.strip().lower() not in ("", "identity") for encoding in encodings):
        raise UnsupportedMediaTypeError("Send the body without Content-Encoding")


async def read_json(request: Request[Any, Any, Any], kind: type[T]) -> T:
    """Return the JSON body as `kind`.

    Raises:
        UnsupportedMediaTypeError: It is not sent as JSON, or compressed.
        InvalidJsonError: It is not strict JSON: one value per key, among others.
        InvalidRequestError: A field is missing, unknown or of another type.
    """
    if request.content_type[0] not in ("application/json", "application/merge-patch+json", ""):
        raise UnsupportedMediaTypeError("Send application/json")
    check_plain(request)
    try:
        return msgspec.convert(parse_json(await request.body()), kind)
    except JsonError as error:
        raise InvalidJsonError(f"The body is not strict JSON: {error}") from error
    except msgspec.ValidationError as error:
        raise _explain(error) from error


def read_precondition(request: Request[Any, Any, Any]) -> Precondition:
    """Return what If-Match and If-None-Match say.

    Raises:
        InvalidRequestError: They hold something else than ETags that an alias has.
    """
    match, none_match = request.headers.get("if-match"), request.headers.get("if-none-match")
    if none_match is not None and none_match.strip() != "*":
        raise InvalidRequestError("If-None-Match may only be *", param="If-None-Match")
    if match is not None and none_match is not None:
        raise InvalidRequestError("Give If-Match or If-None-Match, not both", param="If-None-Match")
    if match is not None and match.strip() == "*":
        return Precondition(any_revision=True)
    revisions = frozenset(_read_revisions(match)) if match is not None else None
    return Precondition(revisions=revisions, must_be_absent=none_match is not None)


def _read_revisions(text: str) -> list[int]:
    """Return the revisions in a list of ETags; a weak or foreign one matches nothing."""
    revisions = []
    for part in text.split(","):
        tag = _ETAG.fullmatch(part)
        if tag is None:
            raise InvalidRequestError('If-Match is an ETag in quotes, such as "3"', param="If-Match")
        is_revision = tag[1] is None and tag[2].isascii() and tag[2].isdigit() and len(tag[2]) < 10
        revisions.append(int(tag[2]) if is_revision else -1)
    return revisions


def _explain(error: msgspec.ValidationError) -> InvalidRequestError:
    message = str(error)
    path = _AT_PATH.search(message)
    prefix = f"{path[1]}." if path else ""
    unknown, missing = _UNKNOWN_FIELD.search(message), _MISSING_FIELD.search(message)
    if unknown:
        return UnknownParameterError(f"The field {prefix}{unknown[1]} is not known here", param=f"{prefix}{unknown[1]}")
    if missing:
        return InvalidRequestError(f"The field {prefix}{missing[1]} is missing", param=f"{prefix}{missing[1]}")
    return InvalidRequestError(message, param=path[1] if path else None)
