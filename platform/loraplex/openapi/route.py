"""GET /openapi.json: the document, open to everyone, as it says nothing that the product's pages do not."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, Response, Router, get

from loraplex.gateway.paging import read_query


def build_openapi_router(document: dict[str, Any]) -> Router:
    """Return the route; `document` is encoded once."""
    encoded = msgspec.json.encode(document)

    @get("/openapi.json")
    async def show(request: Request[Any, Any, Any]) -> Response[bytes]:
        read_query(request, ())
        return Response(encoded, media_type="application/json")

    return Router("/", route_handlers=[show])
