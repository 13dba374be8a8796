"""Writes API keys: create, change, rotate, revoke. Each change raises the names epoch and leaves an event.

The text of a key leaves `create_key` or `rotate_key` once and is kept nowhere.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from loraplex.db.database import Database
from loraplex.db.epoch import bump_epoch
from loraplex.db.events import record_event
from loraplex.db.tables import api_key
from loraplex.errors import ConflictError, InvalidRequestError, NotFoundError
from loraplex.keys.grant import Allowance, build_allowance, check_allowance, check_scopes, check_values
from loraplex.keys.secret import hmac_secret, new_key_text, parse_key
from loraplex_registry.wire.identity import Identity
from loraplex_registry.wire.ids import new_public_id, new_uuid
from loraplex_registry.wire.limits import merge_limits

MAX_OVERLAP_S = 30 * 86_400
DEFAULT_OVERLAP_S = 86_400
_SHOWN = ("name", "owner", "role", "scopes", "limits", "priority", "rotated_from")


class NewKey(msgspec.Struct, frozen=True, kw_only=True):
    """What a key is to be; `limits`, `priority` and `expires_at` None are those of the key that makes it."""

    name: str
    owner: str
    scopes: Sequence[str]
    role: str
    expires_at: datetime | None
    limits: Mapping[str, int | None] | None = None
    priority: int | None = None


class KeyChange(msgspec.Struct, frozen=True, kw_only=True):
    """A merge patch of a key's allowance: UNSET stays, None clears."""

    limits: Mapping[str, int | None] | msgspec.UnsetType | None = msgspec.UNSET
    priority: int | msgspec.UnsetType | None = msgspec.UNSET


class KeyService:
    """The only writer of `api_key`, but for `last_used_at`."""

    def __init__(self, database: Database, pepper: bytes) -> None:
        self._database = database
        self._pepper = pepper

    async def create_key(
        self, by: Identity, tenant_id: uuid.UUID, tenant: str, new: NewKey
    ) -> tuple[dict[str, Any], str]:
        """Create a key and return its row and its text.

        Raises:
            InvalidRequestError: A scope, a role, a limit or the priority is none, or the key would be born expired.
            PermissionDeniedError: The caller gives away more than it has.
        """
        check_scopes(by, new.scopes, new.role)
        check_values(new.limits, new.priority)
        _check_future(new.expires_at)
        text = new_key_text()
        row = self._build_row(text, by.actor) | {
            "tenant_id": tenant_id,
            "name": new.name,
            "owner": new.owner,
            "role": new.role,
            "scopes": list(dict.fromkeys(new.scopes)),
        }
        async with self._database.write() as connection:
            giver = await _read_allowance(connection, by)
            given = build_allowance(giver, new.limits, new.priority, new.expires_at)
            check_allowance(by, giver, given)
            row |= {"limits": given.limits, "priority": given.priority, "expires_at": given.expires_at}
            await _insert(connection, row)
            await _record(connection, by, "key.created", row, tenant, None, _show_created(row))
        return row, text

    async def change_key(
        self, by: Identity, tenant_id: uuid.UUID, tenant: str, key_id: str, change: KeyChange
    ) -> dict[str, Any]:
        """Change how much a key may take, and return its row.

        Raises:
            NotFoundError: The tenant has no such key that the caller may see.
            ConflictError: It is revoked.
            InvalidRequestError: A limit or the priority is none.
            PermissionDeniedError: The caller gives away more than it has.
        """
        limits = None if change.limits is msgspec.UNSET else change.limits
        priority = None if change.priority is msgspec.UNSET else change.priority
        check_values(limits, priority)
        async with self._database.write() as connection:
            # first, as it puts changes in order: what is merged below is what is there
            epoch = await bump_epoch(connection)
            row = await _get_usable(connection, by, tenant_id, tenant, key_id)
            values: dict[str, Any] = {}
            if change.limits is not msgspec.UNSET:
                values["limits"] = merge_limits(row["limits"], change.limits)
            if change.priority is not msgspec.UNSET:
                values["priority"] = change.priority
            if all(row[name] == value for name, value in values.items()):
                return row
            changed = row | values
            check_allowance(
                by, await _read_allowance(connection, by), _allowance_of(changed), before=_allowance_of(row)
            )
            await connection.execute(
                sa.update(api_key).where(api_key.c.id == row["id"]).values(values | {"changed_epoch": epoch})
            )
            before = {name: row[name] for name in values}
            await _record(connection, by, "key.changed", row, tenant, before, values)
        return changed

    async def rotate_key(
        self,
        by: Identity,
        tenant_id: uuid.UUID,
        tenant: str,
        key_id: str,
        overlap_s: int,
        expires_at: datetime | msgspec.UnsetType | None,
    ) -> tuple[dict[str, Any], str]:
        """Make a key like another one, which ends when the overlap is over; return the new row and its text.

        Args:
            by: Who calls; it must have all that the key has.
            tenant_id: Whose key.
            tenant: That tenant's name.
            key_id: The key to be replaced.
            overlap_s: Seconds that it still works; 0 ends it at once.
            expires_at: When the new one ends; UNSET: when the old one would have.

        Raises:
            NotFoundError: The tenant has no such key that the caller may see.
            ConflictError: It is revoked, has expired, or was rotated already.
            InvalidRequestError: The new one would be born expired.
            PermissionDeniedError: The caller would get more than it has.
        """
        _check_future(None if expires_at is msgspec.UNSET else expires_at)
        text = new_key_text()
        async with self._database.write() as connection:
            epoch = await bump_epoch(connection)
            old = await _get_usable(connection, by, tenant_id, tenant, key_id)
            await _check_newest(connection, key_id)
            check_scopes(by, old["scopes"], old["role"])
            kept = ("tenant_id", "name", "owner", "role", "scopes", "limits", "priority", "expires_at")
            row = self._build_row(text, by.actor) | {name: old[name] for name in kept} | {"rotated_from": key_id}
            if expires_at is not msgspec.UNSET:
                row["expires_at"] = expires_at
            check_allowance(by, await _read_allowance(connection, by), _allowance_of(row))
            await connection.execute(api_key.insert(), row | {"changed_epoch": epoch})
            ends_at = _end_of(old, overlap_s)
            values = {"expires_at": ends_at} if overlap_s else {"revoked_at": ends_at}
            await connection.execute(
                sa.update(api_key).where(api_key.c.id == old["id"]).values(values | {"changed_epoch": epoch})
            )
            before = {"expires_at": _show(old["expires_at"]), "is_revoked": False}
            after = {"expires_at": _show(ends_at), "is_revoked": not overlap_s, "rotated_to": row["public_id"]}
            await _record(connection, by, "key.rotated", old, tenant, before, after)
            await _record(connection, by, "key.created", row, tenant, None, _show_created(row))
        return row, text

    async def revoke_key(self, by: Identity, *, tenant_id: uuid.UUID, tenant: str, key_id: str) -> None:
        """Revoke a key; doing it twice is fine.

        Raises:
            NotFoundError: The tenant has no such key that the caller may see.
        """
        async with self._database.write() as connection:
            row = await _get_visible(connection, by, tenant_id, tenant, key_id)
            if row["revoked_at"] is not None:
                return
            await _revoke(connection, api_key.c.id == row["id"])
            await _record(connection, by, "key.revoked", row, tenant, {"is_revoked": False}, {"is_revoked": True})

    async def ensure_bootstrap_key(self, text: str) -> None:
        """Make `text` the one bootstrap admin key; an earlier one with another text dies."""
        key = parse_key(text, self._pepper)
        is_this = (api_key.c.lookup == key.lookup) & (api_key.c.secret_hmac == hmac_secret(key.secret, self._pepper))
        alive = api_key.c.is_bootstrap & api_key.c.revoked_at.is_(None)
        async with self._database.write() as connection:
            await _revoke_former(connection, alive & ~is_this)
            if await _has_key(connection, alive & is_this):
                return
            # A lookup is unique: drop a bootstrap key that had the same one under another pepper or was revoked.
            await connection.execute(sa.delete(api_key).where(api_key.c.lookup == key.lookup, api_key.c.is_bootstrap))
            row = self._build_row(text, "bootstrap") | {
                "tenant_id": None,
                "name": "bootstrap",
                "owner": "bootstrap",
                "role": "admin",
                "scopes": [],
                "is_bootstrap": True,
                "expires_at": None,
            }
            await _insert(connection, row)
            after = {"role": "admin", "is_bootstrap": True, "is_revoked": False}
            await record_event(connection, _bootstrap(), "key.created", row["public_id"], after=after)

    def _build_row(self, text: str, created_by: str) -> dict[str, Any]:
        key = parse_key(text, self._pepper)
        return {
            "id": new_uuid(),
            "public_id": new_public_id("key"),
            "lookup": key.lookup,
            "secret_hmac": hmac_secret(key.secret, self._pepper),
            "is_bootstrap": False,
            "created_at": datetime.now(UTC),
            "created_by": created_by,
            "revoked_at": None,
            "limits": None,
            "priority": None,
            "last_used_at": None,
            "rotated_from": None,
        }


async def list_keys(
    database: Database, by: Identity, tenant_id: uuid.UUID, before: uuid.UUID | None, limit: int
) -> list[dict[str, Any]]:
    """Return up to `limit` keys of a tenant, newest first, older than `before`."""
    query = _visible_keys(by, tenant_id).order_by(api_key.c.id.desc()).limit(limit)
    if before is not None:
        query = query.where(api_key.c.id < before)
    async with database.read() as connection:
        return [dict(row) for row in (await connection.execute(query)).mappings()]


def _visible_keys(by: Identity, tenant_id: uuid.UUID) -> sa.Select[Any]:
    """Platform keys that were made under a tenant are not that tenant's business."""
    query = sa.select(api_key).where(api_key.c.tenant_id == tenant_id)
    return query if by.is_platform else query.where(api_key.c.role == "tenant")


async def _get_visible(
    connection: AsyncConnection, by: Identity, tenant_id: uuid.UUID, tenant: str, key_id: str
) -> dict[str, Any]:
    found = await connection.execute(_visible_keys(by, tenant_id).where(api_key.c.public_id == key_id))
    row = found.mappings().one_or_none()
    if row is None:
        raise NotFoundError(f"{tenant} has no key {key_id[:64]}", param="key_id")
    return dict(row)


async def _get_usable(
    connection: AsyncConnection, by: Identity, tenant_id: uuid.UUID, tenant: str, key_id: str
) -> dict[str, Any]:
    row = await _get_visible(connection, by, tenant_id, tenant, key_id)
    if row["revoked_at"] is not None:
        raise ConflictError(f"Key {key_id} is revoked; create another one")
    if row["expires_at"] is not None and row["expires_at"] <= datetime.now(UTC):
        raise ConflictError(f"Key {key_id} has expired; create another one")
    return row


async def _check_newest(connection: AsyncConnection, key_id: str) -> None:
    """Keys follow each other in one line: the end of a rotated key is that of its overlap, not what was given it."""
    query = sa.select(api_key.c.public_id).where(api_key.c.rotated_from == key_id)
    newer = (await connection.execute(query)).scalar_one_or_none()
    if newer is not None:
        raise ConflictError(f"Key {key_id} was rotated already; rotate {newer}, which replaces it")


async def _read_allowance(connection: AsyncConnection, by: Identity) -> Allowance:
    """Return the allowance of the key that calls; an admin's own says nothing of those that it makes."""
    if by.is_admin:
        return Allowance()
    columns = (api_key.c.limits, api_key.c.priority, api_key.c.expires_at)
    found = await connection.execute(sa.select(*columns).where(api_key.c.public_id == by.key_id))
    return _allowance_of(dict(found.mappings().one()))


def _allowance_of(row: dict[str, Any]) -> Allowance:
    return Allowance(limits=row["limits"], priority=row["priority"], expires_at=row["expires_at"])


def _check_future(expires_at: datetime | None) -> None:
    if expires_at is not None and expires_at <= datetime.now(UTC):
        raise InvalidRequestError("expires_at is in the past", param="expires_at")


def _end_of(old: dict[str, Any], overlap_s: int) -> datetime:
    """Return when a rotated key ends: after the overlap, never later than it would have."""
    end = datetime.now(UTC) + timedelta(seconds=overlap_s)
    return end if old["expires_at"] is None else min(end, old["expires_at"])


def _show(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat().replace("+00:00", "Z")


def _bootstrap() -> Identity:
    """Whoever sets the environment of a gateway."""
    return Identity(
        role="admin",
        tenant_id=None,
        tenant=None,
        scopes=(),
        key_id="gateway",
        actor="bootstrap",
        request_id=new_public_id("req"),
    )


async def _record(
    connection: AsyncConnection,
    by: Identity,
    action: str,
    row: dict[str, Any],
    tenant: str,
    before: dict[str, Any] | None,
    after: dict[str, Any],
) -> None:
    key_id, tenant_id = row["public_id"], str(row["tenant_id"])
    if row["role"] != "tenant":
        # kept under a tenant, and none of its business
        await record_event(connection, by, action, key_id, before=before, after=after, details={"kept_under": tenant})
        return
    await record_event(connection, by, action, key_id, tenant_id=tenant_id, tenant=tenant, before=before, after=after)


def _show_created(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in _SHOWN if row[name] is not None} | {"is_revoked": False}


async def _revoke_former(connection: AsyncConnection, which: sa.ColumnElement[bool]) -> None:
    former = (await connection.execute(sa.select(api_key.c.public_id).where(which))).scalars().all()
    await _revoke(connection, which)
    for key_id in former:
        before, after = {"is_revoked": False}, {"is_revoked": True}
        await record_event(connection, _bootstrap(), "key.revoked", key_id, before=before, after=after)


async def _insert(connection: AsyncConnection, row: dict[str, Any]) -> None:
    await connection.execute(api_key.insert(), row | {"changed_epoch": await bump_epoch(connection)})


async def _revoke(connection: AsyncConnection, which: sa.ColumnElement[bool]) -> None:
    values = {"revoked_at": datetime.now(UTC), "changed_epoch": await bump_epoch(connection)}
    await connection.execute(sa.update(api_key).where(which).values(values))


async def _has_key(connection: AsyncConnection, which: sa.ColumnElement[bool]) -> bool:
    return (await connection.execute(sa.select(api_key.c.id).where(which).limit(1))).first() is not None
