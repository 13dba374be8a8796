"""/healthz, /readyz, /metrics. The first two take no key; metrics take one unless the caller is this machine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from litestar import Request, Response, Router, get

from loraplex.errors import LoraplexError, PermissionDeniedError
from loraplex.fleet.fleet import Fleet
from loraplex.gateway.authentication import Authenticator
from loraplex.gateway.drain import Drain
from loraplex.gateway.metrics import GatewayMetrics
from loraplex.gateway.names import NameIndex

_LOOPBACK = frozenset({"127.0.0.1", "::1"})
_FORWARDING = ("forwarded", "x-forwarded-for", "x-real-ip")
_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_SCOPE = "metrics:read"


def build_probe_router(
    names: NameIndex,
    drain: Drain,
    fleet: Fleet,
    metrics: GatewayMetrics,
    authenticator: Authenticator,
    check_database: Callable[[], Awaitable[None]],
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
    async def scrape(request: Request[Any, Any, Any]) -> Response[bytes]:
        _check_may_scrape(request, authenticator)
        return Response(metrics.render(fleet.view), media_type=_TEXT)

    return Router("/", route_handlers=[healthz, readyz, scrape])


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


def _check_may_scrape(request: Request[Any, Any, Any], authenticator: Authenticator) -> None:
    authorization = request.headers.get("authorization")
    # A proxy on this machine calls from loopback too, but says for whom.
    is_forwarded = any(name in request.headers for name in _FORWARDING)
    if authorization is None and not is_forwarded and request.client and request.client.host in _LOOPBACK:
        return
    identity = authenticator.authenticate(authorization, request.state.request_id)
    if not identity.has_scope(_SCOPE):
        raise PermissionDeniedError(f"This key lacks the scope {_SCOPE}")
