"""Refusals as response objects: for each operation its error codes, grouped by status, in the one error shape."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from loraplex.gateway.problem import CODE_TO_STATUS
from loraplex.openapi.operation import JSON, Operation
from loraplex.openapi.schema import ERROR, Schema, ref

REQUEST_ID: dict[str, Schema] = {"x-request-id": {"schema": {"type": "string", "pattern": "^req_[a-z0-9]{26}$"}}}
_EVERYWHERE = (
    "invalid_request_error",
    "unknown_parameter",
    "method_not_allowed",
    "request_timeout",
    "headers_too_large",
    "internal_error",
    "unavailable",
)
_WITH_KEY = ("invalid_api_key", "permission_denied", "rate_limit_exceeded", "tenant_suspended")
_WITH_BODY = ("payload_too_large", "unsupported_media_type")
_WITH_JSON = ("invalid_json", "unsupported_parameter")
_ONE_BY_ONE = {429: ["retry-after"], 503: ["retry-after"], 401: ["www-authenticate"], 405: ["allow"]}
_HEADERS: dict[str, Schema] = {
    "retry-after": {"description": "Seconds.", "schema": {"type": "string", "pattern": "^[0-9]+$"}},
    "www-authenticate": {"schema": {"const": "Bearer"}},
    "allow": {"schema": {"type": "string"}},
}
# the bytes of a connection that is no HTTP are answered below everything that gives out ids
_WITHOUT_ID = (400, 431)


def list_codes(operation: Operation) -> set[str]:
    """Return every error code that `operation` may answer."""
    codes = {*_EVERYWHERE, *operation.codes}
    if not operation.is_open:
        codes.update(_WITH_KEY)
    if "{" in operation.path:
        codes.add("not_found")
    if operation.body is not None:
        codes.update(_WITH_BODY)
        codes.update(_WITH_JSON if operation.body.media_type == JSON else ())
    return codes


class Refusals:
    """Response objects that operations share: `components` has each once, by a name made of its status and codes."""

    def __init__(self) -> None:
        self.components: dict[str, Any] = {}

    def build(self, operation: Operation) -> dict[str, Any]:
        """Return the responses of `operation` that are errors, by status."""
        by_status: dict[int, list[str]] = defaultdict(list)
        for code in sorted(list_codes(operation)):
            by_status[CODE_TO_STATUS[code]].append(code)
        return {str(status): self._refer(status, codes) for status, codes in sorted(by_status.items())}

    def _refer(self, status: int, codes: list[str]) -> dict[str, Any]:
        name = ".".join([str(status), *codes])
        if name not in self.components:
            self.components[name] = _build(status, codes)
        return {"$ref": f"#/components/responses/{name}"}


def _build(status: int, codes: list[str]) -> dict[str, Any]:
    request_id = {name: {**header, "required": status not in _WITHOUT_ID} for name, header in REQUEST_ID.items()}
    headers = {name: {**_HEADERS[name], "required": True} for name in _ONE_BY_ONE.get(status, ())}
    return {
        "description": ", ".join(codes),
        "headers": request_id | headers | _optional_headers(codes),
        "content": {JSON: {"schema": _build_schema(codes)}},
    }


def _optional_headers(codes: list[str]) -> dict[str, Any]:
    return {"etag": {"schema": {"type": "string"}}} if "precondition_failed" in codes else {}


def _build_schema(codes: list[str]) -> Schema:
    error = ERROR | {"properties": ERROR["properties"] | {"code": {"enum": codes}}}
    properties: Schema = {"error": error}
    if "adapter_rejected" in codes:
        properties["report"] = ref("Report")
    if "precondition_failed" in codes:
        properties["current"] = {"anyOf": [ref("AliasView"), {"type": "null"}]}
    return {"type": "object", "additionalProperties": False, "required": ["error"], "properties": properties}
