"""Parameters that several operations take."""

from __future__ import annotations

from loraplex.openapi.operation import Parameter
from loraplex.openapi.schema import NAME, TIME, Schema

_DAY: Schema = {"type": "string", "format": "date"}

TENANT = Parameter("tenant", "path", NAME)
ADAPTER = Parameter("adapter", "path", NAME)
POSITIVE_NUMBER: Schema = {"type": "integer", "minimum": 1, "maximum": 999_999_999}
NUMBER = Parameter("number", "path", POSITIVE_NUMBER)
PAGE = (
    Parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": 200, "default": 50}),
    Parameter("cursor", "query", {"type": "string", "minLength": 1}, "The `next_cursor` of the page before"),
)
SPAN = (
    Parameter("from", "query", {"anyOf": [TIME, _DAY]}, "From this time, or the beginning of this UTC day, on"),
    Parameter("to", "query", {"anyOf": [TIME, _DAY]}, "Before this time, or the beginning of this UTC day"),
)
OF_TENANT = Parameter("tenant", "query", NAME, "Only of this tenant; a tenant's key sees no other")
IDEMPOTENCY_KEY = Parameter("Idempotency-Key", "header", {"type": "string", "pattern": "^[!-~]{1,200}$"})
