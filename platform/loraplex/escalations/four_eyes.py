"""Who may approve what somebody else asked for: two people, by the owners of their keys and by who issued those.

A key that came of a rotation was issued by whoever issued the first of its line. The bootstrap key was issued by
nobody, and approves only as long as there is no other administrator.
"""

from __future__ import annotations

import unicodedata
from datetime import UTC, datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from loraplex.db.tables import api_key, tenant
from loraplex.errors import PermissionDeniedError

_MAX_ROTATIONS = 1000


class KeyHolder(msgspec.Struct, frozen=True):
    """Whose a key is, and who issued it; None if nobody did."""

    key_id: str
    owner: str
    issuer: str | None
    is_bootstrap: bool = False


def check_four_eyes(requester: KeyHolder, approver: KeyHolder, *, has_other_admin: bool) -> None:
    """Return if `approver` may approve what `requester` asked for.

    Raises:
        PermissionDeniedError: They are one pair of eyes, or the approver is the bootstrap key beside an administrator.
    """
    if approver.is_bootstrap and has_other_admin:
        raise PermissionDeniedError("The bootstrap key does not approve while there is another admin key; use that one")
    if requester.key_id == approver.key_id or _is_same(requester.owner, approver.owner):
        raise PermissionDeniedError(
            f"Four eyes are needed: {approver.owner} asked for this and may not approve it; another administrator may"
        )
    if requester.issuer is not None and approver.issuer is not None and _is_same(requester.issuer, approver.issuer):
        raise PermissionDeniedError(
            f"Four eyes are needed: {approver.issuer} issued both the key that asked and the one that would approve; "
            "use an admin key that somebody else issued"
        )


async def find_holder(connection: AsyncConnection, key_id: str, owner: str) -> KeyHolder:
    """Return who holds a key, by its public id; one that is in no table is its owner's and was issued by nobody."""
    row = await _find_key(connection, key_id)
    if row is None:
        return KeyHolder(key_id, owner, None)
    first = row
    for _ in range(_MAX_ROTATIONS):
        former = None if first["rotated_from"] is None else await _find_key(connection, first["rotated_from"])
        if former is None:
            break
        first = former
    issuer = None if first["is_bootstrap"] else first["created_by"]
    return KeyHolder(key_id, row["owner"], issuer, bool(row["is_bootstrap"]))


async def has_other_admin(connection: AsyncConnection, key_id: str) -> bool:
    """Whether an admin key other than `key_id` works, the bootstrap key left out."""
    is_alive = (
        api_key.c.revoked_at.is_(None)
        & (api_key.c.expires_at.is_(None) | (api_key.c.expires_at > datetime.now(UTC)))
        & (tenant.c.id.is_(None) | (tenant.c.state != "deleted"))
    )
    query = (
        sa.select(api_key.c.id)
        .select_from(api_key.outerjoin(tenant, api_key.c.tenant_id == tenant.c.id))
        .where(api_key.c.role == "admin", ~api_key.c.is_bootstrap, api_key.c.public_id != key_id, is_alive)
        .limit(1)
    )
    return (await connection.execute(query)).first() is not None


async def _find_key(connection: AsyncConnection, public_id: str) -> dict[str, Any] | None:
    columns = (api_key.c.owner, api_key.c.created_by, api_key.c.is_bootstrap, api_key.c.rotated_from)
    row = (await connection.execute(sa.select(*columns).where(api_key.c.public_id == public_id))).mappings().first()
    return None if row is None else dict(row)


def _is_same(one: str, other: str) -> bool:
    """Names of people are compared as people read them."""
    return _fold(one) == _fold(other)


def _fold(name: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())
