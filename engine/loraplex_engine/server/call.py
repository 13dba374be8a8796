"""Reads what a call brings beside its fields: the body within its bounds, and the gateway's private headers."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from litestar import Request
from litestar.exceptions import InternalServerException

from loraplex_engine.errors import (
    ClientGoneError,
    InvalidRequestError,
    MediaTypeError,
    PayloadTooLargeError,
)
from loraplex_engine.wire import done as private
from loraplex_engine.wire.strict_json import decode_object
from loraplex_registry.wire.identity import Identity
from loraplex_registry.wire.ids import new_public_id

MAX_BODY_BYTES = 4 << 20
DEFAULT_DEADLINE_S, MAX_DEADLINE_S = 600.0, 3600.0
_LEAST_S = 0.001
PLATFORM_TENANT = "platform"
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,80}")
_PRIORITY = re.compile(r"-?[0-9]{1,9}")
_WEIGHT = re.compile(r"[1-9][0-9]{0,3}")
_MAX_WEIGHT = 1000


class Caller(msgspec.Struct, frozen=True):
    """What the gateway says about one generation."""

    request_id: str
    tenant_id: str
    deadline_s: float
    priority: int
    """Lower goes first."""
    echo_model: str | None
    wants_done: bool
    cache_salt: str = ""
    """Beside the client's own."""
    weight: int = 1
    """The tenant's share of the engine over that of a tenant of weight 1."""
    began_at: float = msgspec.field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """What is left until the deadline; never nothing."""
        return max(_LEAST_S, self.deadline_s - (time.monotonic() - self.began_at))


async def read_json(request: Request[Any, Any, Any]) -> dict[str, Any]:
    """Return the body as a strict JSON object.

    Raises:
        MediaTypeError, PayloadTooLargeError, InvalidJsonError, ClientGoneError: As their names say.
    """
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise MediaTypeError
    encodings = request.headers.getall("content-encoding", [])
    if any(encoding.strip().lower() not in ("", "identity") for encoding in encodings):
        raise MediaTypeError("Send the body without Content-Encoding.")
    return decode_object(await _read_body(request))


async def _read_body(request: Request[Any, Any, Any]) -> bytes:
    if int(request.headers.get("content-length", "0")) > MAX_BODY_BYTES:
        raise PayloadTooLargeError
    body, chunks = bytearray(), request.stream()
    while True:
        try:
            body += await anext(chunks)
        except StopAsyncIteration:
            return bytes(body)
        except InternalServerException as error:
            # the framework's word for a client that left before its body was whole
            raise ClientGoneError from error
        if len(body) > MAX_BODY_BYTES:
            raise PayloadTooLargeError


def read_caller(headers: Mapping[str, str], identity: Identity) -> Caller:
    """Return the private headers' meaning; the guard has verified the token beside them.

    Raises:
        InvalidRequestError: A header is malformed; `param` is its name.
    """
    request_id = headers.get(private.REQUEST_ID) or new_public_id("req")
    if _REQUEST_ID.fullmatch(request_id) is None:
        raise InvalidRequestError(
            "The request id may have 1 to 80 letters, digits and `_.-`.", param=private.REQUEST_ID
        )
    return Caller(
        request_id=request_id,
        tenant_id=headers.get(private.TENANT_ID) or identity.tenant_id or PLATFORM_TENANT,
        deadline_s=_read_deadline(headers),
        priority=_read_priority(headers),
        echo_model=headers.get(private.ECHO_MODEL),
        wants_done=headers.get(private.DONE) == "1",
        cache_salt=headers.get(private.CACHE_SALT, ""),
        weight=_read_weight(headers),
    )


def _read_priority(headers: Mapping[str, str]) -> int:
    text = headers.get(private.PRIORITY, "0")
    if _PRIORITY.fullmatch(text) is None:
        raise InvalidRequestError(f"The header {private.PRIORITY} must be a whole number.", param=private.PRIORITY)
    return int(text)


def _read_weight(headers: Mapping[str, str]) -> int:
    text = headers.get(private.WEIGHT, "1")
    if _WEIGHT.fullmatch(text) is None or int(text) > _MAX_WEIGHT:
        raise InvalidRequestError(
            f"The header {private.WEIGHT} must be a whole number from 1 to {_MAX_WEIGHT}.", param=private.WEIGHT
        )
    return int(text)


def _read_deadline(headers: Mapping[str, str]) -> float:
    """Return seconds from now: what is left by the gateway's clock, else the client's wish, else the default."""
    for name, unit_s in ((private.DEADLINE_MS, 0.001), (private.TIMEOUT, 1.0)):
        if name not in headers:
            continue
        try:
            seconds = float(headers[name]) * unit_s
        except ValueError:
            seconds = -1.0
        if not 0 < seconds < float("inf"):
            raise InvalidRequestError(f"The header {name} must be a number above 0.", param=name)
        return min(seconds, MAX_DEADLINE_S)
    return DEFAULT_DEADLINE_S
