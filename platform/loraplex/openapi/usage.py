"""The operations on usage: sums, rows, and both against what the engines counted; and what they answer."""

from __future__ import annotations

from typing import Literal

import msgspec

from loraplex.openapi.operation import Answer, Operation, Parameter
from loraplex.openapi.parameter import OF_TENANT, PAGE, SPAN
from loraplex.openapi.schema import Schema, list_of, ref

_PATH = "/api/v1/usage"
_GROUPS: Schema = {
    "type": "array",
    "items": {"enum": ["tenant", "adapter", "version", "key", "day"]},
    "minItems": 1,
    "uniqueItems": True,
}
_OUTCOMES: Schema = {"enum": ["ok", "cancelled", "error", "lost"]}
_WORD: Schema = {"type": "string", "format": "shown-text", "minLength": 1, "maxLength": 100}


class UsageRow(msgspec.Struct):
    """Sums of settled requests; the keys of the grouping are there if they were asked for."""

    requests: int
    requests_ok: int
    requests_cancelled: int
    requests_error: int
    requests_lost: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    load_bytes: int
    queue_s: float
    load_s: float
    prefill_s: float
    decode_s: float
    tenant: str
    adapter: str | None
    version: int | None
    key: str
    day: str


class RequestUsage(msgspec.Struct):
    """What one settled request was, how it ended and what it cost."""

    request_id: str
    tenant: str
    adapter: str | None
    version: int | None
    digest: str | None
    base: str
    key_id: str
    route: str
    model: str
    is_stream: bool
    client_request_id: str | None
    tags: dict[str, str] | None
    created_at: str
    replica: str | None
    settled_at: str
    outcome: Literal["ok", "cancelled", "error", "lost"]
    error_code: str | None
    finish: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float
    prefill_s: float
    load_s: float
    decode_s: float
    preemptions: int
    load_bytes: int


class Counted(msgspec.Struct):
    """Requests, tokens and bytes, counted by somebody."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    load_bytes: int


class Mismatch(msgspec.Struct):
    """A request that engine and rows see differently; null: one of them does not know it."""

    request_id: str
    engine: Counted | None
    usage: Counted | None


class EngineUsage(msgspec.Struct):
    """What one engine's process counted, and what rows say of it; `problem`: it could not be asked."""

    replica: str
    pool: str
    is_exact: bool
    problem: str | None
    began_at: str
    engine: Counted
    usage: Counted
    pending: Counted
    difference: Counted
    lost: int
    mismatches: list[Mismatch]


class Reconciliation(msgspec.Struct):
    """All engines against the usage rows."""

    data: list[EngineUsage]
    is_exact: bool


USAGE_MESSAGES: tuple[type[msgspec.Struct], ...] = (Reconciliation, RequestUsage, UsageRow)

USAGE: tuple[Operation, ...] = (
    Operation(
        method="get",
        path=_PATH,
        name="showUsage",
        tag="reports",
        summary="Sum the usage of settled requests",
        answers=(Answer(200, "One row for each group", list_of("UsageRow")),),
        codes=("not_found",),
        parameters=(OF_TENANT, *SPAN, Parameter("group_by", "query", _GROUPS, is_joined=True)),
    ),
    Operation(
        method="get",
        path=_PATH + "/requests",
        name="listUsage",
        tag="reports",
        summary="List the usage of settled requests, one by one",
        answers=(Answer(200, "One page, newest first", list_of("RequestUsage")),),
        codes=("not_found",),
        parameters=(
            OF_TENANT,
            *SPAN,
            *(Parameter(name, "query", _WORD) for name in ("adapter", "digest", "key")),
            Parameter("outcome", "query", _OUTCOMES),
            *PAGE,
        ),
    ),
    Operation(
        method="get",
        path=_PATH + "/reconcile",
        name="reconcileUsage",
        tag="reports",
        summary="Hold usage against what the engines counted; for platform keys",
        answers=(Answer(200, "Each engine with both counts and their difference", ref("Reconciliation")),),
    ),
)
