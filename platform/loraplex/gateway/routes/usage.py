"""/api/v1/usage: sums, the rows that they are sums of, and both held against what the engines counted."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import msgspec
from litestar import Request, Router, get

from loraplex.db.database import Database
from loraplex.errors import InvalidRequestError, NotFoundError
from loraplex.fleet.fleet import Fleet
from loraplex.fleet.view import Replica
from loraplex.gateway.authentication import target
from loraplex.gateway.body import parse_time
from loraplex.gateway.directory import Directory
from loraplex.gateway.paging import read_limit, read_mark, read_query, show_time, write_mark
from loraplex.gateway.permission import require_platform, require_scope
from loraplex.usage.outcomes import OUTCOMES
from loraplex.usage.reconciliation import Reconciler, Reconciliation
from loraplex.usage.report import GROUPS, RowQuery, UsageQuery, list_rows, sum_usage
from loraplex_engine.wire.client import ReplicaFailedError, UnreachableError
from loraplex_engine.wire.done import UsageReport
from loraplex_registry.wire.identity import Identity

_SCOPE = "usage:read"
_COLUMNS = {"adapter": "adapter", "digest": "digest", "key": "key_id", "outcome": "outcome"}
_MAX_TEXT_LEN = 100
_TIMES = ("created_at", "settled_at")
_HIDDEN = ("tenant_id", "adapter_id", "day", "replica")


class _Cursor(msgspec.Struct, frozen=True, array_like=True):
    """The last row of a page."""

    began_at: datetime
    request_id: str


def build_usage_router(database: Database, directory: Directory, fleet: Fleet) -> Router:
    """Return the routes over `database` and the engines of `fleet`."""
    reconciler = Reconciler(database)

    @get("/")
    async def usage(request: Request[Any, Any, Any]) -> dict[str, Any]:
        identity = require_scope(request, _SCOPE)
        query = read_query(request, {"tenant", "from", "to", "group_by"})
        rows = await sum_usage(database, _read_usage_query(query, identity, directory))
        return {"data": rows, "next_cursor": None}

    @get("/requests")
    async def requests(request: Request[Any, Any, Any]) -> dict[str, Any]:
        identity = require_scope(request, _SCOPE)
        query = read_query(request, {"tenant", "from", "to", "limit", "cursor", *_COLUMNS})
        asked = _read_row_query(query, identity, directory)
        rows = await list_rows(database, msgspec.structs.replace(asked, limit=asked.limit + 1))
        url_to_name = {replica.url: replica.name for replica in fleet.view.replicas}
        page = rows[: asked.limit]
        has_more = len(rows) > asked.limit
        return {
            "data": [_show_row(row, url_to_name) for row in page],
            "next_cursor": write_mark(_Cursor(page[-1]["created_at"], page[-1]["request_id"])) if has_more else None,
        }

    @get("/reconcile")
    async def show_reconciliation(request: Request[Any, Any, Any]) -> dict[str, Any]:
        require_platform(request)
        read_query(request, ())
        replicas = fleet.view.replicas
        found = await asyncio.gather(*(_reconcile(reconciler, fleet, replica) for replica in replicas))
        rows = [_show_reconciliation(replica, one) for replica, one in zip(replicas, found, strict=True)]
        return {"data": rows, "is_exact": all(row["is_exact"] for row in rows)}

    return Router("/api/v1/usage", route_handlers=[usage, requests, show_reconciliation])


def read_tenant_id(name: str | None, identity: Identity, directory: Directory) -> str | None:
    """Return the tenant that is asked for: a tenant's own, for platform keys any or (None) all.

    Raises:
        NotFoundError: There is none of that name, or it is another's.
    """
    if name is None:
        return identity.tenant_id
    aimed = target(identity, name, directory)
    if aimed is None:
        raise NotFoundError("There is no such tenant, or it is not yours.", param="tenant")
    return aimed.target_tenant_id


def _read_usage_query(query: dict[str, str], identity: Identity, directory: Directory) -> UsageQuery:
    groups = query["group_by"].split(",") if "group_by" in query else []
    for name in groups:
        if name not in GROUPS or groups.count(name) > 1:
            raise InvalidRequestError(f"group_by is a list of {','.join(GROUPS)}", param="group_by")
    return UsageQuery(
        tenant_id=read_tenant_id(query.get("tenant"), identity, directory),
        start=_read_time(query, "from"),
        stop=_read_time(query, "to"),
        group_by=groups,
    )


def _read_row_query(query: dict[str, str], identity: Identity, directory: Directory) -> RowQuery:
    exact = {column: _check_text(name, query[name]) for name, column in _COLUMNS.items() if name in query}
    if exact.get("outcome", OUTCOMES[0]) not in OUTCOMES:
        raise InvalidRequestError(f"outcome is one of {', '.join(OUTCOMES)}", param="outcome")
    return RowQuery(
        tenant_id=read_tenant_id(query.get("tenant"), identity, directory),
        start=_read_time(query, "from"),
        stop=_read_time(query, "to"),
        exact=exact,
        before=_read_cursor(query["cursor"]) if "cursor" in query else None,
        limit=read_limit(query.get("limit")),
    )


def _read_time(query: dict[str, str], name: str) -> datetime | None:
    return parse_time(query[name], name) if name in query else None


def _read_cursor(text: str) -> tuple[datetime, str]:
    cursor = read_mark(text, _Cursor)
    if cursor.began_at.tzinfo is None or not cursor.request_id.isprintable():
        raise InvalidRequestError("cursor is not one that a list gave", param="cursor")
    return cursor.began_at, cursor.request_id


def _check_text(name: str, text: str) -> str:
    if not text or len(text) > _MAX_TEXT_LEN or not text.isprintable():
        raise InvalidRequestError(f"{name} is 1 to {_MAX_TEXT_LEN} printable characters", param=name)
    return text


def _show_row(row: dict[str, Any], url_to_name: dict[str, str]) -> dict[str, Any]:
    """An engine's address is nobody's business: it is shown by its name, or not at all once it is gone."""
    shown = {name: value for name, value in row.items() if name not in _HIDDEN}
    times = {name: show_time(row[name]) for name in _TIMES}
    return shown | times | {"replica": url_to_name.get(row["replica"])}


async def _reconcile(reconciler: Reconciler, fleet: Fleet, replica: Replica) -> Reconciliation | OSError:
    async def read(within_s: float) -> UsageReport:
        try:
            return await fleet.client(replica.url).read_usage(within_s)
        except (UnreachableError, ReplicaFailedError) as error:
            raise OSError("it does not answer") from error

    try:
        return await reconciler.reconcile(replica.url, read)
    except OSError as error:
        return error


def _show_reconciliation(replica: Replica, found: Reconciliation | OSError) -> dict[str, Any]:
    shown: dict[str, Any] = {"replica": replica.name, "pool": replica.pool}
    if isinstance(found, OSError):
        return shown | {"is_exact": False, "problem": str(found)}
    return shown | {
        "is_exact": found.is_exact,
        "problem": None,
        "began_at": show_time(found.began_at),
        "engine": msgspec.to_builtins(found.engine),
        "usage": msgspec.to_builtins(found.usage),
        "pending": msgspec.to_builtins(found.pending),
        "difference": msgspec.to_builtins(found.difference),
        "lost": found.num_lost,
        "mismatches": msgspec.to_builtins(found.mismatches),
    }
