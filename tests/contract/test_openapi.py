"""The OpenAPI document against the application: every route, every error code, closed objects, nothing by default."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from litestar import Litestar

from gateway_world import ADMIN_KEY
from loraplex.app import Gateway, running_gateway
from loraplex.gateway.problem import CODE_TO_STATUS
from loraplex.openapi.document import OPERATIONS, build_document
from loraplex.openapi.failure import list_codes
from loraplex.settings import Settings
from loraplex_registry.app import MESSAGES

DOCUMENT = build_document(MESSAGES)
PARTS_ONLY = "/internal/"


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
async def gateway(database_url: str, tmp_path: Path) -> AsyncIterator[Gateway]:
    settings = Settings(
        database_url=database_url,
        object_store_url=f"file://{tmp_path}/objects",
        data_dir=tmp_path,
        admin_key=ADMIN_KEY,
        engine_key="the-engine-key",
    )
    async with running_gateway(settings) as running:
        yield running


def _routes(app: Any) -> set[tuple[str, str]]:
    """Each method and path of the application that is not for other parts."""
    while not isinstance(app, Litestar):
        app = app._app
    return {
        (method.lower(), re.sub(r":\w+}", "}", route.path))
        for route in app.routes
        for method in route.methods
        if method != "OPTIONS" and not route.path.startswith(PARTS_ONLY)
    }


async def test_document_has_every_route_and_no_other(gateway: Gateway) -> None:
    described = {(method, path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == _routes(gateway.app)


async def test_document_is_open_and_so_is_the_head_of_every_page(gateway: Gateway) -> None:
    transport = httpx.ASGITransport(app=gateway.app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        assert (await http.get("/openapi.json")).json() == json.loads(json.dumps(DOCUMENT))
        for path in ("/openapi.json", "/healthz", "/readyz"):
            assert (await http.head(path)).status_code == 200
        assert (await http.head("/v1/models")).status_code == 401
        refused = await http.options("/v1/models", headers={"authorization": f"Bearer {ADMIN_KEY}"})
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")


def test_every_error_code_is_the_answer_of_some_operation() -> None:
    declared = {code for operation in OPERATIONS for code in list_codes(operation)}
    assert declared == set(CODE_TO_STATUS)


def test_every_operation_has_a_name_of_its_own() -> None:
    names = [operation.name for operation in OPERATIONS]
    assert len(names) == len(set(names))


def _schemas(node: Any, at: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object within the document that looks like a schema, with its place."""
    if isinstance(node, dict):
        if "type" in node or "$ref" in node:
            yield at, node
        for key, value in node.items():
            yield from _schemas(value, f"{at}/{key}")
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _schemas(value, f"{at}/{index}")


def test_objects_with_properties_are_closed() -> None:
    named = {at: schema for at, schema in _schemas(DOCUMENT) if isinstance(schema.get("properties"), dict)}
    objects = {at: schema for at, schema in named.items() if schema.get("type") == "object"}
    assert len(objects) > 50
    assert [at for at, schema in objects.items() if schema.get("additionalProperties") is not False] == []


def test_references_lead_somewhere() -> None:
    for at, schema in _schemas(DOCUMENT):
        target: Any = DOCUMENT
        for step in schema.get("$ref", "#").split("/")[1:]:
            assert step in target, f"{at} refers to {schema['$ref']}"
            target = target[step]


def test_no_answer_stands_for_all_others() -> None:
    operations = [operation for methods in DOCUMENT["paths"].values() for operation in methods.values()]
    statuses = {status for operation in operations for status in operation["responses"]}
    assert "default" not in statuses
    assert all(re.fullmatch(r"[2-5]\d\d", status) for status in statuses)
    everywhere = set.intersection(*(set(operation["responses"]) for operation in operations))
    assert everywhere >= {"400", "405", "431", "500", "503"}


def test_what_limits_leave_is_promised_to_no_call_that_none_may_count() -> None:
    def is_required(path: str) -> set[bool]:
        headers = DOCUMENT["paths"][path]["post"]["responses"]["200"]["headers"]
        return {header["required"] for name, header in headers.items() if name.startswith("x-ratelimit-")}

    assert is_required("/v1/chat/completions") == is_required("/v1/completions") == {False}
    assert is_required("/v1/tokenize") == set()
