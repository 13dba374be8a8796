"""Reads `audit_event`, the database's view over the event tables of all parts, and what answered a request.

Generations are no events: each has a row of its own, from before it was sent to an engine on. `find_generation` shows
it as an event, so that one question about a request has one answer. Writes nothing.
"""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa

from loraplex.db.database import Database
from loraplex.db.tables import api_key, gateway_event, request, usage

# The view has the columns of each part's event table; ours stands for all.
_event = sa.table("audit_event", *(sa.column(column.name, column.type) for column in gateway_event.c))


_EXACT = ("tenant_id", "actor", "action", "key_id", "request_id")
_ANSWERED, _OPEN = "request.answered", "request.open"
_NAMED = ("digest", "base", "model", "route", "client_request_id")
_SETTLED = ("outcome", "error_code", "finish", "prompt_tokens", "cached_tokens", "completion_tokens")


class EventQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which events are asked for; None: any.

    `subject` means what was acted on, and its parts: `team-x/support` has the events of its versions and aliases too.
    `start` is inclusive, `stop` is not.
    """

    tenant_id: str | None = None
    actor: str | None = None
    action: str | None = None
    subject: str | None = None
    key_id: str | None = None
    request_id: str | None = None
    start: datetime | None = None
    stop: datetime | None = None


async def list_events(
    database: Database, wanted: EventQuery, before: uuid.UUID | None, limit: int
) -> list[dict[str, Any]]:
    """Return up to `limit` of the events that are wanted, newest first, older than `before`."""
    query = sa.select(_event).where(*_conditions(wanted)).order_by(_event.c.id.desc()).limit(limit)
    if before is not None:
        query = query.where(_event.c.id < before)
    async with database.report() as connection:
        return [dict(row) for row in (await connection.execute(query)).mappings()]


async def find_generation(database: Database, wanted: EventQuery) -> dict[str, Any] | None:
    """Return the generation whose request id is asked for, as an event, if all else that is asked for fits, too.

    Its `details` have the digest that answered, and what it cost; None as long as it runs. `actor` is the key's owner.
    """
    if wanted.request_id is None:
        return None
    costs = [usage.c[name] for name in _SETTLED]
    statement = (
        sa.select(request, api_key.c.owner, usage.c.replica.label("used"), *costs)
        .join(api_key, api_key.c.public_id == request.c.key_id, isouter=True)
        .join(usage, usage.c.request_id == request.c.request_id, isouter=True)
        .where(request.c.request_id == wanted.request_id)
    )
    async with database.report() as connection:
        row = (await connection.execute(statement)).mappings().one_or_none()
    if row is None:
        return None
    event = _build_event(dict(row))
    return event if _fits(event, row["created_at"], wanted) else None


def _build_event(row: dict[str, Any]) -> dict[str, Any]:
    details = {name: row[name] for name in (*_NAMED, *_SETTLED)}
    return {
        "public_id": row["request_id"],
        "at": row["created_at"],
        "action": _OPEN if row["outcome"] is None else _ANSWERED,
        "tenant_id": row["tenant_id"],
        "tenant": row["tenant"],
        "subject": row["base"] if row["adapter"] is None else f"{row['tenant']}/{row['adapter']}@{row['version']}",
        "actor": row["owner"] or row["key_id"],
        "key_id": row["key_id"],
        "request_id": row["request_id"],
        "details": details | {"replica": row["used"] or row["replica"]},
    }


def _fits(event: dict[str, Any], at: datetime, wanted: EventQuery) -> bool:
    """Whether it is what `_conditions` ask for."""
    is_exact = all(getattr(wanted, name) in (None, event[name]) for name in _EXACT)
    subject, asked = event["subject"], wanted.subject
    is_about = asked is None or subject == asked or subject.startswith((f"{asked}@", f"{asked}/"))
    is_after, is_before = wanted.start is None or at >= wanted.start, wanted.stop is None or at < wanted.stop
    return is_exact and is_about and is_after and is_before


def _conditions(wanted: EventQuery) -> list[sa.ColumnElement[bool]]:
    found = [_event.c[name] == value for name in _EXACT if (value := getattr(wanted, name)) is not None]
    if wanted.subject is not None:
        parts = [_event.c.subject.startswith(wanted.subject + mark, autoescape=True) for mark in "@/"]
        found.append(sa.or_(_event.c.subject == wanted.subject, *parts))
    if wanted.start is not None:
        found.append(_event.c.at >= wanted.start)
    if wanted.stop is not None:
        found.append(_event.c.at < wanted.stop)
    return found
