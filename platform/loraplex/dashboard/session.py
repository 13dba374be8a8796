"""Who is logged in: rows that a random token stands for, which live 8 hours, and 30 minutes without a page.

`Sessions` is the only writer of `dashboard_session`. It knows keys by their id alone: whether the key behind a session
still opens anything is asked of the authenticator, by whoever lets a request in.
"""

from __future__ import annotations

import hashlib
import secrets
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from loraplex.db.database import Database
from loraplex.db.events import record_event
from loraplex.db.tables import dashboard_session as table
from loraplex_registry.wire.identity import Identity
from loraplex_registry.wire.ids import new_uuid

LIFE = timedelta(hours=8)
IDLE = timedelta(minutes=30)
_TOUCH_EVERY = timedelta(minutes=1)
_MAX_PER_KEY = 20
_TOKEN_LEN = 43


class Session(msgspec.Struct, frozen=True):
    """One browser that is logged in with a key, which had this role then."""

    id: uuid.UUID
    key_id: str
    role: str
    expires_at: datetime


class Sessions:
    """All sessions; `now` is another clock in tests."""

    def __init__(self, database: Database, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._database = database
        self._now = now

    async def open(self, by: Identity) -> str:
        """Log a key in and return the token that its browser keeps; what has ended meanwhile is deleted."""
        now, token = self._now(), secrets.token_urlsafe(32)
        row = {
            "id": new_uuid(),
            "token_hash": _hash(token),
            "key_id": by.key_id,
            "role": by.role,
            "created_at": now,
            "seen_at": now,
            "expires_at": now + LIFE,
        }
        newest = (
            sa.select(table.c.id).where(table.c.key_id == by.key_id).order_by(table.c.id.desc()).limit(_MAX_PER_KEY)
        )
        async with self._database.write() as connection:
            await connection.execute(sa.delete(table).where(sa.not_(_is_alive(now))))
            await connection.execute(table.insert(), row)
            kept = list((await connection.execute(newest)).scalars())
            await connection.execute(sa.delete(table).where(table.c.key_id == by.key_id, table.c.id.not_in(kept)))
            await self._record(connection, by, "session.opened")
        return token

    async def find(self, token: str, *, is_use: bool = True) -> Session | None:
        """Return the session of a token, None if it has ended; `is_use` begins its 30 minutes anew."""
        if len(token) != _TOKEN_LEN or not token.isascii():
            return None
        now = self._now()
        query = sa.select(table).where(table.c.token_hash == _hash(token), _is_alive(now))
        async with self._database.read() as connection:
            row = (await connection.execute(query)).mappings().one_or_none()
        if row is None:
            return None
        if is_use and now - row["seen_at"] >= _TOUCH_EVERY:
            async with self._database.write() as connection:
                await connection.execute(sa.update(table).where(table.c.id == row["id"]).values(seen_at=now))
        return Session(row["id"], row["key_id"], row["role"], row["expires_at"])

    async def close(self, session: Session, by: Identity | None = None) -> None:
        """End a session; `by` is who logged out, None where its key opens nothing any more."""
        async with self._database.write() as connection:
            await connection.execute(sa.delete(table).where(table.c.id == session.id))
            if by is not None:
                await self._record(connection, by, "session.closed")

    @staticmethod
    async def _record(connection: AsyncConnection, by: Identity, action: str) -> None:
        await record_event(connection, by, action, by.key_id, tenant_id=by.tenant_id, tenant=by.tenant)


def _is_alive(now: datetime) -> sa.ColumnElement[bool]:
    return (table.c.expires_at > now) & (table.c.seen_at > now - IDLE)


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
