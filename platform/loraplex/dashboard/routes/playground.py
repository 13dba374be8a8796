"""The playground: one prompt, one or two models, their answers side by side as they come."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, get, post
from litestar.types import ASGIApp

from loraplex.dashboard.adapter_row import build_rows
from loraplex.dashboard.menu import Entry
from loraplex.dashboard.section import Desk, Section
from loraplex.gateway.body import check_json_type
from loraplex.gateway.inference import INFER
from loraplex.gateway.paging import read_query
from loraplex.gateway.permission import require_scope
from loraplex.gateway.routes.inference import MAX_BODY_BYTES
from loraplex_registry.wire.adapter import AdapterName
from loraplex_registry.wire.identity import Identity

_CHAT = "/v1/chat/completions"
_LIVE = "live"
_NUM_NUMBERS = 3
_MAX_SPELT_OUT = 100


def build_playground(desk: Desk) -> Section:
    """Return the page, and the route by which it calls models as any client of the key does."""
    parts = desk.parts

    @get("/ui/playground")
    async def show(request: Request[Any, Any, Any]) -> Response[str]:
        identity = require_scope(request, INFER)
        query = read_query(request, {"left", "right"})
        await parts.names.ensure_fresh()
        names = _list_names(desk, identity)
        left = query.get("left") or _find_default(desk, identity) or (names[0] if names else "")
        return desk.pages.show(request, "playground.html", names=names, left=left, right=query.get("right", ""))

    @post("/ui/playground/answer", status_code=200, request_max_body_size=MAX_BODY_BYTES)
    async def answer(request: Request[Any, Any, Any]) -> ASGIApp:
        check_json_type(request)
        return await parts.inference.generate(request, _CHAT)

    return Section(entries=[Entry("/ui/playground", "Playground", scope=INFER)], handlers=[show, answer])


def _list_names(desk: Desk, identity: Identity) -> list[str]:
    """Return names to choose from: adapters, then bases; other names of adapters where these are few."""
    caller = desk.parts.inference.build_caller(identity)
    adapters = desk.parts.names.adapters(None if caller.tenant is None else (caller.tenant,))
    bases = [base.name for base in desk.parts.names.bases() if caller.bases is None or base.name in caller.bases]
    is_short = len(adapters) > _MAX_SPELT_OUT
    return [*(name for adapter in adapters for name in _spell(adapter, is_short=is_short)), *bases]


def _find_default(desk: Desk, identity: Identity) -> str | None:
    """Return the default adapter of the tenant, for a platform key of the first tenant that has one, if it is live."""
    adapters = desk.parts.names.adapters(None if identity.is_platform else (identity.tenant or "",))
    ready = (row for row in build_rows(adapters, None) if row.is_default and row.live and row.state == "ready")
    return next((f"{row.tenant}/{row.name}" for row in ready), None)


def _spell(adapter: AdapterName, *, is_short: bool) -> list[str]:
    """Return the names of one adapter: its own if it is live, its other aliases and its newest versions that serve."""
    name = f"{adapter.tenant}/{adapter.name}"
    names = [name] if _LIVE in adapter.aliases else []
    if is_short:
        return names
    numbers = sorted((version.number for version in adapter.versions if version.state == "ready"), reverse=True)
    names += [f"{name}@{alias}" for alias in sorted(adapter.aliases) if alias != _LIVE]
    return [*names, *(f"{name}@{number}" for number in numbers[:_NUM_NUMBERS])]
