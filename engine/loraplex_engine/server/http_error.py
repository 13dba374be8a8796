"""From errors to HTTP: one table from code to status, one body shape, in ASCII whatever the client sent."""

from __future__ import annotations

import json
import logging
from typing import Any

from litestar import Request, Response
from litestar.exceptions import HTTPException

from loraplex_engine.errors import CallError, EngineError, RequestError

_log = logging.getLogger(__name__)
_CODE_TO_STATUS = {
    "invalid_request_error": 400,
    "invalid_json": 400,
    "unknown_parameter": 400,
    "unsupported_parameter": 400,
    "context_length_exceeded": 400,
    "alora_invocation_missing": 400,
    "invalid_grammar": 400,
    "invalid_api_key": 401,
    "permission_denied": 403,
    "model_not_found": 404,
    "not_found": 404,
    "use_chat_completions": 404,
    "embeddings_not_served": 404,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "conflict": 409,
    "adapter_quarantined": 409,
    "payload_too_large": 413,
    "unsupported_media_type": 415,
    "queue_full": 429,
    "cancelled": 499,
    "internal_error": 500,
    "adapter_output_invalid": 500,
    "replica_failed": 502,
    "unavailable": 503,
    "adapter_loading": 503,
    "digest_mismatch": 503,
    "draining": 503,
    "deadline_exceeded": 504,
}
_STATUS_TO_CODE = {404: "not_found", 405: "method_not_allowed", 413: "payload_too_large"}
_STATUS_TO_TYPE = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def status_of(error: EngineError) -> int:
    """Return the HTTP status of an error."""
    return _CODE_TO_STATUS.get(error.code, 500)


def error_body(error: EngineError) -> bytes:
    """Return an error as the JSON body that every part uses, in ASCII."""
    status = status_of(error)
    kind = _STATUS_TO_TYPE.get(status, "server_error" if status >= 500 else "invalid_request_error")
    param = error.param if isinstance(error, CallError | RequestError) else None
    return json.dumps({"error": {"message": str(error), "type": kind, "param": param, "code": error.code}}).encode()


def error_headers(error: EngineError) -> list[tuple[str, str]]:
    """Return the headers that go with an error."""
    retry_after_s = getattr(error, "retry_after_s", None)
    headers = [("content-type", "application/json")]
    if retry_after_s is not None or status_of(error) in (429, 503):
        headers.append(("retry-after", str(max(1, retry_after_s or 1))))
    return headers


def build_response(error: EngineError) -> Response[bytes]:
    """Return an error as a whole answer."""
    headers = dict(error_headers(error))
    return Response(
        error_body(error), status_code=status_of(error), media_type=headers.pop("content-type"), headers=headers
    )


def read_exception(exception: Exception) -> EngineError:
    """Return any exception as an error of ours; what nobody expected is logged and told to nobody."""
    if isinstance(exception, EngineError):
        return exception
    error = EngineError("The engine met a problem of its own; it was logged.")
    if isinstance(exception, HTTPException):
        code = _STATUS_TO_CODE.get(exception.status_code)
        error = CallError(f"{exception.detail or 'The request is not valid'}.".replace("..", "."))
        error.code = code or "invalid_request_error"
        if code is not None or exception.status_code < 500:
            return error
        error = EngineError("The engine met a problem of its own; it was logged.")
    _log.error("a call failed", exc_info=exception)
    return error


def handle_exception(request: Request[Any, Any, Any], exception: Exception) -> Response[bytes]:
    """Answer an exception (the app's handler for all of them)."""
    error = read_exception(exception)
    metrics = request.app.state.get("metrics")
    if metrics is not None:
        metrics.refused.labels(code=error.code).inc()
    return build_response(error)
