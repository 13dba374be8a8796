"""One HTTP connection pool to a gateway; it knows no route.

`Connection` sends JSON, decodes answers into types and turns every refusal into a `ClientError`.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, TypeVar

import httpx
import msgspec

from loraplex.client.errors import ClientError, ConnectionFailedError
from loraplex.client.location import Location, is_loopback
from loraplex_registry.peft.unreadable import UNREADABLE
from loraplex_registry.wire.adapter import Report

T = TypeVar("T")
_MAX_PAGE = 200
_TIMEOUT = httpx.Timeout(60.0, connect=5.0, read=600.0)


class _ErrorDetail(msgspec.Struct):
    message: str
    code: str = ""
    param: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorDetail
    report: Report | None = None


class Page(msgspec.Struct, frozen=True):
    """One page of a list, items still as bytes."""

    data: list[msgspec.Raw]
    next_cursor: str | None = None


class Connection:
    """Calls one gateway with one key; close it, or use it as a context.

    HTTP_PROXY and its kin are for gateways elsewhere: one on this machine is called directly.
    """

    def __init__(self, location: Location, transport: httpx.BaseTransport | None = None) -> None:
        self.url = location.url
        headers = {"authorization": f"Bearer {location.key}"} if location.key else {}
        is_direct = location.is_direct or is_loopback(httpx.URL(location.url).host)
        self.http = httpx.Client(
            base_url=location.url, headers=headers, timeout=_TIMEOUT, transport=transport, trust_env=not is_direct
        )

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.http.close()

    def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send one request and return its successful answer.

        Args:
            method: GET, POST, ...
            path: Path below the gateway's URL.
            options: As `httpx.Client.request` takes them; `params` that are None are left out.

        Raises:
            ConnectionFailedError: Nobody answered.
            ClientError: The server refused, or the path does not mean what it says.
        """
        _check_path(path)
        options["params"] = {name: value for name, value in options.get("params", {}).items() if value is not None}
        try:
            response = self.http.request(method, path, **options)
        except httpx.TransportError as error:
            raise lost(self.url, error) from error
        check_response(response)
        return response

    def get(self, path: str, type_: type[T], **options: Any) -> T:
        """GET one object."""
        return decode(self.send("GET", path, **options).content, type_)

    def list(self, path: str, type_: type[T], *, max_items: int | None = None, **params: Any) -> list[T]:
        """GET all items of a list, page after page, or the first `max_items`."""
        items: list[T] = []
        cursor: str | None = None
        while True:
            limit = None if max_items is None else min(max_items - len(items), _MAX_PAGE)
            page = self.get(path, Page, params=params | {"cursor": cursor, "limit": limit})
            items.extend(decode(bytes(item), type_) for item in page.data)
            cursor = page.next_cursor
            if not cursor or (max_items is not None and len(items) >= max_items):
                return items


def decode(body: bytes, type_: type[T]) -> T:
    """Return `body` as a `type_`; fields that this client does not know are left out.

    Raises:
        ClientError: It is no such object, so another server or version answers there.
    """
    try:
        return msgspec.json.decode(body, type=type_)
    except UNREADABLE as error:
        raise ClientError(
            f"The server's answer is not what this client expects ({error}); check LORAPLEX_URL, and that client and "
            "server have the same version.",
            code="unexpected_answer",
        ) from error


def _check_path(path: str) -> None:
    """Return if each name in the path is one: libraries and proxies take others for steps to another address."""
    for segment in path.split("/")[1:]:
        if segment in (".", "..") or (not segment and path != "/"):
            raise ClientError(f"{segment!r} is no name.", code="invalid_name")


def check_response(response: httpx.Response) -> None:
    """Return if the answer is a success.

    Raises:
        ClientError: It is not; the body's error is in it.
    """
    if not response.is_error:
        return
    raise read_error(response.status_code, response.read())


def read_error(status: int, body: bytes) -> ClientError:
    """Return the error that a body of the platform's one error shape holds, or one that quotes another body."""
    try:
        found = msgspec.json.decode(body, type=_ErrorBody)
    except UNREADABLE:
        return ClientError(f"The server answered {status}: {body[:200].decode(errors='replace')}", status=status)
    detail = found.error
    return ClientError(detail.message, status=status, code=detail.code, param=detail.param, report=found.report)


def lost(url: str, error: httpx.TransportError) -> ConnectionFailedError:
    """Return the error for a connection that failed or broke."""
    reason = str(error) or type(error).__name__
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return ConnectionFailedError(
            f"Nothing answers at {url} ({reason}). Start the platform with `loraplex up`, or set LORAPLEX_URL."
        )
    return ConnectionFailedError(f"The connection to {url} broke ({reason}). Look at its log, then try again.")
