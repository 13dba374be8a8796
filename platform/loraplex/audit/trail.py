"""Reads `audit_event`, the database's view over the event tables of all parts. Writes nothing."""

from __future__ import annotations

import uuid
from typing import Any

import sqlalchemy as sa

from loraplex.db.database import Database
from loraplex.db.tables import gateway_event

# The view has the columns of each part's event table; ours stands for all.
_event = sa.table("audit_event", *(sa.column(column.name, column.type) for column in gateway_event.c))


async def list_events(
    database: Database, tenant_id: str | None, before: uuid.UUID | None, limit: int
) -> list[dict[str, Any]]:
    """Return up to `limit` events of one tenant or of all, newest first, older than `before`."""
    query = sa.select(_event).order_by(_event.c.id.desc()).limit(limit)
    if tenant_id is not None:
        query = query.where(_event.c.tenant_id == tenant_id)
    if before is not None:
        query = query.where(_event.c.id < before)
    async with database.read() as connection:
        return [dict(row) for row in (await connection.execute(query)).mappings()]
