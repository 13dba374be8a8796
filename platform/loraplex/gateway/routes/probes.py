"""/healthz, /readyz, /metrics. The first two take no key; metrics take one unless the caller is this machine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from litestar import Request, Response, Router, get

from loraplex.errors import LoraplexError
from loraplex.gateway.drain import Drain
from loraplex.gateway.names import NameIndex
from loraplex.gateway.scrape import Scrape

_TEXT = "text/plain; version=0.0.4; charset=utf-8"


def build_probe_router(
    names: NameIndex, drain: Drain, check_database: Callable[[], Awaitable[None]], scrape: Scrape
) -> Router:
    """Return the probes; `check_database` raises while the database is away or at another revision."""

    @get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "alive"}

    @get("/readyz")
    async def readyz() -> Response[dict[str, Any]]:
        problem = await _find_problem(names, drain, check_database)
        body = {"status": "ready" if problem is None else "not ready", "problem": problem}
        return Response(body, status_code=200 if problem is None else 503)

    @get("/metrics")
    async def metrics(request: Request[Any, Any, Any]) -> Response[bytes]:
        return Response(await scrape.answer(request), media_type=_TEXT)

    return Router("/", route_handlers=[healthz, readyz, metrics])


async def _find_problem(names: NameIndex, drain: Drain, check_database: Callable[[], Awaitable[None]]) -> str | None:
    """Why this gateway should get no traffic; engines that are away are no reason, it can say that itself."""
    if drain.has_begun:
        return "draining"
    if not names.is_loaded:
        return "names are not loaded"
    try:
        await check_database()
    except LoraplexError as error:
        return error.message
    return None
