"""What versions do on engines: how their generations ended, minute by minute, and loading them ahead of the first."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from litestar import Request, Router, get, post
from litestar.params import FromPath

from loraplex.db.database import Database
from loraplex.errors import InvalidRequestError, NoReplicaError, NotFoundError
from loraplex.fleet.fleet import Fleet
from loraplex.gateway.body import parse_time
from loraplex.gateway.names import NameIndex
from loraplex.gateway.paging import read_limit, read_mark, read_query, show_time, write_mark
from loraplex.gateway.permission import require_scope
from loraplex.gateway.resolution import Caller, resolve
from loraplex.usage.outcomes import OutcomeQuery, read_outcomes
from loraplex_registry.wire.adapter import AdapterName

_DEFAULT_SPAN = timedelta(hours=1)
_EVERYONE = Caller(tenant=None, bases=None)
"""Who may name it is judged before."""

_MAX_NUMBER_LEN = 9


class _Cursor(msgspec.Struct, frozen=True, array_like=True):
    """The last row of a page."""

    minute: datetime
    version: int


def build_version_router(database: Database, names: NameIndex, fleet: Fleet) -> Router:
    """Return the routes over `database`, `names` and `fleet`."""

    @get("/outcomes")
    async def outcomes(
        request: Request[Any, Any, Any], tenant: FromPath[str], adapter: FromPath[str]
    ) -> dict[str, Any]:
        require_scope(request, "adapters:read", "adapters:write")
        query = read_query(request, {"from", "to", "version", "limit", "cursor"})
        found = await _find_adapter(names, tenant, adapter)
        asked = _read_outcome_query(found.adapter_id, query)
        if asked.version is not None:
            _check_there(found, str(asked.version))
        rows = await read_outcomes(database, msgspec.structs.replace(asked, limit=asked.limit + 1))
        return _show_outcomes(rows, asked.limit)

    @post("/versions/{number:str}/warm", status_code=200)
    async def warm(
        request: Request[Any, Any, Any], tenant: FromPath[str], adapter: FromPath[str], number: FromPath[str]
    ) -> dict[str, Any]:
        require_scope(request, "adapters:write")
        read_query(request, ())
        found = await _find_adapter(names, tenant, adapter)
        _check_there(found, number)
        resolved = resolve(f"{tenant}/{adapter}@{number}", _EVERYONE, names, "")
        assert resolved.digest is not None, "it is a version"
        if resolved.pool is not None:
            return {"replicas": _show_pool(fleet, resolved.pool, resolved.digest)}
        problems = await fleet.warm(resolved.base, resolved.digest, resolved.rank, resolved.weights)
        if not problems:
            raise NoReplicaError(f"No engine serves {resolved.base} for this adapter at the moment; try again shortly.")
        return {"replicas": [_show_warm(replica, problem) for replica, problem in sorted(problems.items())]}

    return Router("/api/v1/tenants/{tenant:str}/adapters/{adapter:str}", route_handlers=[outcomes, warm])


async def _find_adapter(names: NameIndex, tenant: str, name: str) -> AdapterName:
    await names.ensure_fresh()
    adapter = names.find_adapter(tenant, name)
    if adapter is None:
        raise NotFoundError(f"{tenant} has no adapter {name}", param="adapter")
    return adapter


def _check_there(adapter: AdapterName, number: str) -> None:
    """Return if a version is there, or was: one that is retired or purged has its past.

    Raises:
        NotFoundError: It never was.
    """
    if number not in {str(version.number) for version in adapter.versions}:
        raise NotFoundError(f"{adapter.tenant}/{adapter.name} has no version {number}", param="version")


def _read_outcome_query(adapter_id: str, query: dict[str, str]) -> OutcomeQuery:
    stop = parse_time(query["to"], "to") if "to" in query else datetime.now(UTC) + timedelta(minutes=1)
    start = parse_time(query["from"], "from") if "from" in query else _before(stop)
    cursor = _read_cursor(query["cursor"]) if "cursor" in query else None
    return OutcomeQuery(
        adapter_id=adapter_id,
        start=start,
        stop=stop,
        version=_read_number(query["version"]) if "version" in query else None,
        before=None if cursor is None else (cursor.minute, cursor.version),
        limit=read_limit(query.get("limit")),
    )


def _before(stop: datetime) -> datetime:
    """The default beginning of a span, within the calendar."""
    return stop - min(_DEFAULT_SPAN, stop - datetime.min.replace(tzinfo=UTC))


def _read_number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_NUMBER_LEN and str(int(text)) == text != "0"):
        raise InvalidRequestError("A version is a whole number from 1 on", param="version")
    return int(text)


def _show_outcomes(rows: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    page = rows[:limit]
    last = page[-1] if len(rows) > limit else None
    return {
        "data": [row | {"minute": show_time(row["minute"])} for row in page],
        "next_cursor": None if last is None else write_mark(_Cursor(last["minute"], last["version"])),
    }


def _show_warm(replica: str, problem: str | None) -> dict[str, Any]:
    return {"replica": replica, "state": "resident"} if problem is None else {"replica": replica, "problem": problem}


def _read_cursor(text: str) -> _Cursor:
    cursor = read_mark(text, _Cursor)
    if cursor.minute.tzinfo is None or not 1 <= cursor.version < 10**_MAX_NUMBER_LEN:
        raise InvalidRequestError("cursor is not one that a list gave", param="cursor")
    return cursor


def _show_pool(fleet: Fleet, pool: str, digest: str) -> list[dict[str, Any]]:
    """The engines of a full fine-tune's pool, which hold it from their start on or not at all."""
    replicas = sorted((one for one in fleet.view.replicas if one.pool == pool), key=lambda one: one.name)
    if not replicas:
        raise NoReplicaError("The pool of this full fine-tune has no engines at the moment; try again shortly.")
    other = "it serves another model"
    return [
        _show_warm(one.name, one.problem if one.model_digest == digest else one.problem or other) for one in replicas
    ]
