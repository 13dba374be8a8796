"""Writes API keys: create, revoke, the bootstrap key. Each change raises the names epoch and leaves an event.

The text of a key leaves `create_key` once and is kept nowhere.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from loraplex.db.database import Database
from loraplex.db.epoch import bump_epoch
from loraplex.db.events import record_event
from loraplex.db.tables import api_key
from loraplex.errors import InvalidRequestError, NotFoundError, PermissionDeniedError
from loraplex.keys.secret import hmac_secret, new_key_text, parse_key
from loraplex_registry.wire.identity import Identity
from loraplex_registry.wire.ids import new_public_id, new_uuid

SCOPES = (
    "infer",
    "adapters:read",
    "adapters:write",
    "usage:read",
    "keys:write",
    "escalations:write",
    "metrics:read",
    "audit:read",
)
PLATFORM_ROLES = ("admin", "admin_readonly")
DEFAULT_SCOPES = ("infer",)


class KeyService:
    """The only writer of `api_key`."""

    def __init__(self, database: Database, pepper: bytes) -> None:
        self._database = database
        self._pepper = pepper

    async def create_key(
        self,
        by: Identity,
        *,
        tenant_id: uuid.UUID,
        tenant: str,
        name: str,
        owner: str,
        scopes: Sequence[str],
        role: str,
        expires_at: datetime | None,
    ) -> tuple[dict[str, Any], str]:
        """Create a key and return its row and its text.

        Raises:
            InvalidRequestError: A scope or role is unknown, or the key would be born expired.
            PermissionDeniedError: The caller gives away more than it has.
        """
        _check_grant(by, scopes, role)
        if expires_at is not None and expires_at <= datetime.now(UTC):
            raise InvalidRequestError("expires_at is in the past", param="expires_at")
        text = new_key_text()
        row = self._build_row(text, by.actor) | {
            "tenant_id": tenant_id,
            "name": name,
            "owner": owner,
            "role": role,
            "scopes": list(dict.fromkeys(scopes)),
            "expires_at": expires_at,
        }
        async with self._database.write() as connection:
            await _insert(connection, row)
            details = {"name": name, "owner": owner, "role": role, "scopes": row["scopes"]}
            await record_event(
                connection,
                by,
                "key.created",
                row["public_id"],
                tenant_id=str(tenant_id),
                tenant=tenant,
                details=details,
            )
        return row, text

    async def revoke_key(self, by: Identity, *, tenant_id: uuid.UUID, tenant: str, key_id: str) -> None:
        """Revoke a key; doing it twice is fine.

        Raises:
            NotFoundError: The tenant has no such key that the caller may see.
        """
        async with self._database.write() as connection:
            found = await connection.execute(_visible_keys(by, tenant_id).where(api_key.c.public_id == key_id))
            row = found.mappings().one_or_none()
            if row is None:
                raise NotFoundError(f"{tenant} has no key {key_id}", param="key_id")
            if row["revoked_at"] is not None:
                return
            await _revoke(connection, api_key.c.id == row["id"])
            await record_event(connection, by, "key.revoked", key_id, tenant_id=str(tenant_id), tenant=tenant)

    async def ensure_bootstrap_key(self, text: str) -> None:
        """Make `text` the one bootstrap admin key; an earlier one with another text dies."""
        key = parse_key(text, self._pepper)
        is_this = (api_key.c.lookup == key.lookup) & (api_key.c.secret_hmac == hmac_secret(key.secret, self._pepper))
        alive = api_key.c.is_bootstrap & api_key.c.revoked_at.is_(None)
        async with self._database.write() as connection:
            await _revoke(connection, alive & ~is_this)
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


def _check_grant(by: Identity, scopes: Sequence[str], role: str) -> None:
    if role not in ("tenant", *PLATFORM_ROLES):
        raise InvalidRequestError(f"role is one of {', '.join(PLATFORM_ROLES)}, or absent", param="role")
    if role != "tenant" and not by.is_admin:
        raise PermissionDeniedError("Only an admin key may create platform keys", param="role")
    for scope in scopes:
        if scope not in SCOPES:
            raise InvalidRequestError(f"{scope!r} is not a scope; scopes are {', '.join(SCOPES)}", param="scopes")
        if not by.has_scope(scope):
            raise PermissionDeniedError(f"A key gives only scopes that it has; this one lacks {scope}", param="scopes")


async def _insert(connection: AsyncConnection, row: dict[str, Any]) -> None:
    await connection.execute(api_key.insert(), row | {"changed_epoch": await bump_epoch(connection)})


async def _revoke(connection: AsyncConnection, which: sa.ColumnElement[bool]) -> None:
    values = {"revoked_at": datetime.now(UTC), "changed_epoch": await bump_epoch(connection)}
    await connection.execute(sa.update(api_key).where(which).values(values))


async def _has_key(connection: AsyncConnection, which: sa.ColumnElement[bool]) -> bool:
    return (await connection.execute(sa.select(api_key.c.id).where(which).limit(1))).first() is not None
