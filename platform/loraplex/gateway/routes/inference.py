"""/v1/chat/completions, /v1/completions, /v1/tokenize."""

from __future__ import annotations

from typing import Any

from litestar import Request, Router, post
from litestar.types import ASGIApp

from loraplex.gateway.body import check_json_type
from loraplex.gateway.inference import Inference

MAX_BODY_BYTES = 4 << 20


def build_inference_router(inference: Inference) -> Router:
    """Return the routes that engines answer."""

    @post("/v1/chat/completions", status_code=200)
    async def chat(request: Request[Any, Any, Any]) -> ASGIApp:
        check_json_type(request)
        return await inference.generate(request, "/v1/chat/completions")

    @post("/v1/completions", status_code=200)
    async def complete(request: Request[Any, Any, Any]) -> ASGIApp:
        check_json_type(request)
        return await inference.generate(request, "/v1/completions")

    @post("/v1/tokenize", status_code=200)
    async def tokenize(request: Request[Any, Any, Any]) -> ASGIApp:
        check_json_type(request)
        return await inference.inspect(request, "/v1/tokenize")

    return Router("/", route_handlers=[chat, complete, tokenize], request_max_body_size=MAX_BODY_BYTES)
