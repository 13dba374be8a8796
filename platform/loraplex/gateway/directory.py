"""Tenants and keys in memory, read from the gateway's own tables by their epoch. `Directory` is its only writer.

`refresh` reads only rows that changed after the epoch it knows; the first one reads all.
"""

from __future__ import annotations

import asyncio
import uuid
from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa

from loraplex.db.database import Database
from loraplex.db.tables import api_key, gateway_epoch, tenant


class TenantEntry(msgspec.Struct, frozen=True):
    """A tenant; `bases` None allows all."""

    id: uuid.UUID
    name: str
    state: str
    bases: tuple[str, ...] | None


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its secret: what verification and identity need."""

    public_id: str
    lookup: str
    secret_hmac: bytes
    tenant_id: uuid.UUID | None
    owner: str
    role: str
    scopes: tuple[str, ...]
    expires_at: datetime | None
    is_revoked: bool

    def __repr__(self) -> str:
        return f"KeyEntry({self.public_id})"


class Directory:
    """All tenants and keys, by id, name and lookup."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = asyncio.Lock()
        self._epoch = 0
        self._is_stale = True
        self._id_to_tenant: dict[uuid.UUID, TenantEntry] = {}
        self._name_to_tenant: dict[str, TenantEntry] = {}
        self._lookup_to_key: dict[str, KeyEntry] = {}

    def find_tenant(self, name: str) -> TenantEntry | None:
        """Return the living tenant of that name."""
        return self._name_to_tenant.get(name)

    def find_tenant_id(self, name: str) -> str | None:
        """Return the id of the living tenant of that name."""
        tenant = self.find_tenant(name)
        return None if tenant is None else str(tenant.id)

    def get_tenant(self, tenant_id: uuid.UUID) -> TenantEntry:
        """Return a tenant by id, also a deleted one."""
        return self._id_to_tenant[tenant_id]

    def find_key(self, lookup: str) -> KeyEntry | None:
        """Return the key that `lookup` belongs to, alive or not."""
        return self._lookup_to_key.get(lookup)

    async def ensure_fresh(self) -> None:
        """Take in a committed change that could not be read at once.

        Raises:
            UnavailableError: The database still does not answer; a key that may be revoked opens nothing.
        """
        if self._is_stale:
            await self.refresh()

    async def refresh(self) -> None:
        """Take in every committed change; until this succeeds the directory counts as stale."""
        self._is_stale = True
        async with self._lock, self._database.read() as connection:
            epoch = (await connection.execute(sa.select(gateway_epoch.c.epoch))).scalar_one()
            tenants = (await connection.execute(_changed(tenant, self._epoch))).mappings().all()
            keys = (await connection.execute(_changed(api_key, self._epoch))).mappings().all()
            for row in tenants:
                self._take_tenant(_read_tenant(row))
            for row in keys:
                self._lookup_to_key[row["lookup"]] = _read_key(row)
            # Read before the rows: what was committed in between is read again, never missed.
            self._epoch = epoch
            self._is_stale = False

    def _take_tenant(self, entry: TenantEntry) -> None:
        self._id_to_tenant[entry.id] = entry
        if entry.state != "deleted":
            self._name_to_tenant[entry.name] = entry
        elif (known := self._name_to_tenant.get(entry.name)) is not None and known.id == entry.id:
            del self._name_to_tenant[entry.name]


def _changed(table: sa.Table, epoch: int) -> sa.Select[Any]:
    return sa.select(table).where(table.c.changed_epoch > epoch).order_by(table.c.changed_epoch)


def _read_tenant(row: Any) -> TenantEntry:
    bases = row["bases"]
    return TenantEntry(row["id"], row["name"], row["state"], None if bases is None else tuple(bases))


def _read_key(row: Any) -> KeyEntry:
    return KeyEntry(
        public_id=row["public_id"],
        lookup=row["lookup"],
        secret_hmac=bytes(row["secret_hmac"]),
        tenant_id=row["tenant_id"],
        owner=row["owner"],
        role=row["role"],
        scopes=tuple(row["scopes"]),
        expires_at=row["expires_at"],
        is_revoked=row["revoked_at"] is not None,
    )
