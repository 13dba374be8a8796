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
from loraplex.errors import UnavailableError
from loraplex_registry.wire.identity import AdapterLimits
from loraplex_registry.wire.limits import RateLimits, read_limits

DEFAULT_WEIGHT = 1
_ADAPTER_LIMITS = AdapterLimits.__struct_fields__
_REFRESH_TIMEOUT_S = 2.0


class TenantEntry(msgspec.Struct, frozen=True):
    """A tenant; `bases` None allows all, `limits` (what it may store) and `rate_limits` None are none of its own.

    `weight` is its share of an engine under load.
    """

    id: uuid.UUID
    name: str
    state: str
    bases: tuple[str, ...] | None
    limits: AdapterLimits | None = None
    rate_limits: RateLimits | None = None
    weight: int = DEFAULT_WEIGHT


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its secret: what verification, identity and limits need.

    Lower `priority` goes first. `rotated_from` is the id of the key that it replaces; `name` is what
    people call it.
    """

    public_id: str
    lookup: str
    secret_hmac: bytes
    tenant_id: uuid.UUID | None
    owner: str
    role: str
    scopes: tuple[str, ...]
    expires_at: datetime | None
    is_revoked: bool
    rate_limits: RateLimits | None = None
    priority: int = 0
    rotated_from: str | None = None
    name: str = ""

    def __repr__(self) -> str:
        return f"KeyEntry({self.public_id})"


class Directory:
    """All tenants and keys, by id, name and lookup."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = asyncio.Lock()
        self._epoch = 0
        self._wanted_epoch = 0
        self._is_stale = True
        self._id_to_tenant: dict[uuid.UUID, TenantEntry] = {}
        self._name_to_tenant: dict[str, TenantEntry] = {}
        self._lookup_to_key: dict[str, KeyEntry] = {}
        self._id_to_key: dict[str, KeyEntry] = {}
        self._id_to_next_id: dict[str, str] = {}

    def find_tenant(self, name: str) -> TenantEntry | None:
        """Return the living tenant of that name."""
        return self._name_to_tenant.get(name)

    def find_tenant_id(self, name: str) -> str | None:
        """Return the id of the living tenant of that name."""
        tenant = self.find_tenant(name)
        return None if tenant is None else str(tenant.id)

    def tenants(self) -> list[TenantEntry]:
        """Return the living tenants by name."""
        return [self._name_to_tenant[name] for name in sorted(self._name_to_tenant)]

    def get_tenant(self, tenant_id: uuid.UUID) -> TenantEntry:
        """Return a tenant by id, also a deleted one."""
        return self._id_to_tenant[tenant_id]

    def find_key(self, lookup: str) -> KeyEntry | None:
        """Return the key that `lookup` belongs to, alive or not."""
        return self._lookup_to_key.get(lookup)

    def find_key_by_id(self, key_id: str) -> KeyEntry | None:
        """Return the key whose public id this is, alive or not; None for what is no key, such as the gateway itself."""
        return self._id_to_key.get(key_id)

    def find_first_key(self, key_id: str) -> str:
        """Return the id of the first of the line of keys that replaced one another and that this one stands in."""
        while (key := self._id_to_key.get(key_id)) is not None and key.rotated_from in self._id_to_key:
            key_id = key.rotated_from
        return key_id

    def list_line(self, key_id: str) -> list[str]:
        """Return the ids of a key and of those that replaced it, one after the other."""
        line = [key_id]
        while (newer := self._id_to_next_id.get(line[-1])) is not None:
            line.append(newer)
        return line

    def find_weight(self, name: str | None) -> int:
        """Return the weight of the living tenant of that name; without one it is what everybody has."""
        tenant = None if name is None else self.find_tenant(name)
        return DEFAULT_WEIGHT if tenant is None else tenant.weight

    def find_priority(self, key_id: str) -> int:
        """Return the priority of the key whose public id this is."""
        key = self.find_key_by_id(key_id)
        return 0 if key is None else key.priority

    async def ensure_fresh(self) -> None:
        """Take in every change that is known of and not read yet.

        Raises:
            UnavailableError: The database does not answer; a key that may be revoked opens nothing.
        """
        if not self._is_behind:
            return
        try:
            async with asyncio.timeout(_REFRESH_TIMEOUT_S), self._lock:
                if self._is_behind:
                    await self._read()
        except TimeoutError as error:
            raise UnavailableError("Keys could not be read in time; try again shortly.") from error

    def note_epoch(self, epoch: int) -> None:
        """Know that `epoch` is committed, by whatever gateway."""
        self._wanted_epoch = max(self._wanted_epoch, epoch)

    async def refresh(self) -> None:
        """Take in every committed change; until this succeeds the directory counts as stale."""
        self._is_stale = True
        async with self._lock:
            # again, for the one before us may have read before what we are to read was committed
            self._is_stale = True
            await self._read()

    @property
    def _is_behind(self) -> bool:
        return self._is_stale or self._epoch < self._wanted_epoch

    async def _read(self) -> None:
        wanted = self._wanted_epoch
        async with self._database.read() as connection:
            epoch = (await connection.execute(sa.select(gateway_epoch.c.epoch))).scalar_one()
            tenants = (await connection.execute(_changed(tenant, self._epoch))).mappings().all()
            keys = (await connection.execute(_changed(api_key, self._epoch))).mappings().all()
            for row in tenants:
                self._take_tenant(_read_tenant(row))
            for row in keys:
                self._take_key(_read_key(row))
            # Read before the rows: what was committed in between is read again, never missed.
            self._epoch = epoch
            self._is_stale = False
            if self._wanted_epoch == wanted > epoch:
                # it is no longer there: the database was put back to an older state
                self._wanted_epoch = epoch

    def _take_tenant(self, entry: TenantEntry) -> None:
        self._id_to_tenant[entry.id] = entry
        if entry.state != "deleted":
            self._name_to_tenant[entry.name] = entry
        elif (known := self._name_to_tenant.get(entry.name)) is not None and known.id == entry.id:
            del self._name_to_tenant[entry.name]

    def _take_key(self, entry: KeyEntry) -> None:
        self._lookup_to_key[entry.lookup] = entry
        self._id_to_key[entry.public_id] = entry
        if entry.rotated_from is not None:
            self._id_to_next_id[entry.rotated_from] = entry.public_id


def _changed(table: sa.Table, epoch: int) -> sa.Select[Any]:
    return sa.select(table).where(table.c.changed_epoch > epoch).order_by(table.c.changed_epoch)


def _read_tenant(row: Any) -> TenantEntry:
    bases, limits = row["bases"], row["limits"]
    return TenantEntry(
        row["id"],
        row["name"],
        row["state"],
        None if bases is None else tuple(bases),
        _read_adapter_limits(limits),
        read_limits(limits),
        row["weight"] or DEFAULT_WEIGHT,
    )


def _read_adapter_limits(stored: dict[str, int] | None) -> AdapterLimits | None:
    found = {name: value for name, value in (stored or {}).items() if name in _ADAPTER_LIMITS}
    return AdapterLimits(**found) if found else None


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
        rate_limits=read_limits(row["limits"]),
        priority=row["priority"] or 0,
        rotated_from=row["rotated_from"],
        name=row["name"],
    )
