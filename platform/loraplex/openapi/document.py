"""Puts the document together from the tables of operations. Pure, and made once in a process."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from loraplex.openapi.advice import ADVICE, ADVICE_MESSAGES
from loraplex.openapi.escalation import ESCALATION, ESCALATION_MESSAGES, ESCALATION_REFINED
from loraplex.openapi.failure import REQUEST_ID, Refusals
from loraplex.openapi.inference import INFERENCE
from loraplex.openapi.management import MANAGEMENT
from loraplex.openapi.message import GATEWAY_MESSAGES
from loraplex.openapi.operation import Answer, Operation, Parameter
from loraplex.openapi.plan import PLAN, PLAN_MESSAGES, PLAN_REFINED
from loraplex.openapi.probe import PROBES
from loraplex.openapi.refinement import REFINED
from loraplex.openapi.registry import REGISTRY
from loraplex.openapi.schema import Schema, build_components
from loraplex.openapi.stats import STATS, STATS_MESSAGES, STATS_REFINED
from loraplex.openapi.usage import USAGE, USAGE_MESSAGES
from loraplex.version import __version__

OPERATIONS: tuple[Operation, ...] = (
    *PROBES,
    *INFERENCE,
    *MANAGEMENT,
    *ESCALATION,
    *USAGE,
    *STATS,
    *PLAN,
    *ADVICE,
    *REGISTRY,
)
_REFINED = REFINED | ESCALATION_REFINED | STATS_REFINED | PLAN_REFINED


@functools.cache
def build_document(
    registry_messages: tuple[type[msgspec.Struct], ...], operations: tuple[Operation, ...] = OPERATIONS
) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document.

    Args:
        registry_messages: The types that the registry's routes take and answer.
        operations: All operations of the gateway.
    """
    paths: dict[str, dict[str, Any]] = {}
    refusals = Refusals()
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _build_operation(operation, refusals)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Loraplex", "version": __version__, "license": {"name": "Apache-2.0"}},
        "servers": [{"url": "/"}],
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "responses": refusals.components,
            "schemas": build_components(
                [
                    *registry_messages,
                    *GATEWAY_MESSAGES,
                    *USAGE_MESSAGES,
                    *STATS_MESSAGES,
                    *PLAN_MESSAGES,
                    *ADVICE_MESSAGES,
                    *ESCALATION_MESSAGES,
                ],
                _REFINED,
            ),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _build_operation(operation: Operation, refusals: Refusals) -> dict[str, Any]:
    built: dict[str, Any] = {
        "operationId": operation.name,
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": refusals.build(operation)
        | {str(answer.status): _build_answer(answer) for answer in operation.answers},
    }
    if operation.parameters:
        built["parameters"] = [_build_parameter(parameter) for parameter in operation.parameters]
    if operation.body is not None:
        content = {operation.body.media_type: {"schema": operation.body.schema}}
        built["requestBody"] = {"required": operation.body.is_required, "content": content}
    if operation.is_open:
        built["security"] = []
    return built


def _build_parameter(parameter: Parameter) -> dict[str, Any]:
    built: dict[str, Any] = {
        "name": parameter.name,
        "in": parameter.place,
        "required": parameter.is_required or parameter.place == "path",
        "schema": parameter.schema,
    }
    if parameter.is_joined:
        built |= {"style": "form", "explode": False}
    return built | ({"description": parameter.description} if parameter.description else {})


def _build_answer(answer: Answer) -> dict[str, Any]:
    headers = {name: {**header, "required": True} for name, header in REQUEST_ID.items()}
    headers |= {name: {"required": True, "schema": schema} for name, schema in answer.headers.items()}
    headers |= {name: {"required": False, "schema": schema} for name, schema in answer.optional_headers.items()}
    built: dict[str, Any] = {"description": answer.description, "headers": headers}
    media: dict[str, Schema] = {} if answer.schema is None else {answer.media_type: answer.schema}
    content = {name: {"schema": schema} for name, schema in (media | answer.other_media).items()}
    return built | ({"content": content} if content else {})
