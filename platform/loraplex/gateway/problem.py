"""From any error to the one error body of the API, and back: `{"error": {"message", "type", "param", "code"}}`.

The one table from codes to statuses. Errors of other parts are known by their `code`, which is part of the contract.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import msgspec
from litestar.exceptions import HTTPException

from loraplex_registry.peft.unreadable import UNREADABLE

_log = logging.getLogger(__name__)

CODE_TO_STATUS = {
    "invalid_request_error": 400,
    "context_length_exceeded": 400,
    "alora_invocation_missing": 400,
    "invalid_grammar": 400,
    "invalid_json": 400,
    "invalid_name": 400,
    "unknown_parameter": 400,
    "unsupported_parameter": 400,
    "invalid_api_key": 401,
    "permission_denied": 403,
    "tenant_suspended": 403,
    "not_found": 404,
    "use_chat_completions": 404,
    "embeddings_not_served": 404,
    "model_not_found": 404,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "conflict": 409,
    "name_reserved": 409,
    "adapter_quarantined": 409,
    "adapter_retired": 410,
    "precondition_failed": 412,
    "payload_too_large": 413,
    "headers_too_large": 431,
    "unsupported_media_type": 415,
    "adapter_rejected": 422,
    "base_mismatch": 422,
    "idempotency_key_reused": 422,
    "precondition_required": 428,
    "queue_full": 429,
    "rate_limit_exceeded": 429,
    "quota_exceeded": 429,
    "internal_error": 500,
    "adapter_output_invalid": 500,
    "replica_failed": 502,
    "unavailable": 503,
    "store_unavailable": 503,
    "adapter_loading": 503,
    "digest_mismatch": 503,
    "no_replica": 503,
    "draining": 503,
    "deadline_exceeded": 504,
}
_STATUS_TO_TYPE = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_HTTP_STATUS_TO_CODE = {
    401: "invalid_api_key",
    403: "permission_denied",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "payload_too_large",
    415: "unsupported_media_type",
}
_HTTP_MESSAGES = {
    404: "There is nothing at this address: inference is below /v1 (/v1/chat/completions), management below /api/v1.",
    405: "This address does not take that method; see the Allow header.",
    413: "The body is larger than allowed here.",
}


class Problem(msgspec.Struct, frozen=True):
    """One error as the API shows it."""

    status: int
    message: str
    code: str
    param: str | None = None
    retry_after_s: int | None = None
    headers: dict[str, str] = {}

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body, the same for every error."""
        error_type = _STATUS_TO_TYPE.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": error_type, "param": self.param, "code": self.code}}

    def encode(self) -> bytes:
        """Return the body as JSON in ASCII: what clients wrote may be no whole text."""
        return json.dumps(self.body, separators=(",", ":")).encode()

    @property
    def all_headers(self) -> dict[str, str]:
        """Headers that go with the body."""
        found = dict(self.headers)
        if self.retry_after_s is not None:
            found["retry-after"] = str(self.retry_after_s)
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        return found


def describe(error: BaseException) -> Problem:
    """Return what a client may know of `error`; what nobody expected is logged and shown as `internal_error`."""
    if isinstance(error, HTTPException):
        return _describe_http(error)
    code = getattr(error, "code", None)
    if not isinstance(code, str) or code not in CODE_TO_STATUS or code == "internal_error":
        _log.error("unexpected error", exc_info=error)
        return Problem(500, "Something failed inside the gateway; report the request id.", "internal_error")
    return Problem(
        status=CODE_TO_STATUS[code],
        message=str(getattr(error, "message", "") or error),
        code=code,
        param=getattr(error, "param", None),
        # the registry's errors say no time of their own
        retry_after_s=getattr(error, "retry_after_s", 1 if CODE_TO_STATUS[code] == 503 else None),
        headers=getattr(error, "headers", None) or {},
    )


def find_code(body: bytes) -> str | None:
    """Return the slug in an error body of any part, None if it is no such body."""
    try:
        error: Any = msgspec.json.decode(body, type=dict[str, Any])["error"]
        code = error["code"]
    except (*UNREADABLE, KeyError, TypeError):
        return None
    return code if isinstance(code, str) else None


def _describe_http(error: HTTPException) -> Problem:
    """Litestar's own refusals: unknown routes and methods, bodies too large, values that do not fit."""
    status = error.status_code
    if status >= 500:
        _log.error("unexpected error", exc_info=error)
        return Problem(500, "Something failed inside the gateway; report the request id.", "internal_error")
    code = _HTTP_STATUS_TO_CODE.get(status, "invalid_request_error")
    return Problem(status, _HTTP_MESSAGES.get(status, error.detail), code, headers=_read_allow(error))


def _read_allow(error: HTTPException) -> dict[str, str]:
    """Litestar's list of methods, as `Edge` lets them through: HEAD wherever there is GET, OPTIONS nowhere."""
    given = {name.lower(): value for name, value in (error.headers or {}).items()}
    if "allow" not in given:
        return {}
    methods = {method.strip() for method in given["allow"].split(",")} - {"OPTIONS"}
    return {"allow": ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))}
