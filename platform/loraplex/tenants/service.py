"""Writes tenants: create, change, delete. Each change raises the names epoch and leaves an event.

A deleted tenant's row stays, and its name stays reserved for 30 days.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from loraplex.db.database import Database
from loraplex.db.epoch import bump_epoch
from loraplex.db.events import record_event
from loraplex.db.tables import tenant
from loraplex.errors import ConflictError, NameReservedError, NotFoundError
from loraplex_registry.wire.identity import Identity
from loraplex_registry.wire.ids import new_uuid
from loraplex_registry.wire.limits import merge_limits

RESERVED_NAMES = frozenset({"platform", "other"})
"""`owned_by` of bases in /v1/models; the label in metrics of what has none of its own."""

_SHOWN = ("display_name", "state", "bases", "limits", "weight")
_NAME_KEPT = timedelta(days=30)


class TenantService:
    """The only writer of `tenant`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create_tenant(
        self,
        by: Identity,
        name: str,
        display_name: str | None,
        bases: Sequence[str] | None,
        limits: dict[str, int | None] | None,
        weight: int | None = None,
    ) -> dict[str, Any]:
        """Create a tenant and return its row; `bases` None allows all, `limits` and `weight` are judged already.

        Raises:
            NameReservedError: The name is kept for the platform or for a tenant deleted a short while ago.
            ConflictError: There is a tenant of that name.
        """
        row = {
            "id": new_uuid(),
            "name": name,
            "display_name": display_name,
            "state": "active",
            "bases": None if bases is None else list(bases),
            "limits": merge_limits(None, limits),
            "weight": weight,
            "created_at": datetime.now(UTC),
            "deleted_at": None,
        }
        try:
            async with self._database.write() as connection:
                await _check_free(connection, name)
                row["changed_epoch"] = await bump_epoch(connection)
                await connection.execute(tenant.insert(), row)
                await _record(connection, by, "tenant.created", row, after=_pick(row, _SHOWN))
        except IntegrityError as error:
            raise ConflictError(f"There is a tenant {name!r} already", param="name") from error
        return row

    async def change_tenant(self, by: Identity, tenant_id: uuid.UUID, changes: dict[str, Any]) -> dict[str, Any]:
        """Apply `changes` (columns display_name, bases, state, weight; limits to be merged) and return the row.

        Raises:
            NotFoundError: The tenant is gone.
        """
        async with self._database.write() as connection:
            # first, as it puts changes of one tenant in order: what is merged below is what is there
            epoch = await bump_epoch(connection) if changes else 0
            old = await _get_row(connection, tenant_id)
            if not changes:
                return old
            if "limits" in changes:
                changes = changes | {"limits": merge_limits(old["limits"], changes["limits"])}
            await connection.execute(
                sa.update(tenant).where(_is_alive(tenant_id)).values(changes | {"changed_epoch": epoch})
            )
            row = await _get_row(connection, tenant_id)
            before, after = _pick(old, changes), _pick(row, changes)
            await _record(connection, by, "tenant.changed", row, before=before, after=after)
        return row

    async def delete_tenant(self, by: Identity, tenant_id: uuid.UUID) -> None:
        """Delete a tenant: its keys stop working, its name stays reserved, usage and events stay.

        Raises:
            NotFoundError: The tenant is gone.
        """
        async with self._database.write() as connection:
            row = await _get_row(connection, tenant_id)
            epoch = await bump_epoch(connection)
            values = {"state": "deleted", "deleted_at": datetime.now(UTC), "changed_epoch": epoch}
            await connection.execute(sa.update(tenant).where(tenant.c.id == tenant_id).values(values))
            await _record(connection, by, "tenant.deleted", row, before=_pick(row, _SHOWN))


async def get_tenant(database: Database, tenant_id: uuid.UUID) -> dict[str, Any]:
    """Return the row of a tenant.

    Raises:
        NotFoundError: The tenant is gone.
    """
    async with database.read() as connection:
        return await _get_row(connection, tenant_id)


async def list_tenants(
    database: Database, only: uuid.UUID | None, before: uuid.UUID | None, limit: int
) -> list[dict[str, Any]]:
    """Return up to `limit` living tenants, newest first, older than `before`; `only` one, if given."""
    query = sa.select(tenant).where(tenant.c.deleted_at.is_(None)).order_by(tenant.c.id.desc()).limit(limit)
    if only is not None:
        query = query.where(tenant.c.id == only)
    if before is not None:
        query = query.where(tenant.c.id < before)
    async with database.read() as connection:
        return [dict(row) for row in (await connection.execute(query)).mappings()]


def _is_alive(tenant_id: uuid.UUID) -> sa.ColumnElement[bool]:
    return (tenant.c.id == tenant_id) & tenant.c.deleted_at.is_(None)


async def _get_row(connection: AsyncConnection, tenant_id: uuid.UUID) -> dict[str, Any]:
    found = (await connection.execute(sa.select(tenant).where(_is_alive(tenant_id)))).mappings().one_or_none()
    if found is None:
        raise NotFoundError(param="tenant")
    return dict(found)


async def _check_free(connection: AsyncConnection, name: str) -> None:
    if name in RESERVED_NAMES:
        raise NameReservedError(f"{name!r} is a name of the platform's own; choose another", param="name")
    kept_since = datetime.now(UTC) - _NAME_KEPT
    query = sa.select(tenant.c.deleted_at).where(
        tenant.c.name == name, tenant.c.deleted_at.is_(None) | (tenant.c.deleted_at > kept_since)
    )
    for deleted_at in (await connection.execute(query)).scalars():
        if deleted_at is None:
            raise ConflictError(f"There is a tenant {name!r} already", param="name")
        until = (deleted_at + _NAME_KEPT).date().isoformat()
        raise NameReservedError(f"{name!r} belonged to a deleted tenant and is reserved until {until}", param="name")


async def _record(
    connection: AsyncConnection,
    by: Identity,
    action: str,
    row: dict[str, Any],
    *,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
) -> None:
    tenant_id, name = str(row["id"]), row["name"]
    await record_event(connection, by, action, name, tenant_id=tenant_id, tenant=name, before=before, after=after)


def _pick(row: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: row[name] for name in names}
