"""/api/v1/plan and /api/v1/advice: what fits on a card, computed, and what to change here, from what was measured."""

from __future__ import annotations

from typing import Any

from litestar import Request, Router, get, post

from loraplex.gateway.advising import Advising
from loraplex.gateway.body import check_text, read_body
from loraplex.gateway.directory import Directory
from loraplex.gateway.paging import read_query
from loraplex.gateway.permission import require_scope
from loraplex.gateway.routes.usage import read_tenant_id
from loraplex.plan.figures import Plan
from loraplex.plan.planner import build_plan
from loraplex.plan.spec import PlanSpec


def build_capacity_router(advising: Advising, directory: Directory) -> Router:
    """Return both routes; every key may plan, advice to a tenant is on its own calls and adapters only."""

    @post("/plan", status_code=200)
    async def plan(request: Request[Any, Any, Any]) -> Plan:
        read_query(request, ())
        spec = await read_body(request, PlanSpec)
        check_text(spec.model, "model")
        return build_plan(spec)

    @get("/advice")
    async def advice(request: Request[Any, Any, Any]) -> dict[str, Any]:
        identity = require_scope(request, "usage:read")
        query = read_query(request, {"tenant"})
        found = await advising.advise(read_tenant_id(query.get("tenant"), identity, directory))
        return {"data": found, "next_cursor": None}

    return Router("/api/v1", route_handlers=[plan, advice])
