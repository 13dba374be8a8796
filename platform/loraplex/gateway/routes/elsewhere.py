"""Routes of OpenAI's API that are not served here: each says what to use instead."""

from __future__ import annotations

from litestar import HttpMethod, Router
from litestar.handlers import HTTPRouteHandler, route

from loraplex.errors import EmbeddingsNotServedError, LoraplexError, UseChatCompletionsError

_METHODS = [HttpMethod.GET, HttpMethod.POST, HttpMethod.DELETE]
_PATH_TO_ERROR: dict[str, type[LoraplexError]] = {
    "/v1/embeddings": EmbeddingsNotServedError,
    "/v1/responses": UseChatCompletionsError,
    "/v1/responses/{rest:path}": UseChatCompletionsError,
}


def build_elsewhere_router() -> Router:
    """Return the routes."""
    return Router("/", route_handlers=[_build(path, error) for path, error in _PATH_TO_ERROR.items()])


def _build(path: str, error: type[LoraplexError]) -> HTTPRouteHandler:
    @route(path, http_method=_METHODS)
    async def refuse() -> None:
        raise error

    return refuse
