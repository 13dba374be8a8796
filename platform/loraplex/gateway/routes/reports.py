"""/api/v1/audit: reading what happened."""

from __future__ import annotations

from typing import Any

from litestar import Request, Router, get

from loraplex.audit.action import check_action
from loraplex.audit.trail import EventQuery, find_generation, list_events
from loraplex.db.database import Database
from loraplex.errors import InvalidRequestError
from loraplex.fleet.fleet import Fleet
from loraplex.gateway.body import parse_time
from loraplex.gateway.directory import Directory
from loraplex.gateway.paging import Page, build_list, read_page, show_time
from loraplex.gateway.permission import require_scope
from loraplex.gateway.routes.usage import read_tenant_id
from loraplex_registry.wire.identity import Identity

EVENT_FILTERS = ("actor", "action", "subject", "key_id", "request_id")
_MAX_FILTER_LEN = 300


def build_report_router(database: Database, directory: Directory, fleet: Fleet) -> Router:
    """Return the routes over `database`; `fleet` knows the engines that events name."""

    @get("/audit")
    async def audit(request: Request[Any, Any, Any]) -> dict[str, Any]:
        identity = require_scope(request, "audit:read")
        page, query = read_page(request, {"tenant", "from", "to", *EVENT_FILTERS})
        return await read_events(database, fleet, page, read_event_query(query, identity, directory))

    return Router("/api/v1", route_handlers=[audit])


async def read_events(database: Database, fleet: Fleet, page: Page, wanted: EventQuery) -> dict[str, Any]:
    """Return a page of events as the API shows them."""
    rows = await list_events(database, wanted, page.before, page.limit + 1)
    if len(rows) <= page.limit and (generation := await find_generation(database, wanted)) is not None:
        # it began before anything that was done in it
        rows.append(_name_replica(generation, fleet))
    return build_list(rows, page, _show_event)


def read_event_query(query: dict[str, str], identity: Identity, directory: Directory) -> EventQuery:
    """Return which events query parameters ask for, and whoever asks may see.

    Raises:
        InvalidRequestError: A value is none.
        NotFoundError: The tenant is none, or another's.
    """
    texts = {name: _check_text(name, query[name]) for name in EVENT_FILTERS if name in query}
    if "action" in texts:
        check_action(texts["action"])
    return EventQuery(
        tenant_id=read_tenant_id(query.get("tenant"), identity, directory),
        start=parse_time(query["from"], "from") if "from" in query else None,
        stop=parse_time(query["to"], "to") if "to" in query else None,
        **texts,
    )


def _check_text(name: str, text: str) -> str:
    if not text or len(text) > _MAX_FILTER_LEN or not text.isprintable():
        raise InvalidRequestError(f"{name} is 1 to {_MAX_FILTER_LEN} printable characters", param=name)
    return text


def _name_replica(event: dict[str, Any], fleet: Fleet) -> dict[str, Any]:
    """Return it with the engine's name, as clients see it, in place of its address; None for one that is gone."""
    names = {replica.url: replica.name for replica in fleet.view.replicas}
    return event | {"details": event["details"] | {"replica": names.get(event["details"]["replica"])}}


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
