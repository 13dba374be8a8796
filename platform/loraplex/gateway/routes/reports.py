"""/api/v1/usage, /api/v1/audit, /api/v1/fleet: reading what happened and what is there."""

from __future__ import annotations

from typing import Any

from litestar import Request, Router, get

from loraplex.audit.trail import list_events
from loraplex.db.database import Database
from loraplex.errors import InvalidRequestError, NotFoundError
from loraplex.fleet.fleet import Fleet
from loraplex.fleet.view import Replica
from loraplex.gateway.authentication import target
from loraplex.gateway.body import parse_time
from loraplex.gateway.directory import Directory
from loraplex.gateway.paging import build_list, read_page, read_query, show_time
from loraplex.gateway.permission import require_platform, require_scope
from loraplex.usage.report import GROUPS, UsageQuery, sum_usage
from loraplex_registry.wire.identity import Identity


def build_report_router(database: Database, directory: Directory, fleet: Fleet) -> Router:
    """Return the routes over `database` and `fleet`."""

    @get("/usage")
    async def usage(request: Request[Any, Any, Any]) -> dict[str, Any]:
        identity = require_scope(request, "usage:read")
        query = read_query(request, {"tenant", "from", "to", "group_by"})
        rows = await sum_usage(database, _read_usage_query(query, identity, directory))
        return {"data": rows, "next_cursor": None}

    @get("/audit")
    async def audit(request: Request[Any, Any, Any]) -> dict[str, Any]:
        identity = require_scope(request, "audit:read")
        page, query = read_page(request, {"tenant"})
        tenant_id = _read_tenant_id(query.get("tenant"), identity, directory)
        rows = await list_events(database, tenant_id, page.before, page.limit + 1)
        return build_list(rows, page, _show_event)

    @get("/fleet")
    async def show_fleet(request: Request[Any, Any, Any]) -> dict[str, Any]:
        require_platform(request)
        return {"data": [_show_replica(replica) for replica in fleet.view.replicas], "next_cursor": None}

    return Router("/api/v1", route_handlers=[usage, audit, show_fleet])


def _read_usage_query(query: dict[str, str], identity: Identity, directory: Directory) -> UsageQuery:
    groups = [name for name in query.get("group_by", "").split(",") if name]
    for name in groups:
        if name not in GROUPS or groups.count(name) > 1:
            raise InvalidRequestError(f"group_by is a list of {','.join(GROUPS)}", param="group_by")
    return UsageQuery(
        tenant_id=_read_tenant_id(query.get("tenant"), identity, directory),
        start=parse_time(query["from"], "from") if "from" in query else None,
        stop=parse_time(query["to"], "to") if "to" in query else None,
        group_by=groups,
    )


def _read_tenant_id(name: str | None, identity: Identity, directory: Directory) -> str | None:
    """Return the tenant that is asked for: a tenant's own, for platform keys any or (None) all."""
    if name is None:
        return identity.tenant_id
    aimed = target(identity, name, directory)
    if aimed is None:
        raise NotFoundError("There is no such tenant, or it is not yours.", param="tenant")
    return aimed.target_tenant_id


def _show_event(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": row["public_id"],
        "at": show_time(row["at"]),
        "action": row["action"],
        "tenant": row["tenant"],
        "subject": row["subject"],
        "actor": row["actor"],
        "key_id": row["key_id"],
        "request_id": row["request_id"],
        "details": row["details"],
    }


def _show_replica(replica: Replica) -> dict[str, Any]:
    return {
        "replica": replica.name,
        "url": replica.url,
        "pool": replica.pool,
        "base": replica.base,
        "serves": replica.problem is None,
        "problem": replica.problem,
        "state": replica.state,
    }
