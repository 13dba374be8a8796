"""The one table from the registry's errors to HTTP: status, `type` and the JSON that every part answers with."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.enums import MediaType
from litestar.exceptions import HTTPException

from loraplex_registry.errors import (
    AdapterRejectedError,
    BodyTimeoutError,
    ConflictError,
    IdempotencyReusedError,
    InvalidRequestError,
    NotFoundError,
    PayloadTooLargeError,
    PermissionDeniedError,
    PreconditionFailedError,
    PreconditionRequiredError,
    QuotaExceededError,
    RegistryError,
    RetiredError,
    TokenError,
    UnavailableError,
    UnsupportedMediaTypeError,
)

# The first class that fits wins: subclasses stand before their bases.
_STATUS: tuple[tuple[type[RegistryError], int], ...] = (
    (TokenError, 401),
    (PermissionDeniedError, 403),
    (InvalidRequestError, 400),
    (NotFoundError, 404),
    (PreconditionFailedError, 412),
    (PreconditionRequiredError, 428),
    (ConflictError, 409),
    (RetiredError, 410),
    (BodyTimeoutError, 408),
    (PayloadTooLargeError, 413),
    (UnsupportedMediaTypeError, 415),
    (AdapterRejectedError, 422),
    (IdempotencyReusedError, 422),
    (QuotaExceededError, 429),
    (UnavailableError, 503),
)
_STATUS_TO_CODE = {
    400: "invalid_request_error",
    401: "invalid_api_key",
    403: "permission_denied",
    404: "not_found",
    405: "method_not_allowed",
    413: "payload_too_large",
    415: "unsupported_media_type",
}
# room is made by purging, which happens now and then, not by waiting a moment
_STATUS_TO_RETRY_AFTER_S = {429: "3600", 503: "1"}
_log = logging.getLogger(__name__)


def status_of(error: RegistryError) -> int:
    """Return the HTTP status of an error; 500 for what should not reach a client."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def type_of(status: int) -> str:
    """Return the `type` that goes with a status."""
    if status >= 500:
        return "server_error"
    special = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    return special.get(status, "invalid_request_error")


def build_body(error: RegistryError, status: int) -> dict[str, Any]:
    """Return the JSON body; refused uploads carry their report, a lost race what is there now."""
    body: dict[str, Any] = {
        "error": {"message": error.message, "type": type_of(status), "param": error.param, "code": error.code}
    }
    if isinstance(error, AdapterRejectedError):
        body["report"] = msgspec.to_builtins(error.report)
    if isinstance(error, PreconditionFailedError):
        body["current"] = msgspec.to_builtins(error.current)
    return body


def answer_registry_error(request: Request[Any, Any, Any], error: RegistryError) -> Response[dict[str, Any]]:  # noqa: ARG001
    """Answer an error of ours."""
    status = status_of(error)
    headers = {"Retry-After": wait_s} if (wait_s := _STATUS_TO_RETRY_AFTER_S.get(status)) else {}
    if isinstance(error, PreconditionFailedError) and error.revision is not None:
        headers["ETag"] = f'"{error.revision}"'
    return Response(build_body(error, status), status_code=status, headers=headers, media_type=MediaType.JSON)


def answer_http_error(request: Request[Any, Any, Any], error: HTTPException) -> Response[dict[str, Any]]:  # noqa: ARG001
    """Answer what the web framework found: no such route, method or body."""
    status = error.status_code
    code = _STATUS_TO_CODE.get(status, "internal_error" if status >= 500 else "invalid_request_error")
    message = error.detail if status < 500 else "The registry failed; see its log."
    body = {"error": {"message": message, "type": type_of(status), "param": None, "code": code}}
    return Response(body, status_code=status, headers=error.headers, media_type=MediaType.JSON)


def answer_mistake(request: Request[Any, Any, Any], error: Exception) -> Response[dict[str, Any]]:
    """Answer a mistake of ours, which only the log explains."""
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    body = {
        "error": {
            "message": "The registry failed; its log says why.",
            "type": type_of(500),
            "param": None,
            "code": RegistryError.code,
        }
    }
    return Response(body, status_code=500, media_type=MediaType.JSON)
