"""The operations that need no key: probes, metrics, this document."""

from __future__ import annotations

from loraplex.openapi.operation import Answer, Operation
from loraplex.openapi.schema import Schema, ref

_TEXT: Schema = {"type": "string"}

PROBES: tuple[Operation, ...] = (
    Operation(
        method="get",
        path="/healthz",
        name="showHealth",
        tag="probes",
        summary="Say that the process is alive",
        answers=(Answer(200, "Alive", ref("Alive")),),
        is_open=True,
    ),
    Operation(
        method="get",
        path="/readyz",
        name="showReadiness",
        tag="probes",
        summary="Say whether the gateway serves",
        answers=(Answer(200, "Ready", ref("Readiness")), Answer(503, "Not ready", ref("Readiness"))),
        is_open=True,
    ),
    Operation(
        method="get",
        path="/metrics",
        name="showMetrics",
        tag="probes",
        summary="Metrics for Prometheus; with the scope metrics:read, or directly from the gateway's own machine",
        answers=(Answer(200, "The text format of Prometheus", _TEXT, "text/plain"),),
        codes=("invalid_api_key", "permission_denied", "tenant_suspended"),
        is_open=True,
    ),
    Operation(
        method="get",
        path="/openapi.json",
        name="showApi",
        tag="probes",
        summary="This document",
        answers=(Answer(200, "An OpenAPI 3.1 document", {"type": "object"}),),
        is_open=True,
    ),
)
