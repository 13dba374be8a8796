"""Honours `Idempotency-Key` on the gateway's own routes: one key of one caller on one route does its work once a day.

A claim is a row that is committed before the work. The answer is written in the transaction of the work itself, so
there is no work without its answer; a claim without one is running, or its process died and it is taken over in a
minute. Work that fails gives its claim back.
"""

from __future__ import annotations

import hashlib
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from loraplex.db.database import Database
from loraplex.db.tables import gateway_idempotency as table
from loraplex.errors import ConflictError, IdempotencyReusedError, InvalidRequestError
from loraplex_registry.wire.identity import Identity
from loraplex_registry.wire.ids import new_uuid

_LIFE = timedelta(hours=24)
DEAD_AFTER = timedelta(minutes=2)
"""Longer than any work under a claim may take."""

_MAX_LEN = 200


class Answer(msgspec.Struct, frozen=True):
    """A stored answer."""

    status: int
    body: bytes


class Claim(msgspec.Struct, frozen=True):
    """A key that this request holds (`row_id`), or the answer that it stands for already."""

    row_id: uuid.UUID | None
    answer: Answer | None = None


def hash_content(body: Any) -> str:
    """Return what a key stands for: the body as it was read."""
    return hashlib.sha256(msgspec.json.encode(body, order="sorted")).hexdigest()


def check_idempotency_key(key: str | None) -> str | None:
    """Return a key that is one.

    Raises:
        InvalidRequestError: It is empty, too long, or not of visible ASCII characters.
    """
    if key is None:
        return None
    if not (1 <= len(key) <= _MAX_LEN and key.isascii() and key.isprintable() and " " not in key):
        raise InvalidRequestError(f"Idempotency-Key is 1 to {_MAX_LEN} visible characters", param="Idempotency-Key")
    return key


class IdempotencyKeys:
    """The only writer of the gateway's claims."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def claim(self, by: Identity, route: str, key: str | None, content: str) -> Claim:
        """Hold a key; without one there is nothing to hold.

        Raises:
            ConflictError: Another request holds it.
            IdempotencyReusedError: It stands for other content.
        """
        if key is None:
            return Claim(None)
        own = (table.c.key_id == by.key_id) & (table.c.route == route) & (table.c.idempotency_key == key)
        now = datetime.now(UTC)
        row_id = new_uuid()
        try:
            async with self._database.write() as connection:
                found = (await connection.execute(sa.select(table).where(own))).mappings().first()
                if found is not None and not _is_over(found, now):
                    return _read(found, content)
                await connection.execute(sa.delete(table).where(own))
                row = {
                    "id": row_id,
                    "key_id": by.key_id,
                    "route": route,
                    "idempotency_key": key,
                    "content": content,
                    "status": None,
                    "body": None,
                    "created_at": now,
                }
                await connection.execute(table.insert(), row)
        except IntegrityError as error:
            raise ConflictError(
                "A request with this Idempotency-Key is still running; wait for it and repeat"
            ) from error
        return Claim(row_id)

    async def finish(self, connection: AsyncConnection, claim: Claim, answer: Answer) -> None:
        """Write the answer, in the transaction of the work.

        Raises:
            ConflictError: The claim was taken over meanwhile, so that the work must not be done here.
        """
        if claim.row_id is None:
            return
        values = {"status": answer.status, "body": answer.body.decode(), "created_at": datetime.now(UTC)}
        done = await connection.execute(sa.update(table).where(table.c.id == claim.row_id).values(values))
        if done.rowcount != 1:
            raise ConflictError("This took too long, and its Idempotency-Key was taken over; look before you repeat")

    async def release(self, claim: Claim) -> None:
        """Give a claim back whose work failed."""
        if claim.row_id is not None:
            async with self._database.write() as connection:
                await connection.execute(sa.delete(table).where(table.c.id == claim.row_id, table.c.status.is_(None)))

    async def sweep(self) -> None:
        """Forget keys whose day is over."""
        async with self._database.write() as connection:
            await connection.execute(sa.delete(table).where(table.c.created_at < datetime.now(UTC) - _LIFE))


def _is_over(row: Any, now: datetime) -> bool:
    return bool(now - row["created_at"] > (_LIFE if row["status"] is not None else DEAD_AFTER))


def _read(row: Any, content: str) -> Claim:
    if row["content"] != content:
        raise IdempotencyReusedError
    if row["status"] is None:
        raise ConflictError("A request with this Idempotency-Key is still running; wait for it and repeat")
    return Claim(None, Answer(row["status"], row["body"].encode()))
